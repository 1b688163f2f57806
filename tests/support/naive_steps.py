"""Steps of the search's oracle: how long every task of a plan's program takes, in plain loops.

What a program is comes from `helm.compiler.program`; nothing else of helm's pricing is shared.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

from naive_timeline import Step

import naive_overflow
from helm.compiler.program import lowered
from helm.compiler.task import Program
from helm.model.graph import Attention, Layer, Unit
from helm.plan.units import PlacedUnit
from naive_rates import (
    F32,
    Plan,
    Task,
    attend,
    beside,
    kv_size,
    layer_ops,
    pair_count,
    places,
    seen_positions,
    unit_seconds,
)

_PROGRAMS: dict[Any, Program] = {}


def units_of(place: Any) -> tuple[Unit, ...]:
    """Of a layer, or the one itself."""
    return place.units if isinstance(place, Layer) else (place,)


def program_of(task: Task, plan: Plan, visits: bool, far: Any) -> Program:
    key = (id(task.model.graph), tuple(plan.devices), visits, far)
    if key not in _PROGRAMS:
        graph = task.model.graph
        units = [
            PlacedUnit(unit.name, unit.kind, unit.layer, site, unit.ops)
            for place, site in zip(places(task), plan.devices, strict=True)
            for unit in units_of(place)
        ]
        widths = {value.name: value.width for value in graph.values}
        _PROGRAMS[key] = lowered(units, widths, graph.logits, visits, far)
    return _PROGRAMS[key]


def cache_of(task: Task, plan: Plan) -> naive_overflow.Cache:
    total = task.batch * math.ceil(task.context / task.page_tokens)
    return naive_overflow.Cache(task.batch * plan.pages, total, task.page_tokens, task.watermark)


@dataclass
class Batch:
    """What a step computes: runs (past, tokens) of sequences, how many rows of logits. far: blocks
    of each run in host memory; left: those that leave before the step."""

    task: Task
    plan: Plan
    runs: list[tuple[int, int]]
    outputs: int
    far: list[int]
    left: int = 0
    waits: bool = False
    visits: bool = False
    prompts: bool = True

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def site(self) -> str:
        """How attention reaches far pages."""
        if not any(self.far) or "accelerator" not in self.plan.devices[1:-1]:
            return "none"
        return "cpu" if self.prompts is False and self.plan.overflow == "cpu" else "visit"

    @functools.cached_property
    def program(self) -> Program:
        return program_of(self.task, self.plan, self.visits, self.site)

    def step(self) -> Step:
        """To be run once."""
        task, link = self.task, self.task.profile["link"]
        program, seconds, counts = self.program, [], {}
        for number, one in enumerate(program.tasks):
            seconds.append(self._seconds(program, number))
            if one.verb == "page":
                counts[number] = self.visits_of(self._op(one)).pages
        there = next((n for n, one in enumerate(program.tasks) if one.lane != "cpu"), None)
        if there is not None and "accelerator" in self.plan.devices:
            seconds[there] += task.profile["accelerator"]["step_s"]
            if self.plan.devices[0] == "accelerator":  # token ids
                size = self.tokens * F32 / link["to_accelerator_bytes_per_s"]
                seconds[there] += link["latency_s"] + size
        own = zip(places(task), self.plan.devices, strict=True)
        pages = [kv_size(task, op) for unit, site in own if site != "cpu" for op in layer_ops(unit)]
        leaving = self.left * task.page_tokens * sum(pages) / link["to_host_bytes_per_s"]
        begin = task.profile["cpu"]["step_s"]
        return Step(program, seconds, counts, begin, leaving, self.waits)

    def _unit(self, one: Any) -> Layer:
        first, last = one.units
        return Layer(self.task.model.graph.units[first : last + 1])

    def _op(self, one: Any) -> Attention:
        return layer_ops(self._unit(one))[0]

    def _seconds(self, program: Program, number: int) -> float:
        one, task, link = program.tasks[number], self.task, self.task.profile["link"]
        up, down = link["to_accelerator_bytes_per_s"], link["to_host_bytes_per_s"]
        rate = up if one.lane == "up" else down
        if one.verb == "run":
            first, last = one.units
            units = task.model.graph.units[first : last + 1]
            return sum(self.whole(unit, one.device) for unit in units)
        if one.verb == "copy" and one.units is None:
            value = next(v for v in task.model.graph.values if v.name == one.value)
            rows = self.tokens if value.rows == "tokens" else self.outputs
            return link["latency_s"] + F32 * rows * value.width / rate if rows else 0.0
        op, launch = self._op(one), self._launch()
        if one.verb == "visit":
            return link["latency_s"] + task.model.weight_bytes([self._unit(one)]) / up
        if one.verb == "cached":
            return sum(past for past, _ in self.runs) * kv_size(task, op) / up
        if one.verb == "written":
            return self.tokens * kv_size(task, op) / down
        found = self.visits_of(op)
        if one.verb == "page":
            copied = found.copied * kv_size(task, op) / up
            return (found.pages * link.get("queued_copy_s", link["latency_s"]) + copied) / max(
                1, found.pages
            )
        if one.verb == "copy":
            widths = {value.name: value.width for value in task.model.graph.values}
            width = op.heads * (op.head_dim + 2) if one.lane == "up" else widths[op.input]
            return link["latency_s"] + F32 * len(self.runs) * width / rate
        if one.verb == "far":
            if one.device == "cpu":
                return self._wait() + self._far(op, "cpu") + self._slower(op, "cpu")
            return self._far(op, "accelerator") / max(1, found.pages) + launch + self._stage()
        return (
            self._stage()
            + self._slower(op, "accelerator") * (one.verb == "near")
            + self._part(one.verb, self._unit(one), op, launch)
        )

    def _launch(self) -> float:
        """Of one more op; the published placement, with no pages there, has none."""
        return float(self.task.profile["accelerator"]["op_s"]) if self.plan.pages else 0.0

    def _stage(self) -> float:
        """Of one more stage."""
        found = self.task.profile["accelerator"].get("stage_s", 0.0)
        return float(found) if self.plan.pages else 0.0

    def _wait(self) -> float:
        """Of the CPU for the accelerator, and its own fixed cost."""
        host = self.task.profile["cpu"]
        return float(self.task.profile["accelerator"]["step_s"] + host["step_s"] + 2 * host["op_s"])

    def _slower(self, op: Attention, site: str) -> float:
        """What attention of one takes longer as both attend."""
        if self.site != "cpu":
            return 0.0
        link = self.task.profile["link"]
        widths = {value.name: value.width for value in self.task.model.graph.values}
        down = F32 * len(self.runs) * widths[op.input] / link["to_host_bytes_per_s"]
        begin = link["latency_s"] + down + self._wait()
        disturbed = dataclasses.replace(self, task=beside(self.task))
        fixed = self.task.profile["accelerator"]["op_s"] + self._stage()
        near, far = self._near(op) + fixed, self._far(op, "cpu")
        if near <= begin or far == 0.0:
            return 0.0
        slow = {
            "accelerator": (disturbed._near(op) + fixed) / near,
            "cpu": disturbed._far(op, "cpu") / far,
        }
        both = min((near - begin) * slow["accelerator"], far * slow["cpu"])
        return both - both / slow[site]

    def _part(self, verb: str, layer: Layer, op: Attention, launch: float) -> float:
        """Up to attention, of attention to near pages, and from there on. Two empty partials more
        than a layer in one piece."""
        op_s = self.task.profile["accelerator"]["op_s"]
        ops = itertools.takewhile(lambda one: not isinstance(one, Attention), layer.ops)
        first = dataclasses.replace(layer.units[0], ops=tuple(ops))
        before = self._bare(first, "accelerator")
        if verb == "before":
            return before + op_s + 2 * launch
        if verb == "near":
            return op_s + self._near(op)
        return self._bare(layer, "accelerator") - before - 2 * op_s

    def _bare(self, unit: Unit | Layer, site: str) -> float:
        sequences = len(self.runs) if not self.prompts else 1
        return unit_seconds(self.task, unit, site, self.tokens, self.outputs, sequences)

    def whole(self, unit: Unit | Layer, site: str) -> float:
        """With all of its KV there. A step without logits has no head."""
        if unit is self.task.model.graph.units[-1] and not self.outputs:
            return 0.0
        sequences, total = len(self.runs) if not self.prompts else 1, 0.0
        tokens = self.outputs if unit is self.task.model.graph.units[-1] else self.tokens
        total = unit_seconds(self.task, unit, site, tokens, self.outputs, sequences)
        for op in layer_ops(unit):
            total += self._attention(op, site)
        return total

    def _attention(self, op: Attention, site: str) -> float:
        if not self.prompts:
            seen = sum(seen_positions(op, past, 1) for past, _ in self.runs)
            return attend(self.task, op, site, 1, seen, seen)
        return sum(
            attend(
                self.task,
                op,
                site,
                count,
                pair_count(op, past, count),
                seen_positions(op, past, count),
            )
            for past, count in self.runs
        )

    def _beyond(self, op: Attention, past: int, count: int, far: int) -> int:
        """Pairs with keys in host memory."""
        end = min(far * self.task.page_tokens, past)
        return sum(
            max(0, end - max(0, query - op.window + 1 if op.window else 0))
            for query in range(past, past + count)
        )

    def _near(self, op: Attention) -> float:
        if not self.prompts:
            seen = sum(seen_positions(op, past, 1) for past, _ in self.runs)
            seen -= self.visits_of(op).seen
            return attend(self.task, op, "accelerator", 1, seen, seen)
        total = 0.0
        for (past, count), far in zip(self.runs, self.far, strict=True):
            pairs = pair_count(op, past, count) - self._beyond(op, past, count, far)
            seen = seen_positions(op, past, count) - self._visits(op, past, count, far).seen
            total += attend(self.task, op, "accelerator", count, pairs, seen)
        return total

    def _far(self, op: Attention, site: str) -> float:
        if not self.prompts:
            seen = self.visits_of(op).seen
            return attend(self.task, op, site, 1, seen, seen)
        return sum(
            attend(
                self.task, op, site, count, self._beyond(op, past, count, far),
                self._visits(op, past, count, far).seen,
            )
            for (past, count), far in zip(self.runs, self.far, strict=True)
        )  # fmt: skip

    def _visits(self, op: Attention, past: int, count: int, far: int) -> naive_overflow.Visits:
        hidden = past + count - seen_positions(op, past, count)
        filled = past if self.prompts else past + count
        return naive_overflow.visits(far, self.task.page_tokens, filled, hidden)

    def visits_of(self, op: Attention) -> naive_overflow.Visits:
        """Of all runs."""
        total = naive_overflow.Visits()
        for (past, count), far in zip(self.runs, self.far, strict=True):
            one = self._visits(op, past, count, far)
            total = naive_overflow.Visits(
                total.pages + one.pages, total.copied + one.copied, total.seen + one.seen
            )
        return total

    def copies_s(self) -> float:
        """Of pages that visit."""
        if self.site != "visit":
            return 0.0
        tasks = enumerate(self.program.tasks)
        pages = [(n, one) for n, one in tasks if one.verb == "page"]
        return sum(
            self._seconds(self.program, n) * self.visits_of(self._op(one)).pages for n, one in pages
        )


def decode_batch(task: Task, plan: Plan, context: int) -> Batch:
    """A token for each of the task's sequences."""
    far = naive_overflow.after_prompts(cache_of(task, plan), task.batch, context)
    runs = [(context - 1, 1)] * task.batch
    return Batch(task, plan, runs, task.batch, far, prompts=False)


def prefill_batches(task: Task, plan: Plan) -> list[Batch]:
    """The steps that prompts fill."""
    steps = fill_steps(task, plan.step_tokens)
    away = naive_overflow.through_prefill(cache_of(task, plan), steps)
    found = []
    for runs, gone in zip(steps, away, strict=True):
        tokens, ends = sum(count for _, count in runs), prompt_ends(task, runs)
        visits = plan.least is not None and tokens >= plan.least
        waits = gone.waits and "accelerator" in plan.devices
        found.append(Batch(task, plan, runs, ends, gone.far, gone.left, waits, visits))
    return found


def fill_steps(task: Task, step_tokens: int) -> list[list[tuple[int, int]]]:
    """Token by token: steps of runs (past, tokens)."""
    steps: list[list[tuple[int, int]]] = [[]]
    used = 0
    for _ in range(task.batch):
        fresh = True
        for position in range(task.prompt):
            if used == step_tokens:
                steps.append([])
                used, fresh = 0, True
            if fresh:
                steps[-1].append((position, 0))
                fresh = False
            past, tokens = steps[-1][-1]
            steps[-1][-1] = (past, tokens + 1)
            used += 1
    return steps


def prompt_ends(task: Task, runs: list[tuple[int, int]]) -> int:
    return sum(past + count == task.prompt for past, count in runs)
