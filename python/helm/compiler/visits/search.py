"""Finds the best plan of each published policy: the number of buffers, of requests at once, and
what the policy leaves open. Knows no plan format and no terminal."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from helm.compiler.budget import PURPOSES, Budget, memory_bytes, missing
from helm.compiler.candidate import Candidate, Missing, VisitUse, goals, predicted
from helm.compiler.choices import Choice
from helm.compiler.problem import Policy, ResourceLimits
from helm.compiler.timeline import Flight
from helm.compiler.times import F64, TERMS
from helm.compiler.visits.halves import ROW, Halves, Shares
from helm.compiler.visits.ops import Ops
from helm.compiler.visits.ring import flight_of
from helm.machine.profile import Profile
from helm.plan.records import Workload
from helm.plan.units import CPU

SLOTS = (2, 3)  # buffers of half a layer that are tried
_SHARES = 64  # into so many parts matrices are split, of which some stay on the accelerator
Found = tuple[tuple[float, ...], Candidate]


class PolicySearch:
    """Of a model on a machine. choices: of whole layers, whose settings and prompts are these
    too."""

    def __init__(self, choices: Sequence[Choice], profile: Profile, threads: int) -> None:
        self._profile = profile
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
        found = [
            one
            for choice in self._choices
            if choice.setting.batch in at_once
            for one in self._of(policy, choice, limits, workload, available)
        ]
        return min(found, key=lambda one: one[0])[1] if found else None

    def flights(self, best: Candidate, workload: Workload) -> list[Flight]:
        """Of what it found: the layers in a decode step, and where the accelerator computes all
        also those in the longest step of prompts."""
        use, context = best.visit, workload.expected_context
        assert use is not None
        choice = next(
            choice
            for choice in self._choices
            if choice.setting.batch == best.sequences
            and choice.mode == ("stream" if use.of_ops else "compute")
        )
        if use.of_ops:
            ops = Ops(choice.setting, [(use.first_op, use.first_op + len(use.ops))])
            return [flight_of(ops.groups(context), use.buffers)]
        halves = self._halves(id(choice))
        shares = Shares(np.array([use.attention]), np.array([use.mlp]))
        last = int(np.argmax(choice.steps.tokens))
        units = halves.decode_units(context), halves.prompt_units()[:, :, last : last + 1]
        each = [halves.groups(shares, one.sum(axis=3)) for one in units]
        return [flight_of(groups, use.buffers) for groups in each]

    def _of(
        self, policy: Policy, choice: Choice, limits: ResourceLimits, workload: Workload,
        available: tuple[int, int],
    ) -> Iterator[Found]:  # fmt: skip
        if policy == "workload-distribution":
            if choice.mode == "stream":
                yield self._shared(choice, limits, workload, available)
        elif choice.mode == "compute" and len(choice.setting.pages):
            for slots in SLOTS:
                yield self._visiting(policy, choice, slots, limits, workload, available)

    # --- the accelerator computes ----------------------------------------------------------------

    def _visiting(
        self, policy: Policy, choice: Choice, slots: int, limits: ResourceLimits,
        workload: Workload, available: tuple[int, int],
    ) -> Found:  # fmt: skip
        halves, shares = self._halves(id(choice)), shares_of(policy)
        items = visiting_budget(choice, halves, shares, slots)
        lacking = missing(items, available, limits)
        # What stays on the accelerator takes no time to come.
        plan = int(np.lexsort((-shares.mlp, np.sum(lacking, axis=0)))[0])
        one, lacks = shares.at(plan), tuple(int(own[plan]) for own in lacking)
        decode, full = (
            halves.decode_terms(one, slots, context)[:, 0]
            for context in (workload.expected_context, workload.context)
        )
        prefill = halves.prefill_terms(one, slots)[:, 0]
        host, buffer = halves.total_bytes(one), halves.buffer_bytes(one)
        matrices = int(halves.total_bytes(Shares(np.zeros(1), np.zeros(1)))[0])
        use = VisitUse(
            policy=policy, buffers=slots, buffer_bytes=int(buffer[0]), host_bytes=int(host[0]),
            matrix_bytes=matrices, attention=float(one.attention[0]), mlp=float(one.mlp[0]),
        )  # fmt: skip
        memory: dict[str, dict[str, int]] = {
            device: {str(purpose): int(own[purpose][plan]) for purpose in PURPOSES}
            for device, own in (("cpu", items.cpu), ("accelerator", items.accelerator))
        }
        candidate = _candidate(
            choice, workload, use, (decode, prefill), float(full.sum()), memory, lacks
        )
        return (sum(lacks), *_goals(candidate, workload), slots), candidate

    @functools.cache  # noqa: B019  # of the choices that it has
    def _halves(self, choice: int) -> Halves:
        own = next(each for each in self._choices if id(each) == choice)
        return Halves(own.setting, own.steps)

    # --- both devices compute --------------------------------------------------------------------

    def _shared(
        self, choice: Choice, limits: ResourceLimits, workload: Workload, available: tuple[int, int]
    ) -> Found:
        """All layers lie in host memory; prompts are computed on the accelerator."""
        row, setting = len(choice.setting.rows.boundary) - 1, choice.setting
        first, ops, decode, full_s = self._split(
            setting.batch, workload.expected_context, workload.context
        )
        prefill = min(choice.prefills, key=lambda way: float(way.priced.total[row, 0]))
        lacks = tuple(int(own[row, 0]) for own in missing(choice.budget, available, limits))
        terms = np.array([prefill.priced.terms(row, 0)[name] for name in TERMS])
        memory = choice.budget.at(row, 0)
        held = sum(setting.model.weight_bytes([x]) for x in setting.model.graph.layers)
        use = VisitUse(
            policy="workload-distribution", buffers=2,
            buffer_bytes=memory["accelerator"]["staging"] // 2, host_bytes=held, matrix_bytes=held,
            ops=ops, first_op=first, of_ops=len(setting.classes.units[0].ops),
        )  # fmt: skip
        least = prefill.visit_least
        candidate = _candidate(
            choice, workload, use, (decode, terms), full_s, memory, lacks,
            stream_tokens=0 if least is None else choice.steps.visit_tokens(row, least),
        )  # fmt: skip
        return (sum(lacks), *_goals(candidate, workload)), candidate

    @functools.cache  # noqa: B019  # of few numbers of requests
    def _split(
        self, batch: int, expected: int, context: int
    ) -> tuple[int, tuple[str, ...], F64, float]:
        """What is fastest at the expected context: the first op of the accelerator, all of them,
        [TERMS] of a step, and the seconds of one at the full context."""
        setting = next(c.setting for c in self._choices if c.setting.batch == batch)
        every = Ops(setting)
        terms = every.terms(expected)
        best = int(np.argmin(terms.sum(axis=0)))
        one = Ops(setting, every.ranges[best : best + 1].tolist())
        return (
            int(every.ranges[best, 0]),
            every.names(best),
            terms[:, best],
            float(one.terms(context).sum()),
        )


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


def visiting_budget(choice: Choice, halves: Halves, shares: Shares, slots: int) -> Budget:
    """[plans] what both devices hold: of layouts of whole layers that with all layers on the
    accelerator, but for what visits it, and with buffers."""
    visits = halves.total_bytes(shares)
    cpu, own = (
        {purpose: np.full(len(visits), items[purpose][ROW, 0]) for purpose in PURPOSES}
        for items in (choice.budget.cpu, choice.budget.accelerator)
    )
    own["weights"] -= visits
    own["staging"] += slots * halves.buffer_bytes(shares)
    cpu["weights"] += visits
    return Budget(cpu, own)


def _candidate(
    choice: Choice, workload: Workload, use: VisitUse, terms: tuple[F64, F64], full_s: float,
    memory: dict[str, dict[str, int]], lacks: tuple[int, ...], stream_tokens: int = 0,
) -> Candidate:  # fmt: skip
    setting = choice.setting
    decode_s, ttft_s = (float(each.sum()) for each in terms)
    named = [dict(zip(TERMS, each.tolist(), strict=True)) for each in terms]
    blocks = len(setting.model.graph.layers)
    pages = setting.pages_of(workload.context)
    on_cpu = bool(use.of_ops)
    return Candidate(
        blocks=blocks,
        cpu_blocks=blocks if on_cpu else 0,
        embedding=CPU,
        head="accelerator",
        kv_blocks=pages,
        accelerator_kv_blocks=0 if on_cpu else pages,
        overflow="stream",
        kv=None,
        decode_groups=1,
        prefill_mode="stream" if stream_tokens else "compute",
        prefill_overlap=False,
        step_tokens=setting.limits.step_tokens,
        stream_tokens=stream_tokens,
        stream_pages=setting.visit_pages if stream_tokens else 0,
        threads=setting.cpu.threads,
        sequences=setting.batch,
        predicted=predicted(workload, setting.batch, (ttft_s, decode_s, full_s), named),
        memory=memory,
        missing=Missing(*lacks),
        objective_s=goals(workload, setting.batch, ttft_s, decode_s)[0],
        visit=use,
    )
