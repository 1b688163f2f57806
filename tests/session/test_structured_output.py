"""LLM under grammars, penalties and biases: answers are valid whatever the model prefers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import helm
from helm.text import structured

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"
HOT: dict[str, Any] = {"temperature": 2, "max_tokens": 200}


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with helm.LLM(kv_dtype="f32", context=512) as loaded:
        yield loaded


def valid(completion: helm.Completion) -> bool:
    jsonschema.validate(json.loads(completion.text), SCHEMA)
    return completion.finish_reason == "stop"


def test_every_answer_is_valid_at_a_high_temperature(llm: helm.LLM) -> None:
    sampling: dict[str, Any] = {**HOT, "json_schema": SCHEMA}
    alone = [llm.generate(PROMPT, **sampling, seed=seed) for seed in range(10)]
    assert all(map(valid, alone))
    assert len({completion.text for completion in alone}) > 5
    text = json.dumps(SCHEMA)
    for seed in (1, 2):
        assert llm.generate(PROMPT, **HOT, json_schema=text, seed=seed).text == alone[seed].text
        with llm.stream(PROMPT, **sampling, seed=seed) as stream:
            assert "".join(chunk.text for chunk in stream) == alone[seed].text


def test_constrained_and_free_prompts_share_steps(llm: helm.LLM) -> None:
    prompts = [PROMPT, "The fox", "A dog and"]
    sampling: dict[str, Any] = {**HOT, "json_schema": SCHEMA, "seed": 4}
    together = llm.generate(prompts, **sampling)
    assert all(map(valid, together))
    assert [one.tokens for one in together] == [
        llm.generate(prompt, **sampling).tokens for prompt in prompts
    ]


def test_chat_answers_obey_too_and_nothing_is_asked_of_a_greedy_model(llm: helm.LLM) -> None:
    talk = [{"role": "user", "content": "Hello"}]
    assert valid(llm.chat(talk, json_schema=SCHEMA, temperature=0, max_tokens=200))
    assert llm.chat(talk, regex="(yes|no)", temperature=0).text in ("yes", "no")
    answer = llm.chat(talk, grammar='start: "a" ("," "b")~2', temperature=0)
    assert answer.text == "a,b,b"
    assert answer.finish_reason == "stop"


def test_log_probabilities_of_every_token_come_along(llm: helm.LLM) -> None:
    found = llm.generate(PROMPT, **HOT, json_schema=SCHEMA, seed=1, logprobs=1)
    assert valid(found)
    assert found.logprobs is not None
    assert len(found.logprobs) == len(found.tokens)
    assert all(record["logprob"] <= 0 for record in found.logprobs)


def test_forced_text_takes_fewer_steps(llm: helm.LLM) -> None:
    names: dict[str, Any] = {
        "type": "object",
        "properties": {"a_rather_long_name_of_a_field": {"const": "x" * 40}},
    }
    names |= {"required": list(names["properties"]), "additionalProperties": False}
    forced = llm.generate(PROMPT, temperature=0, json_schema=names, max_tokens=200)
    drawn = llm.generate(PROMPT, temperature=0, json_schema=names, max_tokens=200, logprobs=0)
    assert json.loads(forced.text) == json.loads(drawn.text)
    assert forced.text == drawn.text
    # Bytes that are read grow with steps.
    assert forced.timings.decode_bytes < drawn.timings.decode_bytes / 3


def test_too_few_tokens_cut_the_text(llm: helm.LLM) -> None:
    found = llm.generate(PROMPT, temperature=2, seed=1, json_schema=SCHEMA, max_tokens=7)
    assert found.finish_reason == "length"
    assert len(found.tokens) == 7
    whole = llm.generate(PROMPT, **HOT, seed=1, json_schema=SCHEMA)
    assert whole.text.startswith(found.text)


def test_end_tokens_that_are_ignored_end_a_complete_text(llm: helm.LLM) -> None:
    found = llm.generate(PROMPT, **HOT, seed=1, json_schema=SCHEMA, ignore_eos=True)
    assert valid(found)


def test_a_bad_grammar_is_refused_before_anything_runs(llm: helm.LLM) -> None:
    with pytest.raises(helm.InvalidError, match=r"\[grammar\] this json_schema cannot be used"):
        llm.generate([PROMPT, "x"], json_schema={"type": "objekt"})
    with pytest.raises(helm.InvalidError, match="were given; a text obeys one of them"):
        llm.generate(PROMPT, json_schema={}, grammar='start: "a"')


def test_a_grammar_that_python_computes_gives_the_same(
    llm: helm.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helm import _helm

    expected = llm.generate([PROMPT] * 3, **HOT, seed=9, json_schema=SCHEMA)
    monkeypatch.setenv("HELM_LLGUIDANCE", _helm.__file__)  # which is not llguidance
    monkeypatch.setattr(structured, "_by_tokenizer", type(structured._by_tokenizer)())
    found = llm.generate([PROMPT] * 3, **HOT, seed=9, json_schema=SCHEMA)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert all(map(valid, found))


def test_a_bias_decides_what_is_said(llm: helm.LLM) -> None:
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    usual = llm.generate(PROMPT, **greedy).tokens
    assert usual[0] not in llm.generate(PROMPT, **greedy, logit_bias={usual[0]: -100}).tokens
    assert llm.generate(PROMPT, **greedy, logit_bias={77: 100}).tokens == [77] * 8
    with pytest.raises(helm.InvalidError, match="outside the model's vocabulary"):
        llm.generate(PROMPT, logit_bias={llm.vocab_size: 1})


def test_penalties_make_repetition_rarer(llm: helm.LLM) -> None:
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 120, "ignore_eos": True}

    def most_frequent(**penalty: float) -> int:
        return max(Counter(llm.generate(PROMPT, **greedy, **penalty).tokens).values())

    usual = most_frequent()
    assert most_frequent(frequency_penalty=2.0) < usual
    assert most_frequent(frequency_penalty=-2.0) > usual

    def distinct(penalty: float) -> int:
        return len(set(llm.generate(PROMPT, **greedy, presence_penalty=penalty).tokens))

    assert distinct(-2.0) < min(distinct(0.0), distinct(2.0))
