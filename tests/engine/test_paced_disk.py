"""Steps that read weights from a paced disk take what the timeline says of the same rates, where
the CPU computes them and where they visit a device that mostly sleeps."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from paced import PacedStep, Rates, Run

import small_models
from engine_helpers import partitioned, prompt_of
from helm import _helm
from helm.compiler.timeline import Clock, collect, submit
from helm.plan.disk import disk_units, on_disk
from helm.plan.schema import Plan
from helm.plan.units import CPU
from small_plans import plan_of

NAME, OWN = "llama_deep", "accelerator"  # five layers
CONTEXT, WARM, TIMED, MOST = 20, 3, 6, 8
RATES = Rates(cpu=2e6, own=4e6, link=4e6, disk=2e6)


def whole() -> Plan:
    return plan_of(NAME, "f32", context=200, page_tokens=16, kv_dtype="f32")


def reading(rings: float, visits: bool, layers: tuple[int, ...]) -> Plan:
    """Two layers and the head lie on the device, matrices of these layers on disk. rings: how many
    of the largest units the ring holds."""
    plan = whole()
    own = partitioned(plan, (CPU, CPU, CPU, CPU, OWN, OWN, OWN))
    matrices = {tensor.name for tensor in plan.tensors if len(tensor.shape) > 1}
    names = {
        name
        for unit in own.units if unit.layer in layers
        for op in unit.ops for name in op.weight_names()
    } & matrices  # fmt: skip
    slices, order = on_disk(own.slices, names), own.schedule
    wide = dataclasses.replace(order, disk_ring_bytes=1 << 40)
    units = disk_units(dataclasses.replace(own, slices=slices, schedule=wide))
    most = int(rings * max(unit.read_bytes for unit in units)) // 4096 * 4096
    order = dataclasses.replace(order, disk_ring_bytes=most)
    if visits:
        order = dataclasses.replace(
            order, prefill="visit", visit_tokens=1, visit_pages=plan.kv.blocks
        )
    return dataclasses.replace(own, slices=slices, schedule=order)


def predicted(plan: Plan, rates: Rates, first: int) -> float:
    """Seconds of so many steps one after the other, of which the first has this position."""
    clock = Clock()
    for position in range(first - WARM, first + TIMED):
        if position == first:
            begin = float(clock.at(CPU))  # type: ignore[arg-type]
        flight = PacedStep(plan, rates, [Run(position)]).flight()
        collect(clock, flight, submit(clock, flight))
    return float(clock.at(CPU)) - begin  # type: ignore[arg-type]


def as_predicted(plan: Plan, rates: Rates) -> None:
    """Other programs make steps longer; what is read meanwhile may make a later one shorter, but
    no more than a ring holds."""
    folder = str(small_models.model_dir(NAME))
    engine = _helm.Engine(
        plan.to_json(), folder, device=rates.device,
        cpu_bytes_per_s=rates.cpu, disk_bytes_per_s=rates.disk,
    )  # fmt: skip
    sequence, found = engine.open(200), list[float]()
    engine.forward(sequence, np.array(prompt_of(CONTEXT), np.int32))

    def steps(count: int) -> float:
        begin = time.perf_counter()
        for token in range(count):
            engine.forward(sequence, np.array([token], np.int32))
        return time.perf_counter() - begin

    steps(WARM)
    for turn in range(MOST):
        position = CONTEXT + WARM + turn * TIMED
        found.append(steps(TIMED) / predicted(plan, rates, position))
        if turn > 0 and min(found) <= 1.05:
            break
    assert 0.95 <= min(found) <= 1.05, found
    taken = WARM + 1 + len(found) * TIMED
    assert engine.stats["disk_used_bytes"] == taken * engine.stats["disk_step_bytes"]


@pytest.mark.parametrize("visits", [False, True])
@pytest.mark.parametrize("disk", [1e6, 4e6])
@pytest.mark.parametrize("rings", [1, 2.5])
def test_layers_from_disk(rings: float, disk: float, visits: bool) -> None:
    """Where the disk is the slowest, and where it is not; beside a ring of one unit nothing is read
    while one is used."""
    as_predicted(reading(rings, visits, (0, 1, 2)), dataclasses.replace(RATES, disk=disk))


@pytest.mark.parametrize("link", [1e6, 16e6])
def test_some_layers_from_disk_visit_beside_others(link: float) -> None:
    as_predicted(reading(2, True, (0, 2)), dataclasses.replace(RATES, link=link))
