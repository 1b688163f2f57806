"""Vocabularies of GGUF files that are refused, with the way out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, File
from gguf_vocabularies import NORMAL, UNKNOWN, byte_level_file, file_of, opened
from helm.errors import TokenizerError


def without(file: File, name: str) -> File:
    return file.without(f"tokenizer.{name}")


def bad_files() -> Iterator[tuple[str, File, str]]:
    valid = byte_level_file()
    tokens = valid.keys[1][2][1]

    def key(name: str, kind: int, content: Any) -> File:
        return byte_level_file("gpt-2", (name, kind, content))

    yield "an unknown model", key("ggml.model", STRING, "rwkv"), r"ggml.model: 'rwkv' is not supp"
    yield (
        "an unknown kind of words",
        byte_level_file("mpt"),
        (r"ggml.pre: 'mpt' is not supported; expected one of .*with tokenizer="),
    )
    yield "no kind of words", without(valid, "ggml.pre"), r"ggml.pre: is missing; expected one of"
    yield "no merges", without(valid, "ggml.merges"), r"'tokenizer.ggml.merges' is missing"
    yield "no tokens", without(valid, "ggml.tokens"), r"'tokenizer.ggml.tokens' is missing"
    yield "merges of numbers", key("ggml.merges", ARRAY, (I32, [1])), "is an array of numbers"
    yield "tokens of text", key("ggml.tokens", STRING, "abc"), "tokens: expected an array"
    yield (
        "a merge of one",
        key("ggml.merges", ARRAY, (STRING, ["ab"])),
        (r"merges: entry 0 is 'ab', expected two tokens"),
    )
    yield (
        "a merge of unknown tokens",
        key("ggml.merges", ARRAY, (STRING, ["qqq zzz"])),
        (r"the vocabulary cannot be used: .*with tokenizer="),
    )
    yield (
        "a token twice",
        key("ggml.tokens", ARRAY, (STRING, [*tokens[:-1], "a"])),
        (r"tokens: holds 'a' twice; expected every token once"),
    )
    yield (
        "a token that is no UTF-8",
        key("ggml.tokens", ARRAY, (STRING, [b"\xff"])),
        (r"'tokenizer.ggml.tokens'\[0\] is not UTF-8"),
    )
    yield (
        "fewer types than tokens",
        key("ggml.token_type", ARRAY, (I32, [1])),
        (r"token_type: 1 elements, tokenizer.ggml.tokens has 2000; expected as many"),
    )
    yield (
        "a special token beyond",
        key("ggml.eos_token_id", U32, 2000),
        (r"eos_token_id: expected an integer from 0 to 1999, found 2000"),
    )
    yield "a flag of text", key("ggml.add_bos_token", STRING, "yes"), "add_bos_token: expected true"
    yield (
        "a beginning without a token",
        without(key("ggml.add_bos_token", BOOL, True), "ggml.bos_token_id"),
        r"bos_token_id is missing; expected the id of the token to add",
    )
    yield "a template of numbers", key("chat_template", U32, 1), "chat_template: expected a string"
    pieces = file_of(["a", "b"], [1, 1], ("ggml.model", STRING, "llama"))
    yield "no scores", pieces, "'tokenizer.ggml.scores' is missing"
    yield (
        "fewer scores than tokens",
        pieces.with_keys(("tokenizer.ggml.scores", ARRAY, (F32, [0.0]))),
        r"scores: 1 elements, tokenizer.ggml.tokens has 2",
    )


BAD = {name: (file, words) for name, file, words in bad_files()}


@pytest.mark.parametrize("name", BAD)
def test_bad_vocabularies_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    file, words = BAD[name]
    with pytest.raises((TokenizerError, OSError)) as caught:
        opened(file, tmp_path)
    message = str(caught.value)
    assert "x.gguf" in message
    assert "\n" not in message
    assert re.search(words, message), message


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has 2000 tokens, the model's embedding 1999 rows"):
        opened(byte_level_file(), tmp_path, rows=1999)


def test_scores_that_are_no_numbers(tmp_path: Path) -> None:
    tokens = ["<unk>", "a", "b", "ab", "ba", "▁"]
    scores = [0.0, float("nan"), float("inf"), float("nan"), -float("inf"), 0.0]
    file = file_of(
        tokens, [UNKNOWN, *[NORMAL] * 5], ("ggml.model", STRING, "llama"),
        ("ggml.scores", ARRAY, (F32, scores)), ("ggml.add_bos_token", BOOL, False),
        ("ggml.unknown_token_id", U32, 0),
    )  # fmt: skip
    with pytest.raises(TokenizerError, match=r"scores: .* is no finite number"):
        opened(file, tmp_path)
