"""Which models this user has loaded, from where and when: a small file of the cache for each. Knows
nothing of what they are."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from helm.base import own_folder
from helm.errors import printable

_MOST = 100  # models; those that were not used for longest are forgotten


def note_use(model: str) -> None:
    """Remembers that `model`, a folder's whole path or a Hugging Face id, was loaded now; nothing
    where the cache cannot be written."""
    with contextlib.suppress(OSError):
        path = _folder() / hashlib.sha256(os.fsencode(model)).hexdigest()[:16]
        try:
            own_folder.touch(path)
        except FileNotFoundError:
            own_folder.write(path, printable(model))
            _forget_oldest()


def last_uses() -> dict[str, float]:
    """When each was loaded last, in seconds since 1970."""
    uses = {}
    for path in _files():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            content, written_s = own_folder.read(path)
            uses[content.decode()] = written_s
    return uses


def _folder() -> Path:
    return own_folder.cache_folder() / "models"


def _files() -> list[Path]:
    try:
        return [entry for entry in _folder().iterdir() if len(entry.name) == 16]
    except OSError:
        return []


def _forget_oldest() -> None:
    files = _files()
    if len(files) > _MOST:
        for path in sorted(files, key=lambda path: path.stat().st_mtime)[:-_MOST]:
            path.unlink()
