"""Grammars: every text that a constraint lets through is valid, whatever the logits prefer."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import small_tokenizers
from grammar_draws import KINDS, allowed, compilers, drawn, small_tokenizer, text_of
from helm import _helm
from helm.errors import InvalidError
from helm.text import structured
from helm.text.called_grammar import CalledCompiler
from helm.text.token_bytes import token_bytes
from helm.text.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "äé": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return small_tokenizer(request.param)


@pytest.mark.parametrize("forces", [True, False])
def test_random_tokens_under_a_schema_are_valid_compact_json(
    tokenizer: Tokenizer, forces: bool
) -> None:
    constraint = structured.json_schema(PERSON, tokenizer)
    for seed in range(25):
        tokens, ended = drawn(constraint.start(), tokenizer, seed, forces=forces)
        text = text_of(tokenizer, tokens)
        assert ended
        value = json.loads(text)
        jsonschema.validate(value, PERSON)
        assert re.sub(r'"(\\.|[^"\\])*"', "", text).count(" ") == 0


def test_regular_expressions_and_grammars_are_obeyed(tokenizer: Tokenizer) -> None:
    pattern = r"[ab]{2,5}x?\.é"
    lark = 'start: "(" start? ")" | "x"'
    for seed in range(25):
        tokens, _ = drawn(structured.regex(pattern, tokenizer).start(), tokenizer, seed)
        assert re.fullmatch(pattern, text_of(tokenizer, tokens))
        made = structured.grammar(lark, tokenizer).start()
        tokens, ended = drawn(made, tokenizer, seed, most=200)
        text = text_of(tokenizer, tokens)
        if ended:
            while text not in ("x", "()"):
                assert (text[0], text[-1]) == ("(", ")")
                text = text[1:-1]


def test_an_object_is_any(tokenizer: Tokenizer) -> None:
    ended = 0
    for seed in range(20):
        made = structured.json_object(tokenizer).start()
        tokens, end = drawn(made, tokenizer, seed, most=400)
        ended += end
        if end:
            assert isinstance(json.loads(text_of(tokenizer, tokens)), dict)
    assert ended


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-1000, 1000),
        st.integers(0, 300),
    ),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.one_of(st.integers(-9, 9), st.booleans(), st.none(), st.text(max_size=4)),
            min_size=1,
            max_size=4,
        ),
    ),
    st.builds(lambda value: {"const": value}, st.text(max_size=6)),
    st.just({"type": "string", "pattern": "^[ab]{1,3}$"}),
)
NAMES = st.text(min_size=1, max_size=5)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def objects(properties: dict[str, Any], share: float) -> dict[str, Any]:
        required = sorted(properties)[: round(share * len(properties))]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.one_of(
        st.builds(objects, st.dictionaries(NAMES, inner, max_size=3), st.floats(0, 1)),
        st.builds(
            lambda items, low, span: {
                "type": "array", "items": items, "minItems": low, "maxItems": low + span,
            },
            inner, st.integers(0, 2), st.integers(0, 2),
        ),
        st.builds(lambda many: {"anyOf": many}, st.lists(inner, min_size=1, max_size=3)),
    )  # fmt: skip


@given(schema=st.recursive(SCALARS, _containers, max_leaves=5), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_accepted_is_valid(tokenizer: Tokenizer, schema: Any, seed: int) -> None:
    refused = ""
    try:
        constraint = structured.json_schema(schema, tokenizer)
    except InvalidError as error:
        refused = str(error)
    if refused:
        assert "cannot be used: " in refused
        return
    tokens, ended = drawn(constraint.start(), tokenizer, seed)
    assert ended
    jsonschema.validate(json.loads(text_of(tokenizer, tokens)), schema)


# The Python interface is the fallback, and the oracle for the native calls.
SCHEMAS: list[Any] = [
    PERSON,
    *({"type": name} for name in ("object", "array", "string", "number", "integer", "boolean")),
    {}, True, {"const": "a b"}, {"enum": [1, None, "x"]}, {"type": ["null", "string"]},
    *({"type": "string", "maxLength": n} for n in (0, 1, 5, 40)),
    *({"type": "integer", "minimum": -n, "maximum": 3 * n} for n in (1, 12, 345)),
    *({"type": "array", "items": {"type": "boolean"}, "minItems": n} for n in (0, 1, 5)),
    *({"type": "string", "format": name} for name in ("date", "uuid", "ipv4", "email", "time")),
    *({"type": "string", "pattern": p} for p in ("^a+$", "^(ab|x)*$", "[.é]")),
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
    {"type": "object", "patternProperties": {"^a": {"type": "boolean"}}},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "multipleOf": 0.5}, {"type": "array", "maxItems": 0},
    {"allOf": [{"type": "integer"}, {"minimum": 3, "maximum": 8}]},
]  # fmt: skip


@pytest.mark.parametrize("forces", [True, False])
def test_native_and_called_masks_are_equal(tokenizer: Tokenizer, forces: bool) -> None:
    native, called = compilers(tokenizer)
    assert len(SCHEMAS) >= 40
    size = tokenizer.vocab_size
    accepted = 0
    for place, schema in enumerate(SCHEMAS):
        text = structured._with_separators(json.dumps(schema))
        made = []
        for compiler in (native, called):
            try:
                made.append(compiler.compile("json_schema", text, 5_000_000, 500_000).start())
            except InvalidError as error:
                made.append(str(error).partition("cannot be used: ")[2][:60])
        if any(isinstance(one, str) for one in made):
            assert made[0] == made[1], schema
            continue
        accepted += 1
        chosen = random.Random(place)
        for _ in range(40):
            masks = [allowed(one, size) for one in made]
            assert masks[0].tolist() == masks[1].tolist(), schema
            if made[0].is_stopped():
                break
            token = int(chosen.choice(masks[0]))
            for one in made:
                one.commit(token)
            runs = [one.forced() for one in made] if forces else [[], []]
            assert runs[0] == runs[1], schema
            for forced in runs[0]:
                for one in made:
                    one.commit(forced)
        assert made[0].is_stopped() == made[1].is_stopped()
    assert accepted >= 36


def test_the_end_is_allowed_where_the_text_may_end_and_there_alone(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_id
    constraint = structured.regex("a?b?", tokenizer).start()
    for text in ("", "a", "ab"):
        assert (end in allowed(constraint, tokenizer.vocab_size)) is True, text
        if text != "ab":
            constraint.commit(tokenizer.token_id("b" if text else "a"))
    exact = structured.regex("ab", tokenizer).start()
    assert end not in allowed(exact, tokenizer.vocab_size)
    exact.commit(tokenizer.token_id("a"))
    assert end not in allowed(exact, tokenizer.vocab_size)
    exact.commit(tokenizer.token_id("b"))
    assert allowed(exact, tokenizer.vocab_size).tolist() == [end]
    assert exact.forced() == [end]


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    special = {i for i in tokenizer._skipped_ids if i != tokenizer.eos_token_id}
    constraint = structured.regex(r"(.|\n)*", tokenizer).start()
    found = set(allowed(constraint, tokenizer.vocab_size).tolist())
    assert not found & special
    assert len(found) > 150  # those that begin a character


def test_requests_of_one_constraint_know_nothing_of_each_other(tokenizer: Tokenizer) -> None:
    constraint = structured.json_schema(PERSON, tokenizer)
    alone = [drawn(constraint.start(), tokenizer, seed)[0] for seed in range(8)]
    found: dict[int, list[int]] = {}

    def run(seed: int) -> None:
        found[seed] = drawn(constraint.start(), tokenizer, seed)[0]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in range(8)] == alone
    assert structured.json_schema(PERSON, tokenizer) is constraint  # compiled once


def test_a_model_of_more_tokens_than_the_tokenizer_never_draws_them(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size + 77
    constraint = structured.json_object(tokenizer, vocab_size=size).start()
    assert allowed(constraint, size).max() < tokenizer.vocab_size


def test_forced_text_has_the_tokens_of_the_tokenizer() -> None:
    byte_level = Tokenizer(small_tokenizers.byte_level(), {"eos_token": "<|end|>"})
    sentencepiece = Tokenizer(small_tokenizers.sentencepiece(), {"eos_token": "</s>"})
    for tokenizer, text in ((byte_level, "Once upon a time émoji"), (sentencepiece, "x ab ab.é")):
        made = structured.regex(re.escape(text) + "[0-9]{3}", tokenizer).start()
        tokens = made.forced()
        assert len(tokens) >= 3
        own = token_bytes(tokenizer, tokenizer.vocab_size).tokenize(text.encode())
        assert tokens == own[: len(tokens)]
        assert text.startswith(text_of(tokenizer, tokens))


def test_what_the_tokenizer_spells_otherwise_is_forced_by_the_longest_tokens() -> None:
    tokenizer = Tokenizer(small_tokenizers.byte_level(), {"eos_token": "<|end|>"})
    table = token_bytes(tokenizer, tokenizer.vocab_size)
    end = tokenizer.eos_token_id
    assert end is not None

    def wrong(_: bytes) -> list[int]:
        raise ValueError("no tokens")

    for tokenize in (wrong, lambda _: [end], lambda _: [10**6, -1]):
        parts = (table.pieces, table.special, [end], tokenize)
        native = _helm.GrammarCompiler(str(structured.library()), *parts)
        called = CalledCompiler(*parts, InvalidError("absent"))
        runs = [
            compiler.compile("regex", "Once upon a time[xy]", 1_000_000, 500_000).start().forced()
            for compiler in (native, called)
        ]
        assert runs[0] == runs[1]
        assert "Once upon a time".startswith(text_of(tokenizer, runs[0]))
        assert runs[0]
