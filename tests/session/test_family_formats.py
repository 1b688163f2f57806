"""Every family with weights in four bits: what the rounded weights give, on any device the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rounded_models import NEAR, rounded_folder, row_errors

import helm
import small_models

CASES = (
    "gemma2", "gemma3", "phi3_longrope", "smollm3", "granite", "olmo2", "olmo3", "glm4",
    "ministral", "cohere2", "stablelm_norms", "llama", "qwen3", "opt", "gpt2",
    "gpt_neox", "qwen3_moe", "qwen3_moe_dense_layers", "qwen3_moe_uneven", "qwen2_moe", "mixtral",
    "olmoe", "granitemoe", "glm4_moe", "phimoe",
)  # fmt: skip


def logits(model: Path, **options: Any) -> np.ndarray:
    with helm.LLM(model, threads=1, context=64, kv_dtype="f32", **options) as llm:
        return np.array(llm.logits(small_models.PROMPT))


@pytest.mark.parametrize("name", CASES)
def test_q4_is_its_weights_and_the_same_on_the_simulated_accelerator(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_models.model_dir(name)
    if name != "phimoe":  # which chooses other experts for some tokens
        exact, near = logits(folder, device="cpu"), logits(folder, device="cpu", dtype="q4")
        # Small matrices are in 8 bits: a weight is off by little, products by less.
        assert 0 < np.linalg.norm(near - exact) / np.linalg.norm(exact) < 0.35
    packed = rounded_folder(name, "q4", tmp_path / "packed", monkeypatch)
    rounded = logits(folder, device="cpu", dtype="q4")
    np.testing.assert_array_equal(logits(packed, device="cpu"), rounded)
    np.testing.assert_array_equal(logits(folder, device="sim:vram=2GiB", dtype="q4"), rounded)
    assert 0 < np.median(row_errors(rounded, logits(packed, device="cpu", dtype="f32"))) < NEAR
