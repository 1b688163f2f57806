"""Reading JSON that may be hostile, with errors that name the field. Knows no file format.

`Reader` walks a parsed document and checks types; `decode` builds frozen dataclasses from one and
`encode` is its inverse. A dataclass field named `input` is written as "in".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from helm.base.arguments import shown
from helm.base.files import MOST_BYTES, decoded, read_file
from helm.errors import CheckpointError, HelmError

T = TypeVar("T")
_RENAMED = {"input": "in"}
_MAX_INTEGER = 2**62


def parse(text: str | bytes | bytearray, subject: str, error: type[HelmError]) -> Reader:
    """Parses `text`, which may begin with a byte order mark; rejects duplicate keys, NaN and
    infinities with `error` naming `subject`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"key {key!r} occurs twice")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    if not isinstance(text, (str, bytes, bytearray)):
        raise error(f"[{subject}] expected JSON text, got {shown(text)}")
    try:
        value = json.loads(decoded(text), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as reason:
        raise error(f"[{subject}] not valid JSON: {reason}") from None
    return Reader(value, subject, error)


def read_json(path: Path, error: type[HelmError], most: int = MOST_BYTES) -> Reader:
    """A JSON file of at most `most` bytes. CheckpointError where it cannot be read, `error` for
    what is in it."""
    return parse(read_file(path, CheckpointError, most=most), str(path), error)


class Reader:
    """One node of a parsed JSON document; every failed expectation raises `error` with its path."""

    def __init__(self, value: Any, subject: str, error: type[HelmError], path: str = "") -> None:
        self.value = value
        self.subject = subject
        self.error = error
        self.path = path

    def reject(self, message: str) -> NoReturn:
        raise self.error(f"[{self.subject}] {self.path or 'top level'}: {message}")

    def _expected(self, what: str) -> NoReturn:
        try:
            shown = repr(self.value)
        except (RecursionError, ValueError):  # nested too deep, or an integer too long to print
            shown = f"a {type(self.value).__name__}"
        self.reject(f"expected {what}, found {shown if len(shown) <= 60 else shown[:57] + '...'}")

    def _child(self, key: str, value: Any) -> Reader:
        return Reader(
            value, self.subject, self.error, f"{self.path}.{key}" if self.path else str(key)
        )

    def names(self) -> dict[str, Any]:
        """The node as an object; iterating gives its keys."""
        if not isinstance(self.value, dict):
            self._expected("an object")
        return self.value

    def __getitem__(self, key: str) -> Reader:
        if key not in self.names():
            self.reject(f"key {key!r} is missing")
        return self._child(key, self.value[key])

    def get(self, key: str, default: Any = None) -> Reader:
        """The child `key`, or `default` in its place when the key is absent."""
        return self._child(key, self.names().get(key, default))

    def items(self, most: int | None = None) -> list[Reader]:
        """The node as an array, of `most` items where that is given."""
        self._array(most)
        return [
            Reader(v, self.subject, self.error, f"{self.path}[{i}]")
            for i, v in enumerate(self.value)
        ]

    def integers(self, low: int, high: int, most: int) -> list[int]:
        """The node as an array of at most `most` integers; nothing is made per item."""
        self._array(most)
        for place, value in enumerate(self.value):
            if type(value) is not int or not low <= value <= high:
                path = f"{self.path}[{place}]"
                Reader(value, self.subject, self.error, path).integer(low, high)
        return list(self.value)

    def _array(self, most: int | None) -> None:
        if not isinstance(self.value, list):
            self._expected("an array")
        if most is not None and len(self.value) > most:
            self.reject(f"has {len(self.value)} items, {most} at most")

    def only(self, keys: Iterable[str]) -> None:
        known = set(keys)
        for key in self.names():
            if key not in known:
                self.reject(f"unknown key {key!r}")

    @property
    def null(self) -> bool:
        return self.value is None

    def integer(self, low: int, high: int) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            self._expected(f"an integer from {low} to {high}")
        return self.value

    def number(self, low: float = -math.inf, high: float = math.inf) -> float:
        if type(self.value) not in (int, float) or not abs(self.value) <= 1e300:
            self._expected("a finite number")
        if not low <= self.value <= high:
            self._expected(f"a number from {low:g} to {high:g}")
        return float(self.value)

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            self._expected("true or false")
        return self.value

    def string(self) -> str:
        if not isinstance(self.value, str):
            self._expected("a string")
        return self.value

    def choice(self, options: Iterable[str]) -> str:
        known = list(options)
        if self.value not in known or not isinstance(self.value, str):
            self._expected("one of " + ", ".join(known))
        return self.value


def encode(value: Any) -> Any:
    """Dataclasses, tuples and dicts as plain JSON values; ops gain their "op" key."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        encoded = {"op": value.op} if hasattr(value, "op") else {}
        for field in dataclasses.fields(value):
            if "optional" in field.metadata and getattr(value, field.name) == field.default:
                continue
            encoded[_RENAMED.get(field.name, field.name)] = encode(getattr(value, field.name))
        return encoded
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(cls: type[T], node: Reader, extra: Iterable[str] = ()) -> T:
    """The dataclass `cls` read from `node`; missing, unknown and ill-typed keys are rejected.

    `extra` are keys that the caller has read itself (such as "op"). A field with the metadata
    "optional" is absent where it has its default.
    """
    schema = _schema(cls)  # type: ignore[arg-type]
    node.only([*extra, *(key for _, key, _, _ in schema)])
    given = (entry for entry in schema if not (entry[3] and entry[1] not in node.names()))
    return cls(**{name: _decode(kind, node[key]) for name, key, kind, _ in given})


@functools.cache
def _schema(cls: type) -> list[tuple[str, str, Any, bool]]:
    """(field, JSON key, type, whether it may be absent) of each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return [
        (field.name, _RENAMED.get(field.name, field.name), hints[field.name],
         "optional" in field.metadata)
        for field in dataclasses.fields(cls)
    ]  # fmt: skip


def _decode(kind: Any, node: Reader) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is int:
        return node.integer(0, _MAX_INTEGER)
    if kind is float:
        return node.number()
    if kind is bool:
        return node.boolean()
    if kind is str:
        return node.string()
    if origin is typing.Literal:
        return node.choice(args)
    if origin is tuple:
        return tuple(_decode(args[0], item) for item in node.items())
    if origin is dict:
        return {key: _decode(args[1], node[key]) for key in node.names()}
    if origin in (typing.Union, types.UnionType):
        return None if node.null else _decode(args[0], node)
    return decode(kind, node)
