"""Writes a model's weights in HELM's own formats, and measures what that changed. Knows files and
formats, no engine."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helm.base.formats import DTYPE_BYTES, FORMATS, STRIP_ROWS
from helm.base.progress import Progress
from helm.model.checkpoint import WEIGHT_DTYPES, TensorInfo
from helm.model.checkpoint.layout import Matrix, metadata_of
from helm.model.checkpoint.rows import RowFiles

_PAGE_BYTES = 4096  # weights begin at a multiple
_PART_WEIGHTS = 1 << 20  # that a thread has in memory at once
_STATED = {own: dtype for dtype, own in WEIGHT_DTYPES.items()}


@dataclass(frozen=True)
class Packed:
    """What was written in one format. relative_rms: the error of the weights by their size, both as
    root mean squares."""

    weights: int
    bytes: int
    relative_rms: float


@dataclass(frozen=True)
class PackedFile:
    """A safetensors file that is to be written: its header, and where each tensor begins."""

    infos: dict[str, TensorInfo]
    matrices: dict[str, Matrix]
    header: bytes
    offsets: dict[str, int]
    bytes: int


def packed_file(infos: Mapping[str, TensorInfo], formats: Mapping[str, str]) -> PackedFile:
    """infos: a model's weights by name. formats: those of matrices; dense ones are as stored."""
    matrices = {
        name: Matrix(formats[name], (info.shape[0], info.shape[1]))
        for name, info in infos.items()
        if formats[name] not in DTYPE_BYTES
    }
    ordered = {**{name: infos[name] for name in matrices}, **infos}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata_of(matrices)}}
    end, begins = 0, {}
    for name, info in ordered.items():
        size = matrices[name].nbytes if name in matrices else info.nbytes
        # One that lies by column stays so.
        shape = [size] if name in matrices else [*(info.aux[0] if info.aux else info).shape]
        dtype = "U8" if name in matrices else _STATED[info.dtype or info.weight_dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        begins[name] = end
        end += size
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE_BYTES)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + begin for name, begin in begins.items()}
    return PackedFile(ordered, matrices, header, offsets, len(header) + end)


def write_packed(
    file: PackedFile, path: Path, folder: Path, threads: int, progress: Progress | None
) -> dict[str, Packed]:
    """Writes the file, a part of a matrix at a time; what was written, by format. folder: where the
    source's files lie. progress: of weights. Raises CheckpointError for weights that are NaN or
    infinite, and OSError."""
    files = RowFiles(folder, file.infos.values())
    total = sum(math.prod(matrix.shape) for matrix in file.matrices.values())
    sums = {m.format: np.zeros(2) for m in file.matrices.values()}
    done, running = 0, deque[tuple[str, int, Future[Any]]]()

    def finish(most: int) -> None:
        nonlocal done
        while len(running) > most:
            format, weights, result = running.popleft()
            sums[format] += result.result()
            done += weights
            if progress is not None:
                progress(done, total)

    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write(handle, file.header, 0)
        with _pool(threads) as pool:
            for name, matrix in file.matrices.items():
                whole = bool(file.infos[name].aux)
                for part in [range(matrix.shape[0])] if whole else _parts(matrix):
                    task = pool.submit(_pack, file, name, part, files, handle)
                    running.append((matrix.format, len(part) * matrix.shape[1], task))
                    finish(2 * threads)
            finish(0)
        for name, info in file.infos.items():
            if name not in file.matrices:
                pieces = files.pieces(info, 0, info.shape[0])
                _write(handle, pieces["weight"][2], file.offsets[name])
    finally:
        os.close(handle)
    files.check()
    return {format: _packed(file, format, *found) for format, found in sums.items()}


def _packed(file: PackedFile, format: str, error: float, size: float) -> Packed:
    own = [matrix for matrix in file.matrices.values() if matrix.format == format]
    weights = sum(math.prod(matrix.shape) for matrix in own)
    relative = math.sqrt(error / size) if size > 0 else 0.0
    return Packed(weights, sum(matrix.nbytes for matrix in own), relative)


@contextlib.contextmanager
def _pool(threads: int) -> Any:
    """Threads that begin nothing more once the block is left."""
    pool = ThreadPoolExecutor(threads, "helm-quantize")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _parts(matrix: Matrix) -> Iterable[range]:
    """Rows that one thread takes at a time, whole strips."""
    rows, cols = matrix.shape
    some = max(1, _PART_WEIGHTS // cols // STRIP_ROWS) * STRIP_ROWS
    return (range(row, min(row + some, rows)) for row in range(0, rows, some))


def _pack(
    file: PackedFile, name: str, part: range, files: RowFiles, handle: int
) -> tuple[float, float]:
    """Writes rows of a matrix; sums of squares, of the errors and of the weights."""
    from helm import _helm

    info, matrix = file.infos[name], file.matrices[name]
    size = (len(part), matrix.shape[1])

    pieces = files.pieces(info, part.start, len(part))
    where: dict[str, Any] = {"name": info.name, "first_row": part.start}
    packed: Any = _helm.encode_weights(info.stored, pieces, *size, matrix.format, **where)
    format = FORMATS[matrix.format]
    strip = format.bytes(STRIP_ROWS, matrix.shape[1])
    _write(handle, packed, file.offsets[name] + format.bytes(part.start, matrix.shape[1]))
    strips = {"weight": ("u8", [packed.size // strip, strip], packed)}
    weights, error = (
        np.asarray(_helm.read_weights(stored, held, *size, **where)).reshape(-1)
        for stored, held in ((info.stored, pieces), (matrix.format, strips))
    )
    error -= weights
    return float(np.dot(error, error)), float(np.dot(weights, weights))


def _write(handle: int, data: Any, offset: int) -> None:
    left = memoryview(data).cast("B")
    while left:
        size = os.pwrite(handle, left, offset)
        left, offset = left[size:], offset + size
