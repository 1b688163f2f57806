"""Prompts in which special tokens that people typed stay text. Knows no engines."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helm.text.tokenizer import Tokenizer

Render = Callable[[Sequence[Mapping[str, Any]]], str]


def literal_tokens(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], render: Render
) -> tuple[str, list[int]]:
    """The text of `render(messages)`, and its ids. Only what the template writes itself becomes
    special tokens."""
    special = tokenizer.special_pattern
    if special is None or not any(special.search(text) for text in _texts(messages)):
        text = render(messages)
        return text, tokenizer.encode(text, add_special_tokens=False)
    nonce = secrets.token_hex(8)
    typed: list[str] = []

    def mark(found: re.Match[str]) -> str:
        typed.append(found[0])
        return f"\ue000{nonce}.{len(typed) - 1}\ue001"

    def unmark(text: str) -> str:
        return marks.sub(lambda found: typed[int(found[1])], text)

    marked = [_replaced(message, lambda text: special.sub(mark, text)) for message in messages]
    text = render(marked)
    marks = re.compile(f"\ue000{nonce}\\.(\\d+)\ue001")
    tokens: list[int] = []
    plain = ""
    for piece in re.split(f"({special.pattern})", text):
        if not marks.search(piece):
            plain += piece
            continue
        tokens += tokenizer.encode(plain, add_special_tokens=False)
        tokens += tokenizer.encode_literally(unmark(piece))
        plain = ""
    return unmark(text), tokens + tokenizer.encode(plain, add_special_tokens=False)


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):
            found += [part["text"] for part in content if isinstance(part.get("text"), str)]
    return found


def _replaced(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        parts = [{**part, "text": change(part["text"])} for part in content]
        return {**message, "content": parts}
    return dict(message)
