"""Weights that visit an accelerator in every step: the bits are those of the CPU, the bytes those
of the plan."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from cut_plans import graph_of
from visiting_plans import visiting_plan

import helm
import small_models
from engine_helpers import greedy, logits_in_chunks, prompt_of
from helm import _helm
from helm.model.graph import Graph
from helm.plan.schema import Plan
from small_plans import plan_of

SHARES = ((0.0, 0.0), (0.0, 0.5), (0.3, 0.3), (1.0, 0.7), (0.6, 1.0))
PROMPTS = [prompt_of(n) for n in (37, 5, 61)]
SIZES = {"context": 100, "page_tokens": 16, "step_tokens": 24, "max_sequences": 3}


@functools.cache
def made(name: str, dtype: str = "f32") -> tuple[Plan, Graph, str]:
    folder = small_models.model_dir(name, dtype)
    return plan_of(name, dtype, **SIZES), graph_of(folder), str(folder)


def outcome(plan: Plan, folder: str, device: str) -> tuple[Any, list[list[int]], dict[str, Any]]:
    """Logits of a prompt in steps of 7 tokens, tokens of several requests, and what was done."""
    engine = _helm.Engine(plan.to_json(), folder, {}, device=device)
    logits = logits_in_chunks(engine, PROMPTS[0], 7)
    return logits, greedy(engine, PROMPTS, 6), engine.stats


@functools.cache
def on_cpu(name: str, dtype: str = "f32") -> tuple[Any, list[list[int]]]:
    plan, _, folder = made(name, dtype)
    return outcome(plan, folder, "cpu")[:2]


@pytest.mark.parametrize("name", [*small_models.CASES, *small_models.WIDE])
def test_the_bits_are_those_of_the_cpu(name: str) -> None:
    plan, graph, folder = made(name)
    want, tokens = on_cpu(name)
    for number, shares in enumerate(SHARES[len(name) % 2 :: 2]):
        head = ("accelerator", "cpu")[number % 2]
        own = visiting_plan(plan, graph, *shares, buffers=2 + number, head=head)
        assert any(own.lacking)
        assert Plan.from_json(own.to_json()) == own
        got, same, stats = outcome(own, folder, "sim:jitter=100us")
        assert np.array_equal(got, want)
        assert same == tokens
        assert stats["streamed_steps"] == stats["steps"]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rows_of_other_formats_visit(dtype: str) -> None:
    plan, graph, folder = made("qwen3", dtype)
    want, tokens = on_cpu("qwen3", dtype)
    got, same, _ = outcome(visiting_plan(plan, graph, 0.4, 0.2, buffers=3), folder, "sim")
    assert np.array_equal(got, want)
    assert same == tokens


def test_units_of_several_devices_take_turns() -> None:
    """Weights come ahead for a unit behind one of the CPU, and requests take turns in groups."""
    import dataclasses

    plan, graph, folder = made("llama")
    own = visiting_plan(plan, graph, 0.5, 0.0, buffers=3, head="cpu")
    own = dataclasses.replace(
        own, schedule=dataclasses.replace(own.schedule, decode_groups=2, prefill_overlap=True)
    )
    _, tokens, _ = outcome(own, folder, "sim:jitter=100us")
    assert tokens == on_cpu("llama")[1]


@pytest.mark.parametrize("policy", ["zigzag", "helm-placement", "all-cpu"])
def test_a_published_policy_runs(policy: str) -> None:
    """With the tokens of the CPU, and no byte of the device more than planned."""
    options = {"context": 96, "kv_dtype": "f32", "max_sequences": 2, "threads": 1}
    model = small_models.model_dir("llama_deep")
    prompts = [prompt_of(20), prompt_of(9)]
    with helm.LLM(str(model), device="cpu", **options) as llm:
        want = greedy(llm.engine, prompts, 5)
    with helm.LLM(str(model), device="sim:vram=256MiB", policy=policy, **options) as llm:
        plan, stats = llm.plan, llm.stats
        assert greedy(llm.engine, prompts, 5) == want
        planned, device = plan.memory["accelerator"], stats["devices"][1]
        assert device["weights_bytes"] == planned.weights_bytes
        assert device["staging_bytes"] == planned.staging_bytes
        assert device["kv_bytes"] == planned.kv_bytes
        assert device["peak_bytes"] <= planned.total_bytes
        assert (policy == "zigzag") == (not any(plan.lacking))  # here it has room for all
