"""Compares what the cost model predicts with what the engine does, on this machine.

Every prediction is made before its run, from a profile whose shapes are none of those tested. Two
errors are given, both predicted over measured time less one:

error: the prediction as the profile makes it, over the median of the rounds.
corrected error: a shared machine drifts by tens of percent within seconds, so right before and
after each step of the engine the product that dominates it is timed as the profile times it, on
memory of its own. `drift` is its rate then over its rate in the profile. The terms that it stands
for (decode: products and attention; prefill: products bound by arithmetic) are priced at that rate,
the others as before, and the result is set against the time of that same run; the median over the
runs.

Runs in which another program took a core of ours are left out where enough others remain in the
round; cases with fewer are marked *.

Partitioned cases have half of the blocks and the head on an accelerator, by default a simulated
one: one thread on a core of its own, the CPU another thread, both profiled so, copies as slow as
the link is said to be. They show whether stages, crossings and overlapped schedules take the time
that the model adds up for them. They do not show a GPU's kernels or launches, nor that two devices
have memory of their own: here both read the same, for which the profile has
`rate_while_both_compute`. Each device has a drift of its own, timed on its cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accuracy_cases import (
    ALONE,
    DTYPES,
    OVERLAPPED,
    SHAPES,
    Case,
    cases,
    config_of,
    partitioned_cases,
)
from helm import _helm
from helm.calibrate import measure_profile
from helm.compiler.candidate import Candidate
from helm.compiler.op_cost import CostedGraph
from helm.compiler.workload import ResourceLimits, Space, Workload
from helm.errors import HelmError
from helm.machine import memory_available
from helm.models import build_graph
from helm.plan import make_plan
from helm.profile import Profile, load_profile
from partition import Layout, costed, place, price
from random_weights import random_weights
from setups import SIM, Probe, Setup, Threads, cpu_setup, partitioned_setup, probes_of

OUTPUT = 16  # decode steps per round
STEP_TOKENS = 512
ENOUGH = 3  # undisturbed runs


@dataclass(frozen=True)
class Run:
    """A decode step, or a prefill to the last first token. waited_s: for which other programs had
    cores of ours. drift: by device, rate of the product that dominates it over its rate in the
    profile."""

    seconds: float
    waited_s: float
    drift: dict[str, float]

    @property
    def undisturbed(self) -> bool:
        return self.waited_s < 0.01 * self.seconds


def joined(runs: Sequence[Run]) -> Run:
    """Runs one after the other as one; drift weighs by what each would take without any."""
    seconds = sum(run.seconds for run in runs)
    drift = {
        device: sum(run.seconds * run.drift[device] for run in runs) / seconds
        for device in runs[0].drift
    }
    return Run(seconds, sum(run.waited_s for run in runs), drift)


@dataclass
class Result:
    """One phase of one case. predicted_s and measured_s as in Run; scaled_s: the part of the
    prediction that drift corrects, by device. rounds: the runs that count of each, and how many
    were undisturbed."""

    case: Case
    phase: str
    predicted_s: float
    scaled_s: dict[str, float]
    rounds: list[tuple[list[Run], int]]

    @property
    def measured_s(self) -> float:
        return self._median(lambda run: run.seconds)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def drift(self) -> float:
        """Of the CPU."""
        return self._median(lambda run: run.drift["cpu"])

    @property
    def corrected_error(self) -> float:
        def expected_s(drift: Mapping[str, float]) -> float:
            late = (s * (1 / drift[device] - 1) for device, s in self.scaled_s.items())
            return self.predicted_s + sum(late)

        return self._median(lambda run: expected_s(run.drift) / run.seconds) - 1

    def _median(self, of: Callable[[Run], float]) -> float:
        """Over the rounds, of the medians over their runs."""
        return statistics.median(statistics.median(map(of, runs)) for runs, _ in self.rounds)

    @property
    def disturbed(self) -> bool:
        """Whether the quickest runs stand for undisturbed ones in most rounds."""
        return statistics.median(count for _, count in self.rounds) < self.enough

    @property
    def enough(self) -> int:
        return ENOUGH if self.phase == "decode" else 1


class Model:
    """An engine over random weights, its threads where the setup wants them."""

    def __init__(self, case: Case, setup: Setup) -> None:
        config = config_of(case.shape)
        graph = build_graph(config, None)
        infos, tensors = random_weights(graph.tensors, case.dtype)
        self.plan = make_plan(
            config, infos, context=case.context + OUTPUT, max_sequences=case.batch,
            dtype=case.dtype, kv_dtype=case.dtype, threads=len(setup.cpus),
            step_tokens=STEP_TOKENS, memory_bytes=memory_available(),
        )  # fmt: skip
        model = costed(self.plan, graph)
        candidate = predict(model, case, setup.profile)
        self.predicted = candidate.predicted
        if case.schedule != ALONE:
            self.plan = place(self.plan, model, candidate)
        self.threads = Threads(setup)
        self.engine = _helm.Engine(self.plan.to_json(), "", tensors, device=setup.device)
        self.threads.started()


def predict(model: CostedGraph, case: Case, profile: Profile) -> Candidate:
    """The case's layout and schedule as the cost model sees them."""
    blocks = len(model.graph.units) - 2
    layout, overlapped = Layout("cpu", blocks, "cpu"), case.schedule == OVERLAPPED
    if case.schedule != ALONE:
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
    return price(model, profile, work, layout, limits, space)


def typical(runs: list[Run], enough: int) -> tuple[list[Run], int]:
    """The undisturbed runs and how many there are; the quickest instead where they are few."""
    undisturbed = [run for run in runs if run.undisturbed]
    if len(undisturbed) >= enough:
        return undisturbed, len(undisturbed)
    return [min(runs, key=lambda run: run.seconds)], len(undisturbed)


class Bench:
    """Runs the phases of one case, round by round, with the probe before and after each."""

    def __init__(self, model: Model, case: Case, probes: Mapping[str, Probe]) -> None:
        self.model, self.case, self.probes = model, case, probes
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

    def rounds(self, phase: str, most: int, seconds: float) -> list[tuple[list[Run], int]]:
        """At least one round, at most `most`, none begun after `seconds`."""
        run, tokens, enough = self.phases[phase]
        found: list[tuple[list[Run], int]] = []
        end = time.perf_counter() + seconds
        while len(found) < most and (not found or time.perf_counter() < end):
            found.append(typical(run(tokens), enough))
        return found

    def _slowness(self, tokens: int) -> dict[str, float]:
        dtype = self.case.dtype
        return {device: probe.slowness(dtype, tokens) for device, probe in self.probes.items()}

    def _steps(self, requests: list[Any], tokens: int) -> list[Run]:
        """Every step until all requests are done, the probe between them; around them all where
        they overlap."""
        generation = _helm.Generation(self.model.engine, requests)
        overlapped = self.case.schedule == OVERLAPPED  # the next step is on its way already
        timed, slowness = [], [self._slowness(tokens)]
        while not generation.done:
            waited, begin = self.model.threads.waited_s(), time.perf_counter()
            generation.advance(0.0)
            seconds = time.perf_counter() - begin
            timed.append((seconds, self.model.threads.waited_s() - waited))
            slowness.append(slowness[-1] if overlapped else self._slowness(tokens))
        if overlapped:
            slowness = [slowness[0], self._slowness(tokens)] * len(slowness)
        drifts = [
            {device: 2 / (before[device] + after[device]) for device in before}
            for before, after in itertools.pairwise(slowness)
        ]
        return [Run(*times, drift) for times, drift in zip(timed, drifts, strict=False)]

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
        requests = [
            _helm.Request(prompt=[*p, 1], sequence=q, cached=self.case.context, max_tokens=OUTPUT)
            for q, p in self.rows.items()
        ]
        steps = self._steps(requests, tokens)
        if self.case.schedule == OVERLAPPED:  # one for all, then the two groups in turn
            steps = [joined(pair) for pair in zip(steps[1::2], steps[2::2], strict=True)]
        for sequence in self.rows:
            self.model.engine.truncate(sequence, self.case.context)
        return steps


def run_case(
    case: Case, setup: Setup, probes: Mapping[str, Probe], args: argparse.Namespace
) -> Iterator[Result]:
    model = Model(case, setup)
    guess = model.predicted
    bench = Bench(model, case, probes)
    for phase, predicted_s, terms, scaled in (
        ("prefill", guess.ttft_s, guess.prefill_terms, ("compute_s",)),
        ("decode", guess.decode_s, guess.decode_terms, ("memory_s", "compute_s", "attention_s")),
    ):
        parts = {
            device: scaled_part(terms, [f"{device}_{name}" for name in scaled]) for device in probes
        }
        rounds = bench.rounds(phase, args.rounds, args.seconds)
        yield Result(case, phase, predicted_s, parts, rounds)


def scaled_part(terms: Mapping[str, float], names: Iterable[str]) -> float:
    """Seconds of the terms of these names, less their share of what overlap saves."""
    spent = sum(seconds for seconds in terms.values() if seconds > 0)
    share = sum(terms[name] for name in names) / spent
    return share * (spent + terms["overlap_s"])


def summary(results: list[Result]) -> dict[str, dict[str, float]]:
    """Median and worst absolute errors."""
    groups = {
        "all": results,
        "decode": [r for r in results if r.phase == "decode"],
        "prefill": [r for r in results if r.phase == "prefill"],
        "partitioned": [r for r in results if r.case.schedule != ALONE],
        "undisturbed": [r for r in results if not r.disturbed],
    }
    return {
        name: {
            "cases": len(group),
            "median": statistics.median(abs(r.error) for r in group),
            "worst": max(abs(r.error) for r in group),
            "corrected_median": statistics.median(abs(r.corrected_error) for r in group),
            "corrected_worst": max(abs(r.corrected_error) for r in group),
        }
        for name, group in groups.items()
        if group
    }


def show(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(box=None, pad_edge=False)
    for name in ("shape", "dtype", "devices", "phase"):
        table.add_column(name)
    columns = ("batch", "context", "rounds", "measured", "predicted", "error", "drift", "corrected")
    for name in columns:
        table.add_column(name, justify="right")
    for r in results:
        mark = "*" if r.disturbed else ""
        table.add_row(
            r.case.shape, r.case.dtype, r.case.schedule, r.phase,
            str(r.case.batch), str(r.case.context), str(len(r.rounds)),
            f"{r.measured_s * 1e3:.2f} ms{mark}", f"{r.predicted_s * 1e3:.2f} ms",
            f"{r.error:+.1%}", f"{r.drift:.2f}", f"{r.corrected_error:+.1%}",
        )  # fmt: skip
    console.print(table)
    console.print("* too few undisturbed runs: the quickest instead")
    for name, errors in summary(results).items():
        console.print(
            f"{name:<12} {errors['cases']:>3.0f} cases: median {errors['median']:.1%}, worst "
            f"{errors['worst']:.1%}; corrected for drift: median "
            f"{errors['corrected_median']:.1%}, worst {errors['corrected_worst']:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--all", action="store_true", help="every combination, not a third")
    parser.add_argument("--rounds", type=int, default=5, help="at most, of a phase of a case")
    parser.add_argument("--seconds", type=float, default=3.0, help="after which no round begins")
    parser.add_argument("--profile", help="a profile file for the CPU (default: measured now)")
    parser.add_argument(
        "--device", default=SIM, help="of the partitioned cases; cpu: leave them out"
    )
    parser.add_argument("--only-partitioned", action="store_true", help="leave the others out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    profile = load_profile(args.profile) if args.profile else measure_profile()
    wanted, cut = cases(args), partitioned_cases(args)
    setups = [(cpu_setup(profile), wanted)]
    if cut:
        try:
            setups.append((partitioned_setup(args.device, profile), cut))
        except HelmError as reason:
            raise SystemExit(str(reason)) from None
    results: list[Result] = []
    for setup, its_cases in setups:
        if setup.profile.unsettled:
            print(
                "unsettled in the profile:", *setup.profile.unsettled, sep="\n  ", file=sys.stderr
            )
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


def as_row(result: Result) -> dict[str, Any]:
    names = ("measured_s", "error", "drift", "corrected_error", "disturbed")
    return {**dataclasses.asdict(result), **{name: getattr(result, name) for name in names}}


if __name__ == "__main__":
    main()
