"""Every family in every dtype, in prompts of many lengths and pages of two sizes.

`HELM_TEST_WHOLE=1 python -m pytest -n 2 tests/engine/test_family_grid.py` takes all of it; without,
a few cells. Every family in f32 is in test_engine.py, in q4 in test_family_formats.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from near_logits import (
    BEST_EXACT_TIER,
    LENGTHS,
    assert_close,
    engine_in,
    engine_of,
    reference_logits,
    settled_rows,
)
from rounded_models import NEAR, rounded_folder, row_errors

import small_models
from engine_helpers import logits_of, prompt_of
from whole import WHOLE

PAGES = (16, 512)  # borders lie within windows, and behind them
DTYPES = ("f32", "f16", "bf16")
POLICIES = ("q8", "q4")
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
            rows = settled_rows(name, dtype, length, 400)
            assert rows >= min(length, 256), what
            assert_close(logits_of(engine, prompt_of(length))[:rows], want[:rows], 400, what)


@pytest.mark.parametrize("name", SHORT)
def test_rounded_weights_are_near(name: str) -> None:
    for page_tokens in PAGES:
        engine = engine_of(name, page_tokens=page_tokens, policy="q8")
        want = reference_logits(name, "f32", LENGTHS[1])
        error = logits_of(engine, prompt_of(LENGTHS[1])) - want
        assert np.linalg.norm(error) / np.linalg.norm(want) < 0.05, page_tokens


@pytest.mark.parametrize("policy", POLICIES if WHOLE else POLICIES[:1])
@pytest.mark.parametrize("name", NAMES)
def test_rounded_weights_give_their_logits(
    name: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no bit of a token's logits depends on what follows it."""
    folder = rounded_folder(name, policy, tmp_path / "packed", monkeypatch)
    exact = engine_in(folder, policy="f32")
    for page_tokens in PAGES:
        engine = engine_in(folder, page_tokens=page_tokens)
        rows = {length: logits_of(engine, prompt_of(length)) for length in SOME}
        longest = rows[max(rows)]
        for got in rows.values():
            np.testing.assert_array_equal(got, longest[: len(got)])
        error = np.median(row_errors(longest, logits_of(exact, prompt_of(len(longest)))))
        assert 0 < error < NEAR, page_tokens
