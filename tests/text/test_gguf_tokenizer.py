"""Tokenizers of GGUF files, against the library's own, SentencePiece, transformers and llama.cpp.

transformers and llama.cpp cut the same vocabularies with code of their own; SentencePiece trains
the vocabulary that it then is the oracle of.
"""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

import text_lines
from gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, File, Tensor
from helm.errors import TokenizerError
from helm.model.gguf.file import read_gguf
from helm.text.gguf_tokenizer import gguf_tokenizer
from helm.text.pre_tokenizers import _DEEPSEEK_LETTERS, PRE_TOKENIZERS
from helm.text.tokenizer import Tokenizer
from llama_model import LlamaModel

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


# --- byte-level ----------------------------------------------------------------------------------


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


# --- bad input -----------------------------------------------------------------------------------


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
