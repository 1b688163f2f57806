"""Measures how fast a checkpoint's own disk is read, and drives with copies of it, as a running
model reads them: past the page cache, several reads at once of each. Writes nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import operator
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
DEPTH, READ_BYTES = 8, 1 << 20  # of a drive, as the runtime's
_BLOCK, _HUGE_PAGE = 4096, 2 << 20


def measure_drives(
    drives: Sequence[Sequence[Path]],
    progress: Progress | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    most_s: float = MOST_S,
) -> tuple[float, ...] | None:
    """Bytes per second of each drive while all are read, spread over its files, until one is
    through: of at most so many bytes in all and so many seconds. None where nothing can be read of
    one."""
    lefts = [_places(files, most_bytes // len(drives)) for files in drives]
    buffers = _buffers(len(drives))
    begin, taken, ends = time.perf_counter(), [0] * len(drives), [0.0] * len(drives)
    lock, through = threading.Lock(), threading.Event()
    what = "the checkpoint's disk" if len(drives) == 1 else f"the checkpoint's {len(drives)} drives"

    def work(drive: int, buffer: npt.NDArray[np.uint8]) -> None:
        with contextlib.suppress(OSError):  # others go on
            read_on(drive, buffer)

    def read_on(drive: int, buffer: npt.NDArray[np.uint8]) -> None:
        with contextlib.ExitStack() as opened:
            known: dict[Path, int] = {}
            while True:
                with lock:
                    place = next(lefts[drive], None)
                    done = sum(taken)
                if place is None:
                    through.set()
                    return
                path, offset, size = place
                if path not in known:
                    known[path] = _open(path)
                    opened.callback(os.close, known[path])
                got = _read(known[path], buffer, offset, size)
                with lock:
                    taken[drive] += got
                    ends[drive] = time.perf_counter() - begin
                if through.is_set() or ends[drive] > most_s:
                    return
                if progress is not None and threading.current_thread() is threading.main_thread():
                    progress(what, min(1.0, done / most_bytes))

    own = [(drive, buffer) for drive, group in enumerate(buffers) for buffer in group]
    threads = [threading.Thread(target=work, args=each) for each in own[1:]]
    for thread in threads:
        thread.start()
    work(*own[0])
    for thread in threads:
        thread.join()
    if progress is not None:
        progress(what, 1.0)
    return tuple(map(operator.truediv, taken, ends)) if all(taken) else None


def _buffers(drives: int) -> npt.NDArray[np.uint8]:
    """One for each read at once: [drives, DEPTH, READ_BYTES]. On huge pages, as the runtime's ring:
    a read into small ones falls into many pieces, which halved the rate of a virtual disk."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
    size = drives * DEPTH * READ_BYTES
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=private)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    every = np.frombuffer(memory, np.uint8)
    first = -every.ctypes.data % _HUGE_PAGE
    return every[first : first + size].reshape(drives, DEPTH, READ_BYTES)


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
