"""Plans of small models whose layers, or head, are cut between two devices."""

from __future__ import annotations

import dataclasses
import functools
import random

import small_models
from helm.base.formats import uncompressed
from helm.compiler.cut.shares import attention_shares, mlp_shares, size_of
from helm.compiler.cut.units import Cut, LayerCut, cut_units
from helm.compiler.placement import parts_of
from helm.compiler.tensors import slices_of
from helm.compiler.visits.rows import visiting_names
from helm.model.families import build_graph, load_config
from helm.model.graph import Attention, Graph, Linear, Unit
from helm.plan.schema import Plan, Schedule
from helm.plan.units import CPU, devices_named
from helm.plan.weights import TensorSpec, cut_cols
from small_plans import plan_of

OWN = "accelerator"


def cut_plan(
    plan: Plan, graph: Graph, cut: Cut, *, alone: bool = False, visits: int = 0,
    lacking: bool = False,
) -> Plan:  # fmt: skip
    """`plan`, whose units all lie on the CPU, cut so, with plenty of memory. alone: on the CPU all
    of it, piece by piece. visits: tokens from which on weights of the CPU's units visit; 0: none.
    lacking: in every step matrices visit the accelerator's part of layers.
    """
    made = cut_units(graph, cut, (CPU, CPU if alone else OWN))
    formats = {held.tensor: held.format for held in plan.slices}
    tensors = parts_of(plan.tensors, made)

    def format(name: str, device: str) -> str:
        held = formats[name]
        return held if device == CPU and not visits and not lacking else uncompressed(held)

    kv = dataclasses.replace(plan.kv, layers=made.kv, window_blocks=0)
    own = kv.blocks * sum(
        isinstance(op, Attention) for unit in made.units if unit.device != CPU for op in unit.ops
    )
    use = dataclasses.replace(plan.memory[CPU], reserve_bytes=64 << 20)
    there = [unit for unit in made.units if unit.device != CPU and unit.layer is not None]
    visiting = visiting_names(there, made.tensors) if lacking else ()
    names = (CPU,) if alone else (CPU, OWN)
    pages = {CPU: kv.pages - own, **({} if alone else {OWN: own})}
    prompts = {"prefill": "visit", "visit_tokens": visits, "visit_pages": kv.blocks}
    return dataclasses.replace(
        plan,
        devices=devices_named(names),
        kv=kv,
        tensors=tensors,
        slices=slices_of(tensors, made.units, format, visiting),
        values=made.values,
        units=made.units,
        memory=dict.fromkeys(names, use),
        schedule=Schedule(pages=pages, **(prompts if visits and not alone else {})),
    )


def graph_of(folder: object) -> Graph:
    return build_graph(load_config(folder))  # type: ignore[arg-type]


def heads_of(unit: Unit, tensors: dict[str, TensorSpec]) -> list[int]:
    """KV heads that the CPU may have of an attention unit, where it is cut."""
    shares = attention_shares(unit)
    if isinstance(shares, str):
        return []
    attention = next(op for op in unit.ops if isinstance(op, Attention))
    each = attention.heads // attention.kv_heads * attention.head_dim
    return [h for h in range(1, attention.kv_heads) if _may_end(shares.last, h * each, tensors)]


def elements_of(unit: Unit, tensors: dict[str, TensorSpec]) -> list[int]:
    """Elements that the CPU may have of an mlp, where it is cut."""
    shares = mlp_shares(unit)
    if isinstance(shares, str):
        return []
    size = shares.inner[0].size  # type: ignore[union-attr]
    return [e for e in range(32, size, 32) if _may_end(shares.last, e, tensors)]


def _may_end(last: Linear | None, column: int, tensors: dict[str, TensorSpec]) -> bool:
    assert last is not None
    return column % cut_cols(tensors[last.parts[0].weight].source) == 0


def homes_of(graph: Graph) -> tuple[str, ...]:
    """Of layers: an accelerator is none where a product reads the residual itself."""
    shares = [
        attention_shares(unit) if unit.kind == "attention" else mlp_shares(unit)
        for unit in graph.units[1:-1]
    ]
    return (CPU, OWN) if all(OWN in s.homes for s in shares if not isinstance(s, str)) else (CPU,)


def random_cut(graph: Graph, plan: Plan, rng: random.Random) -> Cut:
    """Every layer whole on either device, or cut in its attention, its mlp or both; the head
    likewise. At least one of them is cut."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    homes = homes_of(graph)
    while True:
        layers, some = [], False
        for layer in graph.layers:
            attention, mlp = layer.units
            heads = next(op.kv_heads for op in attention.ops if isinstance(op, Attention))
            size = size_of(mlp)
            between = (heads_of(attention, tensors), elements_of(mlp, tensors))
            h = rng.choice((0, heads, *between[0], *between[0]))
            e = rng.choice((0, size, *between[1]))
            some |= h in between[0] or e in between[1]
            layers.append(LayerCut(h, e, rng.choice(homes)))
        vocab = next(value.width for value in graph.values if value.name == graph.logits)
        rows = rng.choice((0, vocab, rng.randint(1, vocab - 1)))
        if some or 0 < rows < vocab:
            return Cut(rng.choice((CPU, OWN)), tuple(layers), rows)


@functools.cache
def cut_in_all_ways(name: str, *, alone: bool = False, visits: int = 0) -> Plan:
    """Of a small model of two layers: both cut by KV heads and elements, with either home, and the
    head."""
    plan, graph = (
        plan_of(name, context=64, page_tokens=16), graph_of(small_models.model_dir(name)),
    )  # fmt: skip
    cut = Cut(CPU, (LayerCut(1, 32), LayerCut(1, 64, OWN)), 48)
    return cut_plan(plan, graph, cut, alone=alone, visits=visits)
