"""Reads matrices in HELM's formats, from the words of cpp/include/helm/tiles.h alone, in numpy."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ROWS, SPAN, BLOCK, LINE = 16, 256, 32, 64
OFFSETS = {"c4.s": 8, "c5.s": 16, "c6.k": 32, "c8.s": 128, "c8.r": 128}
NL4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
MX4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
# Arrays [group][16 rows] of a span, then arrays [16 rows].
ARRAYS: dict[str, tuple[list[str], list[str]]] = {
    "s": (["<u2"], []),
    "m": (["<u2", "<u2"], []),
    "z": (["<u2", "u1"], []),
    "e": (["u1"], []),
    "k": (["i1"], ["<f2"]),
    "km": (["u1", "u1"], ["<f2", "<f2"]),
    "r": ([], []),
}


class Parts(NamedTuple):
    codes: str
    bits: int
    kind: str
    group: int
    offset: int
    wide: bool


def parts_of(name: str) -> Parts:
    match = re.fullmatch(r"(c4|c5|c6|c8|nl4|mx4)\.(km|[smzekr])(\d*)(?:o(\d+))?(b?)", name)
    assert match, name
    codes, kind, group, offset, wide = match.groups()
    bits = int(codes[1]) if codes[0] == "c" else 4
    off = int(offset) if offset else OFFSETS.get(f"{codes}.{kind}", 0)
    return Parts(codes, bits, kind, int(group or 0), off, bool(wide))


def up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def read_back(name: str, data: Bytes, rows: int, cols: int) -> Floats:
    """The values of a packed matrix, f32 [rows, cols]. Fails where rows beyond the last are not 0,
    or the matrix has another size."""
    p = parts_of(name)
    strips = -(-rows // ROWS)
    strip = data.reshape(strips, -1)
    reader = _Reader(strip)
    row_scale = reader.take("<f4", [ROWS]) if p.kind == "r" else None
    padded = up(cols, max(p.group, BLOCK))
    spans = [_span(p, reader, min(SPAN, padded - col), row_scale) for col in range(0, padded, SPAN)]
    assert reader.at == strip.shape[1], "bytes are left"
    values: Floats = np.concatenate(spans, axis=2).reshape(strips * ROWS, padded)
    assert not np.any(values[rows:]), "rows beyond the last"
    return values[:rows, :cols]


class _Reader:
    """Reads the same part of all strips, one after the other, each from a line on."""

    def __init__(self, strips: Bytes) -> None:
        self.strips = strips
        self.at = 0

    def take(self, dtype: str, *shapes: list[int]) -> Any:
        """Arrays that share lines, [strips, *shape] each; what pads them is 0."""
        found = []
        for shape in shapes:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            part = np.ascontiguousarray(self.strips[:, self.at : self.at + size])
            found.append(part.view(dtype).reshape(-1, *shape))
            self.at += size
        end = up(self.at, LINE)
        assert not np.any(self.strips[:, self.at : end]), "padding"
        self.at = end
        return found[0] if len(found) == 1 else found


def _span(p: Parts, reader: _Reader, n: int, row_scale: Floats | None) -> Floats:
    groups = n // p.group if p.group else 1
    by_group, by_row = ARRAYS[p.kind]
    head = [reader.take(dtype, [groups, ROWS]) for dtype in by_group]
    if by_row:
        rest = reader.take(by_row[0], *[[ROWS]] * len(by_row))
        head += rest if len(by_row) > 1 else [rest]
    codes = _codes(p, reader.take("u1", [n // BLOCK, p.bits, ROWS, 4]))
    u = codes.reshape(-1, ROWS, groups, n // groups)
    value: Floats
    f32 = [
        _wide(array, p) if array.dtype == np.uint16 else array.astype(np.float32) for array in head
    ]

    def each(scale: Floats) -> Floats:  # [strips, groups, 16] to [strips, 16, groups, 1]
        return scale.transpose(0, 2, 1)[..., None]

    zero: Any = each(f32[1]) if p.kind == "z" else np.float32(p.offset)
    v = u.astype(np.float32) - zero
    if p.codes in ("nl4", "mx4"):
        v = np.array(NL4 if p.codes == "nl4" else MX4, np.float32)[u]
    if p.kind in "sz":
        value = each(f32[0]) * v
    elif p.kind == "m":
        value = each(f32[0]) * v + each(f32[1])
    elif p.kind == "e":
        value = each(np.ldexp(np.float32(1), head[0].astype(np.int32) - 128)) * v
    elif p.kind == "k":
        value = each(f32[1][:, None] * f32[0]) * v
    elif p.kind == "km":
        value = each(f32[2][:, None] * f32[0]) * v - each(f32[3][:, None] * f32[1])
    else:
        assert row_scale is not None
        value = row_scale[:, :, None, None] * v
    assert value.dtype == np.float32
    result: Floats = value.reshape(-1, ROWS, n)
    return result


def _wide(bits: npt.NDArray[np.uint16], p: Parts) -> Floats:
    if p.wide:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def _codes(p: Parts, lines: Bytes) -> Bytes:
    """Codes [strips, 16 rows, n] of lines [strips, blocks, bits, 16 rows, 4]."""
    quads: Any
    if p.bits == 8:  # line q: columns 4 q to 4 q + 3
        quads = lines
    else:
        quads = np.concatenate([lines[:, :, :4] & 15, lines[:, :, :4] >> 4], axis=2)
        if p.bits == 5:
            quads = quads | np.stack([lines[:, :, 4] >> t & 1 for t in range(8)], axis=2) << 4
        elif p.bits == 6:
            planes = [lines[:, :, 4 + i // 4] >> i % 4 * 2 & 3 for i in range(8)]
            quads = quads | np.stack(planes, axis=2) << 4
    strips, blocks = quads.shape[:2]  # [strips, blocks, 8 quads, 16 rows, 4]
    codes: Bytes = quads.transpose(0, 3, 1, 2, 4).reshape(strips, ROWS, blocks * BLOCK)
    return codes
