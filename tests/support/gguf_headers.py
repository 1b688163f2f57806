"""A header of a GGUF file that is sound, and how others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_bytes import ARRAY, BOOL, F32, STRING, U32, File, Tensor
from helm.errors import HelmError
from helm.model.gguf.file import read_gguf

VALID = File(
    keys=(
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", U32, 1),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "ä", "", "日本"])),
        ("tokenizer.ggml.scores", ARRAY, (F32, [0.5, -1.0, 2.0, -1000.0])),
        ("a.flag", BOOL, True),
    ),
    tensors=(
        Tensor("token_embd.weight", (32, 4), 8, bytes(range(136))),
        Tensor("output_norm.weight", (32,), 0, bytes(range(128))),
    ),
)


def refused(path: Path) -> str:
    """The message by which a file is refused, in one line."""
    with pytest.raises(HelmError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name.split("-0000")[0] in message
    return message
