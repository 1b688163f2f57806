"""Tokens that stand beside tokenizer.json; the oracle is transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from helm.errors import TokenizerError
from helm.text.tokenizer import Tokenizer
from small_tokenizers import byte_level

TURN, TOOL, PAD = "<|turn|>", "<|tool|>", "<|pad|>"
TEXTS = [
    "Hi<|turn|>there", " <|turn|> <|tool|>  x", "a<|tool|>b <|tool|> c", "x<|pad|>y<|end|>z",
    "<|TURN|> Über", "  <|pad|>", "<|img|>n<|turn|>",
]  # fmt: skip
FIRST = byte_level().get_vocab_size()  # the id that a new token gets


def entry(content: str, **flags: bool) -> dict[str, Any]:
    off = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"content": content, **off, "special": True, **flags}


def write(
    folder: Path, config: dict[str, Any] | None = None, backend: Backend | None = None, **files: Any
) -> Path:
    """A tokenizer that knows <|end|> alone, and the files beside it by their stems."""
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config": config or {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


CASES: dict[str, dict[str, Any]] = {
    "decoder": {"config": {"added_tokens_decoder": {
        str(FIRST): entry(TURN), str(FIRST + 1): entry(TOOL, special=False), "0": entry("<|end|>"),
    }}},
    "decoder in another order": {"config": {"added_tokens_decoder": {
        str(FIRST + 1): entry(TOOL), str(FIRST): entry(TURN),
    }}},
    "flags": {"config": {"added_tokens_decoder": {
        str(FIRST): entry(TURN, lstrip=True, rstrip=True),
        str(FIRST + 1): entry(TOOL, single_word=True, special=False),
    }}},
    "flags of a token that tokenizer.json has": {"config": {
        "added_tokens_decoder": {"0": entry("<|end|>", lstrip=True, special=False)},
    }},
    "normalized": {
        "config": {"added_tokens_decoder": {str(FIRST): entry(TURN, normalized=True)}},
        "lower": True,
    },
    "end of sequence of the config": {"config": {
        "eos_token": TURN, "added_tokens_decoder": {str(FIRST): entry(TURN, special=False)},
    }},
    "tokens of the config alone": {"config": {
        "eos_token": TURN, "pad_token": {"__type": "AddedToken", **entry(PAD, lstrip=True)},
        "image_token": "<|img|>", "additional_special_tokens": [TOOL],
    }},
    "an end of sequence of the vocabulary": {"config": {"eos_token": "x"}},
    "added_tokens.json": {
        "added_tokens": {TOOL: FIRST + 1, TURN: FIRST}, "config": {"eos_token": TURN},
    },
    "special_tokens_map.json": {"special_tokens_map": {
        "eos_token": entry(TURN, rstrip=True), "pad_token": PAD,
        "additional_special_tokens": [TOOL, "<|img|>"],
    }},
    "the map wins over a config without a list": {
        "special_tokens_map": {"eos_token": TURN}, "config": {"eos_token": "<|end|>"},
    },
    "the config wins with a list": {
        "special_tokens_map": {"eos_token": TOOL},
        "config": {"eos_token": TURN, "added_tokens_decoder": {str(FIRST): entry(TURN)}},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ids_and_flags_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    files = dict(CASES[case])
    backend = byte_level()
    if files.pop("lower", False):
        backend.normalizer = normalizers.Lowercase()
    write(tmp_path, backend=backend, **files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    if theirs.eos_token_id is not None:
        assert ours.eos_token_id == theirs.eos_token_id
    assert theirs.special_tokens_map.items() <= ours.special_tokens.items()


def test_every_file_is_heeded_though_one_is_newer(tmp_path: Path) -> None:
    listed = {"added_tokens_decoder": {str(FIRST): entry(TURN)}}
    others = {"eos_token": TURN, "pad_token": PAD}
    write(tmp_path, listed, special_tokens_map=others, added_tokens={TURN: FIRST, TOOL: FIRST + 1})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_id == FIRST
    ids = tokenizer.encode(TURN + TOOL + PAD)
    assert ids == [FIRST, FIRST + 1, FIRST + 2]
    assert tokenizer.decode(ids) == TOOL


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"added_tokens_decoder": {str(FIRST + 5): entry(TURN)}}},
         rf"gives '<\|turn\|>' the id {FIRST + 5}, with tokenizer.json it gets {FIRST}; "),
        ({"config": {"added_tokens_decoder": {"3": entry(TURN)}}}, f"the id 3.*gets {FIRST}"),
        ({"config": {"added_tokens_decoder": {"5": entry("<|end|>")}}}, "the id 5.*gets 0"),
        ({"added_tokens": {TURN: FIRST + 1}}, r"added_tokens\.json gives '<\|turn\|>' the id"),
        ({"config": {"added_tokens_decoder": [1]}}, "must be an object by id"),
        ({"config": {"added_tokens_decoder": {"x": entry(TURN)}}}, "'x' is not a token id"),
        ({"config": {"added_tokens_decoder": {"9": TURN}}}, "expected a token with its content"),
        ({"config": {"added_tokens_decoder": {"9": {"content": 5}}}}, "expected a token with its"),
        ({"config": {"added_tokens_decoder": {"9": entry(TURN, lstrip=3)}}},  # type: ignore[arg-type]
         "lstrip must be true or false, got 3"),
        ({"added_tokens": {TURN: "5.0"}}, "'5.0' is not a token id"),
        ({"added_tokens": {TURN: -1}}, "-1 is not a token id"),
        ({"added_tokens": {TURN: 10**400}}, "is not a token id"),
        ({"added_tokens": [TURN]}, "expected an object"),
        ({"added_tokens": {"\ud800": 9}}, "is no valid Unicode text"),
        ({"special_tokens_map": {"eos_token": "a\ud800"}}, "is no valid Unicode text"),
        ({"config": {"additional_special_tokens": ["\udfff"]}}, "is no valid Unicode text"),
    ],
)  # fmt: skip
def test_ids_that_do_not_come_out_right_are_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_directory(write(tmp_path, **files))


def test_an_end_of_sequence_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"eos_token": TURN, "pad_token": PAD})
    Tokenizer.from_directory(tmp_path, FIRST + 1)  # padding is never drawn
    with pytest.raises(TokenizerError, match=f"ids up to {FIRST}.*vocabulary has {FIRST}"):
        Tokenizer.from_directory(tmp_path, FIRST)


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path, {"eos_token": TURN})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Tokenizer.from_directory(tmp_path).eos_token_id == FIRST
