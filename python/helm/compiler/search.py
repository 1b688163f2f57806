"""Finds the fastest placement that fits: every layout, page split, schedule and thread count.

Pure functions from (model, profile, workload, limits) to ranked candidates with reasons. Both
memories are hard limits. Knows no file, no plan format and no terminal.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from helm.compiler.best import Best, SearchResult
from helm.compiler.candidate import Candidate
from helm.compiler.choices import Choice, batches, choices, thread_counts
from helm.compiler.counts import CostedGraph
from helm.compiler.cut.search import CutSearch
from helm.compiler.disk import disk_candidate
from helm.compiler.problem import PUBLISHED_POLICIES, Policy, ResourceLimits, Space
from helm.compiler.visits.search import PolicySearch
from helm.machine.profile import Profile
from helm.plan.records import Objective, Workload

PLENTY = 2**60  # bytes


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
    def _threads(self) -> tuple[list[int], list[int]]:
        return thread_counts(self.profile, self.space)

    @functools.cached_property
    def _priced(self) -> list[Choice]:
        return self._choices(self._threads[0])

    @functools.cached_property
    def _slower(self) -> list[Choice]:
        """With threads that only take less memory."""
        return self._choices(self._threads[1])

    def _choices(self, threads: list[int]) -> list[Choice]:
        parts = self.model, self.profile, self.workload, self.limits, self.space
        return list(choices(*parts, threads))

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
            reason = self._policies.unshared if one is None else ""
            return dataclasses.replace(_only(whole, one), uncut=reason)
        found = self._with_visits(whole, limits, workload) if self.space.policy == "auto" else whole
        return self._with_cuts(found, whole, limits, workload)

    def _with_cuts(
        self, found: SearchResult, whole: SearchResult, limits: ResourceLimits, workload: Workload
    ) -> SearchResult:
        """With a plan whose layers are cut, where that is faster than what was found, or asked for.
        whole: of whole layers alone."""
        search, asked = self._cut_search(whole), self.space.policy == "cut"
        at_once = {workload.batch, *([] if whole.best is None else [whole.best.sequences])}
        below_s = np.inf if asked or found.best is None else found.best.objective_s
        one = search.best(limits, workload, at_once, below_s)
        if one is not None and one.fits and one.objective_s < below_s:
            found = _faster(found, one)
        found = _only(found, one) if asked else found
        return dataclasses.replace(found, uncut=search.reason)

    def _with_visits(
        self, found: SearchResult, limits: ResourceLimits, workload: Workload
    ) -> SearchResult:
        """Where weights that visit the accelerator in every step are faster, a plan of those."""
        if self.profile.accelerator is None or self.space.kv == "host":
            return found
        if "visit" not in self.space.prefill:
            return found  # in formats of the CPU alone
        below_s = np.inf if found.best is None else found.best.objective_s
        one = self._policies.fastest(limits, workload, batches(workload), below_s)
        return found if one is None else _faster(found, one)

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

    @functools.cached_property
    def _policies(self) -> PolicySearch:
        threads = self.profile.cpu.threads if self.space.threads is None else self.space.threads[0]
        return PolicySearch(self._priced, self.profile, threads, self.space)

    def _cut_search(self, whole: SearchResult) -> CutSearch:
        """With the threads that are best for whole layers."""
        threads = self.profile.cpu.threads if self.space.threads is None else self.space.threads[0]
        threads = threads if whole.best is None else whole.best.threads
        if threads not in self._cut_searches:
            every = self._slower if threads in self._threads[1] else self._priced
            own = [choice for choice in every if choice.setting.cpu.threads == threads]
            self._cut_searches[threads] = CutSearch(own, self.space, self.profile)
        return self._cut_searches[threads]

    @functools.cached_property
    def _cut_searches(self) -> dict[int, CutSearch]:
        """By threads."""
        return {}

    def _partitions(self, limits: ResourceLimits, workload: Workload) -> SearchResult:
        """Of whole layers alone."""
        best = Best(self.model, self.profile, workload, limits, self.space)
        at_once = batches(workload)
        for choice in self._priced:
            if choice.setting.batch in at_once:
                best.offer(choice)
        found = best.result()
        least_s = np.inf if found.best is None else found.best.objective_s
        if not self._threads[1] or (found.best is not None and least_s <= best.with_scratch_s):
            return found
        for choice in self._slower:
            if choice.setting.batch in at_once:
                best.offer(choice)
        return best.result()


def _faster(found: SearchResult, one: Candidate) -> SearchResult:
    """With one that is faster than all others."""
    labelled, best = found.labelled, found.best
    if best is not None and best.cut is None and best.visit is None:
        labelled = {"layer-partition": best, **labelled}
    return dataclasses.replace(found, best=one, ranked=(one, *found.ranked), labelled=labelled)


def _only(found: SearchResult, asked: Candidate | None) -> SearchResult:
    """With nothing but a plan of the policy that was asked for, where that fits."""
    best = asked if asked is not None and asked.fits else None
    ranked = () if best is None else (best,)
    return dataclasses.replace(found, best=best, ranked=ranked, asked=asked)


def search(
    model: CostedGraph,
    profile: Profile,
    workload: Workload,
    limits: ResourceLimits | None = None,
    space: Space | None = None,
) -> SearchResult:
    """The result of one `Search`."""
    return Search(model, profile, workload, limits, space).result
