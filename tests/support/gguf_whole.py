"""Whole models of one layer as GGUF files, byte by byte, which tests then spoil."""

from __future__ import annotations

from typing import Any

from gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, File, Tensor

HIDDEN, ROWS = 32, 48
Keys = tuple[tuple[str, int, Any], ...]


def whole(architecture: str = "llama", vocabulary: str = "gpt2", kind: int = 8) -> File:
    """A model. architecture: "llama" or "qwen2"; vocabulary: "llama" or "gpt2"; kind: the type
    number of its matrices, which are zeros."""
    return File(_keys(architecture, _vocabulary(vocabulary)), _tensors(architecture, kind))


def _keys(architecture: str, vocabulary: dict[str, tuple[int, Any]]) -> Keys:
    numbers = {
        "block_count": 1, "context_length": 64, "embedding_length": HIDDEN,
        "attention.head_count": 2,
        "feed_forward_length": 64, "attention.head_count_kv": 1, "rope.dimension_count": 16,
        "vocab_size": ROWS,
    }  # fmt: skip
    return (
        ("general.architecture", STRING, architecture),
        ("general.alignment", U32, 32),
        *((f"{architecture}.{name}", U32, number) for name, number in numbers.items()),
        (f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5),
        (f"{architecture}.rope.freq_base", F32, 10000.0),
        *((f"tokenizer.{name}", kind, content) for name, (kind, content) in vocabulary.items()),
    )


def _tensors(architecture: str, kind: int) -> tuple[Tensor, ...]:
    """Of one layer; matrices in the type `kind`."""
    rows = {
        "attn_q": HIDDEN, "attn_k": 16, "attn_v": 16, "attn_output": HIDDEN, "ffn_gate": 64,
        "ffn_up": 64,
    }  # fmt: skip
    found = [
        Tensor("token_embd.weight", (HIDDEN, ROWS), kind),
        Tensor("output_norm.weight", (HIDDEN,)),
        Tensor("blk.0.attn_norm.weight", (HIDDEN,)),
        Tensor("blk.0.ffn_norm.weight", (HIDDEN,)),
        Tensor("blk.0.ffn_down.weight", (64, HIDDEN), kind),
        *(Tensor(f"blk.0.{name}.weight", (HIDDEN, n), kind) for name, n in rows.items()),
    ]
    if architecture == "qwen2":
        found += [Tensor(f"blk.0.{name}.bias", (rows[name],)) for name in ("attn_q", "attn_k")]
        found += [Tensor("blk.0.attn_v.bias", (16,))]
    else:
        found.append(Tensor("rope_freqs.weight", (8,), 0, b"\0\0\x80?" * 8))
    return tuple(found)


def _vocabulary(kind: str) -> dict[str, tuple[int, Any]]:
    special = ["<unk>", "<s>", "<|end|>", "<tool>"]
    if kind == "gpt2":
        tokens = [*special, *map(chr, range(97, 123)), "Ġ", "Ċ", "ab", "Ġa", "Ġab", "ĊĊ"]
        merges = ["a b", "Ġ a", "Ġ ab", "Ġa b", "Ċ Ċ"]
        own = {"ggml.pre": (STRING, "qwen2"), "ggml.merges": (ARRAY, (STRING, merges))}
    else:
        tokens = [*special, *map(chr, range(97, 123)), "▁", "ab", "▁a", "▁ab", "<0x41>"]
        own = {"ggml.scores": (ARRAY, (F32, [-float(i) for i in range(len(tokens))]))}
    kinds = [2, 3, 3, 4] + [1] * (len(tokens) - 4)
    return {
        "ggml.model": (STRING, kind),
        "ggml.tokens": (ARRAY, (STRING, tokens)),
        "ggml.token_type": (ARRAY, (I32, kinds)),
        "ggml.bos_token_id": (U32, 1),
        "ggml.eos_token_id": (U32, 2),
        "ggml.unknown_token_id": (U32, 0),
        "ggml.add_bos_token": (BOOL, True),
        "chat_template": (STRING, "{% for m in messages %}{{ m.content }}{% endfor %}"),
        **own,
    }
