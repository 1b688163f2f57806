"""Measures how fast a checkpoint's own disk is read, as a running model reads it: past the page
cache, several reads at once. Writes nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helm.measure.quantity import Progress

MOST_BYTES = 2_000_000_000
MOST_S = 3.0
DEPTH, READ_BYTES = 8, 1 << 20  # as the runtime's
_BLOCK, _HUGE_PAGE = 4096, 2 << 20


def measure_disk(
    files: Sequence[Path],
    progress: Progress | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    most_s: float = MOST_S,
) -> float | None:
    """Bytes per second of reads spread over `files`, of at most so many bytes and seconds. None
    where nothing can be read."""
    reads = list(_places(files, most_bytes))
    if not reads:
        return None
    memory = _buffers()
    begin, taken = time.perf_counter(), [0]
    lock, left = threading.Lock(), iter(reads)

    def work(own: int) -> None:
        with contextlib.suppress(OSError):  # others go on
            read_on(memory[own])

    def read_on(buffer: npt.NDArray[np.uint8]) -> None:
        with contextlib.ExitStack() as opened:
            known: dict[Path, int] = {}
            while True:
                with lock:
                    place = next(left, None)
                    done = taken[0]
                if place is None or time.perf_counter() - begin > most_s:
                    return
                path, offset, size = place
                if path not in known:
                    known[path] = _open(path)
                    opened.callback(os.close, known[path])
                got = _read(known[path], buffer, offset, size)
                with lock:
                    taken[0] += got
                if progress is not None and threading.current_thread() is threading.main_thread():
                    progress("the checkpoint's disk", min(1.0, done / most_bytes))

    threads = [threading.Thread(target=work, args=(own,)) for own in range(1, DEPTH)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if progress is not None:
        progress("the checkpoint's disk", 1.0)
    return taken[0] / seconds if taken[0] else None


def _buffers() -> npt.NDArray[np.uint8]:
    """One for each read at once: [DEPTH, READ_BYTES]. On huge pages, as the runtime's ring: a read
    into small ones falls into many pieces, which halved the rate of a virtual disk."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
    memory = mmap.mmap(-1, DEPTH * READ_BYTES + _HUGE_PAGE, flags=private)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    every = np.frombuffer(memory, np.uint8)
    first = -every.ctypes.data % _HUGE_PAGE
    return every[first : first + DEPTH * READ_BYTES].reshape(DEPTH, READ_BYTES)


def _places(files: Sequence[Path], most_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, bytes) of runs of reads, spread over all files where they are larger."""
    sizes = {}
    for path in files:
        with contextlib.suppress(OSError):
            sizes[path] = path.stat().st_size
    share = min(1.0, most_bytes / max(1, sum(sizes.values())))
    for path, size in sizes.items():
        step = 1.0 / share
        blocks = size // READ_BYTES
        at = 0.0
        while at < blocks:
            yield path, int(at) * READ_BYTES, READ_BYTES
            at += step
        if blocks == 0 and size:
            yield path, 0, -(-size // _BLOCK) * _BLOCK


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as reason:
        if reason.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _read(descriptor: int, buffer: npt.NDArray[np.uint8], offset: int, size: int) -> int:
    view = buffer[:size].data
    try:
        return os.preadv(descriptor, [view], offset)
    except OSError as reason:
        if reason.errno != errno.EINVAL:
            raise
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        got = os.preadv(descriptor, [view], offset)
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
        return got
