"""Everything that a search may choose from, priced: pairs of a way to decode and one to prefill.

Ranks nothing and knows no limit of memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.compiler.budget import Budget, StageBytes, executable, itemise, stage_bytes
from helm.compiler.candidate import total_s
from helm.compiler.counts import CostedGraph
from helm.compiler.decode import Priced, price_decode
from helm.compiler.overflow import Bools
from helm.compiler.prefill import Prefill, prepare, price_prefill
from helm.compiler.problem import Mode, Overflow, ResourceLimits, Space
from helm.compiler.setting import Setting, Site, make_setting
from helm.compiler.step_prices import steady_seconds
from helm.compiler.times import F64, classify
from helm.machine.profile import Profile
from helm.plan.records import Workload

SITES: tuple[Site, ...] = ("accelerator", "cpu")


@dataclass(frozen=True)
class DecodeWay:
    """One way to decode. allowed: [rows]."""

    overflow: Overflow
    groups: int
    allowed: Bools
    expected: Priced  # at the workload's expected context
    full_context: Priced

    def key(self, row: int, page: int) -> tuple[float, float]:
        """To be least: where the expected context does not overflow, the full one decides."""
        if not self.allowed[row]:
            return np.inf, np.inf
        return float(self.expected.total[row, page]), float(self.full_context.total[row, page])


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
    fastest way to decode and the fastest to prefill. The first of each way is the plainest."""

    setting: Setting
    head: Site
    mode: Mode
    steps: Prefill
    decodes: tuple[DecodeWay, ...]
    prefills: tuple[PrefillWay, ...]
    budget: Budget
    possible: Bools  # [rows, pages]
    each: StageBytes

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
    model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits, space: Space
) -> Iterator[Choice]:
    classes, known = classify(model), dict[object, Any]()
    for batch, threads in itertools.product(batches(workload), _threads(profile, space)):
        setting = make_setting(
            model, profile, workload, limits, threads, batch,
            space=space, classes=classes, known=known,
        )  # fmt: skip
        decodes = {head: tuple(_decodes(setting, head, space)) for head in _heads(setting)}
        modes: Sequence[Mode] = ("compute",) if setting.accelerator is None else space.prefill
        for mode in modes:
            for sized in _sized(setting, mode, space):
                steps, each = prepare(sized), stage_bytes(sized)
                for head in _heads(setting):
                    prefills = tuple(_prefills(steps, head, mode, space))
                    if prefills:
                        budget = itemise(sized, head, mode, each)
                        possible = executable(sized) | (space.kv == "host")
                        yield Choice(
                            sized,
                            head,
                            mode,
                            steps,
                            decodes[head],
                            prefills,
                            budget,
                            possible,
                            each,
                        )


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


def _decodes(setting: Setting, head: Site, space: Space) -> Iterator[DecodeWay]:
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
        priced = [
            price_decode(setting, head, site, context, groups)
            for context in (work.expected_context, work.context)
        ]
        yield DecodeWay(site, groups, every if groups == 1 else both, *priced)


def _prefills(steps: Prefill, head: Site, mode: Mode, space: Space) -> Iterator[PrefillWay]:
    setting = steps.setting
    rows = setting.rows
    if mode == "stream":
        visits = (rows.boundary > 0) & rows.uses_accelerator(head)
        for least in steps.visit_choices():
            yield PrefillWay(False, least, visits, price_prefill(steps, head, visit_least=least))
        return
    every = np.ones(len(rows.boundary), bool)
    for overlap in (False,) if setting.accelerator is None else space.overlap:
        allowed = rows.has_blocks & ~rows.embedded if overlap else every
        yield PrefillWay(overlap, None, allowed, price_prefill(steps, head, overlap))


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


def _threads(profile: Profile, space: Space) -> list[int]:
    """The sweep's counts, the profile's own choice first."""
    counts = sorted(profile.cpu.thread_sweep) if space.threads is None else list(space.threads)
    return sorted(counts, key=lambda count: (count != profile.cpu.threads, count))
