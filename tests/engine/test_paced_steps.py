"""Decode steps on devices that mostly sleep take what the timeline says of the same rates."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from cut_plans import OWN, cut_plan, graph_of
from paced import PacedStep, Rates, Run
from plans import make_plan

import small_models
from engine_helpers import partitioned, prompt_of
from helm import _helm
from helm.compiler.cut import Cut, LayerCut
from helm.compiler.timeline import period_s
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import load_config
from helm.plan.schema import Plan, Schedule
from helm.plan.units import CPU

MODEL = "llama_deep"
LAYERS = 5
STEPS = 6
RATES = Rates(cpu=2e6, own=4e6, link=4e6)


def plan_of() -> Plan:
    folder = small_models.model_dir(MODEL)
    return make_plan(
        load_config(folder), read_checkpoint(folder), threads=1, memory_bytes=4 << 30,
        kv_dtype="f32", page_tokens=16, step_tokens=160, max_sequences=2, context=260,
    )  # fmt: skip


def engine_of(plan: Plan, rates: Rates) -> Any:
    return _helm.Engine(
        plan.to_json(), str(small_models.model_dir(MODEL)), device=rates.device,
        cpu_bytes_per_s=rates.cpu,
    )  # fmt: skip


def ratios(plan: Plan, rates: Rates, context: int = 20) -> tuple[list[float], list[float]]:
    """Measured over predicted seconds of some steps, and over those of the busier lane."""
    engine = engine_of(plan, rates)
    sequence = engine.open(context + STEPS + 2)
    engine.forward(sequence, np.array(prompt_of(context), np.int32))
    engine.forward(sequence, np.array([3], np.int32))
    timeline, lanes = [], []
    for token in range(STEPS):
        step = PacedStep(plan, rates, [Run(context + 1 + token, engine.stats["evicted_blocks"])])
        begin = time.perf_counter()
        engine.forward(sequence, np.array([token], np.int32))
        took = time.perf_counter() - begin
        timeline.append(took / float(period_s([step.flight()])))
        lanes.append(took / max(step.lane_s(cpu=True), step.lane_s(cpu=False)))
    assert engine.stats["streamed_steps"] == (STEPS + 2) * (plan.schedule.stream_tokens > 0)
    return timeline, lanes


def as_predicted(found: list[float]) -> None:
    """Other programs make a step longer, never shorter, so that the shortest is looked at."""
    assert 0.98 <= min(found) <= 1.05, found


def halves(**changes: Any) -> Plan:
    split = partitioned(plan_of(), (CPU, *(CPU, CPU, OWN, OWN, OWN), CPU))
    return dataclasses.replace(split, schedule=dataclasses.replace(split.schedule, **changes))


def test_layers_on_two_devices() -> None:
    as_predicted(ratios(halves(), RATES)[0])


def test_crossings_take_their_latency() -> None:
    as_predicted(ratios(halves(), dataclasses.replace(RATES, latency_s=0.02))[0])


@pytest.mark.parametrize("link", [2e6, 8e6])
def test_weights_that_visit(link: float) -> None:
    """Where the link is slower than the device, and where it is faster."""
    plan = halves(prefill="stream", stream_tokens=1, stream_pages=plan_of().kv.blocks)
    as_predicted(ratios(plan, dataclasses.replace(RATES, link=link))[0])


@pytest.mark.parametrize("site", ["stream", "cpu"])
def test_pages_that_overflow(site: str) -> None:
    own = 3 * (160 // 16 + 2 * 2)  # slots of three layers: as few as a step needs
    pages = {CPU: plan_of().kv.pages - own, OWN: own}
    plan = halves(overflow=site, pages=pages, watermark=0.5)
    rates = dataclasses.replace(RATES, link=1e6)
    engine = engine_of(plan, rates)
    assert engine.stats["evicted_blocks"] == 0
    del engine
    as_predicted(ratios(plan, rates, 159)[0])


def test_two_groups_keep_both_devices_busy() -> None:
    plan, context = halves(decode_groups=2), 20
    engine = engine_of(plan, RATES)
    requests = [_helm.Request(prompt=prompt_of(context), max_tokens=40) for _ in range(2)]
    generation = _helm.Generation(engine, requests)
    made, times = 0, []
    while not generation.done:
        made += len(generation.advance(0.0))
        times.append((made, time.perf_counter()))
    first, last = (next(t for n, t in times if n >= count) for count in (20, 60))
    flight = PacedStep(plan, RATES, [Run(context + 20)]).flight()
    together = float(period_s([flight, flight]))
    assert together < 0.8 * 2 * float(period_s([flight]))
    assert 0.98 <= (last - first) / (20 * together) <= 1.05


def cut(home: str = CPU, visits: int = 0, heads: int = 1, elements: int = 32) -> Plan:
    layers = (LayerCut(heads, elements, home),) * LAYERS
    graph = graph_of(small_models.model_dir(MODEL))
    return cut_plan(plan_of(), graph, Cut(CPU, layers, 60), visits=visits)


@pytest.mark.parametrize("home", [CPU, OWN])
def test_layers_that_are_cut(home: str) -> None:
    plan, rates = cut(home), dataclasses.replace(RATES, link=64e6)
    found, lanes = ratios(plan, rates)
    as_predicted(found)
    assert min(lanes) <= 1.1, lanes
    split = period_s([PacedStep(halves(), rates, [Run(20)]).flight()])
    both = period_s([PacedStep(plan, rates, [Run(20)]).flight()])
    assert float(both) < 0.8 * float(split)


@pytest.mark.parametrize("home", [CPU, OWN])
def test_crossings_hide_behind_the_slower_device(home: str) -> None:
    rates = dataclasses.replace(RATES, cpu=1e6, link=64e6, latency_s=0.002)
    found, _ = ratios(cut(home), rates)
    as_predicted(found)


def test_a_cut_of_the_head_alone() -> None:
    graph = graph_of(small_models.model_dir(MODEL))
    layers = (LayerCut(2, 72),) * LAYERS
    plan = cut_plan(plan_of(), graph, Cut(CPU, layers, 60))
    assert plan.schedule == Schedule(pages={CPU: plan.kv.pages, OWN: 0})
    as_predicted(ratios(plan, RATES)[0])


def test_cut_layers_that_visit() -> None:
    as_predicted(ratios(cut(visits=1), RATES)[0])
