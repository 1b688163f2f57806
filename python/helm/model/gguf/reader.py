"""The header of one GGUF file: its keys and its table of tensors; reads no tensor.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is the magic,
a u32 version, u64 counts of tensors and keys, the keys, and the tensors. Data begin at the next
multiple of `general.alignment`. Everything read is treated as hostile.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from helm.base.arguments import shown
from helm.base.jsonio import Reader
from helm.errors import CheckpointError
from helm.model.gguf.cursor import Cursor, Source
from helm.model.gguf.types import TYPES, BlockType, refusal

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_TENSORS = 1 << 20
_MOST_KEYS = 1 << 16
_MOST_NAME = 1 << 16  # bytes of a key or of a tensor's name
_LEAST_TENSOR_BYTES = 32  # of an entry with an empty name and one dimension
_LEAST_KEY_BYTES = 13
_MOST_DIMENSIONS = 4
_MOST_EXTENT = 1 << 48
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_LEAST_ALIGNMENT, _MOST_ALIGNMENT = 8, 1 << 24


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. shape: rows first, [rows, cols] or [size]. stored: "f32", "f16",
    "bf16" or "ggml.q4_0" and kin. offset counts bytes from the start of `file`."""

    name: str
    shape: tuple[int, ...]
    stored: str
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Of one file. keys: values by key, arrays not yet decoded. tensors: by name, in the order of
    the file."""

    source: str
    version: int
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def node(self) -> Reader:
        """The keys, to be read with checks; errors name file and key."""
        return Reader(self.keys, self.source, CheckpointError)


def read_header(source: Source, file: str) -> Header:
    """Reads one file; `file` is the name recorded in each tensor. Raises CheckpointError that
    names file and key or tensor, and says what to do."""
    cursor = Cursor(source)
    version = _version(cursor)
    tensors, keys = _counts(cursor)
    values: dict[str, Any] = {}
    for index in range(keys):
        key = cursor.string(f"key {index} of {keys}", _MOST_NAME)
        if key in values:
            cursor.reject(f"key {shown(key)} occurs twice; expected it once; download it again")
        values[key] = cursor.value(f"key {shown(key)}")
    alignment = _alignment(cursor, values)
    entries = [_entry(cursor, index, tensors) for index in range(tensors)]
    data = -(-cursor.place // alignment) * alignment
    placed = _placed(cursor, entries, file, data, alignment)
    return Header(source.name, version, values, placed)


def _version(cursor: Cursor) -> int:
    magic = cursor.take(4, "the magic bytes")
    if magic != MAGIC:
        cursor.reject(
            f"begins with {shown(magic)}, expected {MAGIC!r}; it is no GGUF file, download it again"
        )
    version = cursor.u32("the version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in _VERSIONS and swapped in (1, *_VERSIONS):
        cursor.reject(
            "is big-endian, expected a little-endian file; convert a copy with "
            "`gguf-convert-endian FILE little` of the PyPI package gguf"
        )
    if version == 1:
        cursor.reject("has version 1, expected 2 or 3; convert the original checkpoint again")
    if version not in _VERSIONS:
        cursor.reject(
            f"has version {version}, expected 2 or 3; update HELM, or download the file again if "
            "it is damaged"
        )
    return version


def _counts(cursor: Cursor) -> tuple[int, int]:
    """Tensors and keys, no more than the file can hold."""
    found = []
    for what, most, least in (
        ("tensors", _MOST_TENSORS, _LEAST_TENSOR_BYTES),
        ("keys", _MOST_KEYS, _LEAST_KEY_BYTES),
    ):
        count = cursor.u64(f"the number of {what}")
        possible = min(most, cursor.source.size // least)
        if count > possible:
            cursor.reject(
                f"claims {count} {what}, a file of {cursor.source.size} bytes has at most "
                f"{possible}; it is damaged, download it again"
            )
        found.append(count)
    return found[0], found[1]


def _alignment(cursor: Cursor, values: dict[str, Any]) -> int:
    alignment = values.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    whole = type(alignment) is int and _LEAST_ALIGNMENT <= alignment <= _MOST_ALIGNMENT
    if not whole or alignment & (alignment - 1):
        cursor.reject(
            f"{_ALIGNMENT} is {shown(alignment)}, expected a power of two of at least "
            f"{_LEAST_ALIGNMENT}; convert the original checkpoint again"
        )
    return int(alignment)


def _entry(cursor: Cursor, index: int, count: int) -> tuple[str, tuple[int, ...], BlockType, int]:
    """Name, shape, type and offset behind the header, as the file states them."""
    name = cursor.string(f"the name of tensor {index} of {count}", _MOST_NAME)
    what = f"tensor {shown(name)}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        cursor.reject(
            f"{what} has {dimensions} dimensions, expected 1 to {_MOST_DIMENSIONS}; the file is "
            "damaged, download it again"
        )
    shape = tuple(cursor.u64(what) for _ in range(dimensions))[::-1]
    if not all(1 <= extent <= _MOST_EXTENT for extent in shape):
        cursor.reject(
            f"{what} has the shape {list(shape)}, expected extents from 1 to 2^48; the file is "
            "damaged, download it again"
        )
    number, offset = cursor.u32(what), cursor.u64(what)
    if number not in TYPES:
        cursor.reject(f"{what} {refusal(number)}")
    kind = TYPES[number]
    if shape[-1] % kind.elements:
        cursor.reject(
            f"{what} has rows of {shape[-1]} elements, expected a multiple of {kind.elements} for "
            f"{kind.name}; the file is damaged, download it again"
        )
    return name, shape, kind, offset


def _placed(
    cursor: Cursor,
    entries: list[tuple[str, tuple[int, ...], BlockType, int]],
    file: str,
    data: int,
    alignment: int,
) -> dict[str, GgufTensor]:
    """The tensors in the order of the file, which they must not leave, nor overlap."""
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        what = f"tensor {shown(name)}"
        if name in tensors:
            cursor.reject(f"{what} occurs twice; expected it once; download the file again")
        if offset % alignment:
            cursor.reject(
                f"{what} begins at byte {offset} of the data, expected a multiple of {alignment}; "
                "the file is damaged, download it again"
            )
        nbytes = math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
        if data + offset + nbytes > cursor.source.size:
            cursor.reject(
                f"{what} would end at byte {data + offset + nbytes}, the file has "
                f"{cursor.source.size}; it is truncated, download it again"
            )
        tensors[name] = GgufTensor(name, shape, kind.stored, file, data + offset, nbytes)
    by_offset = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, tensor in itertools.pairwise(by_offset):
        if tensor.offset < before.offset + before.nbytes:
            cursor.reject(
                f"tensor {shown(tensor.name)} overlaps tensor {shown(before.name)}; expected each "
                "to have bytes of its own; download the file again"
            )
    return tensors
