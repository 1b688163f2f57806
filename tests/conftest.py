"""What several test files share: the native tests, built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from native_build import build


@pytest.fixture(scope="session")
def native_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder with everything in tests/native, warnings being errors."""
    folder = tmp_path_factory.mktemp("native")
    build(folder, "-DHELM_WERROR=ON")
    return folder
