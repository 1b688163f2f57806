"""Logarithms of probabilities in both forms of OpenAI's API. Knows no streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from helm.serve.generation import Logprob
from helm.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


def finite(value: float) -> float:
    """As JSON can say it."""
    return float(value) if math.isfinite(value) else _LEAST


class TokenTexts:
    """Texts of single tokens, each made once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            made = self._tokenizer.token_text(token) if self._tokenizer is not None else str(token)
            text = self._known[token] = made
        return text


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], found: Sequence[Logprob], top: int
) -> dict[str, Any]:
    """Of a chat's choice; top: how many of the likeliest tokens each shows."""
    return {
        "content": [
            {
                **_entry(texts[token], logprob),
                "top_logprobs": [_entry(texts[i], value) for i, value in likeliest[:top]],
            }
            for token, (logprob, likeliest) in zip(tokens, found, strict=True)
        ],
        "refusal": None,
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    data = text.encode("utf-8", "replace")
    # U+FFFD stands for bytes that are a part of a character alone.
    return {
        "token": text,
        "logprob": finite(logprob),
        "bytes": None if "\ufffd" in text else list(data),
    }


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    found: Sequence[Logprob | None],
    top: int,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """Of a completion's choice, and where the next one's texts begin; None: not known."""
    shown = [texts[token] for token in tokens]
    offsets = []
    for text in shown:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": shown,
        "token_logprobs": [None if one is None else finite(one[0]) for one in found],
        "top_logprobs": [
            None
            if one is None
            else {
                **{texts[i]: finite(value) for i, value in one[1][:top]},
                **({} if top else {text: finite(one[0])}),
            }
            for text, one in zip(shown, found, strict=True)
        ],
        "text_offset": offsets,
    }, offset
