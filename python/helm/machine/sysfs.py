"""Reading the small text files of /proc and /sys. What cannot be read is empty."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/")


def text(path: Path) -> str:
    """The file's content, stripped; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return ""


def number(content: str) -> int | None:
    """A whole number; None for anything else."""
    return int(content) if re.fullmatch(r"-?\d{1,20}", content) else None


def cpu_list(content: str) -> set[int]:
    """ "0-2,8" as {0, 1, 2, 8}; empty where any part of it is something else."""
    cpus: set[int] = set()
    for part in content.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if found is None:
            return set()
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return cpus
