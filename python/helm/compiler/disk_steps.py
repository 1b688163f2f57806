"""When steps that read weights from disk end, from what their units take. The same rules as those
of `helm.compiler.timeline`, in plain numbers. Knows no model and no machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helm.compiler.problem import DiskWeights
from helm.plan.disk import around


@dataclass(frozen=True)
class StepTimes:
    """Seconds before the first unit, and of each unit in turn, with what crosses."""

    begin_s: float
    units_s: Sequence[float]

    def play(self, start: float, reads: Reads) -> float:
        """When it has ended."""
        cpu = start + self.begin_s
        for number, run_s in enumerate(self.units_s):
            if number not in reads.units:
                cpu += run_s
                continue
            cpu = max(cpu, reads.next_s()) + run_s
            reads.leave(cpu)
        return cpu


@dataclass(frozen=True)
class VisitingLayer:
    """Seconds of a layer that visits an accelerator: of a copy, besides those of its units, by
    number; of its pages that come along, of the run, of those that go back. It comes with one copy,
    or with one for each unit where any is on disk."""

    latency_s: float
    units_s: Sequence[tuple[int, float]]
    cached_s: float
    run_s: float
    written_s: float


@dataclass(frozen=True)
class VisitingTimes:
    """Seconds of a step whose first layers visit an accelerator: of the CPU until its values go up,
    until they have, of the layers, of what the accelerator runs behind them, until the result has
    come down, and of the CPU then."""

    begin_s: float
    up_s: float
    layers: Sequence[VisitingLayer]
    rest_s: float
    down_s: float
    end_s: float

    def play(self, start: float, reads: Reads) -> float:
        """When it has ended. Of two buffers a layer takes the one that was read longer ago."""
        host = start + self.begin_s
        up = main = host + self.up_s
        down, older, newer, gone_up = start, start, start, start

        def load(layer: VisitingLayer) -> None:
            nonlocal host, up, gone_up
            apart = any(number in reads.units for number, _ in layer.units_s)
            for at, (number, seconds) in enumerate(layer.units_s):
                if number in reads.units:  # once the one before has left its place
                    host = max(host, gone_up, reads.next_s())
                up = max(up, host, older) + seconds
                if at == 0 or apart:
                    up += layer.latency_s
                if number in reads.units:
                    gone_up = up
                    reads.leave(up)

        load(self.layers[0])
        for layer, ahead in zip(self.layers, [*self.layers[1:], None], strict=True):
            there = up
            if layer.cached_s:
                up = main = max(up, main, host) + layer.cached_s
            main = max(main, there, host) + layer.run_s
            older, newer = newer, main
            if ahead is not None:
                load(ahead)
            down = main = max(down, main, host) + layer.written_s
        main = max(main, host) + self.rest_s
        return max(down, main) + self.down_s + self.end_s


class Reads:
    """Units that are read ahead into a ring, in turn from step to step, of a model that has been at
    rest: what fits the ring has been read."""

    def __init__(self, units: Sequence[DiskWeights], ring: int, bytes_per_s: float) -> None:
        self.units = {unit.number for unit in units}
        self._ring = around([(unit.number, unit.read_bytes) for unit in units], ring)
        self._bytes_per_s, self._disk, self._left = bytes_per_s, 0.0, list[float]()

    def next_s(self) -> float:
        """When the next one is there."""
        unit, used = self._ring[len(self._left) % len(self._ring)], len(self._left)
        if used < unit.frees:
            return 0.0
        free = max(self._disk, self._left[used - unit.frees])
        self._disk = free + unit.read_bytes / self._bytes_per_s
        return self._disk

    def leave(self, at: float) -> None:
        """Its place is free."""
        self._left.append(at)


def ends_s(
    steps: Sequence[StepTimes | VisitingTimes], units: Sequence[DiskWeights], ring: int,
    bytes_per_s: float,
) -> list[float]:  # fmt: skip
    """When each of these steps has ended, one after the other."""
    reads, end, ends = Reads(units, ring, bytes_per_s), 0.0, list[float]()
    for step in steps:
        end = step.play(end, reads)
        ends.append(end)
    return ends
