"""Guesses change no token: every family with drafters that are right, nearly right and hostile,
with every way to draw, on the CPU and beside a simulated accelerator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from model_tensors import tensors_of
from plans import make_plan

import small_models
from engine_helpers import partitioned, prompt_of
from helm import _helm
from helm.errors import InvalidError
from helm.model.families import load_config
from helm.plan.schema import Plan
from whole import one_in

NEW = 22
VOCAB = 131
Told = list[tuple[int, str, str]]  # (token, its log-probabilities, finish)
Guess = Callable[[int, list[int], int], list[int]]
REPEATING = prompt_of(9) * 3
DRAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 4, "logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 1.0, "repetition_penalty": 0.7, "frequency_penalty": -0.6, "seed": 5},
    {"temperature": 1.0, "logit_bias": [(5, 6.0), (9, -100.0)], "seed": 6},
]


class Rules:
    """A constraint with forced tokens, and an end."""

    def __init__(self) -> None:
        self.last, self.stopped = 1, False

    def mask(self) -> bytes:
        allowed = np.zeros((VOCAB + 31) // 32 * 32, bool)
        allowed[[(self.last * 7 + i) % VOCAB for i in range(1, 12)]] = True
        return np.packbits(allowed, bitorder="little").tobytes()

    def commit(self, token: int) -> None:
        self.last, self.stopped = token, token == 2

    def forced(self) -> list[int]:
        return [(self.last + 1) % VOCAB, (self.last + 2) % VOCAB] if self.last % 3 == 0 else []

    def is_stopped(self) -> bool:
        return self.stopped


def plan_of(name: str, **options: Any) -> Plan:
    folder = small_models.model_dir(name)
    arguments = {
        "threads": 2, "memory_bytes": 4 << 30, "kv_dtype": "f32", "page_tokens": 16,
        "step_tokens": 48, "max_sequences": 24, "context": 160, **options,
    }  # fmt: skip
    return make_plan(load_config(folder), tensors_of(folder), **arguments)


def engine_of(plan: Plan, name: str) -> _helm.Engine:
    return _helm.Engine(plan.to_json(), str(small_models.model_dir(name)), device="sim")


def calls(prompt: list[int] = REPEATING) -> list[dict[str, Any]]:
    """All ways to draw, a stop, and a constraint with forced tokens."""
    return [
        *({"prompt": prompt, "max_tokens": NEW, **draw} for draw in DRAWS),
        {"prompt": prompt, "max_tokens": NEW, "constraint": Rules, "temperature": 1.0, "seed": 8},
        {"prompt": prompt[:-2], "max_tokens": NEW, "constraint": Rules, "logprobs": 0},
        {"prompt": prompt, "max_tokens": 1},
    ]


def run(
    engine: _helm.Engine, given: Sequence[dict[str, Any]], drafter: Any = None, guesses: int = 0,
    prefixes: Any = None,
) -> tuple[list[Told], list[dict[str, Any]]]:  # fmt: skip
    """What each request was told, and its timings."""
    requests = []
    for call in given:
        kind = call.get("constraint")
        made = None if kind is None else _helm.CalledConstraint(kind())
        requests.append(_helm.Request(**{**call, "constraint": made}))
    generation = _helm.Generation(engine, requests, prefixes, drafter=drafter, guesses=guesses)
    told: list[Told] = [[] for _ in given]
    while not generation.done:
        for token in generation.advance(0.0):
            told[token.request].append((token.id, repr((token.logprob, token.top)), token.finish))
    return told, [generation.timings(i) for i in range(len(given))]


def ids(told: Told) -> list[int]:
    return [token for token, _, _ in told]


def with_stops(given: list[dict[str, Any]], told: list[Told]) -> list[dict[str, Any]]:
    """One request more, that ends at a token in the middle of what it is told without."""
    return [*given, {**given[1], "stop_tokens": [ids(told[1])[NEW // 2]]}]


def right(texts: list[list[int]]) -> Guess:
    """Guesses what comes, of requests whose whole texts are known."""

    def guess(request: int, tokens: list[int], most: int) -> list[int]:
        assert texts[request][: len(tokens)] == tokens
        return texts[request][len(tokens) : len(tokens) + most]

    return guess


def nearly_right(texts: list[list[int]]) -> Guess:
    def guess(request: int, tokens: list[int], most: int) -> list[int]:
        found = right(texts)(request, tokens, most)
        return [(token + (i + len(tokens)) % 3 // 2) % VOCAB for i, token in enumerate(found)]

    return guess


def hostile(texts: list[list[int]]) -> Guess:
    source = random.Random(7)

    def guess(request: int, tokens: list[int], most: int) -> list[int]:
        odd = [source.randrange(VOCAB) for _ in range(most + 5)]
        some = right(texts)(request, tokens, most)[: source.randrange(3)]
        return source.choice([some + odd, odd, [VOCAB], [-1], [*some, 2**31 - 1], [], some * 9])

    return guess


WAYS = list(itertools.product((right, nearly_right, hostile), (1, 4)))  # makers, guesses


def check_drafters(
    engine: _helm.Engine,
    given: list[dict[str, Any]],
    want: list[Told],
    prefixes: Any = None,
    ways: Sequence[Any] = WAYS,
) -> None:
    texts = [call["prompt"] + ids(told) for call, told in zip(given, want, strict=True)]
    for make, guesses in ways:
        drafter = _helm.called_drafter(make(texts))
        told, timings = run(engine, given, drafter, guesses, prefixes)
        assert told == want, (make.__name__, guesses)
        guessed = sum(t["guessed_tokens"] for t in timings)
        accepted = sum(t["accepted_tokens"] for t in timings)
        assert 0 < accepted <= guessed
        assert (accepted == guessed) == (make is right)
    told, timings = run(engine, given, _helm.ngram_drafter(), 4, prefixes)
    assert told == want
    told, _ = run(engine, given, _helm.ngram_drafter(), 0, prefixes)
    assert told == want


@pytest.mark.parametrize("name", small_models.SOME)
def test_models_tell_the_same(name: str) -> None:
    plan = plan_of(name)
    engine = engine_of(plan, name)
    given = with_stops(calls(), run(engine, calls())[0])
    want = [run(engine, [call])[0][0] for call in given]
    assert want[-1][-1][2] == "stop"
    assert len(want[-1]) <= NEW // 2 + 1
    for call, told in zip(given, want, strict=True):
        text = call["prompt"] + ids(told)
        for make in one_in(2, (right, hostile), name):
            assert run(engine, [call], _helm.called_drafter(make([text])), 6)[0] == [told]
    check_drafters(engine, given, want, ways=one_in(3, WAYS, name))
    check_models(engine, plan, name, given, want)


def check_models(
    engine: _helm.Engine, plan: Plan, name: str, given: list[dict[str, Any]], want: list[Told]
) -> None:
    """Of models that guess: the same one, which is right, and another."""
    own = _helm.model_drafter(engine_of(plan, name))
    greedy, timings = run(engine, [given[0], {**given[0], "max_tokens": 7}], own, 4)
    assert greedy == [want[0], [*want[0][:6], (*want[0][6][:2], "length")]]
    assert all(0 < t["accepted_tokens"] == t["guessed_tokens"] for t in timings)
    assert run(engine, given, _helm.model_drafter(engine_of(plan, name)), 3)[0] == want
    other = "qwen3" if name != "qwen3" else "llama"
    draft = _helm.model_drafter(engine_of(plan_of(other), other))
    told, timings = run(engine, given, draft, 3)
    assert told == want
    assert sum(t["guessed_tokens"] for t in timings) > 0
    assert run(engine, given, draft, 0)[0] == want


@pytest.mark.parametrize("kv_dtype", ["bf16", "i8"])
@pytest.mark.parametrize("name", ["llama", "qwen3_window", "opt_350m"])
def test_caches_of_other_dtypes_tell_the_same(name: str, kv_dtype: str) -> None:
    engine = engine_of(plan_of(name, kv_dtype=kv_dtype), name)
    want = [run(engine, [call])[0][0] for call in calls()]
    check_drafters(engine, calls(), want)


@pytest.mark.parametrize("name", ["llama_biases", "mistral_window", "qwen3", "opt"])
def test_beside_an_accelerator_they_tell_the_same(name: str) -> None:
    plan = plan_of(name)
    alone = engine_of(plan, name)
    want = [run(alone, [call])[0][0] for call in calls()]
    for devices in (
        ("cpu", "cpu", "accelerator", "accelerator"), ("accelerator", "accelerator", "cpu", "cpu"),
    ):  # fmt: skip
        for overlap, groups in ((False, 1), (True, 2)):
            cut = partitioned(plan, devices, overlap=overlap, decode_groups=groups)
            engine = engine_of(Plan.from_json(cut.to_json()), name)
            if groups == 1:
                check_drafters(engine, calls(), want)
            texts = [call["prompt"] + ids(told) for call, told in zip(calls(), want, strict=True)]
            drafter = _helm.called_drafter(hostile(texts))
            assert run(engine, calls(), drafter, 4)[0] == want


@pytest.mark.parametrize("name", ["llama", "qwen2_window", "opt"])
def test_what_is_kept_of_a_text_is_what_was_told(name: str) -> None:
    """A later prompt begins with the text and finds its KV: a wrong guess in it would show."""
    plan = plan_of(name)
    fresh = engine_of(plan, name)
    first = calls()
    want = [run(fresh, [call])[0][0] for call in first]
    texts = [call["prompt"] + ids(told) for call, told in zip(first, want, strict=True)]
    later = [{**call, "prompt": [*text, 17]} for call, text in zip(first, texts, strict=True)]
    expected = [run(fresh, [call])[0][0] for call in later]
    engine = engine_of(plan, name)
    prefixes = _helm.PrefixCache(engine)
    assert run(engine, first, _helm.called_drafter(hostile(texts)), 5, prefixes)[0] == want
    ends = [call["prompt"] + ids(told) for call, told in zip(later, expected, strict=True)]
    told, timings = run(engine, later, _helm.called_drafter(hostile(ends)), 5, prefixes)
    assert told == expected
    found = [t["prefill_tokens"] < 10 for t in timings]
    assert all(found) or (any(found) and "window" in name)  # one may have moved on behind a stop


def test_a_cancelled_request_leaves_no_guess_behind() -> None:
    engine = engine_of(plan_of("llama"), "llama")
    call = {"prompt": REPEATING, "max_tokens": NEW}
    want = run(engine, [call])[0][0]
    sequence = engine.open(100)
    request = _helm.Request(**call, sequence=sequence)
    drafter = _helm.called_drafter(nearly_right([REPEATING + ids(want)]))
    generation = _helm.Generation(engine, [request], None, drafter=drafter, guesses=5)
    told = []
    while len(told) < 6:
        told += [token.id for token in generation.advance(0.0)]
    generation.cancel(0)
    assert told == ids(want)[: len(told)]
    assert engine.length(sequence) == len(REPEATING) + len(told) - 1


def test_pieces_of_python_that_guess_badly_are_named() -> None:
    engine = engine_of(plan_of("llama"), "llama")

    def fails(_request: int, _tokens: list[int], _most: int) -> list[int]:
        raise ValueError("no idea")

    with pytest.raises(InvalidError, match=r"\[speculate\] no idea"):
        run(engine, calls()[:1], _helm.called_drafter(fails), 2)
    with pytest.raises(InvalidError, match="-1 guesses per step"):
        run(engine, calls()[:1], _helm.ngram_drafter(), -1)


def test_a_plan_whose_steps_have_one_row_of_logits_is_refused() -> None:
    plan = plan_of("llama", max_sequences=1, step_tokens=1)
    engine = engine_of(plan, "llama")
    assert "limits.step_outputs is 1" in _helm.speculation_obstacle(engine)
    with pytest.raises(InvalidError, match=r"\[speculate\] this plan cannot.*step_outputs is 1"):
        run(engine, calls()[:1], _helm.ngram_drafter())
    assert _helm.speculation_obstacle(engine_of(plan_of("llama", max_sequences=1), "llama")) == ""
