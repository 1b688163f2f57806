"""Turns a search's result into the parts of a plan that depend on it. Searches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from helm.compiler.best import SearchResult
from helm.compiler.candidate import Candidate
from helm.compiler.counts import CostedGraph
from helm.compiler.cut.units import Cut, CutUnits, LayerCut, cut_units
from helm.compiler.search import Search
from helm.compiler.visits.rows import split_units, visiting_names
from helm.machine.profile import Profile
from helm.model.graph import Attention, Graph, Unit
from helm.plan.kv import KvSpec
from helm.plan.records import WATERMARK, Alternative, Prediction, ProfileIdentity
from helm.plan.schema import Limits, MemoryUse, Plan, Schedule
from helm.plan.units import CPU, PlacedUnit
from helm.plan.weights import TensorSpec

# What a plan has besides its units, and what is said of it.
Counted = tuple[Limits, KvSpec, dict[str, MemoryUse], Schedule, list[str]]
_ALTERNATIVES = 5  # the best of those not chosen, besides the labelled


def placed(model: CostedGraph, candidate: Candidate | None) -> tuple[CutUnits, frozenset[str]]:
    """Every unit on its device, cut as the candidate is, and the tensors that visit in every step.
    None: all on the CPU."""
    graph = model.graph
    if candidate is None:
        units = tuple(on_device(unit, CPU) for unit in graph.units)
    elif candidate.cut is not None:
        made = cut_units(graph, cut_of(candidate))
        own = [u for u in made.units if u.device != CPU and u.layer is not None]
        visiting = visiting_names(own, made.tensors)
        return made, frozenset() if candidate.visit is None else visiting
    else:
        units, use = placed_units(graph, candidate), candidate.visit
        if use is not None:
            shares = {"attention": use.attention, "mlp": use.mlp}
            return split_units(model, units, shares, use.splits)
    return CutUnits(units, graph.values, graph.tensors, {}, graph.kv.layers), frozenset()


def visits(plan: Plan) -> bool:
    """Whether weights visit an accelerator, in prompts or in every step."""
    return plan.schedule.prefill == "visit" or any(plan.lacking)


def cut_of(candidate: Candidate) -> Cut:
    """Of the graph's layers and head. The candidate has something that is cut."""
    use = candidate.cut
    assert use is not None
    layers = (
        *[LayerCut(use.of_heads, use.of_elements)] * candidate.cpu_blocks,
        *[LayerCut(use.heads, use.elements, use.home)] * use.layers,
        *[LayerCut(0, 0)] * candidate.accelerator_blocks,
    )
    return Cut(CPU, layers, use.rows)


def placed_units(graph: Graph, candidate: Candidate) -> tuple[PlacedUnit, ...]:
    """Every unit of a graph of which nothing is cut on its device."""
    first, *layers, last = candidate.devices()
    of_layers = (
        (unit, device)
        for layer, device in zip(graph.layers, layers, strict=True)
        for unit in layer.units
    )
    pairs = ((graph.units[0], first), *of_layers, (graph.units[-1], last))
    return tuple(on_device(unit, device) for unit, device in pairs)


def parts_of(tensors: Iterable[TensorSpec], made: CutUnits) -> tuple[TensorSpec, ...]:
    """The tensors that the units read, of the checkpoint's `tensors` or parts of them."""
    wholes = {tensor.name: tensor for tensor in tensors}
    return tuple(
        TensorSpec(name, shape, wholes[part.tensor].source, part)
        if (part := made.parts.get(name))
        else wholes[name]
        for name, shape in made.tensors.items()
    )


def kv_cache(kv: KvSpec, made: CutUnits, candidate: Candidate, limits: Limits) -> KvSpec:
    """`kv` with the entries and pages that the candidate has. Where pages overflow, layers with a
    window keep all of theirs."""
    blocks = candidate.kv_blocks * candidate.sequences
    few = kv.most_window_blocks(limits.step_tokens, limits.sequences)
    gives_up = candidate.kv is None and few < blocks
    return replace(kv, layers=made.kv, blocks=blocks, window_blocks=few if gives_up else 0)


def with_accelerator(kv: KvSpec, made: CutUnits, candidate: Candidate, limits: Limits) -> Counted:
    """Where some units are on an accelerator. kv: without pages."""
    limits = replace(limits, step_tokens=candidate.step_tokens)
    kv = kv_cache(kv, made, candidate, limits)
    order = schedule(candidate, kv, accelerator_pages(made.units, kv, candidate))
    notices = []
    if candidate.sequences < limits.sequences:
        notices.append(fewer_at_once(candidate.sequences * limits.context, limits))
    return limits, kv, memory_use(candidate), order, notices


def accelerator_pages(units: Iterable[PlacedUnit], kv: KvSpec, candidate: Candidate) -> int:
    """Page slots of the accelerator."""
    ops = (op for unit in units if unit.device != CPU for op in unit.ops)
    entries = [kv.layers[op.layer] for op in ops if isinstance(op, Attention)]
    if kv.window_blocks:
        return sum(map(kv.entry_pages, entries))
    return len(entries) * candidate.accelerator_kv_blocks * candidate.sequences


def on_device(unit: Unit, device: str) -> PlacedUnit:
    return PlacedUnit(unit.name, unit.kind, unit.layer, device, unit.ops)


def memory_use(candidate: Candidate) -> dict[str, MemoryUse]:
    """The itemised budget; the accelerator is left out if nothing lies there."""
    devices = ("cpu", "accelerator") if candidate.uses_accelerator else ("cpu",)
    items = {device: candidate.memory[device] for device in devices}
    return {
        device: MemoryUse(**{f"{purpose}_bytes": size for purpose, size in sizes.items()})
        for device, sizes in items.items()
    }


def schedule(candidate: Candidate, kv: KvSpec, own: int) -> Schedule:
    """kv: with the page slots of both devices. own: those of the accelerator."""
    pages = {"cpu": kv.pages - own}
    if candidate.uses_accelerator:
        pages["accelerator"] = own
    return Schedule(
        prefill=candidate.prefill_mode,
        prefill_overlap=candidate.prefill_overlap,
        visit_tokens=candidate.visit_tokens,
        visit_pages=candidate.visit_pages,
        visit_buffers=2 if candidate.visit is None else candidate.visit.buffers,
        decode_groups=candidate.decode_groups,
        overflow=candidate.overflow,
        watermark=WATERMARK if candidate.kv is None else candidate.kv.watermark,
        pages=pages,
        disk_ring_bytes=0 if candidate.disk is None else candidate.disk.ring_bytes,
    )


def fewer_at_once(tokens: int, limits: Limits) -> str:
    """What a user of a cache of so many tokens is told."""
    return (
        f"the KV cache holds {tokens:,} tokens in all, not {limits.context:,} for each of "
        f"{limits.sequences} requests; requests wait while it is full"
    )


def less_context(tokens: int, limits: Limits) -> str:
    """What a user is told where memory has room for a context of so many tokens."""
    return f"memory holds a context of {tokens:,} tokens, the model allows {limits.context:,}"


def prediction(search: Search, profile: Profile) -> Prediction:
    """Of the best candidate, with the labelled and the best of the others as alternatives.
    profile: whose rates were priced, perhaps as they are for the weights' access."""
    result, workload = search.result, search.workload
    best = result.best
    assert best is not None
    chosen = next((k for k, c in result.labelled.items() if same_plan(c, best)), "search")
    return Prediction(
        label=chosen,
        workload=workload,
        profile=ProfileIdentity(profile.name, profile.estimated, profile.digest),
        predicted=best.predicted,
        bottleneck=best.bottleneck,
        alternatives=tuple(alternatives(search, best)),
    )


def unused(result: SearchResult, name: str) -> str:
    """Why nothing lies on the accelerator of that name."""
    best = result.best
    assert best is not None
    using = [c for c in result.by_layout if c.uses_accelerator]
    if not using:
        return f"{name} is left unused: no unit can lie there"
    nearest = min(using, key=lambda c: (c.missing.total, c.objective_s))
    if nearest.fits:
        slower = nearest.reason_against(best)
        return f"{name} is left unused: the best placement that uses it would be {slower}"
    return f"{name} is left unused: not even the least of the model fits there, it {nearest.reason}"


def same_plan(one: Candidate, other: Candidate) -> bool:
    """Whether both place all units and their KV alike."""
    return one.layout == other.layout and (one.kv is None) == (other.kv is None)


def alternatives(search: Search, best: Candidate) -> Iterable[Alternative]:
    """The labelled candidates, then the fastest layouts that fit, then the nearest to fitting of
    those that would be faster, each layout once, the best's own only with its KV elsewhere. What
    does not fit is stated as fast as it would be with the memory it lacks."""
    result = search.result
    listed = (*result.by_layout, *result.labelled.values())
    unlimited = result if all(candidate.fits for candidate in listed) else search.unlimited
    seen = {best.layout} if best.kv is None else set()
    ideal = {candidate.layout: candidate for candidate in unlimited.by_layout}
    lacking = [
        c for c in result.by_layout if not c.fits and ideal[c.layout].objective_s < best.objective_s
    ]
    lacking.sort(key=lambda c: (c.missing.total, ideal[c.layout].objective_s))
    shown = [
        *result.labelled.items(),
        *(("search", c) for c in result.ranked[1 : 1 + _ALTERNATIVES]),
        *(("search", c) for c in lacking[:1]),
    ]
    for label, candidate in shown:
        if candidate.layout in seen or same_plan(candidate, best):
            continue
        seen.add(candidate.layout)
        fast = candidate
        if not candidate.fits:
            fast = unlimited.labelled.get(label, ideal[candidate.layout])
        yield Alternative(
            label=label,
            units_cpu=candidate.units_cpu,
            units_accelerator=candidate.units_accelerator,
            embedding=candidate.embedding,
            head=candidate.head,
            fits=candidate.fits,
            ttft_s=fast.predicted.ttft_s,
            decode_tokens_per_s=fast.predicted.decode_tokens_per_s,
            missing={"cpu": candidate.missing.cpu, "accelerator": candidate.missing.accelerator},
            reason=candidate.reason_against(best),
        )
