"""Plans whose weights do not fit into memory: what stays there, what every step reads from disk,
and how long steps take then. What is read is the CPU's; beside it an accelerator may hold layers,
and in long steps compute those of the CPU. Reads no file."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from helm.base.formats import tensor_bytes
from helm.compiler.budget import itemise, memory_bytes, missing
from helm.compiler.candidate import Candidate, DiskUse, Missing, goals, predicted
from helm.compiler.counts import CostedGraph
from helm.compiler.disk_prices import Layout, Priced, PricedSteps
from helm.compiler.disk_steps import StepTimes, ends_s
from helm.compiler.problem import (
    LEAST_RESERVE_BYTES,
    DiskSpace,
    DiskWeights,
    Mode,
    ResourceLimits,
    Space,
    host_reserve,
)
from helm.compiler.setting import Setting, Site, make_setting
from helm.compiler.times import F64, TERMS, classify
from helm.machine.profile import Profile
from helm.model.graph import Graph
from helm.plan.disk import ALIGNMENT, read_bytes
from helm.plan.records import Workload
from helm.plan.weights import TensorSpec, lies_as_held

_RINGS = (2, 3, 4, 8)  # times the largest unit
_HUGE_PAGE = 2 << 20  # of a ring that is larger: so that it takes what it is counted with
_WARM, _TIMED = 4, 4  # steps until they repeat, and those that are timed then


def disk_weights(
    graph: Graph, tensors: Sequence[TensorSpec], formats: Mapping[str, str]
) -> tuple[DiskWeights, ...]:
    """By unit of the graph what could be read from disk: matrices of layers that lie in their files
    as the CPU holds them and that no other unit reads."""
    specs = {tensor.name: tensor for tensor in tensors}
    readers: dict[str, int] = {}
    for unit in graph.units:
        for name in {name for op in unit.ops for name in op.weight_names()}:
            readers[name] = readers.get(name, 0) + 1

    def may(name: str) -> bool:
        tensor = specs[name]
        if len(tensor.shape) != 2 or tensor.source is None or readers[name] > 1:
            return False
        return lies_as_held(tensor, formats[name])

    found = []
    for number, unit in enumerate(graph.units):
        names = sorted({name for op in unit.ops for name in op.weight_names() if may(name)})
        if unit.layer is not None and names:
            held = [(specs[name], formats[name]) for name in names]
            size = sum(tensor_bytes(format, tensor.shape) for tensor, format in held)
            found.append(DiskWeights(number, tuple(names), size, read_bytes(held)))
    return tuple(found)


def disk_candidate(
    model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits, space: Space
) -> Candidate | None:
    """The best plan that reads weights from disk; None where not even that fits."""
    assert space.disk is not None
    available = memory_bytes(profile, limits)
    best: tuple[tuple[float, float], Candidate] | None = None
    for sized in _settings(model, profile, workload, limits, space):
        priced = Priced(sized)
        for layout in _layouts(sized, available, limits, space):
            every = [(least, priced.steps(layout, least)) for least in priced.leasts(layout)]
            rings = _choices(layout, available[0], limits, space.disk)
            for (ring, chosen), (least, steps) in itertools.product(rings, every):
                if best is not None and _bound(sized, steps, ring, chosen, space.disk) >= best[0]:
                    continue
                found = _candidate(priced, layout, least, steps, ring, chosen, space.disk)
                own = found.predicted
                score = goals(workload, sized.batch, own.ttft_s, own.decode_s)
                if best is None or score < best[0]:
                    best = score, found
    return None if best is None else best[1]


def _settings(
    model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits, space: Space
) -> Iterator[Setting]:
    """Of every number of threads and length of steps: the longer, the more tokens of a prompt each
    read serves."""
    threads = sorted(profile.cpu.thread_sweep) if space.threads is None else space.threads
    most = 1 << (workload.prompt * workload.batch - 1).bit_length()
    longer = [n for n in space.visit_steps if limits.step_tokens < n <= most]
    classes, known = classify(model), dict[object, Any]()
    for count, tokens in itertools.product(threads, (limits.step_tokens, *longer)):
        own = dataclasses.replace(limits, step_tokens=tokens)
        yield make_setting(
            model, profile, workload, own, count, workload.batch,
            space=space, classes=classes, known=known,
        )  # fmt: skip


def _layouts(
    setting: Setting, available: tuple[int, int], limits: ResourceLimits, space: Space
) -> Iterator[Layout]:
    """The CPU alone; and with the head on either device as many of the last layers on the
    accelerator as there is room for with all their KV, as then least is read. Once more with room
    there for what visits."""
    rows, units = setting.rows, setting.model.graph.units
    ways: list[tuple[Site, Mode]] = [("cpu", "compute")]
    if setting.accelerator is not None and space.kv != "host":
        modes: tuple[Mode, ...] = ("compute", "visit") if "visit" in space.prefill else ("compute",)
        ways = list(itertools.product(("cpu", "accelerator"), modes))
    for head, mode in ways:
        budget = itemise(setting, head, mode)
        lacks, used = missing(budget, available, limits)[1][:, 0], rows.uses_accelerator(head)
        able = rows.boundary > 0 if mode == "visit" else True
        there = np.flatnonzero(~rows.embedded & used & (lacks == 0) & able)
        alone = head == "cpu" and mode == "compute"
        chosen = [*there[:1].tolist(), *([len(used) - 1] if alone else [])]
        for row in dict.fromkeys(chosen):
            layers = {unit.layer for unit in units if unit.layer is not None}
            own = set(sorted(layers)[int(rows.boundary[row]) :])
            sites: tuple[Site, ...] = tuple(
                "accelerator" if unit.layer in own else "cpu" for unit in units[:-1]
            )
            yield Layout(row, head, (*sites, head), mode, budget.at(row, 0))


def _choices(
    layout: Layout, available: int, limits: ResourceLimits, disk: DiskSpace
) -> Iterator[tuple[int, tuple[DiskWeights, ...]]]:
    """Rings and what lies on disk beside each."""
    items = layout.memory["cpu"]
    taken = sum(size for purpose, size in items.items() if purpose != "reserve")
    weights = [unit for unit in disk.weights if layout.sites[unit.number] == "cpu"]
    largest = max((unit.read_bytes for unit in weights), default=0)
    most = available - items["reserve"]
    if layout.alone:
        most = _most_taken(available, limits.cpu_reserve_bytes)
    seen = set[int]()
    for count in _RINGS:
        ring = ring_bytes(count * largest)
        chosen = spread(weights, taken + ring - most)
        if chosen is None or not chosen or ring in seen:
            continue
        seen.add(ring)
        yield ring, chosen


def ring_bytes(size: int) -> int:
    """As much or a little more, as memory is had."""
    unit = _HUGE_PAGE if size >= _HUGE_PAGE else ALIGNMENT
    return -(-size // unit) * unit


def _most_taken(available: int, reserve: int | None) -> int:
    """The most that a plan takes which leaves the reserve."""
    if reserve is not None:
        return available - reserve
    most = available - LEAST_RESERVE_BYTES
    while most > 0 and most + int(host_reserve(most)) > available:
        most -= max(1, (most + int(host_reserve(most)) - available) // 2)
    return most


def spread(weights: Sequence[DiskWeights], needed: int) -> tuple[DiskWeights, ...] | None:
    """Units of at least so many bytes, few more, spread evenly over a step so that reads keep up
    with it; None where all together are fewer."""
    total = sum(unit.held_bytes for unit in weights)
    if needed > total:
        return None
    chosen, taken, seen = list[DiskWeights](), 0, 0
    for unit in weights:
        seen += unit.held_bytes
        if taken + unit.held_bytes / 2 <= seen * needed / max(1, total):
            chosen.append(unit)
            taken += unit.held_bytes
    numbers = {unit.number for unit in chosen}
    others = [unit for unit in weights if unit.number not in numbers]
    while taken < needed:  # the least that is enough, or the largest
        enough = [unit for unit in others if taken + unit.held_bytes >= needed]
        least = min(enough, key=lambda unit: unit.held_bytes, default=None)
        added = least or max(others, key=lambda unit: unit.held_bytes)
        others.remove(added)
        chosen.append(added)
        taken += added.held_bytes
    while spare := [unit for unit in chosen if taken - unit.held_bytes >= needed]:
        largest = max(spare, key=lambda unit: unit.held_bytes)
        chosen.remove(largest)
        taken -= largest.held_bytes
    return tuple(sorted(chosen, key=lambda unit: unit.number))


def _bound(
    setting: Setting, steps: PricedSteps, ring: int, chosen: Sequence[DiskWeights], disk: DiskSpace
) -> tuple[float, float]:
    """The goals of a plan that waits for the disk, or for all else, alone."""
    size = sum(unit.read_bytes for unit in chosen)
    reads = len(steps.prompts) * size - ring
    ttft_s = max(sum(float(terms.sum()) for _, terms in steps.prompts), reads / disk.bytes_per_s)
    decode_s = max(float(steps.decode[1].sum()), size / disk.bytes_per_s)
    return goals(setting.workload, setting.batch, ttft_s, decode_s)


def _candidate(
    priced: Priced, layout: Layout, least: int | None, steps: PricedSteps, ring: int,
    chosen: tuple[DiskWeights, ...], disk: DiskSpace,
) -> Candidate:  # fmt: skip
    """least: tokens of a step of prompts in which layers visit; None: of no step."""
    setting, work = priced.setting, priced.setting.workload

    def period(step: StepTimes) -> float:
        ends = ends_s([step] * (_WARM + _TIMED), chosen, ring, disk.bytes_per_s)
        return (ends[-1] - ends[_WARM - 1]) / _TIMED

    def named(terms: F64, seconds: float) -> dict[str, float]:
        own = dict(zip(TERMS, terms.tolist(), strict=True))
        return {**own, "disk_s": seconds - float(terms.sum())}

    (decode, decode_terms), (full, _), prompts = steps.decode, steps.full, steps.prompts
    ttft_s = ends_s([step for step, _ in prompts], chosen, ring, disk.bytes_per_s)[-1]
    seconds = ttft_s, period(decode), period(full)
    prompt_terms = np.sum([terms for _, terms in prompts], axis=0)
    terms = named(decode_terms, seconds[1]), named(prompt_terms, ttft_s)
    held, items = sum(unit.held_bytes for unit in chosen), layout.memory["cpu"]
    own = {**items, "weights": items["weights"] - held, "staging": items["staging"] + ring}
    taken = sum(size for purpose, size in own.items() if purpose != "reserve")
    if layout.alone and setting.limits.cpu_reserve_bytes is None:
        own["reserve"] = int(host_reserve(taken))
    blocks, pages = setting.rows.blocks, setting.pages_of(work.context)
    return Candidate(
        blocks=blocks,
        cpu_blocks=int(setting.rows.boundary[layout.row]),
        embedding="cpu",
        head=layout.head,
        kv_blocks=pages,
        accelerator_kv_blocks=0 if layout.alone else pages,
        overflow="stream",
        kv=None,
        decode_groups=1,
        prefill_mode=layout.mode,
        prefill_overlap=False,
        step_tokens=setting.limits.step_tokens,
        visit_tokens=0 if least is None else priced.prefill.visit_tokens(layout.row, least),
        visit_pages=0 if least is None else setting.visit_pages,
        threads=setting.cpu.threads,
        sequences=setting.batch,
        predicted=predicted(work, setting.batch, seconds, terms),
        memory={**layout.memory, "cpu": own},
        missing=Missing(0, 0),
        objective_s=float(goals(work, setting.batch, ttft_s, seconds[1])[0]),
        disk=DiskUse(
            tuple(name for unit in chosen for name in unit.names),
            held,
            sum(unit.read_bytes for unit in chosen),
            ring,
            disk.drives,
        ),
    )
