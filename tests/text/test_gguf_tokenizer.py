"""Tokenizers of GGUF files, against the library's own, SentencePiece, transformers and llama.cpp.

transformers and llama.cpp cut the same vocabularies with code of their own; SentencePiece trains
the vocabulary that it then is the oracle of.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from gguf_bytes import ARRAY, BOOL, I32, STRING, File
from gguf_vocabularies import (
    CONTROL,
    LINES,
    NORMAL,
    USER_DEFINED,
    byte_level,
    byte_level_file,
    file_of,
    ids_of,
    opened,
    same_ids,
    sentencepiece_file,
    sentencepiece_model,
)
from helm.model.gguf.file import read_gguf
from helm.text.gguf_tokenizer import gguf_tokenizer
from helm.text.pre_tokenizers import _DEEPSEEK_LETTERS, PRE_TOKENIZERS
from peers.llama_model import LlamaModel

# --- byte-level ----------------------------------------------------------------------------------


def test_gpt2_is_the_librarys_own(tmp_path: Path) -> None:
    ours = opened(byte_level_file(), tmp_path)
    same_ids(ours, ids_of(byte_level()))
    for line in LINES:
        assert ours.decode(ours.encode(line)) == line


def test_smollm_cuts_digits_before_words(tmp_path: Path) -> None:
    theirs = Backend.from_str(byte_level().to_str())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    same_ids(opened(byte_level_file("smollm"), tmp_path), ids_of(theirs))


TEXT = "I'll pay 1234567   £!!\n"
DIGITS = "1|2|3|4|5|6|7"
# By hand, from what the patterns mean.
WORDS = {
    "gpt-2": "I|'ll| pay| 1234567|  | £!!|\n",
    "llama-bpe": "I|'ll| pay| |123|456|7|  | £!!\n",
    "chatglm-bpe": "I|'ll| pay| |123|456|7|  | £!!\n",
    "qwen2": f"I|'ll| pay| |{DIGITS}|  | £!!\n",
    "qwen35": f"I|'ll| pay| |{DIGITS}|  | £!!\n",
    "smollm": f"I|'ll| pay| |{DIGITS}|  | £!!|\n",
    "tekken": f"I|'ll| pay| |{DIGITS}|  | £!!\n",
    "gpt-4o": "I'll| pay| |123|456|7|  | £!!\n",
    "deepseek-v3": "I|'ll| pay| |123|456|7|  | £!!\n",
    "deepseek-coder": f"I|'|ll| pay| |{DIGITS}|   £|!!|\n",
    "deepseek-llm": "I|'|ll| pay| |1234567|   £|!!|\n",
    "default": "I|'|ll| pay| |123|456|7|  | £|!!|\n",
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_of_every_kind(pre: str, tmp_path: Path) -> None:
    ours = opened(byte_level_file(pre), tmp_path)
    words = ours.backend.pre_tokenizer.pre_tokenize_str(TEXT)
    assert "|".join(TEXT[begin:end] for _, (begin, end) in words) == WORDS[pre]


def test_words_of_every_kind_are_told() -> None:
    kinds = {pre.patterns for pre in PRE_TOKENIZERS.values()}
    assert kinds == {PRE_TOKENIZERS[name].patterns for name in WORDS}


def test_deepseeks_letters_are_cased_ones_in_order() -> None:
    letters, last = _DEEPSEEK_LETTERS, 0
    for first, end in re.findall(r"(.)(?:-(.))?", letters):
        begin, last_before = ord(first), last
        last = ord(end or first)
        assert last_before < begin <= last
        kinds = {unicodedata.category(chr(c)) for c in range(begin, last + 1)}
        assert kinds <= {"Lu", "Ll", "Lt", "Cn"}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_kind_keeps_every_character(pre: str, tmp_path: Path) -> None:
    ours = opened(byte_level_file(pre), tmp_path)
    for line in LINES[:500]:
        words = ours.backend.pre_tokenizer.pre_tokenize_str(line)
        ends = [end for _, (_, end) in words]
        assert [begin for _, (begin, _) in words] == [0, *ends[:-1]]
        assert ends[-1] == len(line)


def test_normalised_text_is_qwens_alone(tmp_path: Path) -> None:
    """Its tokenizer.json says NFC; e and an accent are one letter then."""
    for pre, decoded in (("qwen2", "é"), ("llama-bpe", "e\u0301")):
        ours = opened(byte_level_file(pre), tmp_path)
        assert ours.decode(ours.encode("e\u0301")) == decoded


def test_whole_words_come_before_merges(tmp_path: Path) -> None:
    """llama-bpe takes a word that is a token, though no merge leads to it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    keys = (("ggml.model", STRING, "gpt2"), ("ggml.merges", ARRAY, (STRING, ["a b"])))
    for pre, expected in (("llama-bpe", ["abc"]), ("qwen2", ["ab", "c"])):
        tokens = [*letters, "ab", "abc"]
        file = file_of(
            tokens, [NORMAL] * len(tokens), *keys, ("ggml.pre", STRING, pre),
            ("ggml.add_bos_token", BOOL, False),
        )  # fmt: skip
        assert [tokens[i] for i in opened(file, tmp_path).encode("abc")] == expected


# --- special tokens and templates ----------------------------------------------------------------


def test_special_tokens_and_the_template(tmp_path: Path) -> None:
    ours = opened(byte_level_file(), tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)
    assert ours.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    text = ours.render_chat([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = ours.encode(text, add_special_tokens=False)
    assert [ids.count(0), ids.count(1)] == [2, 1]
    assert ours.decode(ids) == "user\nHi\nassistant\n"
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_templates_by_name(tmp_path: Path) -> None:
    file = byte_level_file("gpt-2", ("chat_template.tool_use", STRING, "{{ tools }}"))
    ours = opened(file, tmp_path)
    assert sorted(ours.chat_templates) == ["default", "tool_use"]
    assert ours.render_chat([{"role": "user", "content": ""}], tools=[1]) == "[1]"


def test_tokens_around_a_text(tmp_path: Path) -> None:
    for bos, eos in ((True, True), (True, False), (False, True), (False, False)):
        file = byte_level_file(
            "gpt-2", ("ggml.add_bos_token", BOOL, bos), ("ggml.add_eos_token", BOOL, eos)
        )
        ours = opened(file, tmp_path)
        ids = ours.encode("Hello")
        assert ids == [*([0] * bos), *ours.encode("Hello", add_special_tokens=False), *([1] * eos)]


def test_llama_bpe_begins_texts_where_the_file_does_not_say(tmp_path: Path) -> None:
    assert opened(byte_level_file("llama-bpe"), tmp_path).encode("x")[0] == 0
    assert opened(byte_level_file("qwen2"), tmp_path).encode("x")[0] != 0


def test_user_defined_tokens_are_found_and_shown(tmp_path: Path) -> None:
    file = byte_level_file()
    kinds = [CONTROL, USER_DEFINED] + [NORMAL] * (len(file.keys[1][2][1]) - 2)
    ours = opened(file.with_keys(("tokenizer.ggml.token_type", ARRAY, (I32, kinds))), tmp_path)
    ids = ours.encode("a<|im_start|>b<|im_end|>c")
    assert {0, 1} <= set(ids)
    assert ours.decode(ids) == "ab<|im_end|>c"


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    for keys in ((), (("tokenizer.ggml.model", STRING, "no_vocab"),)):
        file = File((("general.architecture", STRING, "llama"), *keys))
        assert gguf_tokenizer(read_gguf(file.write(tmp_path / "x.gguf")), 10) is None


def test_fewer_tokens_than_rows(tmp_path: Path) -> None:
    assert opened(byte_level_file(), tmp_path, rows=4096).vocab_size == 2000


# --- SentencePiece -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_the_oracle_of_its_own(prefix: bool, tmp_path: Path) -> None:
    model = sentencepiece_model(prefix)
    ours = opened(sentencepiece_file(model, ("ggml.add_space_prefix", BOOL, prefix)), tmp_path)
    # The library ends a text at a zero byte and takes its own control pieces for text.
    lines = [line for line in LINES if "\0" not in line and line]
    same_ids(ours, model.encode, lines)
    for line in lines:
        assert ours.decode(ours.encode(line)) == line


def test_sentencepiece_begins_texts_where_the_file_does_not_say(tmp_path: Path) -> None:
    model = sentencepiece_model(True)
    ours = opened(sentencepiece_file(model), tmp_path)
    assert ours.encode("x")[0] == model.bos_id() == ours.bos_token_id
    assert ours.decode(ours.encode("x</s>")) == "x"


def test_streamed_pieces_are_the_text(tmp_path: Path) -> None:
    ours = opened(sentencepiece_file(sentencepiece_model(True)), tmp_path)
    for line in LINES[:200]:
        stream = ours.detokenizer()
        ids = ours.encode(line)
        assert "".join([stream.push(i) for i in ids] + [stream.flush()]) == ours.decode(ids)


# --- llama.cpp -----------------------------------------------------------------------------------


def llama_cpp(path: Path) -> Any:
    """Ids of a line in llama.cpp, which reads the file's vocabulary alone."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is the oracle")
    return LlamaModel(path, vocabulary_alone=True).tokenize


# What llama.cpp cuts otherwise than the models' tokenizer.json says: it takes white space beyond
# ASCII for a vertical tab, where DeepSeek's range of ideographs has some, and knows no marks apart
# from letters.
_WIDE_SPACES = r"[\u0085\u00a0\u2003\u2028\u3000]"
CUT_OTHERWISE = {
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), _WIDE_SPACES),
    **dict.fromkeys(("tekken", "gpt-4o", "llama4"), "[\u0947\u093f\u094d]"),
}


def cut_alike(pre: str) -> list[str]:
    """Lines without such characters, and in NFC, as llama.cpp normalises none."""
    other = re.compile(CUT_OTHERWISE.get(pre, "(?!)"))
    return [x for x in LINES if unicodedata.is_normalized("NFC", x) and not other.search(x)]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_words_as_llama_cpp_cuts_them(pre: str, tmp_path: Path) -> None:
    ours = opened(byte_level_file(pre), tmp_path)
    lines = cut_alike(pre)
    assert len(lines) > 1000
    same_ids(ours, llama_cpp(tmp_path / "x.gguf"), lines)
