"""Odd Python values as arguments: other types, borders, values that are hostile themselves."""

from __future__ import annotations

import decimal
import fractions
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import numpy as np

from fuzz import mutate


class PlantedError(Exception):
    """What a hostile value or a callback raises: HELM may let it through."""


def planted(*_: Any) -> NoReturn:
    raise PlantedError("planted")


class Raises:
    """Raises whatever is asked of it."""

    __index__ = __int__ = __float__ = __len__ = __iter__ = __str__ = __bool__ = __fspath__ = planted
    __getitem__ = __hash__ = __eq__ = __contains__ = __call__ = planted  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Raises()"


class Lies(list[Any]):
    """A list that is longer, or shorter, than it says."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(range(5))


class Endless:
    """A sequence without an end."""

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, _: Any) -> int:
        return 1


class Text(str):
    """A string of another class."""


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _loop() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def value(random: Random) -> Any:
    """One value; a fresh one where it can be changed."""
    makers = (
        lambda: mutate.value(random),
        lambda: random.choice(mutate.INTEGERS),
        lambda: random.choice((float("nan"), float("inf"), -float("inf"), 1e39, 0.5, 1e-46)),
        lambda: random.choice((b"x", bytearray(b"x"), memoryview(b"x"), 1j, ..., NotImplemented)),
        lambda: random.choice((decimal.Decimal("NaN"), decimal.Decimal("0.5"), 1j)),
        lambda: random.choice((fractions.Fraction(10**400, 3), 10**5000, -(10**5000))),
        lambda: random.choice((Raises(), Lies([1, 2]), Endless(), Text("a"), planted, int)),
        lambda: random.choice((_deep(50), _deep(100_000), _loop(), [[]], [[1], "a"], [1, "a"])),
        lambda: random.choice((set(), {1, 2}, frozenset("a"), deque([1]), UserList([1]), range(3))),
        lambda: random.choice((UserDict(a=1), OrderedDict(a=1), {"a": planted}, {1: 2})),
        lambda: iter([1, 2]),
        lambda: (i for i in (1, 2)),
        lambda: random.choice((np.int64(3), np.float16(0.5), np.bool_(True), np.str_("a"))),
        lambda: random.choice((np.zeros((0,), np.int32), np.zeros((2, 2), np.int64), np.array(3))),
        lambda: np.array([1, 2, 3], random.choice((np.int8, np.uint64, np.float32, object))),
        lambda: random.choice((np.datetime64("NaT"), np.array(["a"]), np.void(b"a"))),
        lambda: random.choice(("x" * 10_000, "\ud800", "\x00", "a\x00b", "😀", "")),
        lambda: random.choice((Path("absent"), Path("/"), Path("\x00"), Path("\udcff"))),
        lambda: random.choice(([1, 2], ["a", ""], ("a",), [None], [True], [2**31], [-1], [1.0])),
    )  # fmt: skip
    return random.choice(makers)()
