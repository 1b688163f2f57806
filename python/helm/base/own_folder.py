"""Small files in a folder of this user's own, which may lie where others can write, as in /tmp.

Whoever writes there may have been first: a folder or file counts only if it is no link and belongs
to this user or to root. A folder that others could write to is closed to them. Knows not what the
files hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from helm.errors import HelmError

_MOST_BYTES = 16 << 20
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


def cache_folder() -> Path:
    """Under $XDG_CACHE_HOME or ~/.cache, or for users without a home in the folder for temporary
    files."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # the specification: ignore relative ones
        return given / "helm"
    home = Path(os.path.expanduser("~"))
    if home.is_absolute():
        return home / ".cache" / "helm"
    try:
        shared = tempfile.gettempdir()
    except OSError:  # there is none; that it cannot be written shows later
        shared = "/tmp"
    return Path(shared) / f"helm-{os.geteuid()}"


def read(path: Path) -> tuple[bytes, float]:
    """What the file holds, and when it was written. OSError if there is none of ours."""
    with _opened(path.parent) as folder:
        flags = os.O_RDONLY | os.O_NONBLOCK | _OPEN  # of a pipe: not to wait for a writer
        with os.fdopen(os.open(path.name, flags, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            _check_owner(status, path)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
                raise OSError(errno.EINVAL, "is no small regular file", str(path))
            return file.read(), status.st_mtime


def write(path: Path, content: str) -> None:
    """Whole or not at all: readers never see a part. OSError if that cannot be."""
    from helm import _helm

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(path.parent) as folder:
        place = f"/proc/self/fd/{folder}/{path.name}"  # in that folder, whatever its name means now
        try:
            _helm.replace_file(os.fsencode(place), content.encode())
        except HelmError as reason:
            raise OSError(errno.EIO, str(reason), str(path)) from None


def touch(path: Path) -> None:
    """Gives a file that is there the present time. OSError if that cannot be."""
    with _opened(path.parent) as folder:
        os.utime(path.name, dir_fd=folder, follow_symlinks=False)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of the folder: its name may mean another one the next moment."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    try:
        status = os.fstat(descriptor)
        _check_owner(status, folder)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.fchmod(descriptor, 0o700)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "belongs to others", str(path))
