"""bench/compare.py with mixtures: their files of random blocks, what a step reads, their goals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import helm
from bench_config import CONFIG
from bench_runs import process_of, run_of
from compare_report import bar_sheet, speed_sheet
from device_profiles import fast_accelerator
from figures import matrix_elements, product_flops
from gguf_file import MODEL, step_weight_bytes
from gguf_random import random_mixture
from helm import _helm
from helm.compiler.counts import CostedGraph
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.solve import plan_of, solve
from helm.compiler.times import experts_s
from helm.model.families import build_graph, parse_config
from helm.model.mixture_ops import Experts
from helm.plan.records import Workload
from partition import costed, price_experts
from random_weights import random_weights
from scenarios import scenario

HEAD = 300 * 256
TINY: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
ATTENTION, EXPERTS, ROUTER = 2 * 256 * (32 + 16), 3 * 256 * 64, 6 * 256  # of a layer, of an expert


def test_a_file_has_random_blocks_that_helm_loads(tmp_path: Path) -> None:
    folder = random_mixture("tiny", TINY, "q4_0", tmp_path)
    with helm.LLM(folder / MODEL, context=64, threads=1, device="cpu") as llm:
        held = {one.tensor: one.format for one in llm.plan.slices}
        logits = llm.logits([1, 2, 3])
    assert held["model.layers.0.mlp.experts.*.up_proj.weight"] == "c4.s32"
    assert held["model.layers.0.mlp.gate.weight"] == "f32"
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10
    blocks = 2 * (ATTENTION + 2 * EXPERTS) * 18 / 32 + 2 * ROUTER * 4 + HEAD * 210 / 256
    assert step_weight_bytes(folder) == blocks
    with pytest.raises(SystemExit, match="tiny is a mixture, whose files are made in q4_0"):
        random_mixture("tiny", TINY, "q8_0", tmp_path)


def test_a_token_has_its_own_experts_alone() -> None:
    layer = ATTENTION + 2 * EXPERTS + ROUTER
    assert matrix_elements(TINY) == (2 * layer, HEAD)
    behind = 256 * 32 + 2 * EXPERTS + ROUTER
    assert product_flops(TINY, 9) == pytest.approx(2 * (9 * (2 * layer - behind) + behind + HEAD))


def test_a_plan_with_experts_apart_is_priced_placed_and_run() -> None:
    """Attention and head on a device, experts on the CPU, with the logits of the CPU alone."""
    config = parse_config(TINY, "tiny")
    infos, tensors = random_weights(build_graph(config).tensors, "bf16")
    problem = Problem(config, infos, context=64, dtype="bf16", threads=1, memory_bytes=1 << 32)
    alone = solve(problem).plan
    model = costed(alone, build_graph(config))
    limits, space = ResourceLimits(sequences=1), Space(kv="device", threads=(1,))
    found = price_experts(model, fast_accelerator(), Workload(16, 8), limits, space)
    assert 0 < found.predicted.decode_terms["link_s"] < found.predicted.decode_s
    apart = plan_of(problem, model, alone.limits, found)
    places = {(unit.kind, unit.device) for unit in apart.units}
    assert places == {
        ("embedding", "cpu"), ("attention", "accelerator"), ("mlp", "cpu"), ("head", "accelerator")
    }  # fmt: skip
    logits = []
    for plan, device in ((alone, "cpu"), (apart, "sim")):
        engine = _helm.Engine(plan.to_json(), "", tensors, device=device)
        logits.append(engine.forward(engine.open(32), np.arange(20, dtype=np.int32), True))
    np.testing.assert_array_equal(*logits)


def test_experts_are_priced_by_products_of_few_tokens() -> None:
    """Elements of eight tokens at a time at most, packed weights of 64."""
    graph = build_graph(parse_config({**TINY, "num_experts": 2}, "tiny"))
    own = fast_accelerator().cpu
    device = dataclasses.replace(
        own,
        matvec_bytes_per_s={**own.matvec_bytes_per_s, "q4": 1e10},
        matmul_flops={**own.matmul_flops, "q4": {1: 1e10, 8: 5e10, 64: 1e11, 512: 4e11}},
    )
    op = next(op for op in graph.ops() if isinstance(op, Experts))
    for dtype, kind, most in (("bf16", "bf16", 8), ("c4.km32", "q4", 64)):
        model = CostedGraph(graph, dict.fromkeys(graph.tensors, dtype), "bf16")
        for rows in (1, 5, 512):
            _, compute = experts_s(model, op, rows, device)
            flops = 2.0 * rows * 2 * EXPERTS
            assert compute == pytest.approx(flops / device.matmul_rate(kind, min(rows, most)))


@pytest.mark.parametrize(("slower", "goal"), [(1.6, ">= 1.2x"), (1.4, ">= 1.05x")])
def test_the_goal_beside_llama_follows_its_share_of_the_ceiling(slower: float, goal: str) -> None:
    """slower: than the ceiling."""
    names, stored = ("decode", "decode-x4"), 1e6
    what = scenario("decode", 128, 64)
    kv = 2 * 2 * 2 * 8 * what.mean_context * 2
    seconds = slower * 64 * (stored + kv) / 2e9
    processes = [
        process_of("llama.cpp", run_of("decode", seconds)),
        process_of("llama.cpp:no-fa", run_of("decode", 2 * seconds)),
        process_of("helm", *(run_of(name, seconds / 1.1) for name in names)),
    ]
    model = {
        "shape": "made-up", "dtype": "q4_0", "config": TINY, "weight_bytes": stored,
        "engines": ["helm", "llama.cpp", "llama.cpp:no-fa"], "left_out": [],
        "scenarios": [vars(scenario(name, 128, 64)) for name in names], "rounds": [processes],
    }  # fmt: skip
    rows = {row[0]: row for row in bar_sheet(model).rows}
    row = rows["decode over llama.cpp, its best setting"]
    assert (row[2], row[4]) == ("1.10x [1.10x, 1.10x]", goal)
    assert rows["decode, of the read ceiling"][4] == ">= 80%"
    several = next(row for row in speed_sheet(model).rows if row[0] == "decode-x4")
    assert several[3:5] == ("", "")  # how many experts four sequences share is not known
