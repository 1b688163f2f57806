"""Tokenizer, incremental decoding and chat templates; the oracle is decoding everything at once."""

from __future__ import annotations

import decimal
import json
import random
from pathlib import Path
from typing import Any

import pytest

from helm.errors import InvalidError, TokenizerError
from helm.text.tokenizer import Tokenizer
from small_tokenizers import byte_level, save, sentencepiece

WORDS = ["a", " ", "you", "你好", "😀", "é", "\n", "�", "  x", "the quick", ".", "<0x41>"]
BACKENDS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(params=sorted(BACKENDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(BACKENDS[request.param]())


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_streaming_valid_text_equals_decoding_at_once(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 60)))
        tokens = tokenizer.encode(text)
        pieces = streamed(tokenizer, [], tokens)
        assert "".join(pieces) == tokenizer.decode(tokens), text
        if "�" not in text:
            assert not any("�" in piece for piece in pieces), text


def test_streaming_arbitrary_tokens_equals_decoding_at_once(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    for trial in range(500):
        tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 80))]
        assert "".join(streamed(tokenizer, [], tokens)) == tokenizer.decode(tokens), trial


def test_streaming_after_a_prompt_continues_its_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(300):
        prompt = tokenizer.encode(rng.choice(["a", "ab x", "you and", "é.", "  "]))
        words = (rng.choice([w for w in WORDS if w != "�"]) for _ in range(12))
        tokens = tokenizer.encode("".join(words), add_special_tokens=False)
        whole = tokenizer.decode(prompt + tokens)
        expected = whole[len(tokenizer.decode(prompt)) :]
        assert "".join(streamed(tokenizer, prompt, tokens)) == expected


def test_a_leading_space_after_the_prompt_is_kept() -> None:
    tokenizer = Tokenizer(sentencepiece())
    prompt = tokenizer.encode("ab")
    following = tokenizer.token_id("▁x")
    assert following is not None
    assert tokenizer.decode([following]) == "x"  # what decoding it alone would lose
    assert streamed(tokenizer, prompt, [following]) == [" x", ""]


def test_unfinished_characters_are_held_back() -> None:
    tokenizer = Tokenizer(byte_level())
    tokens = [tokenizer.token_id(c) for c in ("ð", "Ł", "ĺ", "ģ")]  # the bytes of U+1F601
    pieces = streamed(tokenizer, [], [t for t in tokens if t is not None])
    assert pieces == ["", "", "", "\N{GRINNING FACE WITH SMILING EYES}", ""]


def test_decoding_work_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level())
    detokenizer = tokenizer.detokenizer()
    longest = 0
    for token in tokenizer.encode("the fox \N{GRINNING FACE} " * 500):
        detokenizer.push(token)
        longest = max(longest, len(detokenizer._tokens))
    assert longest <= 32


def test_special_tokens_follow_the_post_processor() -> None:
    tokenizer = Tokenizer(sentencepiece())
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.decode([1, *tokenizer.encode("a b"), 2]) == "a b"
    assert 1 not in Tokenizer(byte_level()).encode("<s>a")


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert 20 < len(Tokenizer(backend).encode("x y z " * 10)) < 64


def test_token_text_keeps_the_leading_space() -> None:
    tokenizer = Tokenizer(sentencepiece())
    following = tokenizer.token_id("▁x")
    assert following is not None
    assert tokenizer.token_text(following) == " x"


# --- files ---------------------------------------------------------------------------------------


def test_missing_file_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", "{nonsense", '{"model": {"type": "?"}}'])
def test_malformed_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}},
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}},
    ],
    ids=lambda part: next(iter(part)),
)
def test_what_the_library_panics_at_is_refused(tmp_path: Path, part: dict[str, Any]) -> None:
    """A panic is no Exception and would end the process."""
    words = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    content = {"version": "1.0", "added_tokens": [], "model": words, **part}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))

    def use() -> None:
        tokenizer = Tokenizer.from_directory(tmp_path)
        for text in ("a", "a b"):
            tokenizer.decode(tokenizer.encode(text))

    with pytest.raises(TokenizerError, match=r"^\[tokenizer\] .*download it again$"):
        use()


def test_malformed_tokenizer_config_is_refused(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="expected an object"):
        Tokenizer.from_directory(tmp_path)


def test_a_vocabulary_beyond_the_models_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    save(backend, tmp_path)
    Tokenizer.from_directory(tmp_path, size)
    with pytest.raises(TokenizerError, match=f"ids up to {size - 1}.*vocabulary has {size - 1}"):
        Tokenizer.from_directory(tmp_path, size - 1)
    for odd in (decimal.Decimal("NaN"), 0, True, "360", 360.0):
        with pytest.raises(InvalidError, match="vocab_size must be an integer"):
            Tokenizer.from_directory(tmp_path, odd)


def test_special_tokens_are_read_as_strings_and_as_objects(tmp_path: Path) -> None:
    save(sentencepiece(), tmp_path, bos_token={"content": "<s>"}, eos_token="</s>")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_text_with_lone_surrogates_is_refused() -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at character 1"):
        Tokenizer(byte_level()).encode("a\ud800")
