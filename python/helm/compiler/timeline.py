"""The price of time: plays the tasks of programs on lanes and queues. Knows seconds of tasks, no
model, no machine and no memory.

Seconds are numbers or arrays of any shape, an element for each candidate. A task begins when what
it needs has ended, its lane and its queue are free, and the thread that hands tasks over has come
to it. So times are linear in the max-plus sense: what a layer does to the times at which lanes are
free is a matrix, layers in a row are its products, and steps in turn take its eigenvalue.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from helm.compiler.overflow import Bools
from helm.compiler.task import MAIN, UP, Program, Task
from helm.compiler.times import F64, I64
from helm.plan.units import CPU

Seconds = float | F64


class Spread(NamedTuple):
    """Seconds of layers whose pages are spread: from when the accelerator is free, and from when
    the queue of pages is, which begins `until` after the accelerator."""

    main: F64
    pages: F64
    until: F64


LEAVING = -1  # in place of a task's number
_NEVER = -np.inf
_STATE = (MAIN, UP, "older", "newer")  # what a layer may find: free times, its buffers' last use
_ROUNDING = 1e-13


def _latest(times: Iterable[Seconds]) -> Seconds:
    found: Seconds | None = None
    for time in times:
        found = time if found is None else np.maximum(found, time)
    return _NEVER if found is None else found


class Clock:
    """When lanes, queues and buffers are free; since `start` what was not used yet."""

    def __init__(self, start: Seconds = 0.0) -> None:
        self.start, self.free = start, dict[str, Seconds]()

    def at(self, name: str) -> Seconds:
        return self.free.get(name, self.start)

    def play(
        self, task: Task, seconds: Seconds | Spread, ends: Mapping[int, Seconds]
    ) -> tuple[Seconds, Seconds]:
        """(begin, end). ends: of earlier tasks of its program, by number."""
        if task.awaits:  # by the thread that hands it over
            self.free[CPU] = _latest([self.at(CPU), *(ends[i] for i in task.awaits)])
        times = [*map(self.at, task.waits), *(ends[i] for i in task.after if i in ends)]
        begin = _latest({id(time): time for time in times}.values())
        end: Seconds
        if isinstance(seconds, Spread):
            pages = np.maximum(begin + seconds.until, self.at("pages"))
            end = np.maximum(begin + seconds.main, pages + seconds.pages)
        else:
            end = begin + seconds if np.ndim(seconds) or seconds else begin
        there: Seconds | bool = True if task.verb != "cached" else np.greater(end, begin)
        for name in (task.lane, task.queue):  # of no page there is no task
            self.free[name] = end if there is True else np.where(there, end, self.at(name))
        if task.leaves:
            self.free[task.leaves] = end
        if task.reads:
            older, newer = (f"{task.reads} {age}" for age in ("older", "newer"))
            self.free |= {older: self.at(newer), newer: end}
        return begin, end if there is True else np.where(there, end, _NEVER)


@dataclass(frozen=True)
class Flight:
    """A step on its way. seconds: of every task. counts: how often an `each` task happens, by its
    number. begin_s: of the CPU before the first task. leaving_s: of pages that leave meanwhile, in
    the queue of pages; the link back has room for them."""

    program: Program
    seconds: Sequence[Seconds | Spread]
    counts: Mapping[int, int] = field(default_factory=dict)
    begin_s: Seconds = 0.0
    leaving_s: Seconds = 0.0
    waits: Bools | bool = False  # for the accelerator and what leaves, before it begins

    def parts(self) -> tuple[range, range]:
        """Tasks of the submission and of the collection."""
        rest, end = self.program.rest, len(self.program.tasks)
        return range(rest), range(rest, end)


Spans = dict[int, tuple[Seconds, Seconds]]  # by task; of an `each` from the first to the last


def submit(clock: Clock, flight: Flight) -> Spans:
    spans: Spans = {}
    if np.any(flight.leaving_s):
        written = np.maximum(clock.at(CPU), clock.at(MAIN))
        begin = np.maximum(clock.at("pages"), written)
        clock.free["pages"] = begin + flight.leaving_s
        spans[LEAVING] = (begin, clock.at("pages"))
    if np.any(flight.waits):
        ends = [clock.at(CPU), clock.at(MAIN), *(end for _, end in spans.values())]
        waited = _latest(ends)
        clock.free[CPU] = np.where(flight.waits, waited, clock.at(CPU))
    clock.free[CPU] = clock.at(CPU) + flight.begin_s
    return _walk(clock, flight, flight.parts()[0], spans)


def collect(clock: Clock, flight: Flight, spans: Spans) -> Spans:
    """With what is left; the step has ended when the CPU is free."""
    spans = _walk(clock, flight, flight.parts()[1], spans)
    ends = [clock.at(CPU), *(end for _, end in spans.values())]
    clock.free[CPU] = _latest(ends)
    return spans


def _walk(clock: Clock, flight: Flight, numbers: range, spans: Spans) -> Spans:
    found, ends = dict(spans), {number: end for number, (_, end) in spans.items()}
    for number in numbers:
        task = flight.program.tasks[number]
        if task.each and task.verb != "page":
            continue  # played with its page
        group = [number, number + 1] if task.each else [number]
        for _ in range(flight.counts.get(number, 1)):
            for one in group:
                begin, end = clock.play(flight.program.tasks[one], flight.seconds[one], ends)
                found[one], ends[one] = (found.get(one, (begin,))[0], end), end
    return found


def played(flights: Sequence[Flight], at_once: int) -> tuple[list[Spans], Seconds]:
    """The tasks of steps of which so many are on their way at once, and when the last has ended."""
    clock, found = Clock(), list[Spans]()
    for number, flight in enumerate(flights):
        if number >= at_once:
            earlier = number - at_once
            found[earlier] = collect(clock, flights[earlier], found[earlier])
        found.append(submit(clock, flight))
    for number in range(max(0, len(flights) - at_once), len(flights)):
        found[number] = collect(clock, flights[number], found[number])
    return found, clock.at(CPU)


def period_s(flights: Sequence[Flight]) -> F64:
    """Seconds in which each of these steps happens once, where every one is submitted again when
    it was collected, in turn: the greatest mean of a circuit, by Karp's formula (1978)."""
    clock, spans = Clock(_NEVER), [Spans() for _ in flights]
    clock.free[CPU] = 0.0

    def state() -> list[Seconds]:
        # The last of them has ended when the queue of stages or the CPU is free.
        ends = [_latest(e for _, e in s.values()) for s in spans[:-1]]
        return [clock.at(CPU), clock.at(MAIN), *ends]

    states = [state()]
    for _ in states[0]:
        for number, flight in enumerate(flights):
            if spans[number]:
                collect(clock, flight, spans[number])
            spans[number] = submit(clock, flight)
        states.append(state())
    last, rounds = states.pop(), len(states)
    with np.errstate(invalid="ignore"):  # of what is never used
        means = [
            functools.reduce(
                np.minimum, [(last[i] - x[i]) / (rounds - k) for k, x in enumerate(states)]
            )
            for i in range(rounds)
        ]
    return np.asarray(functools.reduce(np.fmax, means))


# --- layers ------------------------------------------------------------------------------------


def body(tasks: Sequence[Task], seconds: Sequence[Seconds], count: I64 | int = 0) -> F64:
    """[to, from, ...] what the tasks of a layer add to each of `_STATE`, at most, -inf where one
    does not depend on the other. count: of far pages, an `each` pair happens so often."""
    shape = np.broadcast_shapes(np.shape(count), *map(np.shape, seconds))
    ring = next((task.reads for task in tasks if task.reads), "pages")
    names = [name if name in (MAIN, UP) else f"{ring} {name}" for name in _STATE]
    matrix = _identity(shape)
    clock, ends = Clock(_NEVER), dict[int, Seconds]()
    clock.free = dict(zip(names, matrix, strict=True))
    for number, (task, each) in enumerate(zip(tasks, seconds, strict=True)):
        if task.each and task.verb == "page":
            pair = [dataclasses.replace(one, each=False) for one in tasks[number : number + 2]]
            pair[1] = dataclasses.replace(pair[1], after=(0,))
            once = body(pair, seconds[number : number + 2])
            now = np.stack([np.broadcast_to(clock.at(name), (4, *shape)) for name in names])
            many = _product(_power(np.broadcast_to(once, (4, 4, *shape)), count), now)
            clock.free |= dict(zip(names, many, strict=True))
        elif not task.each:
            ends[number] = clock.play(task, each, ends)[1]
    return np.stack([np.broadcast_to(clock.at(name), (4, *shape)) for name in names])


def onward(bodies: Sequence[F64], order: Sequence[int]) -> F64:
    """[1 + layers, state, ...] from lanes that are free at 0: when they are after no layer, after
    the first of `order`, which says by its number in bodies what each does, and so on."""
    return _chained(bodies, order, np.zeros(bodies[0].shape[1:]))


def backward(bodies: Sequence[F64], order: Sequence[int]) -> F64:
    """[1 + layers, state, ...] the time from when a lane is free until the last task has ended: of
    no layer, of the last of `order`, of the last two, and so on."""
    end = np.full(bodies[0].shape[1:], _NEVER)
    end[0] = 0.0
    return _chained([each.swapaxes(0, 1) for each in bodies], order[::-1], end)


def _chained(bodies: Sequence[F64], order: Sequence[int], state: F64) -> F64:
    """Once one kind of layer is all that follows and moves all of the state alike it always will,
    as nothing that it does depends on when."""
    alike = next((i for i in range(len(order)) if len(set(order[i:])) == 1), 0)
    found = [state]
    for number, kind in enumerate(order):
        after = (bodies[kind] + state).max(axis=1)
        if number >= alike:
            with np.errstate(invalid="ignore"):  # of what never depends on the start
                moved = after - state
            there = np.isfinite(moved)
            most = moved.max(axis=0, where=there, initial=_NEVER)
            steady = there | np.isneginf(after)
            near = np.abs(np.where(there, moved - most, 0.0)) <= _ROUNDING * np.abs(
                np.where(there, after, 0.0)
            )
            if (steady & near).all():
                left = np.arange(1, len(order) - number + 1).reshape(-1, *(1,) * state.ndim)
                return np.concatenate([found, state + left * most])
        state = after
        found.append(state)
    return np.stack(found)


def _identity(shape: tuple[int, ...]) -> F64:
    own = np.where(np.eye(len(_STATE), dtype=bool), 0.0, _NEVER)
    return np.broadcast_to(own.reshape(*own.shape, *(1 for _ in shape)), (*own.shape, *shape))


def _product(second: F64, first: F64) -> F64:
    return np.asarray((second[:, :, None] + first[None]).max(axis=1))


def _power(matrix: F64, count: I64 | int) -> F64:
    left = np.asarray(count)
    result = _identity(matrix.shape[2:])
    while left.any():
        result = np.where(left & 1, _product(matrix, result), result)
        left = left >> 1
        if left.any():
            matrix = _product(matrix, matrix)
    return result
