"""What is saved with a KV cache: the tokens of the whole call, the messages of a conversation."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helm.base.arguments import shown
from helm.base.jsonio import parse
from helm.errors import InvalidError
from helm.text.chat_template import check_messages

_MOST_TOKEN = 2**31 - 1
_PATH_MAX = 4096  # bytes of a path, on Linux


@dataclass(frozen=True)
class SavedKV:
    """A loaded file.

    tokens: prompt and output of the call that was saved.
    cached: how many of them, from the first, the cache held.
    messages: the conversation, if it was saved with one.
    """

    tokens: list[int]
    cached: int
    messages: list[dict[str, Any]] | None


def file_name(path: Any) -> str:
    """A path as the runtime takes it; InvalidError for what is none."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise InvalidError(f"[kv] expected the path of a file as text, got {shown(path)}")
    try:
        possible = 0 < len(os.fsencode(name)) < _PATH_MAX and "\0" not in name
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise InvalidError(
            f"[kv] {shown(name)} is no path: expected 1 to {_PATH_MAX - 1} bytes without NUL; "
            "choose another"
        )
    return name


def to_metadata(tokens: Sequence[int], messages: Sequence[Mapping[str, Any]] | None) -> str:
    """JSON of a call's tokens, of which the cache may lack the last, and of the messages."""
    if messages is not None:
        check_messages(messages)
        messages = [dict(message) for message in messages]
    try:
        return json.dumps({"tokens": list(tokens), "messages": messages}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidError(f"[kv] messages cannot be saved as JSON: {error}") from None


def from_metadata(cached: int, metadata: str, path: str) -> SavedKV:
    """The inverse, for a file whose cache holds so many tokens."""
    node = parse(metadata, path, InvalidError)
    node.only(("tokens", "messages"))
    tokens = [token.integer(0, _MOST_TOKEN) for token in node["tokens"].items()]
    messages = node["messages"]
    found = None if messages.null else [item.names() for item in messages.items()]
    if found is not None:
        check_messages(found)
    return SavedKV(tokens, cached, found)
