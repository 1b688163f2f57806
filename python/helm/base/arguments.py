"""What callers give as arguments, checked and quoted in messages; knows no parameter by name."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsInt, TypeGuard

from helm.errors import InvalidError, printable

_MOST_COUNT = 2**60  # of anything, bytes included
_SHOWN = 60  # characters
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _SHOWN
_LISTED = 8  # names in one message


def shown(value: object) -> str:
    """`value` as messages quote it: one short line, whatever it is."""
    try:
        text = _repr.repr(value)
    except Exception:  # of the value's own making, or an integer too long to print
        text = f"a value of type {type(value).__name__}"
    text = " ".join(printable(text).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def short(name: str, most: int = 255) -> str:
    """A name in a message; of a path to a file more may be needed."""
    return name if len(name) <= most else f"{name[:40]}..."


def listed(names: Sequence[str]) -> str:
    """ "a, b and 3 more"."""
    first = ", ".join(names[:_LISTED])
    return first if len(names) <= _LISTED else f"{first} and {len(names) - _LISTED} more"


def is_integer(value: object) -> TypeGuard[SupportsInt]:
    """Whether it is one, numpy's among them; truth values are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_one_of(value: object, options: Collection[str]) -> bool:
    """Whether it is one of these words."""
    return isinstance(value, str) and value in options


def count(value: object, what: str) -> int:
    """`value` as an int from 1; `what` begins the message of the InvalidError."""
    if not is_integer(value) or int(value) < 1:
        raise InvalidError(f"{what} must be an integer of at least 1, got {shown(value)}")
    if int(value) > _MOST_COUNT:
        raise InvalidError(f"{what} must be at most {_MOST_COUNT}, got {shown(value)}")
    return int(value)


def check_call(value: object, what: str, call: str) -> None:
    """InvalidError unless it is None or can be called as `call`."""
    if value is not None and not callable(value):
        raise InvalidError(f"{what} must be callable as {call}, got {shown(value)}")


def check_flag(value: object, what: str) -> None:
    """InvalidError unless it is True or False."""
    if not isinstance(value, bool):
        raise InvalidError(f"{what} must be True or False, got {shown(value)}")


def items_of(value: Any) -> Sequence[Any] | None:
    """Those of a list, numpy array or torch tensor; None for what is no list, text among it."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, Sequence) else None


def token_ids(tokens: Any, where: str, place: str = "generate") -> list[int]:
    """Token ids from a list, numpy array or torch tensor of integers."""
    items = items_of(tokens)
    if items is None:
        raise InvalidError(
            f"[{place}] {where} must be text or a list of token ids, got {type(tokens).__name__}"
        )
    for token in items:
        if not is_integer(token):
            raise InvalidError(f"[{place}] {where}: {shown(token)} is not a token id (an integer)")
    return [int(token) for token in items]
