"""Where a checkpoint's tensors are stored, whatever the format of its files; reads tensors only to
tell whether two are the same."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from helm.base.files import open_file
from helm.base.formats import DTYPE_BYTES
from helm.errors import CheckpointError
from helm.model.source import COLUMNS, STORED, Extent, Piece, row_width, stored_bytes, stored_rows

# By safetensors' names.
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
WEIGHT_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_COMPARED = 1 << 20  # elements at a time


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is stored. stored: the encoding, "f32", "f16", "bf16" or what a reader calls
    its own, and safetensors' name for a dtype that no kernel reads ("I64"). extents: runs of rows
    in files relative to the model directory, stacked; none for a tensor in memory, and of one in
    pieces, which are `aux`. exact: of pieces, the format that holds every value as it is."""

    name: str
    shape: tuple[int, ...]
    stored: str
    extents: tuple[Extent, ...]
    aux: tuple[Piece, ...] = ()
    exact: str = ""

    @classmethod
    def in_memory(cls, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        """A tensor that the caller binds from memory; dtype "f32", "f16" or "bf16"."""
        return cls(name, shape, dtype, ())

    @property
    def file(self) -> str | None:
        """That of the first extent or piece; None for a tensor in memory."""
        return next((name for name in self._files()), None)

    @property
    def files(self) -> set[str]:
        """All that it lies in."""
        return set(self._files())

    def _files(self) -> list[str]:
        return [extent.file for extent in self.extents] + [piece.file for piece in self.aux]

    @property
    def held(self) -> str:
        """The format that it is held in where nobody says: that of its values, and bf16 of pieces
        that no packed format holds."""
        if self.aux:
            return self.dtype or ("bf16" if self.exact == "f32" else self.exact)
        return STORED[self.weight_dtype].format

    @property
    def dtype(self) -> str | None:
        """That of its elements; None where they are quantised."""
        if self.stored == COLUMNS:
            return self.exact
        return self.stored if self.stored in DTYPE_BYTES else None

    @property
    def nbytes(self) -> int:
        """What its elements take where they are stored."""
        if self.aux:
            return sum(piece.nbytes for piece in self.aux)
        if self.stored in STORED:
            rows = stored_rows(self.stored, math.prod(self.shape[:1]))
            return rows * stored_bytes(self.stored, row_width(self.shape))
        return math.prod(self.shape) * DTYPE_BITS[self.stored] // 8

    @property
    def weight_dtype(self) -> str:
        """ "f32", "f16", "bf16", or what else matrices are stored in. Raises CheckpointError for
        what no kernel reads."""
        if self.stored not in STORED and not self.aux:
            raise CheckpointError(
                f"[load] tensor {self.name!r} in {self.file} is stored as {self.stored}; expected "
                "F32, F16 or BF16; use an unquantised checkpoint of this model"
            )
        return self.stored

    @property
    def identity(self) -> list[object]:
        """What tells a stored tensor from another, in a plan's fingerprint. That of one dense run
        is as it has always been, so that what was saved for a model stays of use."""
        names = {own: dtype for dtype, own in WEIGHT_DTYPES.items()}
        dtype, shape = names.get(self.stored, self.stored), list(self.shape)
        if self.aux:
            return [self.name, dtype, shape, [dataclasses.astuple(piece) for piece in self.aux]]
        if not self.extents:
            return [self.name, dtype, shape, None, 0, self.nbytes]
        first, *more = self.extents
        if more or first.row_stride or self.stored not in names:
            return [self.name, dtype, shape, [dataclasses.astuple(e) for e in self.extents]]
        return [self.name, dtype, shape, first.file, first.offset, self.nbytes]


def same_data(directory: str | Path, a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two stored tensors have the same values, read up to the first that differs; equal
    bytes are the same, be they NaN. Each is one dense run, as safetensors has it. Raises
    CheckpointError."""
    if a.shape != b.shape or a.aux or b.aux:
        return False
    if a.stored != b.stored and not {a.stored, b.stored} <= {*WEIGHT_DTYPES.values()}:
        return False
    with (
        open_file(Path(directory) / str(a.file)) as (left, _),
        open_file(Path(directory) / str(b.file)) as (right, _),
    ):
        left.seek(a.extents[0].offset)
        right.seek(b.extents[0].offset)
        if a.stored == b.stored:
            steps = range(0, a.nbytes, 4 * _COMPARED)
            sizes = [min(4 * _COMPARED, a.nbytes - begin) for begin in steps]
            return all(left.read(size) == right.read(size) for size in sizes)
        count = math.prod(a.shape)
        sizes = [min(_COMPARED, count - begin) for begin in range(0, count, _COMPARED)]
        return all(
            np.array_equal(_widened(left, a.stored, size), _widened(right, b.stored, size))
            for size in sizes
        )


def _widened(stream: BinaryIO, stored: str, count: int) -> npt.NDArray[np.float32]:
    data = stream.read(stored_bytes(stored, count))
    if stored == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float16 if stored == "f16" else np.float32).astype(np.float32)
