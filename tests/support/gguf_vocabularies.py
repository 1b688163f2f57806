"""Vocabularies of GGUF files, learnt from lines of text, and their tokenizers."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

import text_lines
from gguf_bytes import ARRAY, F32, I32, STRING, U32, File, Tensor
from helm.model.gguf.file import read_gguf
from helm.text.gguf_tokenizer import gguf_tokenizer
from helm.text.tokenizer import Tokenizer

LINES = text_lines.lines()
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def file_of(
    tokens: Sequence[str | bytes], kinds: Sequence[int], *keys: tuple[str, int, Any]
) -> File:
    """A model of no layers with a vocabulary."""
    return File(
        (
            ("general.architecture", STRING, "llama"),
            ("tokenizer.ggml.tokens", ARRAY, (STRING, list(tokens))),
            ("tokenizer.ggml.token_type", ARRAY, (I32, list(kinds))),
            *((f"tokenizer.{name}", kind, content) for name, kind, content in keys),
        ),
        (Tensor("token_embd.weight", (32, len(tokens)), 1),),
    )


def opened(file: File, folder: Path, rows: int | None = None) -> Tokenizer:
    found = read_gguf(file.write(folder / "x.gguf"))
    made = gguf_tokenizer(found, rows or found.tensors["token_embd.weight"].shape[0])
    assert made is not None
    return made


def same_ids(ours: Tokenizer, theirs: Any, lines: Sequence[str] = LINES) -> None:
    """theirs(line) -> ids, without special tokens around them."""
    wrong = [
        (line, found, expected)
        for line in lines
        if (found := ours.encode(line, add_special_tokens=False)) != (expected := theirs(line))
    ]
    assert not wrong, f"{len(wrong)} of {len(lines)} lines differ, the first: {wrong[0]}"


@lru_cache(maxsize=1)
def byte_level() -> Backend:
    """A vocabulary of 2,000 tokens, learnt from the lines themselves."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    return backend


def byte_level_file(pre: str = "gpt-2", *keys: tuple[str, int, Any]) -> File:
    document = json.loads(byte_level().to_str())["model"]
    tokens = sorted(document["vocab"], key=document["vocab"].__getitem__)
    kinds = [CONTROL if token.startswith("<|im_") else NORMAL for token in tokens]
    own = (
        ("ggml.model", STRING, "gpt2"),
        ("ggml.pre", STRING, pre),
        ("ggml.merges", ARRAY, (STRING, [" ".join(pair) for pair in document["merges"]])),
        ("ggml.bos_token_id", U32, 0),
        ("ggml.eos_token_id", U32, 1),
        ("chat_template", STRING, CHATML),
    )
    return file_of(tokens, kinds, *own).with_keys(*((f"tokenizer.{n}", k, c) for n, k, c in keys))


def ids_of(backend: Backend) -> Any:
    return lambda line: backend.encode(line, add_special_tokens=False).ids


@lru_cache(maxsize=2)
def sentencepiece_model(prefix: bool) -> Any:
    """A vocabulary of 1,500 pieces, trained on the lines."""
    library = pytest.importorskip("sentencepiece", reason="the sentencepiece package is the oracle")
    written = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in LINES if "\0" not in line),
        model_writer=written,
        model_type="bpe",
        vocab_size=1500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.99,
        minloglevel=2,
    )
    return library.SentencePieceProcessor(model_proto=written.getvalue())


def sentencepiece_file(model: Any, *keys: tuple[str, int, Any]) -> File:
    ids = range(model.vocab_size())
    kinds = [
        BYTE if model.is_byte(i) else UNKNOWN if model.is_unknown(i)
        else CONTROL if model.is_control(i) else NORMAL
        for i in ids
    ]  # fmt: skip
    own = (
        ("ggml.model", STRING, "llama"),
        ("ggml.scores", ARRAY, (F32, [model.get_score(i) for i in ids])),
        ("ggml.bos_token_id", U32, model.bos_id()),
        ("ggml.eos_token_id", U32, model.eos_id()),
        ("ggml.unknown_token_id", U32, model.unk_id()),
    )
    return file_of([model.id_to_piece(i) for i in ids], kinds, *own, *keys)
