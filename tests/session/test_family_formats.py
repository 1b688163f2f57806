"""Every family with weights in four bits: near its f32 logits, and to the bit on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import helm
import small_models

CASES = (
    "gemma2", "gemma3", "phi3_longrope", "smollm3", "granite", "olmo2", "olmo3", "glm4",
    "ministral", "cohere2", "stablelm_norms", "llama", "qwen3", "opt",
    "qwen3_moe", "qwen3_moe_dense_layers", "qwen3_moe_uneven", "qwen2_moe", "mixtral", "olmoe",
    "granitemoe", "glm4_moe",
)  # fmt: skip


def logits(name: str, **options: Any) -> np.ndarray:
    folder = small_models.model_dir(name)
    with helm.LLM(folder, threads=1, context=64, kv_dtype="f32", **options) as llm:
        return np.array(llm.logits(small_models.PROMPT))


@pytest.mark.parametrize("name", CASES)
def test_q4_is_near_and_the_same_on_the_simulated_accelerator(name: str) -> None:
    exact = logits(name, device="cpu")
    rounded = logits(name, device="cpu", dtype="q4")
    there = logits(name, device="sim:vram=2GiB", dtype="q4")
    np.testing.assert_array_equal(there, rounded)
    assert np.abs(rounded - exact).max() > 0
    # A weight is off by a fifteenth of its group's range at most, products by far less.
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert error < 0.35, error
