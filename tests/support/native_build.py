"""Builds and runs what lies in tests/native."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence, Set
from pathlib import Path

import pytest

from helm import _helm
from whole import WHOLE

ROOT = Path(__file__).parents[2]


def sanitizing(sanitizers: str, optimization: str, *, kernels: bool = True) -> tuple[str, ...]:
    """Options of a build under sanitizers. With the kernels under them, too: the first tier that
    can run, and its integer products; HELM_TEST_WHOLE=1 has all that can run. Without: all
    kernels as they are in a package, so that a compiler's cache has them."""
    available = [tier["name"] for tier in _helm.isa_tiers() if tier["available"]]
    vector = [name for name in available if name != "scalar"]
    tiers = ";".join(available if WHOLE else vector[:1])
    integers = ";".join(t["name"] for t in _helm.integer_isa_tiers() if t["available"])
    chosen = (f"-DHELM_TIERS={tiers}", f"-DHELM_INTEGER_TABLES={integers}")
    return (
        f"-DHELM_SANITIZE={sanitizers}",
        f"-DHELM_SANITIZE_LEVEL={optimization}",
        *(chosen if kernels else ("-DHELM_SANITIZE_KERNELS=OFF",)),
        f"-DHELM_TEST_WHOLE={int(WHOLE)}",
    )


def build(folder: Path, *options: str, targets: Sequence[str] = ()) -> None:
    """Configures `folder` with CMake options and builds the targets, or all."""
    if not all(shutil.which(tool) for tool in ("cmake", "ctest", "ninja")):
        pytest.skip("cmake and ninja are not installed")
    _run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DHELM_TESTS=ON", "-DHELM_CUDA=OFF",
         "-DHELM_WERROR=ON", "-DHELM_UNITY=ON",
         f"-DPython_EXECUTABLE={sys.executable}", *options)  # fmt: skip
    # Behind the tests of another file, whose threads wait for each other where they lack a CPU.
    _run("nice", "-n", "19", "cmake", "--build", folder, "--parallel", str(os.cpu_count()),
         *(arg for target in targets for arg in ("--target", target)))  # fmt: skip


def run_tests(
    folder: Path, only: str = ".*", but: str = "^$", cpus: Set[int] | None = None
) -> None:
    """Runs the tests in `folder` whose names match `only` and not `but`; at least one."""
    output = _run(
        "ctest", "--test-dir", folder, "--output-on-failure", "--parallel", "2", "-R", only,
        "-E", but, cpus=cpus,
    )  # fmt: skip
    assert "100% tests passed" in output
    assert "No tests were found" not in output


def own_cpu() -> set[int]:
    """A CPU for this worker of pytest alone.

    Sanitizers see the races of threads that share a CPU too (tried: without the barrier between two
    ops). On CPUs that another worker's threads use as well, each barrier may wait until the system
    gives the other back: three times as long. The suites as they are have all CPUs.
    """
    cpus = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return {cpus[worker % len(cpus)]}


def _run(*command: str | Path, cpus: Set[int] | None = None) -> str:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=cpus and (lambda: os.sched_setaffinity(0, cpus)),
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-8000:]
    return run.stdout
