"""Prices and places one given layout, where HELM's planner would choose. Runs nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from helm.compiler.advice import costed_graph
from helm.compiler.candidate import Candidate
from helm.compiler.choices import choices
from helm.compiler.counts import CostedGraph, Step
from helm.compiler.cut.memory import CutMemory
from helm.compiler.cut.price import CutPrices
from helm.compiler.cut.search import Way
from helm.compiler.cut.ways import HOMES, Layouts, cut_model
from helm.compiler.placement import accelerator_pages, memory_use, placed_units, schedule
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import search
from helm.compiler.tensors import slices_of
from helm.machine.profile import Profile
from helm.model.graph import Graph
from helm.plan.records import Workload
from helm.plan.schema import Plan
from helm.plan.units import devices_named

_PLENTY = 2**60  # bytes


@dataclass(frozen=True)
class Layout:
    """embedding and head: "cpu" or "accelerator"; the layers before `cpu_blocks` are the CPU's."""

    embedding: str
    cpu_blocks: int
    head: str

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        (embedding,), *layers, (head,) = plan.places
        return cls(embedding, layers.count(frozenset(("cpu",))), head)


def price(
    model: CostedGraph,
    profile: Profile,
    workload: Workload,
    layout: Layout,
    limits: ResourceLimits,
    space: Space,
) -> Candidate:
    """`layout` as the cost model sees it, whether it fits or not, but for a limit on KV; what
    `space` leaves open is chosen for `workload`."""
    if layout == Layout("cpu", len(model.graph.layers), "cpu"):
        profile = dataclasses.replace(profile, accelerator=None, link=None)
    limits = dataclasses.replace(limits, cpu_bytes=_PLENTY, accelerator_bytes=_PLENTY)
    found = search(model, profile, workload, limits, space).by_layout
    return next(c for c in found if c.layout == dataclasses.astuple(layout))


def price_experts(
    model: CostedGraph,
    profile: Profile,
    workload: Workload,
    limits: ResourceLimits,
    space: Space,
) -> Candidate:
    """A mixture's attention and head on the accelerator, embedding and experts on the CPU, whether
    that fits or not."""
    choice = next(
        c for c in choices(model, profile, workload, limits, space) if c.mode == "compute"
    )
    cuts = cut_model(model, choice.setting.classes, space.columns)
    assert not isinstance(cuts, str), cuts
    memory = CutMemory(choice.setting, cuts, choice.each, False)
    way = Way(choice, None, CutPrices(choice.setting, cuts), memory)
    home = HOMES.index("accelerator")
    layout = Layouts(np.array([[0, cuts.blocks, home, 0, cuts.units[1].last, 0]], np.int64).T)
    return way.candidate(layout, limits, workload, (_PLENTY, _PLENTY))


def price_plan(plan: Plan, model: CostedGraph, profile: Profile, workload: Workload) -> Candidate:
    """`plan` under another workload: its layout, threads, page and step sizes, memory for KV, and
    kind of schedule. From how many tokens on weights visit the accelerator is chosen for the
    workload."""
    how, split = plan.schedule, plan.overflows
    limits = ResourceLimits(
        accelerator_kv_bytes=plan.memory["accelerator"].kv_bytes if split else None,
        watermark=how.watermark,
        step_tokens=plan.limits.step_tokens,
        page_tokens=plan.kv.page_tokens,
        sequences=plan.limits.sequences,
    )
    space = Space(
        kv="any" if split else "device",
        overflow=(how.overflow,),
        prefill=(how.prefill,),
        overlap=(how.prefill_overlap,),
        visit_steps=(),
        decode_groups=(how.decode_groups,),
        threads=(plan.threads,),
    )
    return price(model, profile, workload, Layout.of(plan), limits, space)


def place(plan: Plan, model: CostedGraph, candidate: Candidate) -> Plan:
    """`plan` with the units, memory and schedule of `candidate`, which was priced with its
    limits."""
    blocks = candidate.kv_blocks * candidate.sequences
    few = plan.kv.most_window_blocks(candidate.step_tokens, candidate.sequences)
    window_blocks = few if candidate.kv is None and few < blocks else 0
    kv = dataclasses.replace(plan.kv, blocks=blocks, window_blocks=window_blocks)
    units, memory = placed_units(model.graph, candidate), memory_use(candidate)
    return dataclasses.replace(
        plan,
        devices=devices_named(memory),
        limits=dataclasses.replace(plan.limits, step_tokens=candidate.step_tokens),
        threads=candidate.threads,
        kv=kv,
        slices=slices_of(plan.tensors, units, model.format),
        units=units,
        memory=memory,
        schedule=schedule(candidate, kv, accelerator_pages(units, kv, candidate)),
        prediction=None,
    )


def costed(plan: Plan, graph: Graph) -> CostedGraph:
    """The graph with the formats of `plan`."""
    return costed_graph(plan, graph)


def weights_read(plan: Plan, model: CostedGraph) -> dict[str, int]:
    """Device -> bytes of weights that a step of one token reads there."""
    read = {"cpu": 0, "accelerator": 0}
    for unit, placed in zip(model.graph.units, plan.units, strict=True):
        read[placed.device] += model.unit_cost(unit, Step(1, 1)).weight_bytes
    return read
