"""Prices and places one given layout, where HELM's planner would choose. Runs nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from helm.compiler.advice import costed_graph
from helm.compiler.candidate import Candidate
from helm.compiler.counts import CostedGraph, Step
from helm.compiler.placement import accelerator_pages, memory_use, placed, schedule
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
    made, memory = placed(model.graph, candidate), memory_use(candidate)
    return dataclasses.replace(
        plan,
        devices=devices_named(memory),
        limits=dataclasses.replace(plan.limits, step_tokens=candidate.step_tokens),
        threads=candidate.threads,
        kv=kv,
        slices=slices_of(plan.tensors, made.units, model.format),
        units=made.units,
        memory=memory,
        schedule=schedule(candidate, kv, accelerator_pages(made, kv, candidate)),
        prediction=None,
    )


def costed(plan: Plan, graph: Graph) -> CostedGraph:
    """The graph with the formats of `plan`."""
    return costed_graph(plan, graph)


def weights_read(plan: Plan, model: CostedGraph) -> dict[str, int]:
    """Device -> bytes of weights that a step of one token reads there."""
    read = {"cpu": 0, "accelerator": 0}
    for unit, there in zip(model.graph.units, plan.units, strict=True):
        read[there.device] += model.unit_cost(unit, Step(1, 1)).weight_bytes
    return read
