"""Writes GGUF files byte by byte, right or wrong as a test wants them; shares nothing with HELM's
reader. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 4, 5, 6, 7, 8, 9, 10, 12
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Elements and bytes of a block, by type number.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 20: (32, 18),
    23: (256, 136), 30: (1, 2), 39: (32, 17),
}  # fmt: skip


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value without its type. An array's content is (kind, items)."""
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        own, items = content
        head = struct.pack("<IQ", own, len(items))
        return head + b"".join(value(own, item) for item in items)
    return struct.pack(f"<{_CODES[kind]}", content)


@dataclass(frozen=True)
class Tensor:
    """shape: as in the file, the row's length first. offset None: behind the one before."""

    name: str | bytes
    shape: tuple[int, ...]
    kind: int = 0
    data: bytes | None = None
    offset: int | None = None

    def content(self) -> bytes:
        if self.data is not None:
            return self.data
        elements, size = BLOCKS.get(self.kind, (1, 1))
        return bytes(math.prod(self.shape) // elements * size)


@dataclass(frozen=True)
class File:
    """keys: (name, type, content). tensors and keys may be claimed to be more than they are. raw:
    stands where the keys begin; tail: behind the data."""

    keys: tuple[tuple[str | bytes, int, Any], ...] = ()
    tensors: tuple[Tensor, ...] = ()
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    claimed_tensors: int | None = None
    claimed_keys: int | None = None
    raw: bytes = b""
    tail: bytes = b""

    def with_keys(self, *more: tuple[str | bytes, int, Any]) -> File:
        """With `more`, in the place of keys of the same name."""
        names = {name for name, *_ in more}
        return replace(self, keys=(*(k for k in self.keys if k[0] not in names), *more))

    def without(self, *names: str) -> File:
        kept = tuple(key for key in self.keys if key[0] not in names)
        tensors = tuple(tensor for tensor in self.tensors if tensor.name not in names)
        return replace(self, keys=kept, tensors=tensors)

    def header(self) -> bytes:
        tensors = len(self.tensors) if self.claimed_tensors is None else self.claimed_tensors
        keys = len(self.keys) if self.claimed_keys is None else self.claimed_keys
        parts = [self.magic, struct.pack("<IQQ", self.version, tensors, keys), self.raw]
        for name, kind, content in self.keys:
            parts += [string(name), struct.pack("<I", kind), value(kind, content)]
        place = 0
        for tensor in self.tensors:
            offset = place if tensor.offset is None else tensor.offset
            shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            parts += [string(tensor.name), shape, struct.pack("<IQ", tensor.kind, offset % 2**64)]
            place = offset + self._padded(len(tensor.content()))
        return b"".join(parts)

    def bytes(self) -> bytes:
        header = self.header()
        data = bytearray(header + bytes(self._padded(len(header)) - len(header)))
        base = len(data)
        place = 0
        for tensor in self.tensors:
            begin = base + (place if tensor.offset is None else 0)
            content = tensor.content()
            if tensor.offset is None:
                place += self._padded(len(content))
                data += bytes(begin + self._padded(len(content)) - len(data))
                data[begin : begin + len(content)] = content
        return bytes(data) + self.tail

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path

    def _padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment
