"""What loaded models were granted of the host's memory and have not taken yet: in this process and,
by a small file each, in the user's others. Knows bytes and processes, nothing of models.

The system counts memory as used once it is written. What a model will write later, a KV cache above
all, looks free until then, and so do the mapped files that it reads from the page cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from helm.machine.sysfs import ROOT
from helm.machine.sysfs import text as _text

Memory = Sequence[tuple[int, int]]  # (address, bytes)
_PATIENCE_S = 10.0  # for somebody else's turn
_MOST_FILE_BYTES = 1 << 20
_PAGES_AT_ONCE = 1 << 20
_STEPS = 64  # in which a load tells the others how far it is
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-\d+\.json(\.tmp)?")  # pid namespace, pid, start, number
_turn = threading.Lock()
_numbers = itertools.count()
_live: set[Grant] = set()


@dataclass(frozen=True)
class Claim:
    """What a model of a process has yet to take of the system's memory, and, by `file_key`, bytes
    of files that it reads from the page cache again and again."""

    pid: int
    pending_bytes: int
    files: Mapping[str, int]


class Grant:
    """Bytes of the host's memory that a model may take, until `close`, or the process ends.

    A file tells the user's other processes; where none can be written, they are not told.
    """

    def __init__(self, own_bytes: int, loaded_bytes: int, files: Mapping[str, int]) -> None:
        """loaded_bytes: of own_bytes, those that loading writes."""
        self.pid = os.getpid()
        self._granted = self._pending = self._told = own_bytes
        self._loaded = loaded_bytes
        self._lazy: Memory = ()
        self._files = dict(files)
        self._path: Path | None = None
        folder = _folder(ROOT)
        if folder is not None:
            start = _start(ROOT, self.pid)
            name = f"{_namespace(ROOT)}-{self.pid}-{start}-{next(_numbers)}.json"
            self._path = folder / name
        _live.add(self)
        self._tell()

    def loaded(self, share: float) -> None:
        """From 0 to 1 of what loading writes is there."""
        self._pending = self._granted - int(self._loaded * share)
        if (self._told - self._pending) * _STEPS >= self._granted:
            self._tell()

    def settle(self, lazy: Memory) -> None:
        """The model is loaded; what it has yet to take lies in `lazy`."""
        self._pending, self._lazy = 0, lazy
        self._tell()

    def close(self) -> None:
        """Gives it back."""
        if os.getpid() != self.pid:
            return  # a fork of the process that was granted it
        _live.discard(self)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def claim(self) -> Claim:
        pending = self._pending + _untouched(ROOT, self.pid, self._lazy)
        return Claim(self.pid, pending, self._files)

    def _tell(self) -> None:
        self._told = self._pending
        if self._path is None:
            return
        content = {"bytes": self._pending, "lazy": self._lazy, "files": self._files}
        part = self._path.with_name(self._path.name + ".tmp")
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(part, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(part, self._path)


def claims(root: Path = ROOT) -> list[Claim]:
    """Of all models that this process and the user's others have loaded. Files that others left
    when they were killed are removed."""
    own = os.getpid()
    found = [grant.claim() for grant in list(_live) if grant.pid == own] if root == ROOT else []
    folder, namespace = _folder(root), _namespace(root)
    try:
        names = [] if folder is None else os.listdir(folder)
    except OSError:
        names = []
    for name in names:
        fields = _NAME.fullmatch(name)
        if fields is None or fields[1] != namespace or (root == ROOT and int(fields[2]) == own):
            continue
        assert folder is not None
        pid = int(fields[2])
        if _start(root, pid) != fields[3]:
            with contextlib.suppress(OSError):
                os.unlink(folder / name)
        elif fields[4] is None:
            found += _read(root, folder / name, pid)
    return found


def pending_bytes(granted: Iterable[Claim], shared: Collection[str]) -> int:
    """What all have yet to take. Files that several read count once, those of `shared` not at
    all."""
    total, files = 0, dict[str, int]()
    for claim in granted:
        total += claim.pending_bytes
        for key, size in claim.files.items():
            files[key] = max(size, files.get(key, 0))
    return total + sum(size for key, size in files.items() if key not in shared)


def file_key(path: str | Path) -> str:
    """The same for every name of a file; empty where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


@contextlib.contextmanager
def in_turn(patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """What is free does not change by another grant meanwhile: threads and the user's processes
    take turns. Whoever waits for too long, or cannot lock a file, goes on without."""
    deadline = time.monotonic() + patience_s
    mine = _turn.acquire(timeout=patience_s)
    lock = None
    try:
        folder = _folder(ROOT)
        if folder is not None:
            with contextlib.suppress(OSError):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                lock = os.open(folder / "lock", flags, 0o600)
                _await_lock(lock, deadline)
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # forks of this process may have the file open
            os.close(lock)
        if mine:
            _turn.release()


def _await_lock(lock: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)


def _folder(root: Path) -> Path | None:
    """Where the user's processes tell each other, made if need be; None where nobody but the user
    may write to it."""
    user = os.geteuid()
    places = [(f"/run/user/{user}", "helm")]
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(given):
        places.insert(0, (given, "helm"))
    with contextlib.suppress(OSError):  # no folder for temporary files
        places.append((tempfile.gettempdir(), f"helm-{user}"))
    for parent, name in places:
        folder = root / parent.lstrip("/") / name
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = folder.lstat()
        except OSError:
            continue
        private = found.st_uid == user and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISDIR(found.st_mode) and private and os.access(folder, os.W_OK):
            return folder
    return None


def _namespace(root: Path) -> str:
    """Process ids mean nothing to those of another."""
    try:
        return re.sub(r"\D", "", os.readlink(root / "proc/self/ns/pid")) or "0"
    except OSError:
        return "0"


def _start(root: Path, pid: int) -> str:
    """When a process began, in ticks since boot: a number is given again. Empty: it has ended."""
    fields = _text(root / f"proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _read(root: Path, path: Path, pid: int) -> list[Claim]:
    """What a file says; nothing where it is none of ours."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return []
            content = json.loads(file.read(_MOST_FILE_BYTES))
        lazy = [(int(address), int(size)) for address, size in content["lazy"]]
        files = {str(key): int(size) for key, size in content["files"].items()}
        pending = int(content["bytes"]) + _untouched(root, pid, lazy)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
    return [Claim(pid, pending, files)]


def _untouched(root: Path, pid: int, memory: Memory) -> int:
    """Bytes that the system has not provided yet; all of them where it does not tell."""
    if not memory:
        return 0
    import mmap

    import numpy as np

    taken = 0
    with contextlib.suppress(OSError), open(root / f"proc/{pid}/pagemap", "rb", 0) as pagemap:
        for address, size in memory:
            first, count = address // mmap.PAGESIZE, size // mmap.PAGESIZE
            for begin in range(0, count, _PAGES_AT_ONCE):
                pagemap.seek(8 * (first + begin))
                data = pagemap.read(8 * min(_PAGES_AT_ONCE, count - begin))
                pages = np.frombuffer(data[: len(data) // 8 * 8], np.uint64)
                taken += int(np.count_nonzero(pages >> np.uint64(62)))  # in memory or swapped out
    return sum(size for _, size in memory) - taken * mmap.PAGESIZE
