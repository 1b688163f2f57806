"""Weights that visit an accelerator in every step: the bits are those of the CPU, the bytes those
of the plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from cut_plans import graph_of
from visiting_plans import visiting_plan

import helm
import small_models
from device_profiles import fast_accelerator
from engine_helpers import greedy, logits_in_chunks, prompt_of
from helm import _helm
from helm.compiler.problem import PUBLISHED_POLICIES
from helm.model.graph import Graph
from helm.plan.schema import Plan
from small_plans import plan_of
from whole import WHOLE

MODELS = [*small_models.CASES, *small_models.WIDE][:: 1 if WHOLE else 5]
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


@pytest.mark.parametrize("name", MODELS)
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
        assert stats["streamed_steps"] >= 6 + len(PROMPTS[0]) // 7  # each one


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rows_of_other_formats_visit(dtype: str) -> None:
    plan, graph, folder = made("qwen3", dtype)
    want, tokens = on_cpu("qwen3", dtype)
    got, same, _ = outcome(visiting_plan(plan, graph, 0.4, 0.2, buffers=3), folder, "sim")
    assert np.array_equal(got, want)
    assert same == tokens


def test_units_of_several_devices_take_turns() -> None:
    """Weights come ahead for a unit behind one of the CPU, and requests take turns in groups."""
    plan, graph, folder = made("llama")
    own = visiting_plan(plan, graph, 0.5, 0.0, buffers=3, head="cpu")
    own = dataclasses.replace(
        own, schedule=dataclasses.replace(own.schedule, decode_groups=2, prefill_overlap=True)
    )
    _, tokens, _ = outcome(own, folder, "sim:jitter=100us")
    assert tokens == on_cpu("llama")[1]


@functools.cache
def _of_the_bundled_model(device: str, policy: str) -> tuple[Plan, list[list[int]], Any]:
    options = {"profile": fast_accelerator(), "context": 256}
    with helm.LLM(device=device, policy=policy, **options) as llm:  # type: ignore[arg-type]
        found = llm.generate(["Once upon a time", "The fox"], max_tokens=16, temperature=0)
        return llm.plan, [one.tokens for one in found], llm.stats


@pytest.mark.parametrize("policy", PUBLISHED_POLICIES)
def test_a_published_policy_runs(policy: str) -> None:
    """With the tokens of the CPU, and the bytes that were planned."""
    _, want, _ = _of_the_bundled_model("cpu", "auto")
    whole, same, _ = _of_the_bundled_model("sim", "layer-partition")
    assert same == want
    use = whole.memory["accelerator"]
    room = use.total_bytes + use.reserve_bytes - use.weights_bytes // 4
    plan, tokens, stats = _of_the_bundled_model(f"sim:vram={room}", policy)
    assert any(plan.lacking)
    assert tokens == want
    planned, taken = plan.memory["accelerator"], stats["devices"][1]
    for purpose in ("weights", "staging", "kv", "activations"):
        assert taken[f"{purpose}_bytes"] <= getattr(planned, f"{purpose}_bytes"), purpose
    assert taken["staging_bytes"] == planned.staging_bytes
    assert planned.weights_bytes - taken["weights_bytes"] < 256
    assert taken["peak_bytes"] <= planned.total_bytes
    assert stats["devices"][0]["weights_bytes"] == plan.memory["cpu"].weights_bytes
