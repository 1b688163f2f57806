"""Plans whose weights do not fit into memory: what stays there, what every step reads from disk,
and how long steps take then. What is read is the CPU's; beside it an accelerator may hold layers.
Reads no file."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from helm.base.formats import tensor_bytes
from helm.compiler.budget import itemise, memory_bytes, missing
from helm.compiler.candidate import Candidate, DiskUse, Missing, goals, predicted
from helm.compiler.counts import CostedGraph, Step
from helm.compiler.decode import crossing_s
from helm.compiler.layers import decode_attention_s
from helm.compiler.prefill import Prefill, prepare
from helm.compiler.problem import (
    LEAST_RESERVE_BYTES,
    DiskSpace,
    DiskWeights,
    ResourceLimits,
    Space,
    host_reserve,
)
from helm.compiler.setting import Setting, Site, make_setting
from helm.compiler.times import ATTENTION, DEVICE_TERMS, F64, FIXED, LINK, TERMS, unit_s
from helm.machine.profile import Profile
from helm.model.graph import Attention, Graph, Unit
from helm.plan.disk import ALIGNMENT, around, read_bytes
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
        priced = _Priced(sized)
        for layout in _layouts(sized, available, limits, space):
            for ring, chosen in _choices(layout, available[0], limits, space.disk):
                found = _candidate(priced, layout, ring, chosen, space.disk)
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
    for count, tokens in itertools.product(threads, (limits.step_tokens, *longer)):
        own = dataclasses.replace(limits, step_tokens=tokens)
        yield make_setting(model, profile, workload, own, count, workload.batch, space=space)


@dataclass(frozen=True)
class _Layout:
    """A row of the setting with the head there. sites: by unit of the graph. memory: as if all
    weights of the CPU lay there."""

    row: int
    head: Site
    sites: tuple[Site, ...]
    memory: dict[str, dict[str, int]]

    @property
    def alone(self) -> bool:
        """The CPU."""
        return "accelerator" not in self.sites


def _layouts(
    setting: Setting, available: tuple[int, int], limits: ResourceLimits, space: Space
) -> Iterator[_Layout]:
    """The CPU alone; and with the head on either device as many of the last layers on the
    accelerator as there is room for with all their KV, as then least is read."""
    rows, units = setting.rows, setting.model.graph.units
    heads: tuple[Site, ...] = ("cpu",)
    if setting.accelerator is not None and space.kv != "host":
        heads = ("cpu", "accelerator")
    for head in heads:
        budget = itemise(setting, head, "compute")
        lacks, used = missing(budget, available, limits)[1][:, 0], rows.uses_accelerator(head)
        there = np.flatnonzero(~rows.embedded & used & (lacks == 0))
        chosen = [*there[:1].tolist(), *([len(used) - 1] if head == "cpu" else [])]
        for row in dict.fromkeys(chosen):
            layers = {unit.layer for unit in units if unit.layer is not None}
            own = set(sorted(layers)[int(rows.boundary[row]) :])
            sites: tuple[Site, ...] = tuple(
                "accelerator" if unit.layer in own else "cpu" for unit in units[:-1]
            )
            yield _Layout(row, head, (*sites, head), budget.at(row, 0))


def _choices(
    layout: _Layout, available: int, limits: ResourceLimits, disk: DiskSpace
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
    others = [unit for unit in weights if unit not in chosen]
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


@dataclass(frozen=True)
class StepTimes:
    """Seconds before the first unit, and of each unit in turn, with what crosses."""

    begin_s: float
    units_s: Sequence[float]


class _Priced:
    """Times of a setting's steps as if all lay in memory, and their terms [TERMS]."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def decode(self, layout: _Layout, context: int) -> tuple[StepTimes, F64]:
        batch, setting = self.setting.batch, self.setting
        attention = {
            device.site: decode_attention_s(setting, context, device)
            for device in (setting.cpu, setting.accelerator)
            if device is not None
        }
        return self._step(layout, Step(batch, 1, batch), attention)

    def prompts(self, layout: _Layout) -> list[tuple[StepTimes, F64]]:
        prefill, found = self._prefill, list[tuple[StepTimes, F64]]()
        every = {"cpu": prefill.cpu, "accelerator": prefill.accelerator}
        for i, sizes in enumerate(zip(prefill.tokens, prefill.outputs, strict=True)):
            tokens, outputs = map(int, sizes)
            attention = {site: own[:, i, ATTENTION] for site, own in every.items()}
            found.append(self._step(layout, Step(tokens, tokens, outputs=outputs), attention))
        return found

    @functools.cached_property
    def _prefill(self) -> Prefill:
        return prepare(self.setting)

    def _step(
        self, layout: _Layout, step: Step, attention: Mapping[str, F64]
    ) -> tuple[StepTimes, F64]:
        """attention: by site, [classes] of a layer."""
        setting, units = self.setting, self.setting.model.graph.units
        terms, seconds, known = np.zeros(len(TERMS)), np.zeros(len(units)), dict[object, F64]()
        terms[FIXED] += setting.cpu.step_s
        layers = dict.fromkeys(u.layer for u in units if u.layer is not None)
        kinds = dict(zip(layers, setting.classes.member.tolist(), strict=True))
        for number, (unit, site) in enumerate(zip(units, layout.sites, strict=True)):
            if unit.kind == "head" and step.output_rows == 0:
                continue
            kind = None if unit.layer is None else kinds[unit.layer]
            key = unit.kind, kind, site
            if key not in known:
                own = 0.0 if kind is None else attention[site][kind]
                known[key] = self._unit(unit, step, site, float(own))
            terms += known[key]
            seconds[number] = known[key].sum()
        if not layout.alone:
            self._beside(layout, step, terms, seconds)
        return StepTimes(setting.cpu.step_s, seconds.tolist()), terms

    def _beside(self, layout: _Layout, step: Step, terms: F64, seconds: F64) -> None:
        """Adds what an accelerator's part of a step takes besides its units."""
        setting, first = self.setting, layout.sites.index("accelerator")
        assert setting.accelerator is not None
        sizes = np.array([step.tokens]), np.array([step.output_rows])
        crossing = sum(each[layout.row, 0] for each in crossing_s(setting, layout.head, *sizes))
        terms[LINK] += crossing
        terms[DEVICE_TERMS + FIXED] += setting.accelerator.step_s
        seconds[first] += setting.accelerator.step_s + crossing

    def _unit(self, unit: Unit, step: Step, site: Site, attention_s: float) -> F64:
        device = self.setting.cpu if site == "cpu" else self.setting.accelerator
        assert device is not None
        times = np.zeros(len(TERMS))
        times[:DEVICE_TERMS] = unit_s(self.setting.model, unit, step, device)
        if any(isinstance(op, Attention) for op in unit.ops):
            times[ATTENTION] += attention_s
        return times if site == "cpu" else np.roll(times, DEVICE_TERMS)


def ends_s(
    steps: Sequence[StepTimes], units: Sequence[DiskWeights], ring: int, bytes_per_s: float
) -> list[float]:
    """When each of these steps has ended, one after the other, of a model that has been at rest:
    what fits the ring has been read."""
    reads = {
        one.number: (one.read_bytes / bytes_per_s, one.frees)
        for one in around([(unit.number, unit.read_bytes) for unit in units], ring)
    }
    cpu, disk, left, ends = 0.0, 0.0, list[float](), list[float]()
    for step in steps:
        cpu += step.begin_s
        for number, run_s in enumerate(step.units_s):
            if number not in reads:
                cpu += run_s
                continue
            read_s, frees = reads[number]
            if len(left) >= frees:
                disk = max(disk, left[len(left) - frees]) + read_s
                cpu = max(cpu, disk)
            cpu += run_s
            left.append(cpu)
        ends.append(cpu)
    return ends


def _candidate(
    priced: _Priced, layout: _Layout, ring: int, chosen: tuple[DiskWeights, ...], disk: DiskSpace
) -> Candidate:
    setting, work = priced.setting, priced.setting.workload

    def period(step: StepTimes) -> float:
        ends = ends_s([step] * (_WARM + _TIMED), chosen, ring, disk.bytes_per_s)
        return (ends[-1] - ends[_WARM - 1]) / _TIMED

    def named(terms: F64, seconds: float) -> dict[str, float]:
        own = dict(zip(TERMS, terms.tolist(), strict=True))
        return {**own, "disk_s": seconds - float(terms.sum())}

    decode, decode_terms = priced.decode(layout, work.expected_context)
    full, _ = priced.decode(layout, work.context)
    prompts = priced.prompts(layout)
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
        prefill_mode="compute",
        prefill_overlap=False,
        step_tokens=setting.limits.step_tokens,
        visit_tokens=0,
        visit_pages=0,
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
