"""What the tasks of a decode step take where stages and copies are paced, from the plan and the
rates alone. Shares no prices with the search: the timeline plays them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from helm.base.formats import tensor_bytes
from helm.compiler.program import lower
from helm.compiler.task import FAR_PARTIAL, Program, Task
from helm.compiler.timeline import Flight
from helm.model.graph import Attention, Embedding, Op, PositionEmbedding
from helm.plan.disk import disk_units
from helm.plan.schema import Plan
from helm.plan.units import CPU, PlacedUnit


@dataclass(frozen=True)
class Rates:
    """Bytes a second: of stages on the CPU and on the device, of either direction of the link, of
    the disk."""

    cpu: float
    own: float
    link: float
    latency_s: float = 0.0
    disk: float = 0.0

    @property
    def device(self) -> str:
        latency = f",latency={self.latency_s * 1e6:.0f}us" if self.latency_s else ""
        return f"sim:memory={self.own:.0f}B/s,link={self.link:.0f}B/s{latency}"


@dataclass(frozen=True)
class Run:
    """A sequence that decodes: its position, and how many of its blocks lie in host memory."""

    position: int
    far: int = 0


class PacedStep:
    """Of sequences that decode together."""

    def __init__(self, plan: Plan, rates: Rates, runs: Sequence[Run]) -> None:
        self._plan, self._rates, self._runs = plan, rates, runs
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._formats = {(held.tensor, held.device): held.format for held in plan.slices}
        self._widths = {value.name: value.width for value in plan.values}
        self._read_bytes = {unit.number: unit.read_bytes for unit in disk_units(plan)}

    def flight(self) -> Flight:
        """A decode step of them all."""
        program = self._program()
        seconds = [self._task_s(task) for task in program.tasks]
        far = sum(run.far for run in self._runs)
        counts = {i: far for i, task in enumerate(program.tasks) if task.verb == "page"}
        return Flight(program, seconds, counts)

    def lane_s(self, cpu: bool) -> float:
        """What the CPU, or the device, computes."""
        flight = self.flight()
        lanes = zip(flight.program.tasks, flight.seconds, strict=True)
        busy = (s for task, s in lanes if task.lane not in ("up", "down"))
        tasks = (task for task in flight.program.tasks if task.lane not in ("up", "down"))
        return sum(float(s) for task, s in zip(tasks, busy, strict=True)  # type: ignore[arg-type]
                   if (task.lane == CPU) == cpu)  # fmt: skip

    def up_s(self) -> float:
        """What the link to the device carries."""
        flight = self.flight()
        lanes = zip(flight.program.tasks, flight.seconds, strict=True)
        return sum(float(s) for task, s in lanes if task.lane == "up")  # type: ignore[arg-type]

    def _program(self) -> Program:
        visits = 0 < self._plan.schedule.visit_tokens <= len(self._runs)
        far = "none"
        if any(run.far for run in self._runs):
            far = "visit" if self._plan.schedule.overflow == "stream" else "cpu"
        return next(p for p in lower(self._plan) if (p.visits, p.far) == (visits, far))

    def _task_s(self, task: Task) -> float:
        units = () if task.units is None else self._plan.units[task.units[0] : task.units[1] + 1]
        rate = self._rates.cpu if task.lane == CPU else self._rates.own
        if task.verb == "copy":
            return self._copy_s(task)
        if task.verb == "read":
            assert task.units is not None
            return self._read_bytes[task.units[0]] / self._rates.disk
        if task.verb == "visit":
            if any(self._plan.lacking):
                return self._lacking(units) / self._rates.link
            return self._cpu_tensors(units) / self._rates.link
        if task.verb in ("cached", "written"):
            return self._pages(units, task.verb) * self._plan.kv.page_bytes / self._rates.link
        if task.verb == "page":
            return self._plan.kv.page_bytes / self._rates.link
        if task.verb == "run":
            return sum(self._op_bytes(unit, op) for unit in units for op in unit.ops) / rate
        before, attention, after = _around_attention(units)
        if task.verb == "before":
            return sum(self._op_bytes(*one) for one in before) / rate
        if task.verb == "after":
            return sum(self._op_bytes(*one) for one in after) / rate
        if task.verb == "near":
            return sum(self._seen_bytes(attention, self._near(r)) for r in self._runs) / rate
        tokens = self._plan.kv.page_tokens
        pages = 1 if task.each else sum(run.far for run in self._runs)
        return self._seen_bytes(attention, pages * tokens) / rate

    def _copy_s(self, task: Task) -> float:
        if task.value == FAR_PARTIAL:
            assert task.units is not None
            _, attention, _ = _around_attention(self._plan.units[task.units[0] :])
            width = attention.heads * (attention.head_dim + 2)
        else:
            width = self._widths[task.value]
        return self._rates.latency_s + 4 * width * len(self._runs) / self._rates.link

    def _near(self, run: Run) -> int:
        return run.position + 1 - run.far * self._plan.kv.page_tokens

    def _seen_bytes(self, attention: Attention, positions: int) -> int:
        kv = self._plan.kv
        return positions * attention.kv_heads * kv.unit_bytes // kv.page_tokens

    def _op_bytes(self, unit: PlacedUnit, op: Op) -> int:
        """What a stage reads: tables by row, other tensors whole, and all positions seen."""
        if isinstance(op, Attention):
            assert op.window == 0
            return sum(self._seen_bytes(op, run.position + 1) for run in self._runs)
        read = sum(self._bytes(name, unit.device) for name in op.weight_names())
        if isinstance(op, (Embedding, PositionEmbedding)):
            return read // self._tensors[op.table].shape[0] * len(self._runs)
        return read

    def _bytes(self, name: str, device: str) -> int:
        held = self._formats.get((name, device), self._formats.get((name, CPU)))
        assert held is not None
        return tensor_bytes(held, self._tensors[name].shape)

    def _lacking(self, units: Iterable[PlacedUnit]) -> int:
        read = {(n, unit.device) for unit in units for op in unit.ops for n in op.weight_names()}
        return sum(self._bytes(name, CPU) for name, on in read if (name, on) not in self._formats)

    def _cpu_tensors(self, units: Iterable[PlacedUnit]) -> int:
        names = {
            name for u in units if u.device == CPU for op in u.ops for name in op.weight_names()
        }
        return sum(self._bytes(name, CPU) for name in names)

    def _pages(self, units: Iterable[PlacedUnit], verb: str) -> float:
        """Whole pages of a layer; of heads that the CPU has their share."""
        own = sum(
            op.kv_heads for u in units if u.device == CPU for op in u.ops
            if isinstance(op, Attention)
        )  # fmt: skip
        tokens = self._plan.kv.page_tokens
        blocks = [math.ceil(run.position / tokens) if verb == "cached" else 1 for run in self._runs]
        return sum(blocks) * own / self._plan.kv.kv_heads


_Ops = list[tuple[PlacedUnit, Op]]


def _around_attention(units: Sequence[PlacedUnit]) -> tuple[_Ops, Attention, _Ops]:
    ops = [(unit, op) for unit in units for op in unit.ops]
    at = next(i for i, (_, op) in enumerate(ops) if isinstance(op, Attention))
    attention = ops[at][1]
    assert isinstance(attention, Attention)
    return ops[:at], attention, ops[at + 1 :]
