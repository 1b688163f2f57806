"""Tokenizers of published GGUF files give the ids of transformers and of llama.cpp.

These cut the same vocabularies with code of their own. Where they differ from the models' own
tokenizer.json, HELM follows the latter.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import normalizers, pre_tokenizers

import gguf_models
import text_lines
from helm.model.gguf.file import read_gguf
from helm.text.gguf_tokenizer import gguf_tokenizer
from helm.text.tokenizer import Tokenizer
from peers.llama_model import LlamaModel

LINES = text_lines.lines()
SMOLLM2, GEMMA3, QWEN2 = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m-q4_k_m.gguf",
    "Qwen2.5-Coder-1.5B-Q4_K_M.gguf",
)
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "Sicher? 你好 😀"},
]
Ids = Callable[[str], list[int]]


@lru_cache(maxsize=3)
def published(name: str) -> tuple[Path, Tokenizer]:
    path = gguf_models.real(name)
    found = read_gguf(path)
    made = gguf_tokenizer(found, found.tensors["token_embd.weight"].shape[0])
    assert made is not None
    return path, made


def ids_of(tokenizer: Tokenizer) -> Ids:
    return lambda line: tokenizer.encode(line, add_special_tokens=False)


def same_ids(ours: Ids, theirs: Ids, lines: list[str] = LINES) -> None:
    wrong = [line for line in lines if ours(line) != theirs(line)]
    assert not wrong, (
        f"{len(wrong)} of {len(lines)} lines differ, the first is {wrong[0]!r}: "
        f"{ours(wrong[0])} instead of {theirs(wrong[0])}"
    )


@pytest.mark.parametrize("name", [SMOLLM2, QWEN2])
def test_as_transformers_reads_them(name: str) -> None:
    import transformers

    path, ours = published(name)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # It reads vocabulary and merges, and leaves out what only the models' tokenizer.json says.
    if name == SMOLLM2:
        digits = pre_tokenizers.Digits(individual_digits=True)
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    else:
        theirs.backend_tokenizer.normalizer = normalizers.NFC()
    same_ids(ids_of(ours), lambda line: theirs.encode(line, add_special_tokens=False))
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )


def llama_cpp(path: Path) -> Ids:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is the oracle")
    return LlamaModel(path, vocabulary_alone=True).tokenize


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3, QWEN2])
def test_as_llama_cpp_reads_them(name: str) -> None:
    path, ours = published(name)
    same_ids(ids_of(ours), as_tokenizer_json(name, llama_cpp(path)))


def as_tokenizer_json(name: str, theirs: Ids) -> Ids:
    """llama.cpp's ids where it does as the model's tokenizer.json says, and how that differs."""
    if name == QWEN2:  # tokenizer.json says NFC, llama.cpp leaves a text as it is
        return lambda line: theirs(unicodedata.normalize("NFC", line))
    return theirs


@pytest.mark.parametrize("name", [SMOLLM2, QWEN2])  # Gemma 3's file has no template
def test_chat_templates_as_llama_cpp_reads_them(name: str) -> None:
    path, ours = published(name)
    theirs = llama_cpp(path)
    assert ours.chat_templates
    for template in ours.chat_templates:
        for chat in (CHAT[:1], CHAT, [{"role": "system", "content": "Be brief."}, *CHAT]):
            text = ours.render_chat(chat, template=template)
            assert ids_of(ours)(text) == theirs(text), text
