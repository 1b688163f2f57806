"""How long steps take in which weights come through a ring of buffers: what comes, what runs and
when are tasks that the timeline plays. Knows no model, no machine and no memory.

A group is what a buffer of the ring holds, such as half a layer; one for which nothing comes takes
none. What comes for a group begins when
all that comes for the group before is there, and its buffer is free: the group that had it has run.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helm.compiler.task import UP, Program, Task, Verb
from helm.compiler.timeline import Flight, Seconds, played
from helm.compiler.times import F64
from helm.plan.units import CPU

ACCELERATOR, UNPACK, DISK, RING = "accelerator", "unpack", "disk", "ring"
_MANY = 12  # groups, or rows of them, after which steps are steady; ratios of 2 and 3 divide it


@dataclass(frozen=True)
class Piece:
    """Ops that follow one another. Seconds are numbers or arrays, an element for each of many
    plans; 0 where there is nothing to do.

    accelerator_s, cpu_s: of the ops there. up_s: until what the accelerator lacks has come from
    host memory. unpack_s: until that is plain there, once it has come. disk_s: until what it lacks
    has come from a disk, past host memory."""

    name: str
    accelerator_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    up_s: Seconds = 0.0
    unpack_s: Seconds = 0.0
    disk_s: Seconds = 0.0


Group = Sequence[Piece]


@dataclass(frozen=True)
class _Ahead(Task):
    """Handed over ahead of time: what is free before it is its lane alone."""

    @functools.cached_property
    def waits(self) -> tuple[str, ...]:
        return (self.lane,)

    @functools.cached_property
    def queue(self) -> str:
        return self.lane


@dataclass
class _Laid:
    """Tasks so far, and the last of each lane, -1 before there is one."""

    tasks: list[Task] = field(default_factory=list)
    seconds: list[Seconds] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=lambda: {CPU: -1, ACCELERATOR: -1})

    def add(self, lane: str, at: int, seconds: Seconds, *after: int, verb: Verb = "run") -> int:
        """verb: "cached" has no end where its seconds are 0."""
        self.tasks.append(_Ahead(lane, verb, lane, (at, at), after))
        self.seconds.append(seconds)
        return len(self.tasks) - 1

    def run(self, lane: str, at: int, seconds: Seconds, *after: int) -> None:
        """Behind what the other device ran last."""
        other = self.last[ACCELERATOR if lane == CPU else CPU]
        before = (other,) if other >= 0 else ()
        self.last[lane] = self.add(lane, at, seconds, *before, *after)


def flight_of(groups: Sequence[Group], slots: int) -> Flight:
    """A step that runs groups in order, with so many buffers."""
    laid, names = _Laid(), list[str]()
    # The last run of each group for which something came; what came for the last.
    freed, loaded = list[int](), list[int]()
    for group in groups:
        come: list[list[int]] = [[] for _ in group]
        comes = any(
            np.any(own) for piece in group for own in (piece.up_s, piece.unpack_s, piece.disk_s)
        )
        if comes:
            free = freed[-slots : len(freed) - slots + 1] if len(freed) >= slots else []
            begin = laid.add(RING, len(names), 0.0, *loaded, *free)
            come = [_coming(laid, piece, at, begin) for at, piece in enumerate(group, len(names))]
            loaded = [task for tasks in come for task in tasks]
        for at, (piece, own) in enumerate(zip(group, come, strict=True), len(names)):
            if np.any(piece.cpu_s):
                laid.run(CPU, at, piece.cpu_s)
            if own or np.any(piece.accelerator_s):
                laid.run(ACCELERATOR, at, piece.accelerator_s, *own)
        if comes:
            freed.append(laid.last[ACCELERATOR])
        names += [piece.name for piece in group]
    layers = (None,) * len(names)
    program = Program(True, "none", tuple(laid.tasks), tuple(names), layers, True)
    return Flight(program, laid.seconds)


def _coming(laid: _Laid, piece: Piece, at: int, begin: int) -> list[int]:
    """The tasks that bring what a piece lacks, once `begin` has ended."""
    come = list[int]()
    if np.any(piece.up_s):
        come.append(laid.add(UP, at, piece.up_s, begin, verb="cached"))
    if np.any(piece.unpack_s):
        come.append(laid.add(UNPACK, at, piece.unpack_s, begin, *come, verb="cached"))
    if np.any(piece.disk_s):
        come.append(laid.add(DISK, at, piece.disk_s, begin, verb="cached"))
    return come


def coming_s(groups: Sequence[Group], slots: int | None) -> F64:
    """Seconds of groups of one piece each, which the accelerator runs in order, through so many
    buffers; None: at least, with any number. What does not come takes no buffer. As the timeline
    plays the programs of plans. Layers that are alike should share their pieces."""
    pieces = list({id(piece): piece for [piece] in groups}.values())
    places = {id(piece): place for place, piece in enumerate(pieces)}
    order = [places[id(piece)] for [piece] in groups]
    shape = np.broadcast_shapes(*(np.shape(s) for p in pieces for s in (p.up_s, p.accelerator_s)))
    up, run = np.empty((2, len(pieces), *shape))
    for at, piece in enumerate(pieces):
        up[at], run[at] = piece.up_s, piece.accelerator_s
    if slots is None:
        counts = np.bincount(order).astype(np.float64)
        return np.asarray(np.maximum(*(np.tensordot(counts, each, 1) for each in (run, up))))
    if run[0].size == 1:
        own = [(float(u), float(r)) for u, r in zip(up.ravel(), run.ravel(), strict=True)]
        return np.full(shape, _ran_s([own[place] for place in order], slots))
    there = up > 0
    every, some = (of(there.reshape(len(up), -1), axis=1).tolist() for of in (np.all, np.any))
    came: Any = 0.0
    ran: Any = 0.0
    free: list[Any] = [0.0] * slots  # when each buffer is, the next first
    for place in order:
        if not some[place]:
            ran = ran + run[place]
            continue
        comes = np.maximum(came, free[0]) + up[place]
        runs = np.maximum(comes, ran) + run[place]
        if every[place]:
            came, ran, free = comes, runs, [*free[1:], runs]
            continue
        some_of = there[place]
        came, ran = np.where(some_of, comes, came), np.where(some_of, runs, ran + run[place])
        free = [np.where(some_of, *both) for both in zip([*free[1:], ran], free, strict=True)]
    return np.asarray(ran)


def _ran_s(seconds: Sequence[tuple[float, float]], slots: int) -> float:
    """The same for one plan and step. seconds: to come and to run, of each group."""
    came, ran, free = 0.0, 0.0, deque([0.0] * slots)
    for up, run in seconds:
        if up > 0:
            came = max(came, free.popleft()) + up
            ran = max(came, ran)
        ran += run
        if up > 0:
            free.append(ran)
    return ran


def step_s(groups: Sequence[Group], slots: int) -> F64:
    """Seconds from the first task to the last, lanes and buffers being free before."""
    return np.asarray(played([flight_of(groups, slots)], 1)[1])


def steady_s(groups: Sequence[Group], slots: int) -> F64:
    """Seconds that the groups take each time where they are run again and again."""
    once, again = (step_s([*groups] * n, slots) for n in (_MANY, 2 * _MANY))
    return (again - once) / _MANY


def lanes_s(groups: Sequence[Group]) -> Mapping[str, F64]:
    """Seconds in which each lane is busy."""
    fields = {ACCELERATOR: "accelerator_s", CPU: "cpu_s", UP: "up_s", UNPACK: "unpack_s",
              DISK: "disk_s"}  # fmt: skip
    return {
        lane: np.asarray(sum(np.asarray(getattr(p, name)) for group in groups for p in group))
        for lane, name in fields.items()
    }
