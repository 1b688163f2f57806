"""What accuracy.py has measured: runs, visits, results, their errors, tables. Runs nothing."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accuracy_cases import ALONE, Case

ENOUGH = 3  # undisturbed runs of a decode


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


@dataclass(frozen=True)
class Visit:
    """A prediction and the rounds after it. predicted_s as Run.seconds; scaled_s: the part of it
    that drift corrects, by device. rounds: the runs that count of each, and how many were
    undisturbed."""

    predicted_s: float
    scaled_s: dict[str, float]
    rounds: list[tuple[list[Run], int]]

    @property
    def measured_s(self) -> float:
        return self.median(lambda run: run.seconds)

    @property
    def corrected_error(self) -> float:
        def expected_s(drift: Mapping[str, float]) -> float:
            late = (s * (1 / drift[device] - 1) for device, s in self.scaled_s.items())
            return self.predicted_s + sum(late)

        return self.median(lambda run: expected_s(run.drift) / run.seconds) - 1

    def median(self, of: Callable[[Run], float]) -> float:
        """Over the rounds, of the medians over their runs."""
        return statistics.median(statistics.median(map(of, runs)) for runs, _ in self.rounds)


@dataclass
class Result:
    """One phase of one case; medians over its visits."""

    case: Case
    phase: str
    visits: list[Visit]

    @property
    def predicted_s(self) -> float:
        return self._median(lambda visit: visit.predicted_s)

    @property
    def measured_s(self) -> float:
        return self._median(lambda visit: visit.measured_s)

    @property
    def error(self) -> float:
        return self._median(lambda visit: visit.predicted_s / visit.measured_s) - 1

    @property
    def drift(self) -> float:
        """Of the CPU."""
        return self._median(lambda visit: visit.median(lambda run: run.drift["cpu"]))

    @property
    def corrected_error(self) -> float:
        return self._median(lambda visit: visit.corrected_error)

    def _median(self, of: Callable[[Visit], float]) -> float:
        return statistics.median(map(of, self.visits))

    @property
    def rounds(self) -> int:
        return sum(len(visit.rounds) for visit in self.visits)

    @property
    def disturbed(self) -> bool:
        """Whether the quickest runs stand for undisturbed ones in most rounds."""
        counts = [count for visit in self.visits for _, count in visit.rounds]
        return statistics.median(counts) < (ENOUGH if self.phase == "decode" else 1)


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
            str(r.case.batch), str(r.case.context), str(r.rounds),
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


def as_row(result: Result) -> dict[str, Any]:
    names = ("predicted_s", "measured_s", "error", "drift", "corrected_error", "disturbed")
    return {**dataclasses.asdict(result), **{name: getattr(result, name) for name in names}}
