"""Builds C++ programs with find_package(helm) against the installed package."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import helm

PACKAGE = Path(helm.__file__).parent
ROOT = Path(__file__).parents[2]


def build(source: Path, folder: Path) -> Path:
    """Builds the project in `source` in `folder`, and returns that."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    _run(cmake, "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={PACKAGE}")
    _run(cmake, "--build", folder, "--parallel", "2")
    return folder


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
