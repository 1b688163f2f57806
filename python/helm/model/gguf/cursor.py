"""Reads the values of a GGUF header one after the other from bytes that may be hostile; knows the
types of values and no key.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is little
endian. A string is a u64 length and its bytes in UTF-8; an array is a u32 element type, a u64
count and its elements.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from helm.base.arguments import short, shown
from helm.errors import CheckpointError

MOST_STRING = 1 << 26  # bytes
STRING, ARRAY = 8, 9
_BOOL = 7
_SCALARS: dict[int, struct.Struct] = {
    number: struct.Struct(f"<{code}")
    for number, code in
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
    .items()
}  # fmt: skip
_NUMPY = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Source(Protocol):
    """A file, here or elsewhere, of which ranges can be read.

    name: as messages call it. size: bytes. step: the bytes that one read should have at least.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def step(self) -> int: ...

    def read(self, begin: int, count: int) -> bytes:
        """Exactly `count` bytes from `begin`; CheckpointError where the file has not as many."""
        ...


@dataclass(frozen=True)
class Array:
    """An array of a header, decoded when it is asked for.

    subject: file and key, as messages call them. kind: the elements' type in the file. data: the
    elements as stored.
    """

    subject: str
    kind: int
    count: int
    data: bytes

    def strings(self) -> list[str]:
        """The elements; CheckpointError where they are no strings in UTF-8."""
        found: list[str] = []
        try:
            for begin, end in self._spans():
                found.append(self.data[begin:end].decode())
        except UnicodeDecodeError as reason:
            self._no_text(len(found), reason)
        return found

    def chosen(self, indices: Collection[int]) -> dict[int, str]:
        """Those at `indices`; CheckpointError as of `strings`."""
        wanted, found, index = set(indices), dict[int, str](), 0
        try:
            for index, (begin, end) in enumerate(self._spans()):
                if index in wanted:
                    found[index] = self.data[begin:end].decode()
        except UnicodeDecodeError as reason:
            self._no_text(index, reason)
        return found

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each string, which the reader has checked."""
        if self.kind != STRING:
            raise CheckpointError(
                f"{self.subject} is an array of numbers, expected one of strings; take another "
                "file of this model"
            )
        place, data, unpack = 0, self.data, _U64.unpack_from
        for _ in range(self.count):
            begin = place + 8
            place = begin + unpack(data, place)[0]
            yield begin, place

    def _no_text(self, index: int, reason: UnicodeDecodeError) -> NoReturn:
        raise CheckpointError(
            f"{self.subject}[{index}] is not UTF-8: {reason}; download the file again"
        ) from None

    def numbers(self) -> npt.NDArray[Any]:
        """The elements, [count], in their own type; CheckpointError where they are strings."""
        if self.kind not in _NUMPY:
            raise CheckpointError(
                f"{self.subject} is an array of strings, expected one of numbers; take another "
                "file of this model"
            )
        return np.frombuffer(self.data, _NUMPY[self.kind])


class Cursor:
    """A place in a header; reads on in the file as it needs."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.place = 0
        self._have = bytearray()

    def reject(self, message: str) -> NoReturn:
        raise CheckpointError(f"[load] {short(self.source.name, 1000)}: {message}")

    def need(self, count: int, what: str) -> None:
        """Makes `count` more bytes available; `what` they are, for the message."""
        end = self.place + count
        if end > self.source.size:
            self.reject(
                f"{what} would end at byte {end}, the file has {self.source.size}; it is truncated "
                "or damaged, download it again"
            )
        have = len(self._have)
        if end > have:
            more = min(max(end - have, self.source.step), self.source.size - have)
            self._have += self.source.read(have, more)

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        self.need(count, what)
        begin, self.place = self.place, self.place + count
        return self._cut(begin)

    def u32(self, what: str) -> int:
        found: int = _U32.unpack(self.take(4, what))[0]
        return found

    def u64(self, what: str) -> int:
        found: int = _U64.unpack(self.take(8, what))[0]
        return found

    def string(self, what: str, most: int = MOST_STRING) -> str:
        """A string of at most `most` bytes."""
        length = self.u64(f"the length of {what}")
        if length > most:
            self.reject(
                f"{what} has {length} bytes, expected at most {most}; the file is damaged, "
                "download it again"
            )
        data = self.take(length, what)
        try:
            return data.decode()
        except UnicodeDecodeError as reason:
            self.reject(f"{what} {shown(data)} is not UTF-8: {reason}; download the file again")

    def value(self, key: str) -> bool | int | float | str | Array:
        """A typed value; `key` names it in messages."""
        kind = self.u32(f"the type of {key}")
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self._array(key)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            self.reject(
                f"{key} has the unknown value type {kind}; the file is damaged, or newer than "
                "HELM; download it again or update HELM"
            )
        found: int | float = scalar.unpack(self.take(scalar.size, key))[0]
        if kind != _BOOL:
            return found
        if found not in (0, 1):
            self.reject(f"{key} is {found}, expected 0 or 1 of a truth value; download it again")
        return bool(found)

    def _array(self, key: str) -> Array:
        kind, count = self.u32(f"the type of {key}"), self.u64(f"the length of {key}")
        if kind != STRING and kind not in _NUMPY:
            nested = "an array of arrays" if kind == ARRAY else f"of the unknown value type {kind}"
            self.reject(
                f"{key} is {nested}, expected numbers or strings; take another file of this model"
            )
        if count * (8 if kind == STRING else _SCALARS[kind].size) > self.source.size:
            self.reject(
                f"{key} has {count} elements, more than the file of {self.source.size} bytes "
                "holds; it is damaged, download it again"
            )
        begin = self.place
        if kind == STRING:
            self._pass_strings(key, count)
        else:
            size = count * _SCALARS[kind].size
            self.need(size, key)
            self.place += size
        subject = f"[load] {short(self.source.name, 1000)}: {key}"
        return Array(subject, kind, count, self._cut(begin))

    def _pass_strings(self, key: str, count: int) -> None:
        """Moves on behind `count` strings, hundreds of thousands of which a vocabulary has."""
        have, unpack, place = self._have, _U64.unpack_from, self.place
        for index in range(count):
            if place + 8 > len(have):
                self.place = place
                self.need(8, f"{key}[{index}]")
            length = unpack(have, place)[0]
            if length > MOST_STRING:
                self.reject(
                    f"{key}[{index}] has {length} bytes, expected at most {MOST_STRING}; the file "
                    "is damaged, download it again"
                )
            place += 8 + length
        self.place = place
        self.need(0, key)

    def _cut(self, begin: int) -> bytes:
        """The bytes from `begin` to this place."""
        with memoryview(self._have) as have:
            return bytes(have[begin : self.place])
