"""Finds plans of which weights visit the accelerator in every step: the best of all, and of each
published policy. Knows no plan format and no terminal."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from helm.compiler.budget import PURPOSES, Budget, memory_bytes, missing
from helm.compiler.candidate import Candidate, CutUse, Missing, VisitUse, goals, predicted
from helm.compiler.choices import Choice
from helm.compiler.cut.ways import CutModel, Layouts, cut_model, cut_use
from helm.compiler.problem import Policy, ResourceLimits, Space
from helm.compiler.times import F64, I64, TERMS
from helm.compiler.visits.halves import ROW, Halves, Shares
from helm.compiler.visits.shared import BUFFERS, SharedLayers
from helm.machine.profile import Profile
from helm.plan.records import Workload
from helm.plan.units import CPU

SLOTS = (2, 3)  # buffers of half a layer that are tried
_SHARES = 64  # into so many parts matrices are split, of which some stay on the accelerator
_LESS = 1.0 - 1e-9  # what is not less by that is as fast
Found = tuple[tuple[float, ...], Candidate]


@dataclass(frozen=True, eq=False)
class _Bound:
    """Plans of a choice, none of which has a lower objective than score. ttft_s: at least, of
    each; None: only what the link takes was counted."""

    score: float
    slots: int
    choice: Choice
    plans: Shares
    ttft_s: F64 | None = None

    def __lt__(self, other: _Bound) -> bool:
        mine, others = (self.score, self.slots), (other.score, other.slots)
        return mine < others

    def apart(self, halves: Halves, workload: Workload) -> Iterator[_Bound]:
        """Each alone, with decode as it is."""
        assert self.ttft_s is not None
        step_s = halves.decode_terms(self.plans, self.slots, workload.expected_context).sum(axis=0)
        score = goals(workload, self.choice.setting.batch, self.ttft_s, step_s)[0]
        for plan, own in enumerate(score.tolist()):
            only = self.ttft_s[plan : plan + 1]
            yield dataclasses.replace(self, score=own, plans=self.plans.at(plan), ttft_s=only)


class PolicySearch:
    """Of a model on a machine. choices: of whole layers, whose settings and prompts are these
    too."""

    def __init__(
        self, choices: Sequence[Choice], profile: Profile, threads: int, space: Space
    ) -> None:
        # Whether rows of a matrix may stay while others visit.
        self._profile, self._space, self._splits = profile, space, not space.uncut
        self._choices = [
            choice
            for choice in choices
            if choice.head == "accelerator" and choice.setting.cpu.threads == threads
        ]

    def best(
        self, policy: Policy, limits: ResourceLimits, workload: Workload, at_once: Sequence[int]
    ) -> Candidate | None:
        """What lacks least, and then is fastest; None where no plan has the policy. at_once: how
        many requests may run together."""
        available = memory_bytes(self._profile, limits)
        choices = [c for c in self._choices if c.setting.batch in at_once and self._computes(c)]
        if policy == "workload-distribution":
            return self._best_shared(choices, limits, workload, available)
        found = [
            self._visiting(policy, choice, slots, limits, workload, available)
            for choice, slots in itertools.product(choices, SLOTS)
        ]
        return min(found, key=lambda one: one[0])[1] if found else None

    def fastest(
        self, limits: ResourceLimits, workload: Workload, at_once: Sequence[int], below_s: float
    ) -> Candidate | None:
        """The best plan of any shares that fits, None if no objective is below so many seconds."""
        available, best = memory_bytes(self._profile, limits), None
        bounds = [
            each
            for choice, slots in itertools.product(self._choices, SLOTS)
            if choice.setting.batch in at_once and self._computes(choice)
            for each in self._rough(choice, slots, limits, workload, available)
        ]
        heapq.heapify(bounds)
        while bounds and bounds[0].score < below_s * _LESS:
            first = heapq.heappop(bounds)
            if first.ttft_s is None:
                heapq.heappush(bounds, self._finer(first, workload))
                continue
            if len(first.plans.mlp) > 1:
                for each in first.apart(self._halves(id(first.choice)), workload):
                    heapq.heappush(bounds, each)
                continue
            halves, context = self._halves(id(first.choice)), workload.expected_context
            step_s = halves.decode_terms(first.plans, first.slots, context).sum(axis=0)
            ttft_s = halves.prefill_terms(first.plans, first.slots).sum(axis=0)
            score = goals(workload, first.choice.setting.batch, ttft_s, step_s)[0][0]
            if score < below_s * _LESS:
                best, below_s = first, float(score)
        if best is None:
            return None
        return self._candidate("auto", best.choice, best.plans, best.slots, workload, (0, 0))

    # --- the accelerator computes ----------------------------------------------------------------

    def _computes(self, choice: Choice) -> bool:
        """Whether the accelerator may compute all layers; steps of one size are there once."""
        longer = choice.setting.limits.step_tokens > self._choices[0].setting.limits.step_tokens
        return len(choice.setting.pages) > 0 and (choice.mode == "compute" or longer)

    def _visiting(
        self, policy: Policy, choice: Choice, slots: int, limits: ResourceLimits,
        workload: Workload, available: tuple[int, int],
    ) -> Found:  # fmt: skip
        halves, shares = self._halves(id(choice)), shares_of(policy)
        items = visiting_budget(choice, *halves.sizes(shares), slots)
        lacking = missing(items, available, limits)
        # What stays on the accelerator takes no time to come.
        plan = int(np.lexsort((-shares.mlp, np.sum(lacking, axis=0)))[0])
        lacks = tuple(int(own[plan]) for own in lacking)
        candidate = self._candidate(policy, choice, shares.at(plan), slots, workload, lacks)
        return (sum(lacks), *_goals(candidate, workload), slots), candidate

    def _rough(
        self, choice: Choice, slots: int, limits: ResourceLimits, workload: Workload,
        available: tuple[int, int],
    ) -> Iterator[_Bound]:  # fmt: skip
        """Of those that fit, for each share of attention that of the mlp which leaves least to
        come."""
        grid, sizes = self._grid
        lacks = np.sum(missing(visiting_budget(choice, *sizes, slots), available, limits), 0)
        side = round(math.sqrt(len(lacks)))
        fits = (lacks == 0).reshape(side, side)
        fits[-1, -1] = False  # nothing visits
        some = np.flatnonzero(fits.any(axis=1))
        if not len(some):
            return
        plans = grid.of(some * side + side - 1 - np.argmax(fits[some, ::-1], axis=1))
        come_s = float(sizes[0][fits.ravel()].min()) / choice.setting.visit_bytes_per_s
        ttft_s = choice.steps.steps * come_s
        score = goals(workload, choice.setting.batch, ttft_s, come_s)[0]
        yield _Bound(float(score), slots, choice, plans)

    def _finer(self, rough: _Bound, workload: Workload) -> _Bound:
        """With what the accelerator takes."""
        plans, halves = rough.plans, self._halves(id(rough.choice))
        ttft_s = halves.prefill_terms(plans, None).sum(axis=0)
        step_s = halves.decode_terms(plans, None, workload.expected_context).sum(axis=0)
        score = goals(workload, rough.choice.setting.batch, ttft_s, step_s)[0]
        return dataclasses.replace(rough, score=float(score.min()), ttft_s=ttft_s)

    @functools.cached_property
    def _grid(self) -> tuple[Shares, tuple[I64, I64, I64]]:
        """All shares, and what `visiting_budget` needs of them, whatever the choice."""
        grid, halves = grid_of(_SHARES if self._splits else 1), self._halves(id(self._choices[0]))
        return grid, halves.sizes(grid)

    def _candidate(
        self, policy: Policy, choice: Choice, one: Shares, slots: int, workload: Workload,
        lacks: tuple[int, ...],
    ) -> Candidate:  # fmt: skip
        """With the shares of one plan."""
        halves = self._halves(id(choice))
        sizes = halves.sizes(one)
        items = visiting_budget(choice, *sizes, slots)
        decode, full = (
            halves.decode_terms(one, slots, context)[:, 0]
            for context in (workload.expected_context, workload.context)
        )
        prefill = halves.prefill_terms(one, slots)[:, 0]
        matrices = int(halves.total_bytes(Shares(np.zeros(1), np.zeros(1)))[0])
        use = VisitUse(
            policy=policy, buffers=slots, buffer_bytes=int(sizes[2][0]),
            host_bytes=int(sizes[0][0]), matrix_bytes=matrices,
            attention=float(one.attention[0]), mlp=float(one.mlp[0]), splits=self._splits,
        )  # fmt: skip
        terms, memory = (decode, prefill), _memory(items)
        return _candidate(choice, workload, use, terms, float(full.sum()), memory, lacks)

    @functools.cache  # noqa: B019  # of the choices that it has
    def _halves(self, choice: int) -> Halves:
        own = next(each for each in self._choices if id(each) == choice)
        return Halves(own.setting, own.steps, self._splits)

    # --- both devices compute --------------------------------------------------------------------

    @functools.cached_property
    def _cuts(self) -> CutModel | str:
        """How the layers may be shared, or why they may not."""
        setting = self._choices[0].setting
        return self._space.uncut or cut_model(setting.model, setting.classes, self._space.columns)

    @property
    def unshared(self) -> str:
        """Why no plan shares layers, "" where some may."""
        return self._cuts if isinstance(self._cuts, str) else ""

    def _best_shared(
        self, choices: Sequence[Choice], limits: ResourceLimits, workload: Workload,
        available: tuple[int, int],
    ) -> Candidate | None:  # fmt: skip
        """All layers lie in host memory. The balance ranks, the timeline prices the best."""
        best: tuple[tuple[float, ...], SharedLayers, Layouts] | None = None
        for choice in choices:
            shared = self._shared(id(choice))
            if shared is None or not len(of := shared.layouts):
                continue
            lacks = np.sum(missing(shared.budget(of), available, limits), axis=0)
            step_s = shared.about_s(of, workload.expected_context)
            at = np.lexsort((step_s, lacks))[:1]
            ttft_s = float(shared.about_ttft_s(of.at(at))[0])
            score = goals(workload, choice.setting.batch, ttft_s, float(step_s[at[0]]))
            key = (float(lacks[at[0]]), *score)
            if best is None or key < best[0]:
                best = key, shared, of.at(at)
        if best is None:
            return None
        _, shared, one = best
        lacking = missing(shared.budget(one), available, limits)
        return self._shared_candidate(shared, one, workload, tuple(int(n[0]) for n in lacking))

    def _shared_candidate(
        self, shared: SharedLayers, one: Layouts, workload: Workload, lacks: tuple[int, ...]
    ) -> Candidate:
        items, size = shared.budget(one), int(shared.visiting_bytes(one)[0])
        expected, full = workload.expected_context, workload.context
        terms = shared.decode_terms(one, expected), shared.prefill_terms(one)
        full_s = float(shared.decode_terms(one, full).sum())
        use = VisitUse(
            policy="workload-distribution", buffers=BUFFERS,
            buffer_bytes=int(shared.buffer_bytes(one)[0]), host_bytes=size,
            matrix_bytes=int(shared.visiting_bytes(one.with_(heads=0, elements=0))[0]),
        )  # fmt: skip
        memory = _memory(items)
        return _candidate(
            shared.choice, workload, use, terms, full_s, memory, lacks, cut_use(shared.cuts, one)
        )

    @functools.cache  # noqa: B019  # of the choices that it has
    def _shared(self, choice: int) -> SharedLayers | None:
        if isinstance(self._cuts, str):
            return None
        own = next(each for each in self._choices if id(each) == choice)
        return SharedLayers(own, self._cuts)


def _memory(items: Budget) -> dict[str, dict[str, int]]:
    """Of the one plan."""
    return {
        device: {str(purpose): int(own[purpose][0]) for purpose in PURPOSES}
        for device, own in (("cpu", items.cpu), ("accelerator", items.accelerator))
    }


def _goals(candidate: Candidate, workload: Workload) -> tuple[float, float]:
    predicted = candidate.predicted
    return goals(workload, candidate.sequences, predicted.ttft_s, predicted.decode_s)


def shares_of(policy: Policy) -> Shares:
    """What may stay on the accelerator: every share in even steps where the policy leaves it to
    memory."""
    if policy == "zigzag":
        every = np.arange(_SHARES, -1, -1) / _SHARES
        return Shares(every, every)
    mlp = 0.5 if policy == "helm-placement" else 0.0
    return Shares(np.zeros(1), np.array([mlp]))


@functools.cache
def grid_of(levels: int) -> Shares:
    """Every share of attentions with every one of mlps, those of one attention side by side."""
    each = np.arange(levels + 1) / levels
    return Shares(np.repeat(each, levels + 1), np.tile(each, levels + 1))


def visiting_budget(choice: Choice, visits: I64, left: I64, buffers: I64, slots: int) -> Budget:
    """[plans] what both devices hold: of layouts of whole layers that with all layers on the
    accelerator, but for what visits it, and with buffers. The bytes are `Halves.sizes`."""
    cpu, own = (
        {purpose: np.full(len(visits), items[purpose][ROW, 0]) for purpose in PURPOSES}
        for items in (choice.budget.cpu, choice.budget.accelerator)
    )
    own["weights"] -= left
    own["staging"] += slots * buffers
    cpu["weights"] += visits
    return Budget(cpu, own)


def _candidate(
    choice: Choice, workload: Workload, use: VisitUse, terms: tuple[F64, F64], full_s: float,
    memory: dict[str, dict[str, int]], lacks: tuple[int, ...], cut: CutUse | None = None,
) -> Candidate:  # fmt: skip
    setting = choice.setting
    decode_s, ttft_s = (float(each.sum()) for each in terms)
    named = [dict(zip(TERMS, each.tolist(), strict=True)) for each in terms]
    blocks = len(setting.model.graph.layers)
    pages = setting.pages_of(workload.context)
    return Candidate(
        blocks=blocks,
        cpu_blocks=0,
        embedding=CPU,
        head="accelerator",
        kv_blocks=pages,
        accelerator_kv_blocks=pages,
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
        predicted=predicted(workload, setting.batch, (ttft_s, decode_s, full_s), named),
        memory=memory,
        missing=Missing(*lacks),
        objective_s=goals(workload, setting.batch, ttft_s, decode_s)[0],
        cut=cut,
        visit=use,
    )
