"""A step as a list of tasks on lanes, in the order in which they are enqueued. Plain data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from helm.plan.units import CPU

Far = Literal["none", "visit", "cpu", "both"]
Verb = Literal[
    "run", "before", "near", "far", "after", "copy", "visit", "cached", "written", "page", "read"
]  # fmt: skip
UP, DOWN, MAIN, DISK = "up", "down", "main", "disk"
FAR_PARTIAL = "attention over far pages"
_RUNS = ("run", "before", "near", "far", "after")
_HEADS = {
    "none": "",
    "visit": ", far pages visit",
    "cpu": ", far pages on cpu",
    "both": ", far pages visit and on cpu",
}


@dataclass(frozen=True)
class Task:
    """lane: a device, or a direction of its link. verb: `run` units; of a layer whose pages are
    spread, the part `before` attention to them, attention to `near` and `far` ones, and what comes
    `after`; `copy` a value; weights of a layer `visit`; its pages that are `cached` come along and
    those `written` go back; a far `page` comes. units: first and last, of a copy those of its
    layer, if it has one. aside: not in the queue of the device's stages. each: for every far page
    in turn, with the task behind. after: tasks of other lanes whose results or buffers it needs.
    `read` weights of a unit from disk. awaits: tasks that must have ended before it is handed over.
    leaves: what waits for the unit's memory in the ring.
    """

    lane: str
    verb: Verb
    device: str  # that computes, or whose link is used
    units: tuple[int, int] | None
    after: tuple[int, ...] = ()
    value: str = ""
    aside: bool = False
    each: bool = False
    awaits: tuple[int, ...] = ()
    reads: str = ""  # the buffers in turn of which it reads one
    needs: str = ""  # of the ring: memory that must be left
    leaves: str = ""  # and memory that it leaves

    @functools.cached_property
    def waits(self) -> tuple[str, ...]:
        """What must be free: the lane, the queue, and a buffer. A task begins no earlier than the
        thread that hands it over, which is the CPU's lane."""
        if self.lane == DISK:  # reads go on by themselves, into memory that is left
            return (DISK, self.needs)
        buffer = {"visit": ("weights older",), "page": ("pages older",)}.get(self.verb, ())
        return tuple(dict.fromkeys((self.lane, self.queue, CPU, *buffer)))

    @functools.cached_property
    def queue(self) -> str:
        if self.lane in (CPU, DISK) or not self.aside:
            return self.lane if self.lane in (CPU, DISK) else MAIN
        return "weights" if self.verb == "visit" else "pages"


@dataclass(frozen=True)
class Program:
    """Of the steps in which weights `visit` or rest, and far pages visit, or the CPU attends to
    them, or both, each to some, as `far` says. names, layers: of its units. cut: units of one layer
    and kind run on several devices, or weights come for several stages."""

    visits: bool
    far: Far
    tasks: tuple[Task, ...]
    names: tuple[str, ...]
    layers: tuple[int | None, ...]
    cut: bool

    @functools.cached_property
    def rest(self) -> int:
        """The first task that is left for when the step is collected: one of the CPU that waits
        for a device, but for attention within a layer. None is left where units are cut, as then
        the CPU computes all along."""
        tasks = enumerate(() if self.cut else self.tasks)
        return next(
            (i for i, t in tasks if t.lane == CPU and t.verb == "run" and t.after), len(self.tasks)
        )

    def subject(self, task: Task) -> str:
        """What the task is about, as in the text."""
        if task.verb == "copy":
            ends = (task.device, CPU) if task.lane == DOWN else (CPU, task.device)
            return f"{task.value} {'>'.join(ends)}"
        assert task.units is not None
        first, last = (self.names[unit] for unit in task.units)
        if task.verb in ("run", "read"):
            return first if first == last else f"{first}..{last}"
        layer = f"layer.{self.layers[task.units[0]]}"
        if task.verb == "visit":
            return layer if self.visits and self._is_layer(*task.units) else first
        return f"{layer} {_PARTS.get(task.verb, task.verb)}"

    def _is_layer(self, first: int, last: int) -> bool:
        """Whether these are all of its units."""
        layer = self.layers[first]
        return self.layers.index(layer) == first and layer not in self.layers[last + 1 :]

    def text(self) -> str:
        """A line for each task, below one for the kind."""
        lines = [f"program {'visit' if self.visits else 'rest'}{_HEADS[self.far]}"]
        for index, task in enumerate(self.tasks):
            words = [
                str(index),
                task.lane,
                verb_of(task),
                self.subject(task) + ", each" * task.each,
            ]
            words += ["aside"] * task.aside
            words += ["after", *map(str, task.after)] if task.after else []
            lines.append(" ".join(words))
        return "\n".join(lines)


_PARTS = {"page": "far"}


def verb_of(task: Task) -> str:
    """run, copy, visit, page or read."""
    if task.verb in _RUNS:
        return "run"
    return "page" if task.verb in ("cached", "written", "page") else task.verb
