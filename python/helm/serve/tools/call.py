"""One tool call as a JSON object that comes character by character."""

from __future__ import annotations

import json
from collections.abc import Collection

from helm.serve.tools.json_text import SPACE, Malformed, Value

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type", "index")


class Call:
    """Reads `{"name": ..., "arguments": {...}}`, also with `parameters`, or within `function`.

    begun: the name is one of the tools' and its arguments have begun. done: the object is closed.
    An object that is no call raises Malformed as soon as that is seen.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.done = False
        self._names = names
        self._state = "open"
        self._key = ""
        self._value = Value()
        self._text: list[str] = []  # of the value that is read
        self._inner: Call | None = None
        self._arguments = False  # whether they have begun
        self._held = ""  # arguments that came before the name

    @property
    def begun(self) -> bool:
        return self.name is not None and self._arguments

    def push(self, char: str) -> str:
        """More of the arguments' text."""
        if self._state == "inner":
            return self._push_inner(char)
        if self._state in ("in key", "in value"):
            consumed, text = self._push_value(char)
            if consumed:
                return text
        if char in SPACE:
            return ""
        return self._structure(char)

    def _structure(self, char: str) -> str:
        if self._state == "open" and char == "{":
            self._state = "first key"
        elif self._state in ("key", "first key") and char == '"':
            self._begin("in key", char)
        elif self._state == "colon" and char == ":":
            self._state = "value"
        elif self._state == "value":
            return self._begin_value(char)
        elif self._state == "comma" and char == ",":
            self._state = "key"
        elif self._state == "comma" and char == "}":
            return self._close()
        else:
            raise Malformed
        return ""

    def _begin(self, state: str, char: str) -> None:
        self._state, self._value, self._text = state, Value(), [char]
        self._value.push(char)

    def _begin_value(self, char: str) -> str:
        if self._key == "function" and char == "{":
            self._inner, self._state = Call(self._names), "inner"
            return self._push_inner(char)
        self._begin("in value", char)
        if self._key in _NAMES and char != '"':
            raise Malformed
        if self._key in _ARGUMENTS:
            if self._arguments or char not in '{"n':
                raise Malformed
            if char == "{":
                self._arguments = True
                return self._release(char)
        return ""

    def _push_inner(self, char: str) -> str:
        assert self._inner is not None
        text = self._inner.push(char)
        if self._inner.name is not None and self.name is None:
            self.name = self._inner.name
        if self._inner.begun:
            self._arguments = True
        if self._inner.done:
            self._state = "comma"
        return text

    def _push_value(self, char: str) -> tuple[bool, str]:
        """Whether the value took the character, and what to release."""
        shown = self._value.push(char)
        streamed = self._state == "in value" and self._text[0] == "{" and self._key in _ARGUMENTS
        text = ""
        if shown is not None and streamed:
            text = self._release(shown)
        elif shown is not None:
            self._text.append(shown)
        if self._value.done:
            text += self._ended(streamed)
        return shown is not None, text

    def _ended(self, streamed: bool) -> str:
        if self._state == "in key":
            self._key, self._state = json.loads("".join(self._text)), "colon"
            if self._key not in (*_NAMES, *_ARGUMENTS, *_OTHERS):
                raise Malformed
            return ""
        self._state = "comma"
        if streamed or self._key in _OTHERS:
            return ""
        value = json.loads("".join(self._text))
        if self._key in _NAMES:
            if self.name is not None or value not in self._names:
                raise Malformed
            self.name = value
            held, self._held = self._held, ""
            return held
        self._arguments = True
        return self._release("{}" if value is None else _object(value))

    def _release(self, text: str) -> str:
        if self.name is not None:
            return text
        self._held += text
        return ""

    def _close(self) -> str:
        if self.name is None:
            raise Malformed
        self.done = True
        if self._arguments:
            return ""
        self._arguments = True
        return "{}"


def _object(text: str) -> str:
    """Arguments that were written as a string, which must be the text of an object."""
    value = Value()
    kept = []
    for char in text.strip(SPACE):
        if value.done:
            raise Malformed
        if "\ud800" <= char <= "\udfff":  # half a character, which no answer may hold
            raise Malformed
        kept.append(value.push(char) or "")
    if not kept or kept[0] != "{" or not value.done:
        raise Malformed
    return "".join(kept)
