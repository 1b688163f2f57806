"""Compares what the cost model predicts with what the engine does, on this machine.

Every prediction is made before its run, from a profile whose shapes are none of those tested. A
shared machine drifts, so a case is visited several times: each visit measures a profile, predicts
from it, then runs. Two errors are given, both predicted over measured time less one:

error: the prediction as the profile before the visit makes it, over the median of the visit's
rounds; the median over the visits.
corrected error: the machine also drifts by tens of percent within seconds, so before steps of the
engine the product that dominates them is timed as the profile times it, on memory of its own:
before each step of a prefill, before every second one of decode, of which the one after it counts,
the engine's threads being awake again. `drift` is its rate then over its rate in the profile. The
terms that it stands for (decode: products and attention; prefill: products bound by arithmetic) are
priced at that rate, the others as before, and the result is set against the time of that same run;
the median over the runs of all visits.

Runs in which another program took a core of ours are left out where enough others remain in the
round; cases with fewer are marked *.

Partitioned cases have half of the blocks and the head on an accelerator, or, of a mixture, all but
the embedding and the experts. By default it is a simulated one: one thread on a core of its own,
the CPU another thread, both profiled so, copies as slow as the link is said to be. They show
whether stages, crossings and overlapped schedules take the time that the model adds up for them.
They do not show a GPU's kernels or launches, nor that two devices have memory of their own: here
both read the same, for which the profile has `rate_while_both_compute`. Each device has a drift of
its own, timed on its cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from accuracy_cases import (
    ALONE,
    CLASSES,
    CUT,
    EXPERTS,
    OVERLAPPED,
    SHAPES,
    Case,
    cases,
    config_of,
    partitioned_cases,
)
from accuracy_report import ENOUGH, Result, Run, Visit, as_row, joined, show, summary
from helm import _helm
from helm.base.formats import DTYPES
from helm.compiler.candidate import Candidate
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.solve import plan_of, solve
from helm.errors import HelmError
from helm.machine.profile import Profile, load_profile
from helm.machine.resources import memory_available
from helm.model.families import build_graph
from helm.plan.records import Workload
from partition import Layout, costed, price, price_experts
from random_weights import random_weights
from setups import SIM, Probe, Setup, Threads, cpu_setup, partitioned_setup, probes_of

OUTPUT = 24  # decode steps per round
OVERLAPPED_PARTS = 4  # in which they run where steps overlap, the probe before each part
STEP_TOKENS = 512


class Model:
    """An engine over random weights, its threads where the setup wants them."""

    def __init__(self, case: Case, setup: Setup) -> None:
        config = config_of(case.shape)
        graph = build_graph(config)
        infos, tensors = random_weights(graph.tensors, case.dtype)
        problem = Problem(
            config, infos, context=case.context + OUTPUT, max_sequences=case.batch,
            dtype=case.dtype, kv_dtype=case.kv_dtype, threads=len(setup.cpus),
            step_tokens=STEP_TOKENS, memory_bytes=memory_available(),
        )  # fmt: skip
        self.plan = solve(problem).plan
        self.costed, self.case = costed(self.plan, graph), case
        if case.schedule != ALONE:
            found = self.predict(setup.profile)
            self.plan = plan_of(problem, self.costed, self.plan.limits, found)
        self.threads = Threads(setup)
        self.engine = _helm.Engine(self.plan.to_json(), "", tensors, device=setup.device)
        self.threads.started()

    def predict(self, profile: Profile) -> Candidate:
        """The case's layout and schedule as the cost model sees them."""
        case, blocks = self.case, len(self.costed.graph.layers)
        layout, overlapped = Layout("cpu", blocks, "cpu"), case.schedule == OVERLAPPED
        if case.schedule in (CUT, OVERLAPPED):
            layout = Layout("cpu", blocks // 2, "accelerator")
        work = Workload(prompt=case.context, output=OUTPUT, batch=case.batch)
        limits = ResourceLimits(sequences=case.batch, step_tokens=STEP_TOKENS)
        space = Space(
            kv="device",
            prefill=("compute",),
            overlap=(overlapped,),
            decode_groups=(2 if overlapped else 1,),
            threads=(profile.cpu.threads,),
        )
        if case.schedule == EXPERTS:
            return price_experts(self.costed, profile, work, limits, space)
        return price(self.costed, profile, work, layout, limits, space)


def typical(runs: list[Run], enough: int) -> tuple[list[Run], int]:
    """The undisturbed runs and how many there are; the quickest instead where they are few."""
    undisturbed = [run for run in runs if run.undisturbed]
    if len(undisturbed) >= enough:
        return undisturbed, len(undisturbed)
    return [min(runs, key=lambda run: run.seconds)], len(undisturbed)


class Bench:
    """Runs the phases of one case, round by round, with the probe before each step."""

    def __init__(
        self, model: Model, case: Case, probes: Mapping[str, Probe], profile: Profile
    ) -> None:
        self.model, self.case, self.probes, self.profile = model, case, probes, profile
        vocab = model.plan.model.vocab_size
        self.rows = {
            model.engine.open(case.context + OUTPUT): [
                (i * 7919 + 13 + 101 * b) % vocab for i in range(case.context)
            ]
            for b in range(case.batch)
        }
        self._steps(self._prompts(min(case.context, STEP_TOKENS)), 1)  # touches the buffers
        in_step = case.batch // 2 if case.schedule == OVERLAPPED else case.batch
        self.phases = {
            "prefill": (self._prefill, min(STEP_TOKENS, case.batch * case.context), 1),
            "decode": (self._decode, in_step, ENOUGH),
        }

    def rounds(
        self, phase: str, profile: Profile, most: int, seconds: float
    ) -> list[tuple[list[Run], int]]:
        """At least one round, at most `most`, none begun after `seconds`; drift is from what
        `profile` says."""
        self.profile = profile
        run, tokens, enough = self.phases[phase]
        found: list[tuple[list[Run], int]] = []
        end = time.perf_counter() + seconds
        while len(found) < most and (not found or time.perf_counter() < end):
            found.append(typical(run(tokens), enough))
        return found

    def _slowness(self, tokens: int) -> dict[str, float]:
        return {
            device: probe.slowness(getattr(self.profile, device), self.case.dtype, tokens)
            for device, probe in self.probes.items()
        }

    def _steps(self, requests: list[Any], tokens: int, every: int = 1) -> list[Run]:
        """Every step until all requests are done, the probe before one in `every`; before them all
        where they overlap."""
        generation = _helm.Generation(self.model.engine, requests)
        overlapped = self.case.schedule == OVERLAPPED  # the next step is on its way already
        found: list[Run] = []
        drift: dict[str, float] = {}
        while not generation.done:
            if not found or (len(found) % every == 0 and not overlapped):
                drift = {device: 1 / late for device, late in self._slowness(tokens).items()}
            waited, begin = self.model.threads.waited_s(), time.perf_counter()
            generation.advance(0.0)
            seconds = time.perf_counter() - begin
            found.append(Run(seconds, self.model.threads.waited_s() - waited, drift))
        return found

    def _prefill(self, tokens: int) -> list[Run]:
        """Every prompt into an empty sequence."""
        return [joined(self._steps(self._prompts(self.case.context), tokens))]

    def _prompts(self, tokens: int) -> list[Any]:
        """Requests for the first `tokens` of every prompt, and one more."""
        for sequence in self.rows:
            self.model.engine.truncate(sequence, 0)
        return [
            _helm.Request(prompt=p[:tokens], sequence=q, max_tokens=1) for q, p in self.rows.items()
        ]

    def _decode(self, tokens: int) -> list[Run]:
        """After a prefill."""
        if self.case.schedule != OVERLAPPED:
            # The engine's threads fell asleep while the probe ran: the second step counts.
            return self._decode_steps(tokens, OUTPUT)[1::2]
        found: list[Run] = []
        for _ in range(OVERLAPPED_PARTS):  # one step for all, then the two groups in turn
            steps = self._decode_steps(tokens, OUTPUT // OVERLAPPED_PARTS)
            found += [joined(pair) for pair in zip(steps[1::2], steps[2::2], strict=True)]
        return found

    def _decode_steps(self, tokens: int, count: int) -> list[Run]:
        requests = [
            _helm.Request(prompt=[*p, 1], sequence=q, cached=self.case.context, max_tokens=count)
            for q, p in self.rows.items()
        ]
        steps = self._steps(requests, tokens, every=2)
        for sequence in self.rows:
            self.model.engine.truncate(sequence, self.case.context)
        return steps


def run_case(
    case: Case, setup: Setup, probes: Mapping[str, Probe], args: argparse.Namespace
) -> list[Result]:
    """Both phases."""
    model = Model(case, setup)
    try:
        bench = Bench(model, case, probes, setup.profile)
        results = [Result(case, "prefill", []), Result(case, "decode", [])]
        for _ in range(args.visits):
            profile = model.threads.measure_again()
            guess = model.predict(profile).predicted
            for result, predicted_s, terms, scaled in (
                (results[0], guess.ttft_s, guess.prefill_terms, _PREFILL_DRIFTS),
                (results[1], guess.decode_s, guess.decode_terms, _DECODE_DRIFTS),
            ):
                parts = {d: scaled_part(terms, [f"{d}_{name}" for name in scaled]) for d in probes}
                rounds = bench.rounds(result.phase, profile, args.rounds, args.seconds)
                result.visits.append(Visit(predicted_s, parts, rounds))
        return results
    finally:
        model.threads.release()


# Terms of a prediction that the probe stands for.
_PREFILL_DRIFTS = ("compute_s",)
_DECODE_DRIFTS = ("memory_s", "compute_s", "attention_s")


def scaled_part(terms: Mapping[str, float], names: Iterable[str]) -> float:
    """Seconds of the terms of these names, less their share of what overlap saves."""
    spent = sum(seconds for seconds in terms.values() if seconds > 0)
    share = sum(terms[name] for name in names) / spent
    return share * (spent + terms["overlap_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=CLASSES, default=list(DTYPES))
    parser.add_argument("--all", action="store_true", help="every combination, not a third")
    parser.add_argument("--visits", type=int, default=3, help="profiles, each before its runs")
    parser.add_argument("--rounds", type=int, default=5, help="at most, of a phase of a visit")
    parser.add_argument("--seconds", type=float, default=1.5, help="after which no round begins")
    parser.add_argument("--profile", help="a profile file for the CPU (default: measured)")
    parser.add_argument(
        "--device", default=SIM, help="of the partitioned cases; cpu: leave them out"
    )
    parser.add_argument("--only-partitioned", action="store_true", help="leave the others out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    given = load_profile(args.profile) if args.profile else None
    wanted, cut = cases(args), partitioned_cases(args)
    setups = [(cpu_setup(given), wanted)] if wanted else []
    if cut:
        try:
            setups.append((partitioned_setup(args.device, given), cut))
        except HelmError as reason:
            raise SystemExit(str(reason)) from None
    results: list[Result] = []
    for setup, its_cases in setups:
        if setup.profile.unsettled:
            print("unsettled at first:", *setup.profile.unsettled, sep="\n  ", file=sys.stderr)
        probes = probes_of(setup)
        for case in its_cases:
            for result in run_case(case, setup, probes, args):
                results.append(result)
                line = f"{case} {result.phase} {result.error:+.1%} {result.corrected_error:+.1%}"
                print(line, file=sys.stderr)
    if args.json:
        report = {
            "profiles": {setup.device: setup.profile.to_dict() for setup, _ in setups},
            "results": [as_row(result) for result in results],
            "summary": summary(results),
        }
        print(json.dumps(report, indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
