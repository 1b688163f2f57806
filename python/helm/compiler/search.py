"""Finds the fastest placement that fits: every layout, page split, schedule and thread count.

Pure functions from (model, profile, workload, limits) to ranked candidates with reasons. Both
memories are hard limits. Knows no file, no plan format and no terminal.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from helm.compiler.budget import memory_bytes, missing
from helm.compiler.candidate import Candidate, Missing, OverflowUse, SitePrice, goals, predicted
from helm.compiler.choices import SITES, Choice, batches, choices
from helm.compiler.counts import CostedGraph
from helm.compiler.cut.search import CutSearch
from helm.compiler.disk import disk_candidate
from helm.compiler.order import least, less
from helm.compiler.problem import PUBLISHED_POLICIES, Policy, ResourceLimits, Space
from helm.compiler.setting import Site
from helm.compiler.timeline import Flight
from helm.compiler.times import F64
from helm.compiler.visits.search import PolicySearch
from helm.machine.profile import Profile
from helm.plan.records import Objective, Workload

PLENTY = 2**60  # bytes
_CUTS = 2  # of the layouts that are cut, those that are kept


@dataclass(frozen=True)
class SearchResult:
    """best: the fastest candidate that fits, None if none does. ranked: the best of each layout
    that fits, fastest first, cut ones too. by_layout: the best of every layout of whole layers,
    those that do not fit as well, in the order all on the accelerator, then by boundary; what a
    plot over k shows. labelled: "all-accelerator", "fill-accelerator" and "all-cpu", as far as the
    machine has them, and where the best is cut "layer-partition", the best that is not. cuts: the
    best of those that are cut, or of a published policy that was asked for, those that do not fit
    as well. uncut: why nothing can be cut, "" if
    something can."""

    best: Candidate | None
    ranked: tuple[Candidate, ...]
    by_layout: tuple[Candidate, ...]
    labelled: dict[str, Candidate]
    cuts: tuple[Candidate, ...] = ()
    uncut: str = ""


class Search:
    """Every candidate of `space`, priced once when first asked for, and ranked within any memory
    and by any objective.

    Raises ProfileError if the profile lacks a rate that the model needs. Never raises for lack of
    memory: see `require`.
    """

    def __init__(
        self,
        model: CostedGraph,
        profile: Profile,
        workload: Workload,
        limits: ResourceLimits | None = None,
        space: Space | None = None,
    ) -> None:
        self.model, self.profile, self.workload = model, profile, workload
        self.limits, self.space = limits or ResourceLimits(), space or Space()

    @functools.cached_property
    def _priced(self) -> list[Choice]:
        return list(choices(self.model, self.profile, self.workload, self.limits, self.space))

    @functools.cached_property
    def result(self) -> SearchResult:
        """Within the limits, by the workload's objective; ties go to the better other phase, then
        to more on the accelerator."""
        return self._ranked(self.limits, self.workload)

    @functools.cached_property
    def unlimited(self) -> SearchResult:
        """If memory were no object: what layouts would reach that do not fit."""
        plenty = dataclasses.replace(
            self.limits,
            cpu_bytes=PLENTY,
            accelerator_bytes=PLENTY,
            accelerator_weights_bytes=None,
            accelerator_kv_bytes=None,
        )
        return self._partitions(plenty, self.workload)

    def within(self, **memory_bytes: Any) -> SearchResult:
        """Within other amounts of memory, by their names in ResourceLimits."""
        return self._ranked(dataclasses.replace(self.limits, **memory_bytes), self.workload)

    def towards(self, objective: Objective) -> SearchResult:
        """By another objective. "throughput" and "serve" may run fewer sequences at once."""
        changed = dataclasses.replace(self.workload, objective=objective)
        if objective in ("throughput", "serve") and changed.batch > 1:
            return Search(self.model, self.profile, changed, self.limits, self.space).result
        return self._ranked(self.limits, changed)

    def _ranked(self, limits: ResourceLimits, workload: Workload) -> SearchResult:
        whole = self._partitions(limits, workload)
        if whole.best is None and self.space.disk is not None:
            read = disk_candidate(self.model, self.profile, workload, limits, self.space)
            return whole if read is None else dataclasses.replace(whole, best=read, ranked=(read,))
        if self.space.policy == "layer-partition":
            return whole
        if self.space.policy in PUBLISHED_POLICIES:
            one = self._published(self.space.policy, limits, workload)
            every = [] if one is None else [one]
            fit = tuple(c for c in every if c.fits)
            best = one if fit else None
            return dataclasses.replace(whole, best=best, ranked=fit, cuts=tuple(every))
        return self._with_visits(self._with_cuts(whole, limits, workload), limits, workload)

    def _with_cuts(
        self, whole: SearchResult, limits: ResourceLimits, workload: Workload
    ) -> SearchResult:
        search = self._cut_search(whole)
        at_once = {workload.batch, *([] if whole.best is None else [whole.best.sequences])}
        cuts = search.best(limits, workload, at_once)[:_CUTS]
        found = dataclasses.replace(whole, cuts=tuple(cuts), uncut=search.reason)
        fitting = sorted((c for c in cuts if c.fits), key=lambda c: c.objective_s)
        ranked = (*fitting[:1], *whole.ranked)
        if self.space.policy == "cut":
            ranked = tuple(fitting)
        elif not fitting or (whole.best and whole.best.objective_s <= fitting[0].objective_s):
            return found
        labelled = whole.labelled
        if whole.best is not None:
            labelled = {"layer-partition": whole.best, **labelled}
        best = ranked[0] if ranked else None
        return dataclasses.replace(found, best=best, ranked=ranked, labelled=labelled)

    def _with_visits(
        self, found: SearchResult, limits: ResourceLimits, workload: Workload
    ) -> SearchResult:
        """Where weights that visit the accelerator in every step are faster, a plan of those."""
        space, best = self.space, found.best
        if self.profile.accelerator is None or space.policy != "auto" or space.kv == "host":
            return found
        if "stream" not in space.prefill:
            return found  # in formats of the CPU alone
        below_s = np.inf if best is None else best.objective_s
        one = self._policies.fastest(limits, workload, batches(workload), below_s)
        if one is None:
            return found
        labelled = found.labelled
        if best is not None and "layer-partition" not in labelled and best.cut is None:
            labelled = {"layer-partition": best, **labelled}
        return dataclasses.replace(found, best=one, ranked=(one, *found.ranked), labelled=labelled)

    @functools.cached_property
    def published(self) -> dict[Policy, Candidate]:
        """The best plan of each published policy within the limits, as far as the machine and the
        model have one; of those that do not fit what lacks least."""
        found = {
            policy: self._published(policy, self.limits, self.workload)
            for policy in PUBLISHED_POLICIES
        }
        return {policy: one for policy, one in found.items() if one is not None}

    def _published(
        self, policy: Policy, limits: ResourceLimits, workload: Workload
    ) -> Candidate | None:
        if self.profile.accelerator is None or self.space.kv == "host":
            return None
        return self._policies.best(policy, limits, workload, batches(workload))

    def policy_flights(self, best: Candidate) -> list[Flight]:
        """Steps of a published policy's plan that this search found."""
        return self._policies.flights(best, self.workload)

    @functools.cached_property
    def _policies(self) -> PolicySearch:
        threads = self.profile.cpu.threads if self.space.threads is None else self.space.threads[0]
        return PolicySearch(self._priced, self.profile, threads, not self.space.uncut)

    def _cut_search(self, whole: SearchResult) -> CutSearch:
        """With the threads that are best for whole layers."""
        threads = self.profile.cpu.threads if self.space.threads is None else self.space.threads[0]
        threads = threads if whole.best is None else whole.best.threads
        if threads not in self._cut_searches:
            own = [choice for choice in self._priced if choice.setting.cpu.threads == threads]
            self._cut_searches[threads] = CutSearch(own, self.space, self.profile)
        return self._cut_searches[threads]

    @functools.cached_property
    def _cut_searches(self) -> dict[int, CutSearch]:
        """By threads."""
        return {}

    def _partitions(self, limits: ResourceLimits, workload: Workload) -> SearchResult:
        """Of whole layers alone."""
        best = _Best(self.model, self.profile, workload, limits, self.space)
        at_once = batches(workload)
        for choice in self._priced:
            if choice.setting.batch in at_once:
                best.offer(choice)
        return best.result()


def search(
    model: CostedGraph,
    profile: Profile,
    workload: Workload,
    limits: ResourceLimits | None = None,
    space: Space | None = None,
) -> SearchResult:
    """The result of one `Search`."""
    return Search(model, profile, workload, limits, space).result


def _scores(choice: Choice, workload: Workload) -> tuple[F64, F64]:
    """[rows, pages] the objective and what breaks ties, both to be small."""
    if workload.objective == "serve":
        return choice.serve_s, choice.decode_s.min(axis=0)
    ttft, step = choice.prefill_s.min(axis=0), choice.decode_s.min(axis=0)
    return goals(workload, choice.setting.batch, ttft, step)


class _Best:
    """Keeps the best candidate of every layout: the least that lacks memory first, then the best
    by score."""

    def __init__(
        self, model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits,
        space: Space,
    ) -> None:  # fmt: skip
        self._blocks, self._space = len(model.graph.layers), space
        self._workload = workload
        self._limits, self._available = limits, memory_bytes(profile, limits)
        rows = 1 if profile.accelerator is None else self._blocks + 2
        self._score = {head: np.full((3, rows), np.inf) for head in SITES}
        self._found: dict[Site, list[tuple[Choice, int] | None]] = {
            head: [None] * rows for head in SITES
        }
        self._labels: dict[str, tuple[tuple[float, ...], Choice, int]] = {}

    def offer(self, choice: Choice) -> None:
        lacks = sum(missing(choice.budget, self._available, self._limits))
        first, second = _scores(choice, self._workload)
        if choice.mode == "compute":
            self._offer_labels(choice, np.asarray(lacks))
        lacks = np.where(choice.possible, lacks, np.inf)
        scores = np.stack([lacks, first, second])  # [3, rows, pages]
        page = least(scores)
        score = np.take_along_axis(scores, page[None, :, None], axis=2)[:, :, 0]
        best = self._score[choice.head]
        for row in np.flatnonzero(self._allowed(choice) & less(score, best)):
            best[:, row] = score[:, row]
            self._found[choice.head][row] = (choice, int(page[row]))

    def _allowed(self, choice: Choice) -> npt.NDArray[np.bool_]:
        rows = choice.setting.rows
        allowed = np.ones(len(rows.boundary), bool)
        if self._space.one_boundary and choice.head == "cpu":
            allowed &= rows.boundary == self._blocks
        if choice.mode == "stream":
            allowed &= choice.prefills[0].allowed
        return allowed

    def _offer_labels(self, choice: Choice, lacks: F64) -> None:
        """The plans that need no model of time: everything on one side, and as many blocks as
        fit beside their whole KV cache, run in the plainest way."""
        choice = dataclasses.replace(
            choice, decodes=choice.decodes[:1], prefills=choice.prefills[:1]
        )
        first, _ = _scores(choice, self._workload)
        full, last = 0, lacks.shape[0] - 1
        offers = [("all-cpu", last, 0)] if choice.head == "cpu" else [("all-accelerator", 0, 0)]
        if choice.head == "accelerator":
            offers += [
                ("fill-accelerator", int(r), int(r))
                for r in np.flatnonzero(lacks[:, full] == 0)[:1]
            ]
        for label, row, rank in offers:
            score = (float(lacks[row, full] > 0), float(rank), float(first[row, full]))
            if label not in self._labels or score < self._labels[label][0]:
                self._labels[label] = (score, choice, row)

    def result(self) -> SearchResult:
        layouts = [
            self._candidate(*found, row)
            for row in range(len(self._found["cpu"]))
            for head in SITES
            if (found := self._found[head][row]) is not None
        ]
        fitting = [candidate for candidate in layouts if candidate.fits]
        ranked = sorted(fitting, key=lambda c: (c.objective_s, self._tie(c)))
        labelled = {
            label: self._candidate(choice, 0, row)
            for label, (_, choice, row) in self._labels.items()
        }
        return SearchResult(ranked[0] if ranked else None, tuple(ranked), tuple(layouts), labelled)

    def _tie(self, candidate: Candidate) -> float:
        predicted = candidate.predicted
        return predicted.ttft_s if self._workload.objective == "decode" else predicted.decode_s

    def _candidate(self, choice: Choice, page: int, row: int) -> Candidate:
        setting, rows = choice.setting, choice.setting.rows
        lacks = missing(choice.budget, self._available, self._limits)
        held = int(setting.pages[page]) if rows.has_blocks[row] else 0
        decode = min(choice.decodes, key=lambda way: way.key(row, page))
        prefill = choice.prefills[int(np.argmin(choice.prefill_s[:, row, page]))]
        visits_from = prefill.visit_least
        ways = prefill.priced, decode.expected, decode.full_context
        ttft_s, decode_s, full_s = (float(each.total[row, page]) for each in ways)
        seconds = ttft_s, decode_s, full_s
        terms = decode.expected.terms(row, page), prefill.priced.terms(row, page)
        return Candidate(
            blocks=self._blocks,
            cpu_blocks=int(rows.boundary[row]),
            embedding="accelerator" if rows.embedded[row] else "cpu",
            head=choice.head,
            kv_blocks=setting.pages_of(self._workload.context),
            accelerator_kv_blocks=held,
            overflow=decode.overflow,
            kv=_overflow_use(choice, row, page),
            decode_groups=decode.groups,
            prefill_mode=choice.mode,
            prefill_overlap=prefill.overlap,
            step_tokens=setting.limits.step_tokens,
            stream_tokens=0 if visits_from is None else choice.steps.visit_tokens(row, visits_from),
            stream_pages=0 if visits_from is None else setting.visit_pages,
            threads=setting.cpu.threads,
            sequences=setting.batch,
            predicted=predicted(self._workload, setting.batch, seconds, terms),
            memory=choice.budget.at(row, page),
            missing=Missing(*(int(device[row, page]) for device in lacks)),
            objective_s=float(choice.serve_s[row, page])
            if self._workload.objective == "serve"
            else goals(self._workload, setting.batch, ttft_s, decode_s)[0],
        )


def _overflow_use(choice: Choice, row: int, page: int) -> OverflowUse | None:
    """What overflows of a candidate's KV; None where nothing can."""
    setting = choice.setting
    if not (setting.rows.has_blocks[row] and setting.pool.overflows[page]):
        return None
    pool, context = setting.pool, setting.workload.context
    near = min(context, int(pool.kept[page]) // pool.sequences * pool.page_tokens)
    far = int(pool.far_blocks(context)[page])
    sites = []
    for site in dict.fromkeys(way.overflow for way in choice.decodes):
        ways = (way for way in choice.decodes if way.overflow == site)
        sites.append(SitePrice(site, *min(way.key(row, page) for way in ways)))
    return OverflowUse(pool.watermark, near, far, tuple(sites))
