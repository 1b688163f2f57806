"""Random tokens under a constraint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import small_tokenizers
from helm import _helm
from helm.errors import InvalidError
from helm.text import structured
from helm.text.called_grammar import CalledCompiler
from helm.text.token_bytes import token_bytes
from helm.text.tokenizer import Tokenizer

KINDS = ("byte_level", "sentencepiece")


def small_tokenizer(kind: str) -> Tokenizer:
    if kind == "byte_level":
        return Tokenizer(small_tokenizers.byte_level(), {"eos_token": "<|end|>"})
    return Tokenizer(small_tokenizers.sentencepiece(), {"eos_token": "</s>"})


def allowed(constraint: Any, vocab_size: int) -> np.ndarray:
    """Ids whose bit of the mask is set."""
    words = np.frombuffer(constraint.mask(vocab_size), np.uint8)
    return np.flatnonzero(np.unpackbits(words, bitorder="little")[:vocab_size])


def drawn(
    constraint: Any, tokenizer: Tokenizer, seed: int, most: int = 3000, forces: bool = True
) -> tuple[list[int], bool]:
    """Random tokens under a constraint, and whether it ended within `most`."""
    chosen = random.Random(seed)
    tokens: list[int] = []
    while not constraint.is_stopped():
        if len(tokens) >= most:
            return tokens, False
        token = int(chosen.choice(allowed(constraint, tokenizer.vocab_size)))
        constraint.commit(token)
        tokens.append(token)
        for forced in constraint.forced() if forces and not constraint.is_stopped() else []:
            assert forced in allowed(constraint, tokenizer.vocab_size)
            constraint.commit(forced)
            tokens.append(forced)
    assert tokens[-1] == tokenizer.eos_token_id
    assert allowed(constraint, tokenizer.vocab_size).size == 0
    return tokens, True


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    pieces = token_bytes(tokenizer, tokenizer.vocab_size).pieces
    return b"".join(pieces[token] for token in tokens).decode()


def compilers(tokenizer: Tokenizer) -> tuple[Any, Any]:
    """llguidance called natively and from Python."""
    table = token_bytes(tokenizer, tokenizer.vocab_size)
    end = tokenizer.eos_token_id
    assert end is not None
    parts = (table.pieces, table.special, [end], table.tokenize)
    native = _helm.GrammarCompiler(str(structured.library()), *parts)
    return native, CalledCompiler(*parts, InvalidError("absent"))
