"""Which weights lie on slower memory nodes, where the nearer memory does not hold all.

Memory near the cores is used alone where a plan fits there. Else the search has all memory, and the
CPU's rates are those of weights of which a share lies in each tier. Shares follow from the plan, so
a search is made anew until they are those that it had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from helm.base.sizes import size_text
from helm.compiler.disk import spread
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import DiskWeights, Slower
from helm.errors import OutOfMemoryError
from helm.machine.rates import CpuProfile, MemoryTier
from helm.model.graph import Embedding, Op, PositionEmbedding
from helm.model.mixture_ops import Experts
from helm.plan.schema import Plan
from helm.plan.units import CPU
from helm.plan.weights import slice_bytes

S = TypeVar("S")  # a study
_ROUNDS, _ALIKE = 4, 0.01
# What goes first: embeddings, of which a step reads rows; what a link brings no faster; mixtures,
# of which it reads some experts; layers, each the same part of them; the rest.
_ROWS, _LINKED, _SOME, _LAYERS, _REST = range(5)


def in_tiers(problem: Problem, solve: Callable[[Problem], S]) -> S:
    """What `solve` finds, with weights on slower nodes where they must be."""
    cpu = problem.loading.cpu if problem.profile is None else problem.profile.cpu
    if cpu is None or not cpu.tiers:
        return solve(problem)
    slower = sum(tier.memory_bytes for tier in cpu.tiers)
    near_bytes = max(0, min(problem.room_bytes, cpu.memory_bytes - slower))
    near = dataclasses.replace(problem, memory_bytes=near_bytes, context=problem.limits.context)
    try:
        return solve(near)
    except OutOfMemoryError:
        return _with_slower(problem, cpu, near_bytes, solve)


def _with_slower(
    problem: Problem, cpu: CpuProfile, near_bytes: int, solve: Callable[[Problem], S]
) -> S:
    shares: tuple[float, ...] = (0.0,) * len(cpu.tiers)
    for _ in range(_ROUNDS):
        slower = Slower(shares, near_bytes)
        study: Any = solve(dataclasses.replace(problem, slower=slower))
        if study.access == "mapped":  # where the system has cached the files
            return study  # type: ignore[no-any-return]
        needed = study.placed.memory[CPU]
        bytes_ = needed.total_bytes + needed.reserve_bytes - problem.resident_bytes - near_bytes
        placed = with_nodes(
            study.placed, cpu.tiers, bytes_, _link_rate(problem), problem.resident_bytes > 0
        )
        before, shares = shares, shares_of(placed, cpu.tiers)
        if max(abs(a - b) for a, b in zip(before, shares, strict=True)) < _ALIKE:
            break
    said = [_said(placed, tier) for tier in cpu.tiers if placed.node_bytes.get(tier.node)]
    found: S = dataclasses.replace(study, placed=placed).saying(*said)
    return found


def _link_rate(problem: Problem) -> float:
    link = None if problem.profile is None else problem.profile.link
    return 0.0 if link is None else link.to_accelerator_bytes_per_s


def _said(plan: Plan, tier: MemoryTier) -> str:
    return (
        f"{size_text(plan.node_bytes[tier.node])} of weights lie on memory node {tier.node}, as "
        f"nearer memory does not hold them; the CPU reads them at "
        f"{tier.bytes_per_s / 1e9:,.1f} GB/s"
    )


def with_nodes(
    plan: Plan,
    tiers: Sequence[MemoryTier],
    needed: int,
    link_bytes_per_s: float = 0.0,
    bound: bool = False,
) -> Plan:
    """With so many bytes of the CPU's weights, or a little more, in the tiers: first what a step
    reads little of, then the same part of every unit. The fastest tier has what is read most.
    bound: tensors without a source lie in memory already. Raises OutOfMemoryError where the tiers
    have no room."""
    left, chosen = needed, list[tuple[int, DiskWeights]]()
    groups = _groups(plan, tiers, link_bytes_per_s, bound)
    for use in sorted(groups):
        taken = spread(groups[use], min(left, sum(own.held_bytes for own in groups[use])))
        chosen += [(use, own) for own in taken or () if left > 0]
        left = needed - sum(own.held_bytes for _, own in chosen)
    room = {tier.node: tier.memory_bytes for tier in tiers}
    nodes = dict[str, int]()
    for _, own in sorted(chosen, key=lambda one: (-one[0], one[1].number)):
        node = next((node for node in room if room[node] >= own.held_bytes), None)
        if node is None:
            break
        room[node] -= own.held_bytes
        nodes[own.names[0]] = node
    if left > 0 or len(nodes) < len(chosen):
        raise OutOfMemoryError(
            f"[plan] {size_text(needed)} of weights do not fit near the cores, and slower memory "
            "nodes have no room for them, tensor by tensor; free memory or choose a smaller model"
        )
    slices = tuple(
        dataclasses.replace(held, node=nodes.get(held.tensor)) if held.device == CPU else held
        for held in plan.slices
    )
    return dataclasses.replace(plan, slices=slices)


def shares_of(plan: Plan, tiers: Sequence[MemoryTier]) -> tuple[float, ...]:
    """Of the CPU's weights that steps read, what lies in each tier."""
    sizes, uses = slice_bytes(plan.tensors, plan.slices, CPU), _ops(plan)
    nodes = {held.tensor: held.node for held in plan.slices if held.device == CPU}
    read = {name: size for name, size in sizes.items() if not _rows_alone(uses[name])}
    whole = max(1, sum(read.values()))
    return tuple(
        sum(size for name, size in read.items() if nodes[name] == tier.node) / whole
        for tier in tiers
    )


def _groups(
    plan: Plan, tiers: Sequence[MemoryTier], link_bytes_per_s: float, bound: bool
) -> dict[int, list[DiskWeights]]:
    """By what of them a step reads: weights that may lie anywhere, each tensor apart."""
    sizes, uses = slice_bytes(plan.tensors, plan.slices, CPU), _ops(plan)
    linked = all(tier.bytes_per_s >= link_bytes_per_s for tier in tiers)
    found: dict[int, list[DiskWeights]] = {}
    order = {name: number for number, name in enumerate(uses)}
    layers = [op for unit in plan.units if unit.layer is not None for op in unit.ops]
    of_layers = {name for op in layers for name in op.weight_names()}
    for held in sorted(plan.held(CPU), key=lambda one: order[one[0].name]):
        name, own = held[0].name, held[1]
        if own.access != "resident" or sizes[name] == 0 or (bound and held[0].source is None):
            continue
        devices, ops = {device for device, _ in uses[name]}, [op for _, op in uses[name]]
        use = _LAYERS if name in of_layers else _REST
        if _rows_alone(uses[name]):
            use = _ROWS
        elif CPU not in devices and linked:
            use = _LINKED
        elif all(isinstance(op, Experts) for op in ops):
            use = _SOME
        size = sizes[name]
        found.setdefault(use, []).append(DiskWeights(order[name], (name,), size, size))
    return found


def _ops(plan: Plan) -> dict[str, list[tuple[str, Op]]]:
    """By tensor, in the order of a step: what reads it, and on which device."""
    found: dict[str, list[tuple[str, Op]]] = {}
    for unit in plan.units:
        for op in unit.ops:
            for name in op.weight_names():
                found.setdefault(name, []).append((unit.device, op))
    return found


def _rows_alone(uses: Sequence[tuple[str, Op]]) -> bool:
    return all(isinstance(op, (Embedding, PositionEmbedding)) for _, op in uses)
