"""Quantities of a noisy machine, where other programs take cores for milliseconds at a time.

Each is timed in short runs that know whether their threads kept their cores. Quantities are visited
in turn until each has enough undisturbed runs or the time is up. What counts is the mean over the
undisturbed runs of a visit, as a step is the sum of many such runs, and of those the median over
the visits, as machines have slow moments. Knows not what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from helm.measure.tiny_model import QUICK

Progress = Callable[[str, float], None]  # (what is measured now, share done from 0 to 1)

_VISIT_S = 0.01  # shorter than other programs usually leave the cores alone
_LEAST_VISITS = 5  # machines drift: not all figures from one moment
_WANTED = 9  # undisturbed runs of each shape
_FEW = 3  # below this many the quickest runs are taken instead


class Timing(Protocol):
    """What one run does, and how long the runs took; see _helm.ProbeTiming."""

    @property
    def flops(self) -> float: ...
    @property
    def bytes(self) -> float: ...
    @property
    def run_s(self) -> list[float]: ...
    @property
    def undisturbed_s(self) -> list[float]: ...


Measure = Callable[[float], Sequence[Timing]]  # seconds -> a timing per shape


@dataclass
class Shape:
    """All runs of one shape."""

    flops: float
    bytes: float
    run_s: list[float] = field(default_factory=list)
    undisturbed_s: list[list[float]] = field(default_factory=list)  # by visit, none empty

    def add(self, timing: Timing) -> None:
        self.run_s += timing.run_s
        if timing.undisturbed_s:
            self.undisturbed_s.append(timing.undisturbed_s)

    @property
    def undisturbed(self) -> int:
        return sum(map(len, self.undisturbed_s))

    @property
    def trusted(self) -> bool:
        """Whether there are undisturbed runs enough to go by."""
        return self.undisturbed >= _FEW

    @property
    def seconds(self) -> float:
        """Of one run that has the machine for itself."""
        if self.trusted:
            return float(np.median([np.mean(visit) for visit in self.undisturbed_s]))
        return float(np.quantile(self.run_s, QUICK))


@dataclass
class Quantity:
    """Something measured in several visits."""

    name: str
    measure: Measure
    shapes: list[Shape] = field(default_factory=list)
    visits: int = 0

    def visit(self, seconds: float) -> None:
        timings = self.measure(seconds)
        self.visits += 1
        self.shapes = self.shapes or [Shape(t.flops, t.bytes) for t in timings]
        for shape, timing in zip(self.shapes, timings, strict=True):
            shape.add(timing)

    @property
    def settled(self) -> bool:
        return self.visits >= _LEAST_VISITS and all(
            shape.undisturbed >= _WANTED for shape in self.shapes
        )

    @property
    def trusted(self) -> bool:
        return all(shape.trusted for shape in self.shapes)

    @property
    def seconds(self) -> float:
        """One run of every shape."""
        return sum(shape.seconds for shape in self.shapes)

    @property
    def flops_per_s(self) -> float:
        return sum(shape.flops for shape in self.shapes) / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return sum(shape.bytes for shape in self.shapes) / self.seconds


def visit(
    quantities: Sequence[Quantity], seconds: float, report: Progress, begin: float, end: float
) -> None:
    """Visits in turn the quantities that are not settled, each at least once, for `seconds`."""
    start = time.perf_counter()
    spent = 0.0
    open_ones = list(quantities)
    while open_ones:
        for quantity in open_ones:
            if spent >= seconds and quantity.visits:
                continue
            settled = 1 - len(open_ones) / len(quantities)
            report(quantity.name, begin + (end - begin) * min(1.0, max(settled, spent / seconds)))
            quantity.visit(min(_VISIT_S, seconds / len(quantities)))
            spent = time.perf_counter() - start
        if spent >= seconds:
            return
        open_ones = [quantity for quantity in open_ones if not quantity.settled]


def rate_ratio(shapes: Sequence[Shape]) -> float:
    """Of two ways to hold weights: the first half of the shapes are products with copied ones, the
    second the same products with others, timed in turn; the rate of these over that of those."""
    half = len(shapes) // 2
    copied, other = (sum(s.seconds for s in part) for part in (shapes[:half], shapes[half:]))
    return copied / other
