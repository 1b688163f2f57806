"""Builds and runs the native tests: as they are, and under the sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from helm import _helm
from native_build import build, run_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_native(tmp_path: Path) -> None:
    build(tmp_path)
    run_tests(tmp_path)


# Compiles a third faster than -O2 -g; traces still name lines. Of the tiers those that can run.
QUICK = (
    "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG",
    f"-DHELM_TIERS={';'.join(tier['name'] for tier in _helm.isa_tiers() if tier['available'])}",
)


def test_native_under_address_and_undefined_sanitizers(tmp_path: Path) -> None:
    names = ("kernel", "runtime", "cuda_kernel", "cuda_plugin")
    build(
        tmp_path,
        "-DHELM_SANITIZE=address,undefined",
        *QUICK,
        targets=[f"helm_{name}_tests" for name in names],
    )
    run_tests(tmp_path, only="^(kernels|runtime|cuda_kernels|cuda_plugin)$")


def test_runtime_and_cuda_kernels_under_thread_sanitizer(tmp_path: Path) -> None:
    """Emulated threads of a block are ordered by barriers alone: a missing one is a race."""
    build(
        tmp_path,
        "-DHELM_SANITIZE=thread",
        *QUICK,
        targets=("helm_runtime_tests", "helm_cuda_kernel_tests"),
    )
    run_tests(tmp_path, only="^(runtime|cuda_kernels)$")
