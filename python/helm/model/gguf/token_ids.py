"""Ids of tokens that begin a text, end an answer or fill a gap, as a GGUF file has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from helm.model.gguf.file import Gguf

CONTROL = 3  # of tokenizer.ggml.token_type
_MOST = 2**31
# Tokens that end an answer whatever the keys say: older converters knew eos alone.
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<EOT>", "</s>",
}  # fmt: skip


def token_ids(gguf: Gguf) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` with all that end an answer, and `pad_token_id`, as in a
    config.json."""
    node = gguf.node()

    def token(name: str) -> int | None:
        found = node.get(f"tokenizer.ggml.{name}_token_id")
        return None if found.null else found.integer(0, _MOST)

    ends = (token("eos"), token("eot"), token("eom"), *_known_ends(gguf))
    return {
        "bos_token_id": token("bos"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "pad_token_id": token("padding"),
    }


def _known_ends(gguf: Gguf) -> list[int]:
    """Control tokens that are called so."""
    tokens, kinds = gguf.array("tokenizer.ggml.tokens"), gguf.array("tokenizer.ggml.token_type")
    if tokens is None or kinds is None or tokens.count != kinds.count:
        return []
    control = np.flatnonzero(kinds.numbers() == CONTROL).tolist()
    return [i for i, token in tokens.chosen(control).items() if token in _ENDS]
