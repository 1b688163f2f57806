"""JSON that comes character by character: where a value ends, and whether it is one."""

from __future__ import annotations

import re

SPACE = " \t\r\n"
MOST_DEPTH = 64  # of objects and arrays in each other
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")


class Malformed(Exception):
    """A character that cannot come here."""


class Value:
    """One JSON value. Raw control characters within strings, which small models write, are
    escaped; anything else that JSON does not allow raises Malformed."""

    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []  # what closes each open object or array
        self._state = "value"
        self._is_key = False
        self._digits = 0  # that a \u lacks
        self._word = ""  # of a number or literal

    def push(self, char: str) -> str | None:
        """What to show for the character; None: the value, a number, had ended before it."""
        if self._state == "string":
            return self._string(char)
        if self._state == "escape":
            if char not in '"\\/bfnrtu':
                raise Malformed
            self._digits = 4 if char == "u" else 0
            self._state = "hex" if char == "u" else "string"
            return char
        if self._state == "hex":
            if char not in "0123456789abcdefABCDEF":
                raise Malformed
            self._digits -= 1
            self._state = "hex" if self._digits else "string"
            return char
        if self._state == "number" and char in "+-.eE0123456789":
            self._word += char
            return char
        if self._state == "number":
            if not _NUMBER.fullmatch(self._word):
                raise Malformed
            self._ended()
            if self.done:
                return None
        if self._state == "literal":
            return self._literal(char)
        if char not in SPACE:
            self._structure(char)
        return char

    def _string(self, char: str) -> str:
        if char == '"':
            if self._is_key:
                self._state, self._is_key = "colon", False
            else:
                self._ended()
        elif char == "\\":
            self._state = "escape"
        elif char < " ":
            return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char, f"\\u{ord(char):04x}")
        return char

    def _literal(self, char: str) -> str:
        self._word += char
        if self._word in _LITERALS:
            self._ended()
        elif not any(word.startswith(self._word) for word in _LITERALS):
            raise Malformed
        return char

    def _structure(self, char: str) -> None:
        state, closes = self._state, self._open[-1] if self._open else ""
        if char == closes and state in ("first value", "first key", "comma"):
            self._open.pop()
            self._ended()
        elif state in ("value", "first value"):
            self._begin(char)
        elif state in ("key", "first key") and char == '"':
            self._state, self._is_key = "string", True
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "comma" and char == ",":
            self._state = "key" if closes == "}" else "value"
        else:
            raise Malformed

    def _begin(self, char: str) -> None:
        if char in "{[":
            if len(self._open) == MOST_DEPTH:
                raise Malformed
            self._open.append("}" if char == "{" else "]")
            self._state = "first key" if char == "{" else "first value"
        elif char == '"':
            self._state = "string"
        elif char in "-0123456789":
            self._state, self._word = "number", char
        elif char in "tfn":
            self._state, self._word = "literal", char
        else:
            raise Malformed

    def _ended(self) -> None:
        self._state = "comma"
        self.done = not self._open
