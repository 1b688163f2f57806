"""Where a tensor is stored: runs of rows in files, in an encoding. Reads no file.

A *stored* encoding is named by the reader that knows it. One whose name is a format's is held as
it lies there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from helm.base.formats import FORMATS, STRIP_ROWS
from helm.model.gguf.types import TYPES


class Stored(NamedTuple):
    """An encoding: `elements` of a row in each block of `size` bytes; 0: strips of 16 rows, as the
    format has them. format: that of weights which holds a matrix of them exactly."""

    elements: int
    size: int
    format: str


# Formats that files hold as they lie in memory.
PACKED = ("c8.s32", "c4.km32")
# Matrices in several tensors of the checkpoint; cpp/weights/pieces.h says which.
COLUMNS = "columns"  # a dense matrix as [columns, rows], its only piece
IN_PIECES = (
    *("gptq4", "gptq4v2", "gptq8", "gptq8v2", "awq4", "ct4", "ct8", "f8e4m3", "mx4", COLUMNS),
)
PIECE_BYTES = {  # of an element
    **dict.fromkeys(("f32", "i32"), 4),
    **dict.fromkeys(("f16", "bf16"), 2),
    **dict.fromkeys(("i8", "u8", "f8e4m3"), 1),
}
# Those of ggml, the plain dtypes among them, and HELM's own.
STORED = {
    **{
        kind.stored: Stored(kind.elements, kind.block_bytes, kind.format) for kind in TYPES.values()
    },
    **{name: Stored(1, 0, name) for name in PACKED},
}


@dataclass(frozen=True)
class Extent:
    """A run of `rows` rows: `offset` bytes into `file` of the model directory. An element of a
    vector is a row. row_stride: bytes from one row to the next; 0: they lie side by side."""

    file: str
    offset: int
    rows: int
    row_stride: int = 0


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint that is a part of a matrix: its integers, its scales, ... name: by
    the end of its own, as "qzeros". dtype: one of PIECE_BYTES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        return PIECE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Source:
    """Where a tensor is stored. The extents' rows are stacked; or it has pieces."""

    stored: str
    extents: tuple[Extent, ...]
    aux: tuple[Piece, ...] = field(default=(), metadata={"optional": True})

    @property
    def reorders(self) -> bool:
        """Whether columns are stored in another order than they have in memory (act-order)."""
        return any(piece.name.endswith("g_idx") for piece in self.aux)


def row_width(shape: tuple[int, ...]) -> int:
    """Elements of a row; those of a vector are rows of one."""
    return math.prod(shape[1:])


def stored_bytes(stored: str, elements: int) -> int:
    """What so many elements of a row take, a multiple of a block; of strips, a row's share."""
    encoding = STORED[stored]
    if stored in PACKED:
        return FORMATS[stored].bytes(STRIP_ROWS, elements) // STRIP_ROWS
    return -(-elements // encoding.elements) * encoding.size


def stored_rows(stored: str, rows: int) -> int:
    """Rows with those that fill the last strip."""
    return -(-rows // STRIP_ROWS) * STRIP_ROWS if stored in PACKED else rows
