"""Plans whose weights do not fit into memory: what stays there, what every step reads from disk,
and how long steps take then. On the CPU alone. Reads no file."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from helm.base.formats import tensor_bytes
from helm.compiler.budget import itemise, memory_bytes
from helm.compiler.candidate import Candidate, DiskUse, Missing, goals, predicted
from helm.compiler.counts import CostedGraph, Step
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
from helm.compiler.setting import Setting, make_setting
from helm.compiler.times import ATTENTION, DEVICE_TERMS, F64, FIXED, TERMS, unit_s
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
    available = memory_bytes(profile, limits)[0]
    alone = dataclasses.replace(profile, accelerator=None, link=None)
    best: tuple[tuple[float, float], Candidate] | None = None
    for sized in _settings(model, alone, workload, limits, space):
        priced: _Priced | None = None
        items: dict[str, int] = {purpose: int(size[0, 0]) for purpose, size in itemise(
            sized, "cpu", "compute").cpu.items()}  # fmt: skip
        for ring, chosen in _choices(items, available, limits, space.disk):
            priced = priced or _Priced(sized)
            found = _candidate(priced, items, ring, chosen, space.disk)
            score = goals(workload, sized.batch, found.predicted.ttft_s, found.predicted.decode_s)
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


def _choices(
    items: Mapping[str, int], available: int, limits: ResourceLimits, disk: DiskSpace
) -> Iterator[tuple[int, tuple[DiskWeights, ...]]]:
    """Rings and what lies on disk beside each."""
    taken = sum(size for purpose, size in items.items() if purpose != "reserve")
    largest = max((unit.read_bytes for unit in disk.weights), default=0)
    seen = set[int]()
    for count in _RINGS:
        ring = ring_bytes(count * largest)
        needed = taken + ring - _most_taken(available, limits.cpu_reserve_bytes)
        chosen = spread(disk.weights, needed)
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
    """Seconds of the CPU: before the first unit, and by unit."""

    begin_s: float
    units_s: Sequence[float]


class _Priced:
    """Times of a setting's steps as if all lay in memory."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        work = setting.workload
        self.decode = self._decode(work.expected_context)
        self.full = self._decode(work.context)
        self.prefill = prepare(setting)
        self.prompts = [self._prompt(self.prefill, i) for i in range(self.prefill.steps)]

    def _decode(self, context: int) -> tuple[StepTimes, F64]:
        attention = decode_attention_s(self.setting, context, self.setting.cpu)
        batch = self.setting.batch
        return self._step(Step(batch, 1, batch), attention)

    def _prompt(self, prefill: Prefill, step: int) -> tuple[StepTimes, F64]:
        tokens, outputs = int(prefill.tokens[step]), int(prefill.outputs[step])
        attention = prefill.cpu[:, step, ATTENTION]
        return self._step(Step(tokens, tokens, outputs=outputs), attention)

    def _step(self, step: Step, attention: F64) -> tuple[StepTimes, F64]:
        """attention: [classes] of a layer. And the terms [DEVICE_TERMS]."""
        setting = self.setting
        terms, seconds, known = np.zeros(DEVICE_TERMS), list[float](), dict[object, F64]()
        terms[FIXED] += setting.cpu.step_s
        layers = dict.fromkeys(u.layer for u in setting.model.graph.units if u.layer is not None)
        kinds = dict(zip(layers, setting.classes.member.tolist(), strict=True))
        for unit in setting.model.graph.units:
            if unit.kind == "head" and step.output_rows == 0:
                seconds.append(0.0)
                continue
            kind = None if unit.layer is None else kinds[unit.layer]
            key = unit.kind, kind
            if key not in known:
                known[key] = self._unit(unit, step, 0.0 if kind is None else attention[kind])
            terms += known[key]
            seconds.append(float(known[key].sum()))
        return StepTimes(setting.cpu.step_s, seconds), terms

    def _unit(self, unit: Unit, step: Step, attention_s: float) -> F64:
        times = unit_s(self.setting.model, unit, step, self.setting.cpu)
        if any(isinstance(op, Attention) for op in unit.ops):
            times[ATTENTION] += attention_s
        return times


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
    priced: _Priced, items: Mapping[str, int], ring: int, chosen: tuple[DiskWeights, ...],
    disk: DiskSpace,
) -> Candidate:  # fmt: skip
    setting, work = priced.setting, priced.setting.workload

    def period(step: StepTimes) -> float:
        ends = ends_s([step] * (_WARM + _TIMED), chosen, ring, disk.bytes_per_s)
        return (ends[-1] - ends[_WARM - 1]) / _TIMED

    def named(device: F64, seconds: float) -> dict[str, float]:
        terms = dict.fromkeys(TERMS, 0.0) | dict(zip(TERMS, map(float, device), strict=False))
        return {**terms, "disk_s": seconds - float(device.sum())}

    (decode, decode_terms), (full, _) = priced.decode, priced.full
    prompts = [step for step, _ in priced.prompts]
    ttft_s = ends_s(prompts, chosen, ring, disk.bytes_per_s)[-1]
    seconds = ttft_s, period(decode), period(full)
    prompt_terms = np.sum([terms for _, terms in priced.prompts], axis=0)
    terms = named(decode_terms, seconds[1]), named(prompt_terms, ttft_s)
    held = sum(unit.held_bytes for unit in chosen)
    own = {**items, "weights": items["weights"] - held, "staging": items["staging"] + ring}
    taken = sum(size for purpose, size in own.items() if purpose != "reserve")
    fixed = setting.limits.cpu_reserve_bytes
    own["reserve"] = int(host_reserve(taken)) if fixed is None else fixed
    blocks = setting.rows.blocks
    return Candidate(
        blocks=blocks,
        cpu_blocks=blocks,
        embedding="cpu",
        head="cpu",
        kv_blocks=setting.pages_of(work.context),
        accelerator_kv_blocks=0,
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
        memory={"cpu": own, "accelerator": dict.fromkeys(own, 0)},
        missing=Missing(0, 0),
        objective_s=float(goals(work, setting.batch, ttft_s, seconds[1])[0]),
        disk=DiskUse(
            tuple(name for unit in chosen for name in unit.names),
            held,
            sum(unit.read_bytes for unit in chosen),
            ring,
            disk.bytes_per_s,
        ),
    )
