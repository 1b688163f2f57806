"""Every family in every dtype, in prompts of many lengths and pages of two sizes.

`HELM_TEST_WHOLE=1 python -m pytest -n 2 tests/engine/test_family_grid.py` takes all of it; without,
a few cells. Every family in f32 is in test_engine.py, in q4 in test_family_formats.py.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from near_logits import BEST_EXACT_TIER, LENGTHS, assert_close, engine_of, reference_logits

import small_models
from engine_helpers import logits_of, prompt_of

WHOLE = os.environ.get("HELM_TEST_WHOLE") == "1"
PAGES = (16, 512)  # borders lie within windows, and behind them
DTYPES = ("f32", "f16", "bf16")
POLICIES = {"q8": 0.05, "q4": 0.35}  # the norm of the error, of that of the logits
SHORT = ("gemma3", "gpt_neox", "mistral_window")
NAMES = list(small_models.CASES) if WHOLE else SHORT
SOME = LENGTHS if WHOLE else LENGTHS[1:2]


@pytest.mark.parametrize("dtype", DTYPES if WHOLE else ("f16",))
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELM_CPU_ISA", BEST_EXACT_TIER)
    for page_tokens in PAGES:
        engine = engine_of(name, dtype, page_tokens=page_tokens)
        for length in SOME:
            what = f"{name} in {dtype}, {length} tokens, pages of {page_tokens}"
            want = reference_logits(name, dtype, length)
            assert_close(logits_of(engine, prompt_of(length)), want, 400, what)


@pytest.mark.parametrize("policy", POLICIES if WHOLE else ("q8",))
@pytest.mark.parametrize("name", NAMES)
def test_rounded_weights_are_near(name: str, policy: str) -> None:
    """And no bit of a token's logits depends on what follows it."""
    for page_tokens in PAGES:
        engine = engine_of(name, page_tokens=page_tokens, policy=policy)
        rows = {length: logits_of(engine, prompt_of(length)) for length in SOME}
        for length, got in rows.items():
            want = reference_logits(name, "f32", length)
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < POLICIES[policy], (length, page_tokens)
            longest = rows[max(rows)]
            np.testing.assert_array_equal(got, longest[: len(got)])
