"""What a plan becomes: for each kind of step a program, the list of tasks that the runtime walks.

The same rules as the runtime's; a test compares both as text. Knows no times.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from helm.compiler.accesses import accesses
from helm.compiler.task import DISK, DOWN, FAR_PARTIAL, UP, Far, Program, Task, Verb
from helm.errors import PlanError
from helm.model.graph import Attention, Embedding, Select
from helm.plan.disk import DiskUnit, disk_units
from helm.plan.schema import Plan
from helm.plan.units import CPU, PlacedUnit


def lower(plan: Plan) -> tuple[Program, ...]:
    """The programs of every kind of step that the plan can have. Raises PlanError for a layout
    that the runtime refuses."""
    widths = {value.name: value.width for value in plan.values}
    schedule, visits = plan.schedule, plan.schedule.visit_tokens > 0
    kinds: list[tuple[bool, Far]] = [(False, "none")]
    if visits:
        kinds.append((True, "none"))
    if plan.overflows:
        fars: tuple[Far, ...] = ("visit", "cpu", "both")
        for far in fars[: 3 if schedule.overflow == "cpu" else 1]:
            kinds += [(False, far), (True, far)] if visits else [(False, far)]
    disk, ring = disk_units(plan), (plan.lacking, schedule.visit_buffers)
    return tuple(lowered(plan.units, widths, plan.logits, *kind, disk, *ring) for kind in kinds)


def lowered(
    units: Sequence[PlacedUnit], widths: Mapping[str, int], logits: str, visits: bool, far: Far,
    disk: Sequence[DiskUnit] = (), lacking: Sequence[bool] = (), buffers: int = 2,
) -> Program:  # fmt: skip
    """The program of one kind. widths: of every value. lacking: see `Plan`. buffers: that visit."""
    return _Lowering(units, widths, visits, far, disk, lacking, buffers).program(logits)


@functools.cache
def pattern(visits: bool, far: Far) -> Program:
    """Where the ends and layer 0 lie on the CPU, layer 1 on the accelerator: what is in any other
    program is in this one, if for more layers."""
    value = "hidden"
    attentions = [Attention(value, 0, 0, 0, value, i, 1, 1, 1, 1.0, 0) for i in range(2)]
    units = (
        PlacedUnit("embedding", "embedding", None, CPU, (Embedding("", value),)),
        PlacedUnit("layer.0", "attention", 0, CPU, (attentions[0],)),
        PlacedUnit("layer.1", "attention", 1, "accelerator", (attentions[1],)),
        PlacedUnit("head", "head", None, CPU, (Select(value, value),)),
    )
    return lowered(units, {value: 1}, value, visits, far)


@functools.cache
def layer_tasks(visits: bool, far: Far) -> tuple[Task, ...]:
    """Of the layer of the pattern that visits, or whose pages are spread, with `after` counted
    among them."""
    tasks, unit = pattern(visits, far).tasks, 1 if visits else 2
    mine = [i for i, task in enumerate(tasks) if task.units == (unit, unit)]
    place = {number: here for here, number in enumerate(mine)}
    return tuple(
        replace(tasks[i], after=tuple(place[j] for j in tasks[i].after if j in place)) for i in mine
    )


def is_layer(unit: PlacedUnit) -> bool:
    return any(isinstance(op, Attention) for op in unit.ops)


@dataclass
class _Stage:
    """Units from `begin` until before `end`. copies: of values that it is the last to write, with
    the stage that reads each. handed: tasks of copies that it waits for."""

    begin: int
    end: int
    device: str
    copies: list[tuple[int, str]]
    handed: list[int]


class _Lowering:
    def __init__(
        self, units: Sequence[PlacedUnit], widths: Mapping[str, int], visits: bool, far: Far,
        disk: Sequence[DiskUnit] = (), lacking: Sequence[bool] = (), buffers: int = 2,
    ) -> None:  # fmt: skip
        self._disk, self._buffers, self._lacking = disk, buffers, lacking or (False,) * len(units)
        self._on_disk = {unit.number: unit for unit in disk}
        self._disk_users: list[int] = []  # tasks after which the memory of what was read is free
        self._units, self._widths, self._far, self._visits = units, widths, far, visits
        there = next((unit.device for unit in units if unit.device != CPU), CPU)
        self._places = [
            there if visits and unit.device == CPU and unit.layer is not None else unit.device
            for unit in units
        ]
        used: dict[object, set[str]] = {}
        for unit, place in zip(units, self._places, strict=True):
            used.setdefault((unit.layer, unit.kind), set()).add(place)
        # By unit: whether those of its layer and kind run on several devices.
        self._cut = [len(used[unit.layer, unit.kind]) > 1 for unit in units]
        self._tasks: list[Task] = []
        self._last: dict[str, int] = {}  # run of each device
        self._handed: list[int] = []  # copies for the stage that begins
        self._groups: list[tuple[int, int]] = []  # whose weights visit
        self._apart_groups = False  # in several stages
        self._loads: list[int] = []
        self._visitors: list[int] = []  # runs of those

    def program(self, logits: str) -> Program:
        stages = self._stages()
        self._find_groups(stages)
        for stage in stages:
            self._stage(stage)
            for reader, value in stage.copies:
                to = stages[reader]
                to.handed.append(self._copy(value, stage.device, to.device))
        if self._places[-1] != CPU:
            self._copy(logits, self._places[-1], CPU)
        units = self._units
        return Program(
            self._visits, self._far, tuple(self._tasks), tuple(unit.name for unit in units),
            tuple(unit.layer for unit in units), any(self._cut) or self._apart_groups,
        )  # fmt: skip

    def _stages(self) -> list[_Stage]:
        """Longest runs on one device, with what they hand over."""
        stages: list[_Stage] = []
        for unit, device in enumerate(self._places):
            if stages and stages[-1].device == device and not self._apart(unit):
                stages[-1].end = unit + 1
            else:
                stages.append(_Stage(unit, unit + 1, device, [], []))
        writer: dict[str, int] = {}
        there: dict[str, set[str]] = {}  # devices that have a value as it was last written
        for at, stage in enumerate(stages):
            for one in self._units[stage.begin : stage.end]:
                for value, reads, writes in accesses(one.ops, self._widths):
                    if reads and value in writer and stage.device not in there[value]:
                        stages[writer[value]].copies.append((at, value))
                        there[value].add(stage.device)
                    if writes:
                        writer[value], there[value] = at, {stage.device}
        return stages

    def _apart(self, unit: int) -> bool:
        """Whether a unit must not share a stage with the one before it: both are of what is cut,
        and between them stands what another device has to do."""
        before, own = self._units[unit - 1], self._units[unit]
        return self._cut[unit] and (before.layer, before.kind) == (own.layer, own.kind)

    def _add(self, task: Task) -> int:
        self._tasks.append(task)
        return len(self._tasks) - 1

    def _run(self, verb: Verb, device: str, begin: int, end: int, *after: int) -> int:
        wanted, self._handed = (*self._handed, *after), []
        self._last[device] = self._add(Task(device, verb, device, (begin, end - 1), wanted))
        return self._last[device]

    def _copy(self, value: str, source: str, to: str) -> int:
        lane, device = (DOWN, source) if to == CPU else (UP, to)
        return self._add(Task(lane, "copy", device, None, (self._last[source],), value))

    def _stage(self, stage: _Stage) -> None:
        self._handed = stage.handed
        if not self._loads and self._groups and self._groups[0][0] < stage.end:
            for _ in range(self._buffers - 1):
                self._visit_next()
        unit = stage.begin
        while unit < stage.end:
            after = self._group_end(unit)
            if after > unit:
                self._visiting(stage.device, unit, after)
            else:
                while after < stage.end and self._group_end(after) == after:
                    after += 1
                self._resident(stage.device, unit, after)
            unit = after

    def _group_end(self, unit: int) -> int:
        """Behind the units whose weights come with this one's: its layer, or it; else itself."""
        end = self._layer_end(unit, len(self._units))
        if any(self._units[i].device != self._places[i] for i in range(unit, end)):
            return end
        return unit + 1 if self._lacking[unit] else unit

    def _find_groups(self, stages: Sequence[_Stage]) -> None:
        for stage in stages:
            before, unit = len(self._groups), stage.begin
            while unit < stage.end:
                end = self._group_end(unit)
                if end > unit:
                    self._groups.append((unit, end))
                unit = max(end, unit + 1)
            self._apart_groups |= 0 < before < len(self._groups)
        if self._apart_groups and self._visits:
            raise PlanError(
                "[plan] layers whose weights visit the GPU must follow one another there; "
                'set schedule.prefill to "compute"'
            )

    def _layer_end(self, begin: int, end: int) -> int:
        """Behind the units of the layer of unit `begin`."""
        layer, after = self._units[begin].layer, begin + 1
        while after < end and layer is not None and self._units[after].layer == layer:
            after += 1
        return after

    def _visit_next(self) -> None:
        index = len(self._loads)
        if index < len(self._groups):
            (begin, end), read = self._groups[index], index - self._buffers
            after = (self._visitors[read],) if read >= 0 else ()
            if any(begin <= unit.number < end for unit in self._disk):  # then unit by unit
                own = [(i, i + 1) for i in range(begin, end)
                       if self._units[i].device != self._places[i]]  # fmt: skip
            else:
                own = [(begin, end)]
            for first, behind in own:
                self._visit(first, behind, after)
            self._loads.append(len(self._tasks) - 1)

    def _visit(self, begin: int, end: int, after: tuple[int, ...]) -> None:
        one = self._on_disk.get(begin) if end == begin + 1 else None
        before = self._disk_users[-1:]  # whose memory is given back first
        wanted = () if one is None else (self._read(one),)
        number = self._add(Task(UP, "visit", self._places[begin], (begin, end - 1),
                                (*after, *wanted), aside=True))  # fmt: skip
        if one is not None:
            self._tasks[-1] = replace(self._tasks[-1], awaits=(*before, *wanted))
            self._uses(number, one)

    def _visiting(self, device: str, begin: int, end: int) -> None:
        loaded, units = self._loads[len(self._visitors)], (begin, end - 1)
        pages = self._units[begin].device != device or end > begin + 1
        cached = (self._add(Task(UP, "cached", device, units)),) if pages else ()
        self._visitors.append(self._run("run", device, begin, end, loaded, *cached))
        self._tasks[-1] = replace(self._tasks[-1], reads="weights")
        self._visit_next()
        if pages:
            self._add(Task(DOWN, "written", device, units, (self._visitors[-1],)))

    def _read(self, unit: DiskUnit) -> int:
        """Of the next unit on disk, in the order of the plan."""
        at, users = len(self._disk_users), self._disk_users
        after = (users[at - unit.frees],) if at >= unit.frees else ()
        before = self._disk[(at - unit.frees) % len(self._disk)].number
        units = unit.number, unit.number
        return self._add(Task(DISK, "read", CPU, units, after, needs=f"ring {before}"))

    def _uses(self, number: int, unit: DiskUnit) -> None:
        """The task leaves the memory in which the unit was."""
        self._tasks[number] = replace(self._tasks[number], leaves=f"ring {unit.number}")
        self._disk_users.append(number)

    def _reading(self, begin: int, end: int) -> None:
        """Runs of the CPU, those units apart of which weights come from disk."""
        for unit in self._disk:
            if not begin <= unit.number < end:
                continue
            if unit.number > begin:
                self._run("run", CPU, begin, unit.number)
            read, begin = self._read(unit), unit.number + 1
            number = self._run("run", CPU, unit.number, begin)
            wanted = (read, *self._tasks[number].after)
            self._tasks[number] = replace(self._tasks[number], after=wanted)
            self._uses(number, unit)
        if begin < end:
            self._run("run", CPU, begin, end)

    def _resident(self, device: str, begin: int, end: int) -> None:
        if device == CPU and self._disk:
            self._reading(begin, end)
            return
        if device == CPU or self._far == "none":
            self._run("run", device, begin, end)
            return
        while begin < end:
            after = self._layer_end(begin, end)
            if is_layer(self._units[begin]):
                self._spread(device, begin, after)
            else:
                while after < end and not is_layer(self._units[after]):
                    after += 1
                self._run("run", device, begin, after)
            begin = after

    def _spread(self, device: str, begin: int, end: int) -> None:
        units = (begin, end - 1)
        query = self._run("before", device, begin, end)
        on_cpu = self._far in ("cpu", "both")
        if on_cpu:
            attention = next(op for op in self._units[begin].ops if isinstance(op, Attention))
            query = self._add(Task(DOWN, "copy", device, units, (query,), attention.input, True))
        if self._far in ("visit", "both"):
            page = self._add(Task(UP, "page", device, units, aside=True, each=True))
            far = self._run("far", device, begin, end, page)
            self._tasks[far] = replace(self._tasks[far], each=True, reads="pages")
        self._run("near", device, begin, end)
        partial: tuple[int, ...] = ()
        if on_cpu:
            far = self._run("far", CPU, begin, end, query)
            partial = (self._add(Task(UP, "copy", device, units, (far,), FAR_PARTIAL)),)
        self._run("after", device, begin, end, *partial)
