"""What lies at a path, told apart from what this user may not look at. Reads no file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from helm.errors import CheckpointError


@contextlib.contextmanager
def permitted(place: str) -> Iterator[None]:
    """Turns the system's refusal into a CheckpointError that names what it refused."""
    try:
        yield
    except PermissionError as reason:
        raise CheckpointError(
            f"[{place}] this user is not allowed to read {reason.filename}: {reason.strerror}; "
            "change the permissions of the file or of a folder above it, or name another"
        ) from None


def kind(path: Path | str) -> str:
    """ "folder", "file", or "" where there is nothing of the two. PermissionError where this user
    may not look, which os.path.isdir() takes for nothing."""
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        raise
    except (OSError, ValueError):
        return ""
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else ""
