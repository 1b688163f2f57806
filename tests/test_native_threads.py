"""Builds and runs the native tests that have threads under their sanitizer.

Apart from `test_native.py`, so that both are built and run at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from native_build import build, own_cpu, run_tests, sanitizing
from whole import WHOLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    targets = ("helm_runtime_tests", *(["helm_cuda_kernel_tests"] if WHOLE else []))
    build(folder, *sanitizing("thread", "-O1"), targets=targets)
    return folder


def test_runtime_under_thread_sanitizer(sanitized: Path) -> None:
    run_tests(sanitized, only="^runtime$", cpus=own_cpu())


@pytest.mark.skipif(not WHOLE, reason="HELM_TEST_WHOLE=1 has it")
def test_cuda_kernels_under_thread_sanitizer(sanitized: Path) -> None:
    """Emulated threads of a block are ordered by barriers alone: a missing one is a race."""
    run_tests(sanitized, only="^cuda_kernels$", cpus=own_cpu())
