"""Reads files whole that may be anything: only regular ones, up to a size. Knows of formats only
what is often found in a file's place."""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from helm.base.arguments import short
from helm.errors import CheckpointError, HelmError

MOST_BYTES = 64 << 20
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
GGUF = (
    "is a GGUF file in the place of another; give that file itself as the model, or put the right "
    "one in its place"
)
_IN_ITS_PLACE = {
    b"version https://git-lfs": "is a Git LFS pointer, which stands for the file; run `git lfs "
    "pull` in its folder, or download the model again with `hf download`",
    b"GGUF": GGUF,
}


def present(path: Path, error: type[HelmError] = CheckpointError, place: str = "load") -> bool:
    """Whether there is something of this name, be it a link that leads nowhere. Raises `error`
    where its folder may not be searched."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as reason:
        raise _unreadable(path, reason, error, place) from None
    return True


@contextlib.contextmanager
def open_file(
    path: Path, error: type[HelmError] = CheckpointError, place: str = "load", gguf: bool = False
) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size; gguf: it may be of that format. Raises `error`, which names
    `place` and the file, also for an OSError while it is open."""
    try:
        # Opening a pipe would wait for who writes to it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise error(f"[{place}] {path} is not a regular file; expected one")
            with open(handle, "rb", closefd=False) as stream:
                begin = stream.read(max(map(len, _IN_ITS_PLACE)))
                for start, what in _IN_ITS_PLACE.items():
                    if begin.startswith(start) and not (gguf and what is GGUF):
                        raise error(f"[{place}] {path} {what}")
                stream.seek(0)
                yield stream, status.st_size
        finally:
            os.close(handle)
    except HelmError:
        raise
    except (OSError, ValueError) as reason:
        raise _unreadable(path, reason, error, place) from None


def _unreadable(path: Path, reason: Exception, error: type[HelmError], place: str) -> HelmError:
    why = getattr(reason, "strerror", None) or reason
    return error(f"[{place}] cannot read {short(str(path), 1000)}: {why}")


def read_file(
    path: Path,
    error: type[HelmError] = CheckpointError,
    place: str = "load",
    most: int = MOST_BYTES,
) -> bytes:
    """The bytes of a regular file of at most `most`; `error` otherwise."""
    with open_file(path, error, place) as (stream, size):
        data = b"" if size > most else stream.read(most + 1)
    if size > most or len(data) > most:
        raise error(
            f"[{place}] {path} is over {most >> 20} MiB, more than such a file may have; check "
            "that it is the right one"
        )
    return data


def decoded(text: str | bytes | bytearray) -> str:
    """UTF-8, or UTF-16 that begins with its byte order mark, without the mark. Raises
    UnicodeDecodeError."""
    if not isinstance(text, str):
        text = text.decode("utf-16" if text.startswith(_UTF16) else "utf-8")
    return text.removeprefix("\ufeff")


def read_text(
    path: Path,
    error: type[HelmError] = CheckpointError,
    place: str = "load",
    most: int = MOST_BYTES,
) -> str:
    """The same as text."""
    data = read_file(path, error, place, most)
    try:
        return decoded(data)
    except UnicodeDecodeError as reason:
        raise error(f"[{place}] {path} is not UTF-8 text: {reason}") from None
