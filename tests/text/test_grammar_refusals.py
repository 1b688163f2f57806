"""Grammars that are refused, with the reason; tokenizers and libraries that cannot be used."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest

import small_tokenizers
from grammar_draws import KINDS, allowed, compilers, drawn, small_tokenizer, text_of
from helm import _helm
from helm.errors import InvalidError, TokenizerError
from helm.text import structured
from helm.text.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return small_tokenizer(request.param)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ("{", "json_schema is no JSON"),
        ("[1]", "json_schema must be a JSON object"),
        (7, "json_schema must be a JSON object"),
        ({"enum": [float("nan")]}, "json_schema is no JSON"),
        ({"const": {1, 2}}, "json_schema is no JSON"),
        ({"const": "\ud800"}, "lone surrogate"),
        ({"const": "a" * (structured.MOST_BYTES + 1)}, "bytes; the most are"),
        ('{"const": "' + "a" * structured.MOST_BYTES + '"}', "bytes; the most are"),
        ({"type": "string", "pattern": "(" * 50}, "cannot be used"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "cannot be used"),
    ],
)
def test_schemas_that_cannot_be_used_say_why(
    tokenizer: Tokenizer, schema: Any, message: str
) -> None:
    with pytest.raises(InvalidError, match=re.escape(message)):
        structured.json_schema(schema, tokenizer)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a{1,500}){1,500}(b|c{1,300}){1,900}$"},
        {"type": "string", "pattern": "^(a|b)*a(a|b){3000}$"},
        {"enum": [f"{i * i:x}" for i in range(20_000)]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9, "minItems": 10**8},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}},
    ],
)
def test_a_large_schema_takes_seconds_at_most_or_is_refused(
    tokenizer: Tokenizer, schema: Any
) -> None:
    begin = time.process_time()
    with contextlib.suppress(InvalidError):
        made = structured.json_schema(schema, tokenizer).start()
        for _ in range(20):
            if not made.is_stopped():
                made.commit(int(allowed(made, tokenizer.vocab_size)[-1]))
    assert time.process_time() - begin < 20


def test_a_deep_schema_is_refused_whatever_holds_it(tokenizer: Tokenizer) -> None:
    deep: Any = {"type": "null"}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(InvalidError, match="nested deeper than"):
        structured.json_schema(deep, tokenizer)
    with pytest.raises(InvalidError, match=r"nested deeper|no JSON"):
        structured.json_schema('{"items":' * 5000 + "{}" + "}" * 5000, tokenizer)
    wide = {"enum": [1]}
    for _ in range(40):
        wide = {"anyOf": [wide, wide]}
    with pytest.raises(InvalidError, match=r"more than .* values"):
        structured.json_schema(wide, tokenizer)


def test_other_grammars_that_cannot_be_used_say_why(tokenizer: Tokenizer) -> None:
    for make, text in ((structured.regex, "("), (structured.grammar, "start: nothing")):
        with pytest.raises(InvalidError, match="cannot be used: "):
            make(text, tokenizer)
        with pytest.raises(InvalidError, match="must be text, and not empty"):
            make("", tokenizer)
        with pytest.raises(InvalidError, match="zero character"):
            make("a\0", tokenizer)


def test_a_token_outside_the_mask_is_an_error(tokenizer: Tokenizer) -> None:
    for compiler in compilers(tokenizer):
        constraint = compiler.compile("regex", "a", 1_000_000, 500_000).start()
        before = allowed(constraint, tokenizer.vocab_size).tolist()
        other = next(i for i in range(tokenizer.vocab_size) if i not in before)
        with pytest.raises(InvalidError, match="cannot go on"):
            constraint.commit(other)


def test_tokenizers_whose_text_is_no_sum_of_tokens_are_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="decodes with WordPiece"):
        structured.json_object(Tokenizer(backend, {"eos_token": "a"}))


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidError, match="neither the model nor its tokenizer has an end"):
        structured.json_object(Tokenizer(small_tokenizers.byte_level()))


def test_without_the_library_the_message_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "library", lambda: None)
    with pytest.raises(InvalidError, match="pip install"):
        structured.json_object(tokenizer, vocab_size=tokenizer.vocab_size + 1)


def test_an_unknown_library_leaves_the_work_to_python(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELM_LLGUIDANCE", _helm.__file__)  # loads, and is not llguidance
    constraint = structured.regex("[ab]{3}", tokenizer, vocab_size=tokenizer.vocab_size + 2)
    made = constraint.start()
    assert isinstance(made, _helm.CalledConstraint)
    tokens, _ = drawn(made, tokenizer, 1)
    assert re.fullmatch("[ab]{3}", text_of(tokenizer, tokens))
