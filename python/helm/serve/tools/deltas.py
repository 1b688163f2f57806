"""What a parser of tool calls gives: pieces of content and pieces of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ContentDelta:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class ToolDelta:
    """A piece of one call.

    index: of the call within the answer, from 0. id, name: in the first piece of a call alone.
    arguments: more of its JSON text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """As an entry of `delta.tool_calls`."""
        function: dict[str, Any] = {"arguments": self.arguments}
        if self.id is None:
            return {"index": self.index, "function": function}
        function = {"name": self.name, **function}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Delta = ContentDelta | ToolDelta


def joined(deltas: list[Delta]) -> list[Delta]:
    """The same with neighbours of one kind as one; the first piece of a call stays alone."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, ContentDelta):
            if isinstance(last, ContentDelta):
                found[-1] = ContentDelta(last.text + delta.text)
            elif delta.text:
                found.append(delta)
        elif (
            isinstance(last, ToolDelta)
            and last.index == delta.index
            and last.id is None
            and delta.id is None
        ):
            found[-1] = ToolDelta(last.index, None, None, last.arguments + delta.arguments)
        elif delta.id is not None or delta.arguments:
            found.append(delta)
    return found
