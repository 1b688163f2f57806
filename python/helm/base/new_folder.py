"""A folder that appears whole or not at all. Knows not what it holds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from helm.base.sizes import size_text
from helm.errors import InvalidError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_room(target: Path, needed_bytes: int, place: str) -> None:
    """InvalidError, which begins with `place`, where the disk of a new folder lacks the room."""
    folder = target.absolute().parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as reason:
        raise _unwritable(folder, reason, place) from None
    if needed_bytes > free:
        raise InvalidError(
            f"[{place}] {target} takes {size_text(needed_bytes)}, and {size_text(free)} are free "
            "there; make room, or name a folder on another disk"
        )


@contextlib.contextmanager
def new_folder(target: Path, place: str) -> Iterator[Path]:
    """A hidden folder beside `target`, which takes its name once the block has ended well. What
    ends the block otherwise removes it; what a killed process left is removed by the next. Raises
    InvalidError, which begins with `place`, where `target` is there or cannot be written."""
    refuse_existing(target, place)
    parent = target.absolute().parent
    part = parent / f".{target.absolute().name}.part"
    try:
        part.mkdir(exist_ok=True)
        lock = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as reason:
        raise _unwritable(part, reason, place) from None
    try:
        _lock(lock, part, target, place)
        try:
            _empty(part)
            yield part
            _sync(*part.rglob("*"), part)
            refuse_existing(target, place)
            os.rename(part, target)
            _sync(parent)
        except OSError as reason:
            shutil.rmtree(part, ignore_errors=True)
            if reason.errno not in _FULL:
                raise
            raise InvalidError(
                f"[{place}] the disk of {target} is full: {reason.strerror}; nothing was kept; "
                "make room, or name a folder on another disk"
            ) from None
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def refuse_existing(target: Path, place: str) -> None:
    """InvalidError where there is something of that name, be it a link that leads nowhere."""
    if os.path.lexists(target):
        raise InvalidError(
            f"[{place}] {target} exists already; expected the name of a new folder; remove that, "
            "or name another"
        )


def _lock(handle: int, part: Path, target: Path, place: str) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(part)):
            return
    raise InvalidError(
        f"[{place}] another process is making {target}; wait until it has ended, or name another"
    )


def _empty(part: Path) -> None:
    for entry in os.scandir(part):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _sync(*paths: Path) -> None:
    """What they hold to the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _unwritable(path: Path, reason: OSError, place: str) -> InvalidError:
    return InvalidError(
        f"[{place}] cannot write {path}: {reason.strerror}; name a folder that this user can write"
    )
