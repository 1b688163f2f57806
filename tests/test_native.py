"""Builds and runs the native tests: as they are, and under the sanitizers of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from native_build import build, own_cpu, run_tests, sanitizing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
LONG = ("kernels", "runtime", "cuda_kernels")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    names = ("kernel", "runtime", "cuda_kernel", "cuda_plugin")
    build(
        folder,
        *sanitizing("address,undefined", "-Og"),  # half of -O1's time to compile
        targets=[f"helm_{name}_tests" for name in names],
    )
    return folder


@pytest.mark.parametrize("name", LONG)
def test_native(plain: Path, name: str) -> None:
    run_tests(plain, only=f"^{name}$")


def test_all_other_native_tests(plain: Path) -> None:
    run_tests(plain, but=f"^({'|'.join(LONG)})$")


@pytest.mark.parametrize("name", [*LONG, "cuda_plugin"])
def test_native_under_address_and_undefined_sanitizers(sanitized: Path, name: str) -> None:
    run_tests(sanitized, only=f"^{name}$", cpus=own_cpu())
