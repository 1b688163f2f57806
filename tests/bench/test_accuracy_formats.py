"""What formats of weights cost in accuracy, as bench/accuracy_formats.py measures it."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
from near_logits import BEST_EXACT_TIER

import gguf_models
from accuracy_formats import LLAMA, OWN, STORED, Divergence, Sums, broken, measure, prompts_of

SAME = Divergence(100, 0.0, 10.0, 0.0, 1.0, 0)


def divergence(logits: np.ndarray, reference: np.ndarray, tokens: list[int]) -> Divergence:
    sums = Sums()
    sums.add(logits, reference, tokens)
    return sums.divergence


def test_divergence_of_a_few_rows_by_hand() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    logits = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32)) + 3
    found = divergence(logits, reference, [2, 1])
    assert found.kl == pytest.approx(0.5 * (0.5 * np.log(2) - 0.25 * np.log(2)))
    assert found.perplexity == pytest.approx(1 / 0.5)  # of token 1 after token 2
    assert found.perplexity_change == pytest.approx(0.25 / 0.5 - 1)
    assert (found.same_best, found.clear_changes) == (0.5, 1)


def test_a_change_between_near_tokens_is_not_clear() -> None:
    reference = np.array([[1.0, 0.6, 0.0]], np.float32)
    assert divergence(reference[:, [1, 0, 2]], reference, [0]).clear_changes == 0


def test_no_limit_is_kept_by_nan() -> None:
    found = divergence(np.full((2, 3), np.nan, np.float32), np.ones((2, 3), np.float32), [0, 1])
    assert len(broken({"auto": found, LLAMA: SAME})) >= 2


def test_every_limit_is_told() -> None:
    assert broken({"auto": SAME, LLAMA: SAME}) == []
    llama = dataclasses.replace(SAME, kl=0.01)
    worse = {"kl": 0.0111, "perplexity_change": -0.004, "same_best": 0.96, "clear_changes": 1}
    for name, value in worse.items():
        found = {"auto": dataclasses.replace(SAME, **{name: value}), LLAMA: llama}
        assert len(broken(found)) == 1, name
    assert broken({"q8": dataclasses.replace(SAME, kl=OWN["q8"].kl * 1.01)})


def test_prompts_are_spread_over_a_text() -> None:
    assert prompts_of(range(100), 20, 10) == [list(range(10)), list(range(90, 100))]
    with pytest.raises(SystemExit, match="the text has 15 tokens, expected 20"):
        prompts_of(range(15), 20, 10)


def test_own_formats_of_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are of the formats. Products that round activations to bf16 cost some more."""
    rounded = measure(None, ["q8", "q4"], 2000, 256)
    for dtype in ("q8", "q4"):
        assert rounded[dtype].kl < 1.25 * OWN[dtype].kl
    monkeypatch.setenv("HELM_CPU_ISA", BEST_EXACT_TIER)
    assert broken(measure(None, ["q8", "q4"], 2000, 256)) == []


def test_stored_weights_are_nearer_to_f32_than_in_llama_cpp() -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is what the limits are set by")
    path = gguf_models.real("SmolLM2-135M-Instruct.Q4_1.gguf")
    found = measure(str(path), ["auto"], 512, 256)
    assert found["auto"].kl < found[LLAMA].kl * STORED.over_llama / 2
    assert found["auto"].clear_changes == 0
    assert found["auto"].same_best >= STORED.same_best
