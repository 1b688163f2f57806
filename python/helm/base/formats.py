"""Formats of weights, and dtypes of elements: names, sizes and units. As cpp/include/helm/format.h
has the formats."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from helm.errors import InvalidError

DType = Literal["f32", "f16", "bf16"]
DTYPES: tuple[str, ...] = get_args(DType)
DTYPE_BYTES: dict[str, int] = {"f32": 4, "f16": 2, "bf16": 2}
# How matrices are held: as stored, in a dtype, or packed in 8 or 4 bits.
PACKED_POLICIES = ("q8", "q4")
POLICIES = ("auto", *DTYPES, *PACKED_POLICIES)
DTYPE_CHOICES = (*POLICIES, "fit")  # the first of auto and PACKED_POLICIES that fits
# What rounding normally distributed weights costs: the error by the weights' size, both as root
# mean squares. Measured, see tests/weights/test_rounding.py.
ROUNDING_RMS = {"q8": 0.0053, "q4": 0.072}
# i8: integers with an f32 scale per row of K or V, that is per position and KV head.
KvDType = Literal["f32", "f16", "bf16", "i8"]
KV_DTYPES: tuple[str, ...] = get_args(KvDType)
KV_ELEMENT_BYTES: dict[str, int] = {**DTYPE_BYTES, "i8": 1}
KV_SCALE_BYTES: dict[str, int] = {"i8": 4}
_SYNONYMS = {
    **dict.fromkeys(("float32", "fp32", "float"), "f32"),
    **dict.fromkeys(("float16", "fp16", "half"), "f16"),
    "bfloat16": "bf16",
    "int8": "i8",
}


def dtype_name(value: str) -> str:
    """HELM's name of a dtype that others call otherwise; anything else as it is."""
    return _SYNONYMS.get(value, value) if isinstance(value, str) else value


def kv_position_bytes(dtype: str, kv_heads: int, head_dim: int) -> int:
    """K and V of one position of one layer."""
    return 2 * kv_heads * (head_dim * KV_ELEMENT_BYTES[dtype] + KV_SCALE_BYTES.get(dtype, 0))


STRIP_ROWS = 16  # side by side in a packed format
BLOCK_COLS = 32  # columns of one scale of activations
SPAN_COLS = 256  # of a strip's spans but the last
LINE_BYTES = 64  # bytes; all parts of a packed matrix are such lines


class Codes(NamedTuple):
    """What is stored per weight."""

    bits: int  # per weight, without scales and escapes
    packed: bool = False  # in strips of STRIP_ROWS


class Scales(NamedTuple):
    """The arrays in front of the codes of a span, each padded to a line."""

    group_bytes: tuple[int, ...]  # of arrays [groups, 16 rows]: bytes per element
    span_f16: int = 0  # arrays f16 [16 rows], which share one line
    strip_f32: int = 0  # arrays f32 [16 rows] at the begin of the strip
    centred: bool = True  # codes are relative to an offset


_CODES = {
    "f32": Codes(32),
    "f16": Codes(16),
    "bf16": Codes(16),
    "bf16c": Codes(12),
    "c4": Codes(4, True),
    "c5": Codes(5, True),
    "c6": Codes(6, True),
    "c8": Codes(8, True),
    "nl4": Codes(4, True),
    "mx4": Codes(4, True),
}
_SCALES = {
    "": Scales(()),
    "s": Scales((2,)),
    "m": Scales((2, 2), centred=False),
    "z": Scales((2, 1), centred=False),
    "e": Scales((1,)),
    "k": Scales((1,), span_f16=1),
    "km": Scales((1, 1), span_f16=2, centred=False),
    "r": Scales((), strip_f32=1),
}


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class Format(NamedTuple):
    """How the bytes of a weight slice are encoded. Made by `parse`.

    `group`: columns that share a scale, 0 if none do; `offset`: what is subtracted from a code;
    `wide`: 16-bit scales are bf16, not f16.
    """

    codes: str
    scales: str = ""
    group: int = 0
    offset: int = 0
    wide: bool = False

    @property
    def packed(self) -> bool:
        """Whether rows lie side by side in strips of 16."""
        return _CODES[self.codes].packed

    @property
    def dense(self) -> bool:
        """Whether one element lies after the other."""
        return not self.packed and self.codes != "bf16c"

    @property
    def row_unit(self) -> int:
        """A slice begins and ends at multiples of so many rows, but for the matrix's end."""
        return STRIP_ROWS if self.packed else 1

    @property
    def col_unit(self) -> int:
        """A slice begins and ends at multiples of so many columns, but for the matrix's end."""
        if self.packed:
            return max(BLOCK_COLS, self.group)
        return 128 if self.codes == "bf16c" else 1

    def read_bytes(self, rows: int, cols: int) -> int:
        """What a product of all rows reads of a matrix in memory."""
        if self.packed:
            return -(-rows // STRIP_ROWS) * self._strip_bytes(cols)
        if self.codes == "bf16c":  # three lines per chunk, and eight bytes per row
            return rows * (-(-cols // 128) * 192 + 8)
        return rows * cols * (_CODES[self.codes].bits // 8)

    def bytes(self, rows: int, cols: int) -> int:
        """What a matrix takes in memory; of bf16c, with the most escapes that it may have."""
        escapes = rows * cols // 256 + 64 if self.codes == "bf16c" else 0
        return self.read_bytes(rows, cols) + 4 * escapes

    def takes(self, cols: int) -> bool:
        """Whether a matrix of so many columns can be had: bf16c has 16 bits for a column."""
        return self.codes != "bf16c" or cols <= 65536

    def _span_bytes(self, cols: int) -> int:
        scales = _SCALES[self.scales]
        groups = cols // self.group if self.group else 0
        header = sum(_round_up(groups * STRIP_ROWS * n, LINE_BYTES) for n in scales.group_bytes)
        header += LINE_BYTES if scales.span_f16 else 0
        return header + cols // BLOCK_COLS * _CODES[self.codes].bits * LINE_BYTES

    def _strip_bytes(self, cols: int) -> int:
        spans, rest = divmod(_round_up(cols, self.col_unit), SPAN_COLS)
        whole = spans * self._span_bytes(SPAN_COLS)
        last = self._span_bytes(rest) * (rest > 0)
        return _SCALES[self.scales].strip_f32 * LINE_BYTES + whole + last


# All formats. A new one is a name here, with sizes in tests/data/format_bytes.json.
FORMAT_NAMES = (
    *("f32", "f16", "bf16", "bf16c"),
    *("c4.s32", "c4.s64", "c4.s128", "c4.s32b", "c4.s64b", "c4.s128b"),
    *("c4.z32", "c4.z64", "c4.z128", "c4.z32b", "c4.z64b", "c4.z128b"),
    *("c4.m32", "c4.km32", "c4.km16", "c4.k16o4"),
    *("c5.s32", "c5.m32", "c5.km32", "c6.k16"),
    *("c8.s32", "c8.s64", "c8.s128", "c8.s32b", "c8.s64b", "c8.s128b"),
    *("c8.z32", "c8.z64", "c8.z128", "c8.z32b", "c8.z64b", "c8.z128b", "c8.r"),
    *("nl4.s32", "nl4.k32", "mx4.e32"),
)
_NAME = re.compile(r"([a-z]+\d+c?)(?:\.([a-z]+?)(\d*)(?:o(\d+))?(b?))?")


def _parse(name: str) -> Format:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    codes, scales, group, offset, wide = match.groups("")
    centre = 0
    if codes.startswith("c") and _SCALES[scales].centred:  # a code's middle, but where it says so
        centre = int(offset) if offset else 1 << _CODES[codes].bits - 1
    return Format(codes, scales, int(group or 0), centre, bool(wide))


FORMATS = {name: _parse(name) for name in FORMAT_NAMES}
_NAMES = {format: name for name, format in FORMATS.items()}


def parse(name: str) -> Format:
    """The format of a name; InvalidError, which names all formats, for any other."""
    if name not in FORMATS:
        known = ", ".join(FORMAT_NAMES)
        raise InvalidError(f'[format] no format has the name "{name}"; known: {known}')
    return FORMATS[name]


def name(format: Format) -> str:
    """The name that `parse` takes."""
    return _NAMES[format]


def tensor_bytes(format: str, shape: tuple[int, ...]) -> int:
    """What a matrix [rows, cols] or a vector [size] takes in a format of that name."""
    rows, cols = shape if len(shape) == 2 else (1, *shape)
    return FORMATS[format].bytes(rows, cols)


def uncompressed(format: str) -> str:
    """The name of the format that has the same weights on every device."""
    return "bf16" if format == "bf16c" else format
