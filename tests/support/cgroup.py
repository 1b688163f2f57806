"""Runs commands under a memory limit of a control group, where this machine lets tests make one.

@needs_cgroup
def test_a_small_container() -> None:
    with memory_cgroup(800 << 20) as group:
        result = group.run([sys.executable, "-c", "..."])
        assert not group.was_killed(result)
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_MOUNT = Path("/sys/fs/cgroup")
_JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class Group:
    """A control group of its own: its folder, and commands in it."""

    def __init__(self, folder: Path, unified: bool) -> None:
        self.folder, self._unified = folder, unified

    def command(self, arguments: Sequence[str | Path]) -> list[str]:
        """`arguments` as a command that runs in the group."""
        return ["sh", "-c", _JOIN, str(self.folder), *map(str, arguments)]

    def run(
        self, arguments: Sequence[str | Path], timeout: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs `arguments` in the group to its end. options: those of subprocess.run."""
        return subprocess.run(
            self.command(arguments),
            **{"capture_output": True, "text": True, "timeout": timeout, **options},
        )

    def was_killed(self, result: subprocess.CompletedProcess[str]) -> bool:
        """Whether the command ended as one does that took more memory than there is."""
        return result.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)

    @property
    def used_bytes(self) -> int:
        """What the system counts as used, page cache included."""
        name = "memory.current" if self._unified else "memory.usage_in_bytes"
        return int((self.folder / name).read_text())

    def limit(self, limit_bytes: int) -> None:
        """Sets the limit. Memory beyond it is not swapped out."""
        names = ("memory.max",) if self._unified else ("memory.limit_in_bytes",)
        for name in names:
            (self.folder / name).write_text(str(limit_bytes))
        swap = ("memory.swap.max", "0") if self._unified else ("memory.swappiness", "0")
        with contextlib.suppress(OSError):  # a system without swap
            (self.folder / swap[0]).write_text(swap[1])

    def remove(self) -> None:
        """Ends what still runs in the group, and removes it."""
        deadline = time.monotonic() + 10
        while self.folder.exists():
            for process in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Group]:
    """A control group with a limit, removed at the end of the block with what runs in it."""
    group = _make()
    try:
        group.limit(limit_bytes)
        yield group
    finally:
        group.remove()


def _make() -> Group:
    """Raises OSError where that is not allowed."""
    v1 = _MOUNT / "memory"
    unified = not (v1 / "memory.limit_in_bytes").exists()
    if unified and "memory" not in (_MOUNT / "cgroup.subtree_control").read_text().split():
        (_MOUNT / "cgroup.subtree_control").write_text("+memory")
    folder = (_MOUNT if unified else v1) / f"helm-test-{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    return Group(folder, unified)


@functools.cache
def unavailable() -> str:
    """Why there are no control groups with a memory limit for tests; empty where there are."""
    try:
        with memory_cgroup(64 << 20) as group:
            group.run(["true"], check=True)
    except (OSError, subprocess.SubprocessError) as reason:
        return f"no memory control group can be made here: {reason}"
    return ""


needs_cgroup = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available")
