"""Rows of stored tensors as the bytes that they are in files. Knows where they lie, not what they
mean."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helm.base.formats import STRIP_ROWS
from helm.errors import CheckpointError
from helm.model.checkpoint import TensorInfo
from helm.model.source import PACKED, row_width, stored_bytes, stored_rows

Bytes = npt.NDArray[np.uint8]
Pieces = dict[str, tuple[str, list[int], Bytes]]  # dtype, shape and bytes by name


class RowFiles:
    """The files of a checkpoint; `check` tells whether they are as they were. Threads may share
    it."""

    def __init__(self, folder: Path, infos: Iterable[TensorInfo]) -> None:
        names = sorted({file for info in infos for file in info.files})
        self._folder = folder
        self._found = {name: self._identity(name) for name in names}

    def check(self) -> None:
        """CheckpointError where a file changed since the beginning."""
        for name, found in self._found.items():
            if self._identity(name) != found:
                raise CheckpointError(
                    f"[load] {self._folder / name} changed while it was read; try again when it is "
                    "complete"
                )

    def _identity(self, name: str) -> tuple[int, int]:
        try:
            status = os.stat(self._folder / name)
        except OSError as reason:
            raise self._unreadable(name, reason.strerror) from None
        return status.st_size, status.st_mtime_ns

    def read(self, info: TensorInfo, first: int, count: int) -> Bytes:
        """Rows [first, first + count), one after the other, [rows, bytes of a row]; of strips, as
        many rows as fill them, of which `first` begins one. An element of a vector is a row."""
        width, count = stored_bytes(info.stored, row_width(info.shape)), stored_rows(
            info.stored, count
        )  # fmt: skip
        out = np.empty((count, width), np.uint8)
        begin = 0
        for extent in info.extents:
            rows = stored_rows(info.stored, extent.rows)
            low, high = max(first, begin), min(first + count, begin + rows)
            if low < high:
                stride = extent.row_stride or width
                offset = extent.offset + (low - begin) * stride
                data = self._bytes(extent.file, offset, (high - low - 1) * stride + width)
                shape, strides = (high - low, width), (stride, 1)
                found = np.lib.stride_tricks.as_strided(data, shape, strides, writeable=False)
                out[low - first : high - first] = found
            begin += rows
        return out

    def pieces(self, info: TensorInfo, first: int, count: int) -> Pieces:
        """Such rows as helm.encode_weights takes them; of a matrix in pieces all of it."""
        if info.aux:
            return {
                p.name: (p.dtype, list(p.shape), self._bytes(p.file, p.offset, p.nbytes))
                for p in info.aux
            }
        unit = STRIP_ROWS if info.stored in PACKED else 1
        data = self.read(info, first, count)
        shape = [len(data) // unit, data.shape[1] * unit]
        return {"weight": ("u8", shape, data.reshape(-1))}

    def _bytes(self, name: str, offset: int, size: int) -> Bytes:
        out = np.empty(size, np.uint8)
        place = memoryview(out.data)
        try:
            handle = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < size:
                    got = os.preadv(handle, [place[done:]], offset + done)
                    if got == 0:
                        raise self._unreadable(name, f"it ends before byte {offset + size}")
                    done += got
            finally:
                os.close(handle)
        except CheckpointError:
            raise
        except OSError as reason:
            raise self._unreadable(name, reason.strerror) from None
        return out

    def _unreadable(self, name: str, why: str | None) -> CheckpointError:
        return CheckpointError(f"[load] cannot read {self._folder / name}: {why}")
