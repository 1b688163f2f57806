"""Plans of small models whose accelerator computes all layers, while weights visit it in every
step."""

from __future__ import annotations

import dataclasses

from engine_helpers import partitioned
from helm.base.formats import uncompressed
from helm.compiler.counts import CostedGraph
from helm.compiler.placement import parts_of
from helm.compiler.tensors import slices_of
from helm.compiler.visits.rows import split_units
from helm.model.graph import Graph
from helm.plan.schema import Plan
from helm.plan.units import CPU

OWN = "accelerator"


def visiting_plan(
    plan: Plan,
    graph: Graph,
    attention: float,
    mlp: float,
    *,
    buffers: int = 2,
    splits: bool = True,
    head: str = OWN,
) -> Plan:
    """`plan`, whose units all lie on the CPU, with all layers on the accelerator, of whose matrices
    these shares stay there."""
    own = partitioned(plan, (CPU, *[OWN] * len(graph.layers), head))
    formats = {held.tensor: uncompressed(held.format) for held in plan.slices}
    model = CostedGraph(graph, formats, plan.kv.dtype, {})
    shares = {"attention": attention, "mlp": mlp}
    made, visiting = split_units(model, own.units, shares, splits)
    tensors = parts_of(plan.tensors, made)
    return dataclasses.replace(
        own,
        tensors=tensors,
        slices=slices_of(tensors, made.units, lambda name, _: formats[name], visiting),
        units=made.units,
        schedule=dataclasses.replace(own.schedule, visit_buffers=buffers),
    )
