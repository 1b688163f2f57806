"""A conversation's prompt as token ids, in which answers keep the ids that they were generated as.

What a model generated need not be what its tokenizer makes of the text, and the KV cache holds the
former. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helm.base.arguments import token_ids
from helm.errors import TokenizerError
from helm.text.tokenizer import Tokenizer

Render = Callable[[Sequence[Mapping[str, Any]]], str]


def conversation_tokens(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], render: Render
) -> list[int]:
    """The ids of `render(messages)`; a message's "tokens" stand for its content where they, and
    the template, say the same text."""
    text = render(messages)
    tokens = _with_own(tokenizer, messages, text, render)
    if tokens and tokenizer.decode(tokens, skip_special_tokens=False) == text:
        return tokens
    whole = tokenizer.encode(text, add_special_tokens=False)
    return tokens if tokens and tokenizer.decode(tokens) == tokenizer.decode(whole) else whole


def _with_own(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], text: str, render: Render
) -> list[int]:
    """Ids of the text, of which the messages bring some; empty where none has any."""
    own = {i: found for i, m in enumerate(messages) if (found := _own(tokenizer, m, i))}
    pieces = _around(messages, own, render)
    if not pieces or not text.startswith(pieces[0]):
        return []
    tokens: list[int] = []
    start, place = 0, len(pieces[0])  # of what `tokens` lacks, of what has been looked at
    for (i, ids), piece in zip(own.items(), pieces[1:], strict=True):
        content = messages[i]["content"]
        if text.startswith(content + piece, place):
            before = text[start:place].removesuffix(_lead(tokenizer, ids, content))
            tokens += tokenizer.encode(before, add_special_tokens=False) + ids
            start = place + len(content)
            place = start + len(piece)
        elif (at := text.find(piece, place)) >= 0:  # the template shows another text
            place = at + len(piece)
        else:
            break
    return tokens + tokenizer.encode(text[start:], add_special_tokens=False)


def shown_tokens(tokenizer: Tokenizer, content: Any, tokens: list[int]) -> list[int] | None:
    """Those of an answer's ids that are its content, without the one that ended it; None where
    the text is another one, as after a stop string."""
    cuts = (tokens[:-1], tokens)
    return next((ids for ids in cuts if tokenizer.decode(ids) == content), None)


def _own(tokenizer: Tokenizer, message: Mapping[str, Any], index: int) -> list[int] | None:
    given = message.get("tokens")
    if given is None:
        return None
    ids = token_ids(given, f"message {index}: tokens", "chat")
    return shown_tokens(tokenizer, message.get("content"), ids)


def _around(
    messages: Sequence[Mapping[str, Any]], own: Mapping[int, list[int]], render: Render
) -> list[str]:
    """What the template puts before, between and after the contents of the messages `own`; empty
    where that cannot be told."""
    if not own:
        return []
    marks = {i: f"CONTENT_OF_MESSAGE_{i}_HERE" for i in own}
    try:
        rest = render([{**m, "content": marks.get(i, m.get("content"))}
                       for i, m in enumerate(messages)])  # fmt: skip
    except TokenizerError:
        return []
    pieces = []
    for mark in marks.values():
        piece, found, rest = rest.partition(mark)
        if not found:
            return []
        pieces.append(piece)
    return [*pieces, rest]


def _lead(tokenizer: Tokenizer, ids: list[int], content: str) -> str:
    """The space that the ids begin with within a text, and a template may show before it."""
    anchor = tokenizer.encode("a", add_special_tokens=False)
    within = tokenizer.decode([*anchor, *ids])[len(tokenizer.decode(anchor)) :]
    return within.removesuffix(content)
