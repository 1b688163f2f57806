"""What `speculate` asks for, and what an LLM tells of its guesses."""

from __future__ import annotations

import json
from typing import Any

import pytest

import helm
import small_models
from command import helm as command
from helm.serve.metrics import Metrics

REPEATS = "one two three four five six " * 6


def told(completion: helm.Completion) -> tuple[int, int]:
    timings = completion.timings
    return timings.guessed_tokens, timings.accepted_tokens


def test_texts_are_the_same_and_timings_tell_what_was_guessed() -> None:
    options: dict[str, Any] = {"context": 256, "threads": 1, "prefix_cache": False}
    calls: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.5, "seed": 4},
    ]  # fmt: skip
    with helm.LLM(speculate="off", **options) as off, helm.LLM(**options) as auto:
        assert off.stats["speculation"] == {"by": "off", "reason": ""}
        assert auto.stats["speculation"] == {"by": "ngram", "reason": ""}
        guessed = accepted = 0
        for call in calls:
            text = {"max_tokens": 80, "ignore_eos": True, **call}
            want = off.generate(REPEATS, **text)
            got = auto.generate(REPEATS, **text)
            assert got.tokens == want.tokens
            assert told(want) == (0, 0)
            assert want.timings.saved_s == 0
            guessed, accepted = guessed + told(got)[0], accepted + told(got)[1]
            assert got.timings.decode_tokens == 79
        assert 0 <= accepted <= guessed
        assert auto._service is not None
        stats = auto._service.stats()
        assert (stats["guessed_tokens"], stats["accepted_tokens"]) == (guessed, accepted)
        assert stats["steps"] == stats["tokens"] - accepted


def test_other_words_are_refused_before_anything_is_loaded() -> None:
    for wrong in ("on", "", 3, None, True):
        with pytest.raises(helm.InvalidError, match=r"\[load\] speculate must be auto, off, ngr"):
            helm.LLM("/nowhere", speculate=wrong)  # type: ignore[arg-type]


def test_models_of_torch_take_it_too() -> None:
    module = small_models.make_model("llama")
    with helm.LLM.from_torch(module, context=64, speculate="ngram", threads=1) as llm:
        assert llm.stats["speculation"]["by"] == "ngram"
    with pytest.raises(helm.InvalidError, match="speculate must be"):
        helm.LLM.from_torch(module, context=64, speculate="yes")


def test_the_command_takes_it_and_tells() -> None:
    given = ("run", "bundled", REPEATS, "--raw", "-n", "60", "--temperature", "0", "-t", "1")
    on = json.loads(command(*given, "--json", "--speculate", "ngram").stdout)
    off = json.loads(command(*given, "--json", "--speculate", "off").stdout)
    assert on["tokens"] == off["tokens"]
    assert off["timings"]["guessed_tokens"] == 0
    assert on["timings"]["accepted_tokens"] <= on["timings"]["guessed_tokens"]
    refused = command(*given, "--speculate", "maybe", status=2)
    assert "auto" in refused.stderr


def test_metrics_count_guesses() -> None:
    stats = {"guessed_tokens": 12.0, "accepted_tokens": 9.0, "saved_s": -0.25, "steps": 3.0}
    text = Metrics().text(stats, 0, {}, True, {})
    assert "\nhelm_engine_guessed_tokens_total 12\n" in text
    assert "\nhelm_engine_accepted_tokens_total 9\n" in text
    assert "\nhelm_engine_saved_s -0.25\n" in text
