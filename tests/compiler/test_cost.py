"""Counts per op against torch's FLOP counter and the checkpoint; times against a naive oracle."""

from __future__ import annotations

import dataclasses
import functools
import json
import random

import numpy as np
import pytest
import torch
from naive_steps import Batch
from naive_timeline import run
from plans import make_plan
from torch.utils.flop_counter import FlopCounterMode

import naive_memory
import naive_rates
import naive_search
import search_cases
import small_models
from helm.compiler.budget import itemise
from helm.compiler.counts import CostedGraph, OpCost, Step, causal_pairs, visible_positions
from helm.compiler.decode import price_decode
from helm.compiler.prefill import prepare, price_prefill
from helm.compiler.problem import ResourceLimits
from helm.compiler.setting import make_setting, page_choices
from helm.compiler.times import prefill_queries
from helm.machine.profile import Profile
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import build_graph, load_config
from helm.model.graph import Attention
from helm.plan.records import Workload
from whole import WHOLE

MOST_PLANS = 80  # of one machine, unless HELM_TEST_WHOLE=1 asks for all


def costed(name, dtype="f32", kv_dtype="f32"):
    graph = build_graph(load_config(small_models.model_dir(name)))
    formats = {k: "f32" if len(s) == 1 else dtype for k, s in graph.tensors.items()}
    return CostedGraph(graph, formats, kv_dtype)


def torch_flops(name, tokens, cached=0):
    """Of every matrix product outside the rotary table, which is no matrix of the model."""
    model = small_models.make_model(name)
    ids = torch.zeros((1, cached + tokens), dtype=torch.long)
    with torch.no_grad():
        past = model(ids[:, :cached], use_cache=True).past_key_values if cached else None
        with FlopCounterMode(display=False, depth=10) as counter:
            model(ids[:, cached:], past_key_values=past)
    counts = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for key, ops in counts.items() if key.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary


@pytest.mark.parametrize("name", [n for n in small_models.CASES if n not in small_models.MIXTURES])
def test_flops_are_those_of_torch(name):
    model = costed(name)
    for tokens in (1, 7, 13):
        step = Step(tokens, tokens, outputs=tokens, causal=False)
        assert model.cost(step).flops == torch_flops(name, tokens)


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_flops_of_a_decode_step_are_those_of_torch(name):
    want = torch_flops(name, 1, cached=9)
    assert costed(name).cost(Step(1, 10, outputs=1, causal=False)).flops == want
    assert costed(name).cost(Step(1, 10)).flops == want  # one query sees everything


@pytest.mark.parametrize("name", small_models.CASES)
def test_bytes_are_those_of_the_checkpoint(name):
    model = costed(name)
    stored = sum(info.nbytes for info in read_checkpoint(small_models.model_dir(name)).values())
    assert model.weight_bytes(model.graph.units) == stored


def test_sixteen_bit_checkpoints_keep_vectors_in_f32():
    model = costed("qwen3", "bf16")
    infos = read_checkpoint(small_models.model_dir("qwen3", "bf16")).values()
    vectors = sum(info.nbytes for info in infos if len(info.shape) == 1)
    assert model.weight_bytes(model.graph.units) == sum(i.nbytes for i in infos) + vectors


def test_a_step_reads_every_matrix_once_and_one_row_per_token():
    model = costed("llama")
    embedding, *rest = model.graph.units
    read = model.cost(Step(5, 5)).weight_bytes
    assert read == model.weight_bytes(rest) + 5 * 48 * 4
    assert model.unit_cost(embedding, Step(5, 5)).weight_bytes == 5 * 48 * 4


@pytest.mark.parametrize(("kv_dtype", "row"), [("bf16", 16 * 2), ("i8", 16 + 4)])
def test_kv_bytes_of_a_step(kv_dtype, row):
    model = costed("llama", kv_dtype=kv_dtype)
    cost = model.cost(Step(6, 20, sequences=3))
    position = 2 * 2 * row  # K and V of two heads of 16
    assert model.kv_position_bytes == position
    assert cost.kv_write_bytes == 2 * 6 * position  # two layers
    assert cost.kv_read_bytes == 2 * 3 * 20 * position


def test_windows_bound_what_is_read_and_computed():
    op = next(o for o in costed("mistral_window").graph.ops() if isinstance(o, Attention))
    assert op.window == 4
    for past, tokens in ((0, 1), (0, 9), (3, 1), (2, 5), (50, 3)):
        mask = [
            [q - 4 < key <= q for key in range(past + tokens)] for q in range(past, past + tokens)
        ]
        assert causal_pairs(past, tokens, 4) == sum(map(sum, mask))
        assert visible_positions(past + tokens, tokens, 4) == np.any(mask, axis=0).sum()


def test_costs_add_up():
    model = costed("opt_350m")
    step = Step(4, 9, outputs=2)
    total = sum((model.op_cost(op, step) for op in model.graph.ops()), OpCost())
    assert model.cost(step) == total
    assert all(value > 0 for value in dataclasses.astuple(total))


def test_steps_fill_with_one_prompt_after_the_other():
    queries = prefill_queries(prompt=5, batch=3, step_tokens=8)
    runs = list(zip(queries.step, queries.past, queries.tokens, strict=True))
    assert runs == [(0, 0, 5), (0, 0, 3), (1, 3, 2), (1, 0, 5)]
    assert prefill_queries(16, 1, 8).steps == 2


def test_page_choices_cover_all_and_none():
    assert list(page_choices(1000, 512)) == [2, 1, 0]
    many = page_choices(1_000_000, 100)
    assert (many[0], many[-1]) == (10_000, 0)
    assert len(many) <= 129


def limits_of(task):
    return ResourceLimits(
        cpu_reserve_bytes=0,
        accelerator_reserve_bytes=0,
        step_tokens=task.step_tokens,
        page_tokens=task.page_tokens,
        watermark=task.watermark,
    )


@pytest.mark.parametrize("name", ["llama_tied_sharded", "qwen2_window", "opt_350m", "qwen3"])
@pytest.mark.parametrize("seed", range(4))
def test_every_plan_costs_what_the_oracle_says(name, seed):
    """Rows, pages, sites, modes, steps and groups of one random machine and workload."""
    task = search_cases.random_task(costed(name, "bf16", "i8" if seed == 3 else "bf16"), seed)
    if seed == 2:
        task.mapped, task.profile["cpu"]["mapped_matvec_ratio"] = 0.7, 0.6
    profile = Profile.from_json(json.dumps(task.profile))
    cpu = profile.cpu.with_mapped_weights(task.mapped)
    assert (cpu == profile.cpu) == (seed != 2)
    profile = dataclasses.replace(profile, cpu=cpu)
    work = Workload(task.prompt, task.output, task.batch, task.context)
    setting = make_setting(
        task.model, profile, work, limits_of(task), profile.cpu.threads, task.batch
    )
    pages = list(setting.pages)

    @functools.cache
    def prefill_of(step_tokens):
        limits = dataclasses.replace(setting.limits, step_tokens=step_tokens)
        return prepare(dataclasses.replace(setting, limits=limits))

    @functools.cache
    def decode_of(*arguments):
        return price_decode(setting, *arguments)

    @functools.cache
    def priced_prefill(step_tokens, *arguments):
        return price_prefill(prefill_of(step_tokens), *arguments)

    @functools.cache
    def budget_of(step_tokens, head, mode):
        return itemise(prefill_of(step_tokens).setting, head, mode)

    plans = [*naive_search.plans(task, "any"), *naive_search.plans(task, "host")]
    if len(plans) > MOST_PLANS and not WHOLE:
        plans = random.Random(seed).sample(plans, MOST_PLANS)
    for plan in plans:
        k = plan.devices[1:-1].count("cpu")
        row = 0 if plan.devices[0] == "accelerator" else 1 + k
        head, page = plan.devices[-1], pages.index(plan.pages)
        for context in (work.expected_context, work.context):
            got = decode_of(head, plan.overflow, context, plan.groups)
            want = naive_search.decode_seconds(task, plan, context)
            if row == 0 and plan.groups == 2:  # pages come before their step is at the accelerator
                assert want * (1 - 1e-9) <= got.total[row, page] <= want * 1.02
                want = got.total[row, page]
            assert got.total[row, page] == pytest.approx(want, rel=1e-9)
            assert sum(got.terms(row, page).values()) == pytest.approx(want, rel=1e-9)
            assert got.overlap[row, page] <= 0
        got = priced_prefill(plan.step_tokens, head, plan.overlap, plan.least)
        want = naive_search.prefill_seconds(task, plan)
        assert got.total[row, page] == pytest.approx(want, rel=1e-9), plan
        assert sum(got.terms(row, page).values()) == pytest.approx(want, rel=1e-9)
        mode = "compute" if plan.least is None else "visit"
        memory = budget_of(plan.step_tokens, head, mode).at(row, page)
        for site, size in naive_memory.sizes(task, plan).items():
            assert sum(memory[site].values()) == size, plan
            assert memory[site]["kv"] == naive_memory.kv_bytes(task, plan)[site]
            assert memory[site]["weights"] == naive_memory.weights(task, plan, site)


def visiting_seconds(batch):
    """Of the layers that visit alone."""
    step = batch.step()
    visits = {one.units for one in step.program.tasks if one.verb == "visit"}
    step.seconds = [
        seconds if one.units in visits else 0.0
        for one, seconds in zip(step.program.tasks, step.seconds, strict=True)
    ]
    return run([step], 1) - step.begin_s


def test_streaming_starts_where_it_is_faster_than_the_cpu():
    """Of steps of one prompt at its start, exactly those of visit_from tokens and more."""
    task = search_cases.random_task(costed("llama"), 7)
    task.profile["link"] |= {"to_accelerator_bytes_per_s": 3e5, "to_host_bytes_per_s": 1e9}
    profile = Profile.from_json(json.dumps(task.profile))
    limits = dataclasses.replace(limits_of(task), step_tokens=128)
    setting = make_setting(task.model, profile, Workload(128, 1), limits, 2, 1)
    prefill = prepare(setting)
    row = 2  # one block on the CPU
    plan = naive_rates.Plan(["cpu", "cpu", "accelerator", "cpu"], 99, "visit")
    faster = []
    for tokens in (1 << i for i in range(8)):
        batch = Batch(task, plan, [(0, tokens)], 1, [0], visits=True)
        faster.append(visiting_seconds(batch) < batch.whole(task.model.graph.layers[0], "cpu"))
    assert faster == sorted(faster)
    assert not faster[0]
    assert faster[-1]
    assert prefill.visit_from[row] == 1 << faster.index(True)
    assert prefill.visit_tokens(row, 128) == prefill.visit_from[row]
    assert prefill.visit_tokens(row, 4) <= 4  # every step of 4 tokens is to stream


@pytest.mark.parametrize("name", ["llama", "opt_350m", "qwen2_window"])
def test_all_on_the_cpu_takes_what_the_runtime_allocates(name):
    folder = small_models.model_dir(name)
    plan = make_plan(
        load_config(folder), read_checkpoint(folder), threads=3, memory_bytes=1 << 32, context=600
    )
    profile = Profile.from_json(json.dumps(search_cases.random_profile(0, threads=3)))
    model = costed(name)
    limits = ResourceLimits(sequences=8, cpu_reserve_bytes=0)
    setting = make_setting(model, profile, Workload(10, 10, 8, 600), limits, 3, 8)
    memory = itemise(setting, "cpu", "compute").at(-1, -1)
    used = plan.memory["cpu"]
    assert memory["cpu"]["weights"] == used.weights_bytes
    assert memory["cpu"]["kv"] == used.kv_bytes
    assert memory["cpu"]["activations"] == used.activations_bytes
    assert memory["cpu"]["workspace"] == used.workspace_bytes
    assert not any(memory["accelerator"].values())
