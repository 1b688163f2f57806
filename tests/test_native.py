"""Builds and runs the native tests: as they are, and under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def build_and_run(
    build: Path, *options: str, only: str = ".*", targets: tuple[str, ...] = ()
) -> None:
    cmake, ctest = shutil.which("cmake"), shutil.which("ctest")
    if cmake is None or ctest is None or shutil.which("ninja") is None:
        pytest.skip("cmake and ninja are not installed")
    python = f"-DPython_EXECUTABLE={sys.executable}"
    steps = [
        [
            cmake,
            "-S",
            ROOT,
            "-B",
            build,
            "-G",
            "Ninja",
            "-DHELM_TESTS=ON",
            "-DHELM_CUDA=OFF",
            python,
            *options,
        ],
        [cmake, "--build", build, *(arg for target in targets for arg in ("--target", target))],
        [ctest, "--test-dir", build, "--output-on-failure", "-R", only],
    ]
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    for step in steps:
        run = subprocess.run(step, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, (run.stdout + run.stderr)[-8000:]
    assert "100% tests passed" in run.stdout
    assert "No tests were found" not in run.stdout


def test_native(tmp_path: Path) -> None:
    build_and_run(tmp_path, "-DHELM_WERROR=ON")


def test_native_under_address_and_undefined_sanitizers(tmp_path: Path) -> None:
    build_and_run(
        tmp_path, "-DHELM_SANITIZE=address,undefined", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"
    )


def test_runtime_and_cuda_kernels_under_thread_sanitizer(tmp_path: Path) -> None:
    """Emulated threads of a block are ordered by barriers alone: a missing one is a race."""
    build_and_run(
        tmp_path,
        "-DHELM_SANITIZE=thread",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        only="runtime|cuda_kernels",
        targets=("helm_runtime_tests", "helm_cuda_kernel_tests"),
    )
