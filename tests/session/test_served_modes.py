"""Steps of a model whose KV overflows, in the modes by which its plan prices them."""

from __future__ import annotations

from typing import Any

import helm
from device_profiles import fast_accelerator
from helm.session.async_llm import AsyncLLM


def test_steps_have_the_modes_that_the_plan_prices() -> None:
    many = [
        f"The {word} went" for word in ["dog", "cat", "boy", "girl", "sun", "fox", "bird", "tree"]
    ]
    options: dict[str, Any] = {"max_tokens": 180, "ignore_eos": True, "temperature": 0}
    # Of as large pages, between which weights are rounded anew where K and V meet them in bf16.
    with helm.LLM(device="cpu", threads=1, page_tokens=16) as llm:
        want = [result.tokens for result in llm.generate(many, **options)]
    with helm.LLM(
        device="sim", profile=fast_accelerator(), threads=1, context=512, page_tokens=16,
        objective="serve", kv_overflow="cpu", kv_vram_bytes=1 << 20,
    ) as llm:  # fmt: skip
        assert llm.plan.predictor is not None
        assert [result.tokens for result in llm.generate(many, **options)] == want
        stats = AsyncLLM.over(llm).stats()
    assert stats["joint_steps"] > 0
    assert sum(stats[f"{mode}_steps"] for mode in ("near", "joint", "split")) == stats["steps"]
    assert stats["far_rows"] >= stats["joint_steps"] + stats["split_steps"]
    for mode in ("near", "joint"):
        assert stats[f"{mode}_predicted_s"] > 0
        assert stats[f"{mode}_measured_s"] > 0
