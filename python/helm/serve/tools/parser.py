"""Finds tool calls in the text of an answer while it comes; knows nothing of tokens."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any

from helm.serve.tools.call import Call
from helm.serve.tools.deltas import ContentDelta, Delta, ToolDelta, joined
from helm.serve.tools.families import FAMILIES, Family, family_of, tool_names
from helm.serve.tools.json_text import SPACE, Malformed, Value
from helm.serve.tools.schema import call_schema

_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)", re.ASCII)
_NAMED_PART = re.compile(r"[\w.\-\[\]\s]{0,300}", re.ASCII)


def parser_for(
    template: str,
    tools: Sequence[Any] | None,
    form: str | None = None,
    live: bool = True,
    new_id: Callable[[], str] | None = None,
) -> ToolParser | None:
    """The parser of one answer; None without tools.

    template: the chat template's text, which tells the family. form: the family's name instead.
    live, new_id: see ToolParser.
    """
    if not tools:
        return None
    family = family_of(template) if form is None else FAMILIES[form]
    return ToolParser(family, tools, live, new_id)


class ToolParser:
    """Takes an answer's text in any pieces; gives content and calls.

    A call is a JSON object with the name of one of `tools` and an object of arguments. What only
    looks like one stays content, every character of it. With `live` a call is announced where its
    arguments begin, and they are given as they come; should they break off, what came of them
    stands, and what follows is content. Without, a call is given once it is whole, and a broken
    one is content. new_id makes the ids.
    """

    def __init__(
        self,
        family: Family,
        tools: Sequence[Any],
        live: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self.family = family
        self.calls = 0  # that were announced
        self._tools = tools
        self._names = frozenset(tool_names(tools))
        self._live = live
        self._new_id = new_id or (_short_id if family.short_ids else _long_id)
        self._state = self._text
        self._buffer = ""
        self._raw: list[str] = []  # since the opener: content, should it be no call
        self._out: list[Delta] = []
        self._last = False
        self._fresh = True  # nothing but space has come
        self._in_list = False
        self._named = False  # whether the name stood before the object
        self._call: Call | Value = Value()
        self._name = ""
        self._announced = False
        self._waiting: list[str] = []  # arguments of a call that is not announced

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that `feed` needs to see even where they are special tokens."""
        return self.family.markers

    def feed(self, text: str, last: bool = False) -> list[Delta]:
        """What `text` adds; last: no more follows."""
        self._buffer += text
        self._last = last
        while self._state():
            pass
        if last:
            if self._raw and not self._announced:
                self._content("".join(self._raw))
            self._raw = []
        out, self._out = joined(self._out), []
        return out

    def required_schema(self, choice: Any, parallel: bool = False) -> dict[str, Any] | None:
        """The JSON schema of an answer that is a call, for tool_choice "required" or a named tool;
        None for "auto" and "none". parallel: an array of calls, one at least. InvalidError for a
        tool that is not there. `feed` takes such an answer without the family's markers."""
        return call_schema(self._tools, choice, self.family.key, parallel)

    # Each state takes something off the buffer and returns True, or waits for more: False.

    def _text(self) -> bool:
        if self._fresh:
            seen = self._buffer.lstrip(SPACE)
            if not self._last and any(opener.startswith(seen) for opener in self.family.openers):
                return False
            if seen[:1] in ("{", "[") and not seen.startswith(self.family.openers):
                self._fresh = False
                self._state = self._body
                return True
            self._fresh = False
        places = [(at, o) for o in self.family.openers if (at := self._buffer.find(o)) >= 0]
        if places:
            at, opener = min(places)
            before = self._buffer[:at]
            kept = before.rstrip(SPACE)
            self._content(kept)
            self._raw = [before[len(kept) :], opener]
            self._buffer = self._buffer[at + len(opener) :]
            self._state = self._body
            return True
        end = len(self._buffer) if self._last else self._certain()
        self._content(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return False

    def _certain(self) -> int:
        """How much of the buffer is content whatever follows: not space, nor half an opener."""
        end = len(self._buffer)
        for opener in self.family.openers:
            for size in range(min(len(opener) - 1, len(self._buffer)), 0, -1):
                if self._buffer.endswith(opener[:size]):
                    end = min(end, len(self._buffer) - size)
                    break
        return len(self._buffer[:end].rstrip(SPACE))

    def _body(self) -> bool:
        """After an opener: an object, a list of them, or a name."""
        self._skip_space()
        if not self._buffer:
            return False
        self._in_list = self._named = False
        if self._buffer[0] == "{":
            return self._begin()
        if self._buffer[0] == "[":
            self._in_list = True
            self._take(1)
            self._state = self._element
            return True
        if self.family.named and self._raw and "[TOOL_CALLS]" in self._raw:
            return self._name_first()
        return self._give_up()

    def _name_first(self) -> bool:
        found = _NAMED.match(self._buffer)
        if found and found[1] in self._names:
            self._name = found[1]
            self._take(found.end())
            self._named, self._call = True, Value()
            self._announced, self._waiting = False, []
            self._state = self._read
            if self._live:
                self._announce()
            return True
        if not found and not self._last and _NAMED_PART.fullmatch(self._buffer):
            return False
        return self._give_up()

    def _element(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        return self._begin() if self._buffer[0] == "{" else self._give_up()

    def _begin(self) -> bool:
        self._call = Call(self._names)
        self._announced, self._waiting = False, []
        self._state = self._read
        return True

    def _read(self) -> bool:
        """Within a call."""
        for place, char in enumerate(self._buffer):
            try:
                text = self._call.push(char) or ""
            except Malformed:
                self._buffer = self._buffer[place:]
                return self._give_up()
            self._raw.append(char)
            self._arguments(text)
            if self._call.done:
                self._buffer = self._buffer[place + 1 :]
                self._finish_call()
                return True
        self._buffer = ""
        return False

    def _arguments(self, text: str) -> None:
        if text:
            self._waiting.append(text)
        if self._live and not self._announced and isinstance(self._call, Call) and self._call.begun:
            self._name = self._call.name or ""
            self._announce()
        if self._announced and self._waiting:
            self._out.append(ToolDelta(self.calls - 1, None, None, "".join(self._waiting)))
            self._waiting = []

    def _announce(self) -> None:
        self._announced = True
        self._raw = []
        self._out.append(ToolDelta(self.calls, self._new_id(), self._name, ""))
        self.calls += 1

    def _finish_call(self) -> None:
        if isinstance(self._call, Call):
            self._name = self._call.name or ""
        if not self._announced:
            self._announce()
        self._arguments("")
        self._announced, self._raw = False, []
        self._state = self._separator if self._in_list else self._closer

    def _separator(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        if self._buffer[0] == ",":
            self._take(1)
            self._state = self._element
            return True
        if self._buffer[0] == "]":
            self._buffer, self._raw = self._buffer[1:], []
            self._state = self._closer
            return True
        return self._give_up()

    def _closer(self) -> bool:
        """After a call, or a list of them: what closes it, if anything does."""
        seen = self._buffer.lstrip(SPACE)
        closer = self.family.closer
        if not self._last and (not seen or (closer.startswith(seen) and seen != closer)):
            return False
        if closer and seen.startswith(closer):
            self._buffer = seen[len(closer) :]
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Whether another call follows at once."""
        seen = self._buffer.lstrip(SPACE)
        if not seen:
            if self._last:
                self._buffer = ""
            return False
        if seen[0] == "{":
            self._raw = [self._buffer[: len(self._buffer) - len(seen)]]
            self._buffer = seen
            self._state = self._body
        elif seen[0] in ";,":
            after = seen[1:].lstrip(SPACE)
            if not after and not self._last:
                return False
            self._state = self._text
            if after.startswith("{"):
                self._raw = [self._buffer[: len(self._buffer) - len(after)]]
                self._buffer = after
                self._state = self._body
        else:
            self._state = self._text
        return True

    def _give_up(self) -> bool:
        """What came since the opener is no call."""
        if not self._announced:
            self._content("".join(self._raw))
        self._raw, self._waiting, self._announced = [], [], False
        self._state = self._text
        return True

    def _skip_space(self) -> None:
        seen = self._buffer.lstrip(SPACE)
        self._take(len(self._buffer) - len(seen))

    def _take(self, size: int) -> None:
        self._raw.append(self._buffer[:size])
        self._buffer = self._buffer[size:]

    def _content(self, text: str) -> None:
        if text:
            self._out.append(ContentDelta(text))


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
