"""Everything that a search may choose from, priced: pairs of a way to decode and one to prefill.

Ranks nothing and knows no limit of memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from helm.compiler.budget import Budget, StageBytes, executable, itemise, stage_bytes
from helm.compiler.candidate import total_s
from helm.compiler.counts import CostedGraph
from helm.compiler.decode import Priced, cpu_attention_s, decode_base, price_decode
from helm.compiler.overflow import Bools
from helm.compiler.prefill import Prefill, least_prefill_s, prepare, price_prefill
from helm.compiler.problem import Mode, Overflow, ResourceLimits, Space
from helm.compiler.setting import Setting, Site, make_setting
from helm.compiler.step_prices import steady_seconds
from helm.compiler.times import DEVICE_TERMS, F64, classify
from helm.machine.profile import Profile
from helm.plan.records import Workload

T = TypeVar("T")
SITES: tuple[Site, ...] = ("accelerator", "cpu")


@dataclass(frozen=True)
class DecodeWay:
    """One way to decode. allowed: [rows]. expected: at the workload's expected context. full: at
    its full one, when it is asked for."""

    overflow: Overflow
    groups: int
    allowed: Bools
    expected: Priced
    full: Callable[[], Priced]

    @functools.cached_property
    def full_context(self) -> Priced:
        return self.full()

    def key(self, row: int, page: int) -> tuple[float, float]:
        """To be least: where the expected context does not overflow, the full one decides."""
        if not self.allowed[row]:
            return np.inf, np.inf
        return float(self.expected.total[row, page]), float(self.full_context.total[row, page])


def fastest(ways: Sequence[DecodeWay], row: int, page: int) -> DecodeWay:
    """The first with the least key. The full context of those beaten at the expected one is not
    priced."""
    expected = [way.expected.total[row, page] if way.allowed[row] else np.inf for way in ways]
    tied = [way for way, total in zip(ways, expected, strict=True) if total == min(expected)]
    return min(tied, key=lambda way: way.key(row, page)) if tied[1:] else tied[0]


@dataclass(frozen=True)
class PrefillWay:
    """One way to prefill. visit_least: see `price_prefill`."""

    overlap: bool
    visit_least: int | None
    allowed: Bools
    priced: Priced


@dataclass(frozen=True)
class Choice:
    """One point of what changes memory, but for row and page; every objective then wants the
    fastest way to decode and the fastest to prefill. The first of each way is the plainest. Ways
    are priced when first asked for. least_decode_s, least_prefill_s: [rows] no way takes less."""

    setting: Setting
    head: Site
    mode: Mode
    steps: Prefill
    decode_ways: Callable[[], tuple[DecodeWay, ...]]
    prefill_ways: Callable[[], tuple[PrefillWay, ...]]
    least_decode_s: Callable[[], F64]
    least_prefill_s: Callable[[], F64]
    budget: Budget
    possible: Bools  # [rows, pages]
    each: StageBytes

    @functools.cached_property
    def decodes(self) -> tuple[DecodeWay, ...]:
        return self.decode_ways()

    @functools.cached_property
    def prefills(self) -> tuple[PrefillWay, ...]:
        return self.prefill_ways()

    @property
    def plainest(self) -> Choice:
        """With the plainest ways alone."""
        return dataclasses.replace(
            self,
            decode_ways=lambda: self.decodes[:1],
            prefill_ways=lambda: self.prefills[:1],
        )

    @functools.cached_property
    def decode_s(self) -> F64:
        """[ways, rows, pages], infinite where a way is not allowed"""
        return _allowed_s([(way.expected.total, way.allowed) for way in self.decodes])

    @functools.cached_property
    def prefill_s(self) -> F64:
        """[ways, rows, pages], likewise"""
        return _allowed_s([(way.priced.total, way.allowed) for way in self.prefills])

    @functools.cached_property
    def serve_s(self) -> F64:
        """[rows, pages] for all requests, while they come and go: in the best mode, or, where all
        KV lies with its layers, in waves with what overlaps then."""
        setting, work = self.setting, self.setting.workload
        waves = total_s(work, setting.batch, self.prefill_s.min(axis=0), self.decode_s.min(axis=0))
        overflows = setting.rows.has_blocks[:, None] & setting.pool.overflows
        steady = steady_seconds(setting, self.head)
        return np.minimum(steady, np.where(overflows, np.inf, waves))


def _allowed_s(ways: list[tuple[F64, Bools]]) -> F64:
    return np.stack([np.where(allowed[:, None], total, np.inf) for total, allowed in ways])


def choices(
    model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits, space: Space,
    counts: Sequence[int] | None = None,
) -> Iterator[Choice]:  # fmt: skip
    """counts: of threads, None: the first of `thread_counts`."""
    counts = thread_counts(profile, space)[0] if counts is None else counts
    classes, known = classify(model), dict[object, Any]()
    for batch, threads in itertools.product(batches(workload), counts):
        setting = make_setting(
            model, profile, workload, limits, threads, batch,
            space=space, classes=classes, known=known,
        )  # fmt: skip
        decodes = {head: _once(_decodes, setting, head, space) for head in _heads(setting)}
        least = {head: _once(_least_decode_s, setting, head, space) for head in _heads(setting)}
        modes: Sequence[Mode] = ("compute",) if setting.accelerator is None else space.prefill
        for mode in modes:
            for sized in _sized(setting, mode, space):
                key = "prompts", batch, threads, sized.limits.step_tokens
                steps = sized.once(key, prepare, sized)  # the same in both modes
                if mode == "visit" and not steps.visit_choices():
                    continue
                each = stage_bytes(sized)
                possible = executable(sized) | (space.kv == "host")
                for head in _heads(setting):
                    prefills = functools.partial(_prefills, steps, head, mode, space)
                    bound = functools.partial(least_prefill_s, steps, head, mode == "visit")
                    budget = itemise(sized, head, mode, each)
                    yield Choice(
                        sized, head, mode, steps, decodes[head], prefills, least[head],
                        functools.cache(bound), budget, possible, each,
                    )  # fmt: skip


def _once(priced: Callable[[Setting, Site, Space], T], *args: Any) -> Callable[[], T]:
    """Of these arguments, when it is first asked for."""
    found: list[T] = []

    def ask() -> T:
        if not found:
            found.append(priced(*args))
        return found[0]

    return ask


def _heads(setting: Setting) -> Sequence[Site]:
    return SITES[1:] if setting.accelerator is None else SITES


def _sized(setting: Setting, mode: Mode, space: Space) -> Iterator[Setting]:
    """The setting with the tokens that a step may have: longer ones only where weights visit, and
    no longer than what the prompts fill."""
    yield setting
    if mode == "compute":
        return
    most = 1 << (setting.workload.prompt * setting.batch - 1).bit_length()
    for tokens in space.visit_steps:
        if setting.limits.step_tokens < tokens <= most:
            limits = dataclasses.replace(setting.limits, step_tokens=tokens)
            yield dataclasses.replace(setting, limits=limits)


def _least_decode_s(setting: Setting, head: Site, space: Space) -> F64:
    """[rows] without attention on the accelerator. Groups that take turns keep the busier device
    busy."""
    counts, _ = setting.counts()
    found = np.full(len(setting.rows.boundary), np.inf)
    for groups in space.decode_groups:
        if groups > setting.batch:
            continue
        lanes = np.zeros((2, len(found)))
        for part in (setting,) if groups == 1 else setting.halves:
            base = decode_base(part, head)
            lanes += base[: 2 * DEVICE_TERMS].reshape(2, DEVICE_TERMS, -1).sum(axis=1)
            lanes[0] += counts @ cpu_attention_s(part, setting.workload.expected_context)
        found = np.minimum(found, lanes.sum(axis=0) if groups == 1 else lanes.max(axis=0))
    return found


def _decodes(setting: Setting, head: Site, space: Space) -> tuple[DecodeWay, ...]:
    return tuple(_each_decode(setting, head, space))


def _each_decode(setting: Setting, head: Site, space: Space) -> Iterator[DecodeWay]:
    rows, work = setting.rows, setting.workload
    every = np.ones(len(rows.boundary), bool)
    both = _both(setting, head)
    may_overflow = setting.accelerator is not None and space.kv != "device"
    overflows = space.overflow if may_overflow else space.overflow[:1]
    if work.objective == "serve" and "cpu" in overflows:  # as a joint step has it
        overflows = ("cpu",)
    for groups, site in itertools.product(space.decode_groups, overflows):
        if groups > 1 and (setting.batch < groups or not both.any()):
            continue
        price = functools.partial(price_decode, setting, head, site, groups=groups)
        full = functools.partial(price, work.context)
        allowed = every if groups == 1 else both
        yield DecodeWay(site, groups, allowed, price(work.expected_context), full)


def _prefills(steps: Prefill, head: Site, mode: Mode, space: Space) -> tuple[PrefillWay, ...]:
    setting = steps.setting
    rows = setting.rows
    if mode == "visit":
        visits = may_visit(setting, head)
        return tuple(
            PrefillWay(False, least, visits, price_prefill(steps, head, visit_least=least))
            for least in steps.visit_choices()
        )
    every = np.ones(len(rows.boundary), bool)
    overlaps = (False,) if setting.accelerator is None else space.overlap
    return tuple(
        PrefillWay(
            overlap,
            None,
            rows.has_blocks & ~rows.embedded if overlap else every,
            price_prefill(steps, head, overlap),
        )
        for overlap in overlaps
    )


def may_visit(setting: Setting, head: Site) -> Bools:
    """[rows] whether there are weights on the CPU, and an accelerator that they may visit."""
    rows = setting.rows
    return np.asarray((rows.boundary > 0) & rows.uses_accelerator(head))


def _both(setting: Setting, head: Site) -> Bools:
    """[rows] whether each device has a unit."""
    rows = setting.rows
    on_cpu = ~rows.embedded | (rows.boundary > 0) | (head == "cpu")
    return np.asarray(on_cpu & rows.uses_accelerator(head))


def batches(workload: Workload) -> list[int]:
    """How many sequences run at once: all, or for throughput and service also fewer."""
    if workload.objective not in ("throughput", "serve"):
        return [workload.batch]
    powers = [2**i for i in range(workload.batch.bit_length()) if 2**i < workload.batch]
    return [workload.batch, *reversed(powers)]


def thread_counts(profile: Profile, space: Space) -> tuple[list[int], list[int]]:
    """Those of the sweep with which something may be faster than with any other, the profile's own
    first, and the others: these take less scratch, and are faster in nothing."""
    cpu, found = profile.cpu, list[int]()
    every = sorted(cpu.thread_sweep) if space.threads is None else list(space.threads)
    every.sort(key=lambda count: (count != cpu.threads, count))
    if len(every) == 1:
        return every, []
    rates = {
        count: (-cpu.with_threads(count).op_s, cpu.thread_sweep[count], min(count, cpu.threads))
        for count in every
    }

    def beats(one: int, other: int) -> bool:
        """The first of those that are alike, too."""
        if rates[one] == rates[other]:
            return every.index(one) < every.index(other)
        return all(its >= mine for its, mine in zip(rates[one], rates[other], strict=True))

    for count in every:
        if count == cpu.threads or not any(beats(other, count) for other in every):
            found.append(count)
    return found, [count for count in every if count not in found]
