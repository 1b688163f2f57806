"""One plan's steps as the timeline plays them: when every task of a decode step and of the prompts'
steps begins and ends. Searches nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.base.formats import tensor_bytes
from helm.compiler.candidate import Candidate
from helm.compiler.counts import Step
from helm.compiler.cut.unit_price import share_unit
from helm.compiler.cut.units import ROLES, costed
from helm.compiler.cut.ways import HOMES
from helm.compiler.layers import (
    SpreadLayer,
    beside_copies,
    decode_attention_s,
    decode_layers,
    key,
    prefill_layers,
    visiting_seconds,
    visits_s,
)
from helm.compiler.overflow import PrefillFar
from helm.compiler.prefill import Prefill, prepare
from helm.compiler.program import lower
from helm.compiler.search import Search
from helm.compiler.setting import F32, Setting, make_setting
from helm.compiler.task import DISK, Far, Program, Task, verb_of
from helm.compiler.timeline import LEAVING, Flight, Spans, played
from helm.compiler.times import ATTENTION, F64, unit_s
from helm.model.graph import Attention, Unit
from helm.plan.disk import disk_units
from helm.plan.schema import Plan
from helm.plan.units import CPU, PlacedUnit

_SITES = ("cpu", "accelerator")


@dataclass(frozen=True)
class Span:
    """A task and when it runs. step: of those that are shown. verb: "run", "copy", "visit", "page",
    "read" from disk, or "leave" for pages that make room. count: how often it happens from start_s
    to end_s."""

    step: int
    lane: str
    verb: str
    task: str
    start_s: float
    end_s: float
    count: int = 1


@dataclass(frozen=True)
class Steps:
    """title: what they are. seconds: from the first's start to the last's end."""

    title: str
    seconds: float
    spans: tuple[Span, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "seconds": self.seconds,
            "tasks": [dataclasses.asdict(span) for span in self.spans],
        }


class PlannedSteps:
    """Of the plan of a search's candidate, with the times that the search had."""

    def __init__(self, search: Search, best: Candidate, plan: Plan) -> None:
        self.plan, self._best, work = plan, best, search.workload
        limits = dataclasses.replace(search.limits, step_tokens=best.step_tokens)
        setting = make_setting(
            search.model, search.profile, work, limits, best.threads, best.sequences,
            space=search.space,
        )  # fmt: skip
        held = setting.pages == best.accelerator_kv_blocks
        page = int(np.argmax(held)) if held.any() else 0
        self.setting = dataclasses.replace(setting, pages=setting.pages[page : page + 1])
        self._programs = {(p.visits, p.far): p for p in lower(self.plan)}
        self._spreads = best.accelerator_blocks > 0
        rate = 1.0 if best.disk is None else best.disk.bytes_per_s
        self._lacks = _lacking_bytes(plan)
        self._read_s = {unit.number: unit.read_bytes / rate for unit in disk_units(plan)}
        self._model = costed(
            search.model,
            plan.values,
            {tensor.name: tensor.shape for tensor in plan.tensors},
            {tensor.name: tensor.whole for tensor in plan.tensors},
        )
        # By unit of the plan: its layer's class, None of the embedding and the head; its role in
        # what is cut; and the first unit that is like it.
        layers = dict.fromkeys(u.layer for u in plan.units if u.layer is not None)
        classes = dict(zip(layers, self.setting.classes.member.tolist(), strict=True))
        self._class = [None if u.layer is None else classes[u.layer] for u in plan.units]
        self._role = [
            role if (role := unit.name.rpartition(".")[2]) in ROLES else "" for unit in plan.units
        ]
        first: dict[object, int] = {}
        self._like = [
            first.setdefault((unit.kind, *key), number)
            for number, (unit, *key) in enumerate(
                zip(plan.units, self._class, self._role, strict=True)
            )
        ]

    # --- decode ----------------------------------------------------------------------------------

    def decode(self, context: int) -> list[Flight]:
        """One step, or one of each group, at an equal context of all sequences."""
        if self._best.decode_groups == 1:
            return [self._decode(self.setting, context)]
        halves = self.setting.halves
        flights = [self._decode(half, context) for half in halves]
        if flights[0].program.far == "cpu":
            return flights
        assert self.setting.link is not None
        beside = [self._copies_s(half, context) for half in reversed(halves)]
        return [beside_copies(self.setting.link, *one) for one in zip(flights, beside, strict=True)]

    def _decode(self, setting: Setting, context: int) -> Flight:
        far: Far = "none"
        if self._spreads and setting.pool.far_blocks(context)[0] > 0:
            far = "visit" if self._best.overflow == "stream" else "cpu"
        layers = [] if far == "none" else decode_layers(setting, self._best.overflow, context)
        attention = {
            device.site: decode_attention_s(setting, context, device)
            for device in (setting.cpu, setting.accelerator)
            if device is not None
        }
        step = Step(setting.batch, 1, setting.batch)
        return self._flight(setting, self._programs[False, far], step, attention, layers)

    def _copies_s(self, setting: Setting, context: int) -> float:
        if not self._spreads or self._best.overflow != "stream":
            return 0.0
        layers = decode_layers(setting, "stream", context)
        own = [k for k, u in zip(self._class, self.plan.units, strict=True)
               if k is not None and u.kind == "attention" and u.device != CPU]  # fmt: skip
        return float(sum(layers[kind].copies_s[0] for kind in own))

    # --- prompts ---------------------------------------------------------------------------------

    @functools.cached_property
    def prefill(self) -> Prefill:
        return prepare(self.setting)

    def prompts(self) -> list[Flight]:
        """Every step until all prompts have their first token."""
        prefill, best, setting = self.prefill, self._best, self.setting
        overflows = self._spreads and bool(setting.pool.overflows[0])
        far = prefill.far if overflows else None
        layers: list[SpreadLayer] = []
        if far is not None:
            layer_s = prefill.accelerator.sum(axis=2)
            layers = prefill_layers(setting, prefill.queries, far, prefill.outputs, layer_s)
        flights, copying = [], 0.0
        for step in range(prefill.steps):
            flight = self._prompt(step, far, layers)
            if best.prefill_overlap and setting.link is not None:
                front = np.array(flight.begin_s + flight.seconds[0])  # type: ignore[operator]
                slow = setting.link.beside_copies(front, np.array(copying + flight.leaving_s))
                seconds = [float(slow) - flight.begin_s, *flight.seconds[1:]]
                flight = dataclasses.replace(flight, seconds=seconds)
                own = [self._class[t.units[0]] for t in flight.program.tasks
                       if t.verb == "page" and t.units]  # fmt: skip
                copying = float(sum(layers[k].copies_s[step, 0] for k in own if k is not None))
            flights.append(flight)
        return flights

    def _prompt(self, step: int, far: PrefillFar | None, layers: Sequence[SpreadLayer]) -> Flight:
        prefill, setting = self.prefill, self.setting
        tokens, outputs = int(prefill.tokens[step]), int(prefill.outputs[step])
        visits = 0 < self._best.visit_tokens <= tokens
        runs = prefill.queries.step == step
        split = far is not None and bool(far.far[runs].any())
        program = self._programs[visits, "visit" if split else "none"]
        attention = {
            site: every[:, step, ATTENTION]
            for site, every in (("cpu", prefill.cpu), ("accelerator", prefill.accelerator))
        }
        here, past = [_at(layer, step) for layer in layers], int(prefill.queries.past[runs].sum())
        one = Step(tokens, tokens, outputs=outputs)
        flight = self._flight(setting, program, one, attention, here, past)
        if far is None or setting.link is None:
            return flight
        own = [k for k, u in zip(self._class, self.plan.units, strict=True)
               if k is not None and u.kind == "attention" and u.device != CPU]  # fmt: skip
        size = float(sum(prefill.page_bytes[kind] for kind in own)) * float(far.left[step, 0])
        leaving = size / setting.link.to_host_bytes_per_s
        return dataclasses.replace(flight, leaving_s=leaving, waits=bool(far.waits[step, 0]))

    def _unit_s(
        self, setting: Setting, step: Step, attention: Mapping[str, F64], visits: bool
    ) -> Callable[[int, str], float]:
        """Seconds of a unit on a device. attention: [classes] of all heads, by site. visits:
        layers of which the CPU has some run on the accelerator."""
        units, heads = self.plan.units, self._model.graph.kv.kv_heads

        @functools.cache
        def alone(number: int, device: str) -> float:
            unit, kind = units[number], self._class[number]
            at = setting.cpu if device == CPU else setting.accelerator
            assert at is not None
            seconds = float(unit_s(self._model, _plain(unit), step, at).sum())
            for op in unit.ops:
                if isinstance(op, Attention):
                    seconds += float(attention[at.site][kind]) * op.kv_heads / heads
            return seconds

        @functools.cache
        def shared(number: int) -> dict[str, float]:
            own, kind = units[number], self._class[number]
            pieces = {
                role: unit
                for role, unit in zip(self._role, units, strict=True)
                if role and (unit.layer, unit.kind) == (own.layer, own.kind)
            }
            both = [np.asarray(0.0 if kind is None else attention[site][kind]) for site in _SITES]
            plain = {role: _plain(unit) for role, unit in pieces.items()}
            home = HOMES.index(pieces["home"].device)
            found = share_unit(setting, self._model, plain, home, step, (both[0], both[1]))
            return {role: float(times.sum()) for role, times in found.times.items()}

        def seconds(number: int, device: str) -> float:
            like, role = self._like[number], self._role[number]
            if units[number].kind == "head" and step.output_rows == 0:
                return 0.0
            if not role or (visits and units[number].layer is not None):
                return alone(like, device)
            return shared(like)[role]

        return seconds

    def _flight(
        self, setting: Setting, program: Program, step: Step, attention: Mapping[str, F64],
        layers: Sequence[SpreadLayer], past: int = 0,
    ) -> Flight:  # fmt: skip
        """Its tasks' seconds: of a run those of its units, of a layer those of its class. past:
        positions that its tokens attend to besides."""
        rows = {"tokens": step.tokens, "outputs": step.output_rows}
        values = {v.name: F32 * v.width * rows[v.rows] for v in self.plan.values}
        link, seconds_of = setting.link, self._unit_s(setting, step, attention, program.visits)

        def task_s(task: Task) -> float:
            if task.verb == "copy" and task.units is None:
                assert link is not None
                rate = link.to_accelerator_bytes_per_s
                rate = rate if task.lane == "up" else link.to_host_bytes_per_s
                size = values[task.value]
                return link.latency_s + size / rate if size else 0.0
            assert task.units is not None
            first, last = task.units
            if task.verb == "read":
                return self._read_s[first]
            kind = self._class[first]
            units = range(first, last + 1)
            if task.verb == "visit" and not program.visits:
                assert link is not None
                return link.latency_s + self._lacks[first] / setting.visit_bytes_per_s
            if task.verb in ("visit", "cached", "written"):
                return float(self._visiting_s(setting, units, step, past)[task.verb])
            if task.verb == "run":
                return sum(seconds_of(unit, task.device) for unit in units)
            assert kind is not None
            return float(np.ravel(layers[kind].seconds[key(task)])[0])

        seconds = [task_s(task) for task in program.tasks]
        begin_s = setting.cpu.step_s
        lanes = [task.lane for task in program.tasks]
        first = next((i for i, lane in enumerate(lanes) if lane not in (CPU, DISK)), None)
        if self._best.cut is not None:  # before anything, as the CPU goes on while a guest begins
            assert setting.accelerator is not None
            begin_s += setting.accelerator.step_s
        elif first is not None and setting.accelerator is not None:
            seconds[first] += setting.accelerator.step_s
            if self.plan.units[0].device != CPU and link is not None:  # token ids
                seconds[first] += (
                    link.latency_s + F32 * step.tokens / link.to_accelerator_bytes_per_s
                )
        counts = {}
        for i, task in enumerate(program.tasks):
            if task.verb == "page" and task.units is not None:
                kind = self._class[task.units[0]]
                assert kind is not None
                counts[i] = int(np.ravel(layers[kind].far.pages)[0])
        flight = Flight(program, seconds, counts, begin_s)
        if self._best.cut is None or program.visits or not any(self._lacks):
            return flight
        assert link is not None
        return beside_copies(link, flight, visits_s(flight))

    def _visiting_s(self, setting: Setting, units: range, step: Step, past: int) -> dict[str, Any]:
        """Of what comes and goes with a layer, of which the CPU has all or some."""
        of = [self.plan.units[number] for number in units]
        own = [unit for unit in of if unit.device == CPU]
        kind, model = self._class[units[0]], self._model
        assert kind is not None
        heads = sum(op.kv_heads for unit in own for op in unit.ops if isinstance(op, Attention))
        weights, share = model.weight_bytes(map(_plain, own)), heads / model.graph.kv.kv_heads
        layer = setting.classes.units[kind]
        return visiting_seconds(setting, layer, past, step.tokens, 0.0, weights, share)


def _lacking_bytes(plan: Plan) -> list[int]:
    """By unit: of its weights, those that its device does not hold."""
    held = {(own.tensor, own.device): own.format for own in plan.slices}
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    names = ({name for op in unit.ops for name in op.weight_names()} for unit in plan.units)
    return [
        sum(
            tensor_bytes(held[name, CPU], shapes[name])
            for name in read
            if (name, unit.device) not in held
        )
        for unit, read in zip(plan.units, names, strict=True)
    ]


def _plain(unit: PlacedUnit) -> Unit:
    return Unit(unit.name, unit.kind, unit.layer, unit.ops)


def _at(layer: SpreadLayer, step: int) -> SpreadLayer:
    """Of one step."""

    def pick(values: Any) -> Any:
        return np.broadcast_to(values, layer.near_s.shape)[step]

    return dataclasses.replace(
        layer,
        seconds={name: pick(each) for name, each in layer.seconds.items()},
        far=type(layer.far)(
            *(pick(getattr(layer.far, f.name)) for f in dataclasses.fields(layer.far))
        ),
    )


def planned_steps(search: Search, best: Candidate, plan: Plan) -> tuple[Steps, Steps]:
    """A decode step at the expected context, and a step of prompts: the last of the longest; two
    where the plan has two on their way at once."""
    planned = PlannedSteps(search, best, plan)
    groups, context = best.decode_groups, search.workload.expected_context
    decode = _drawn(f"Decode at {context:,} positions", planned.decode(context), groups)
    flights, tokens = planned.prompts(), planned.prefill.tokens
    last = max(range(len(flights)), key=lambda step: (tokens[step], step))
    at_once = 2 if best.prefill_overlap and len(flights) > 1 else 1
    first = max(0, min(last, len(flights) - at_once))
    shown = flights[first : first + at_once]
    title = f"Prompt of {int(tokens[last]):,} tokens in a step"
    if len(flights) > at_once:
        title += f", {len(flights)} steps in all"
    return decode, _drawn(title, shown, at_once)


def _drawn(title: str, flights: Sequence[Flight], at_once: int) -> Steps:
    steps, end = played(flights, at_once)
    found = [
        span
        for step, (flight, spans) in enumerate(zip(flights, steps, strict=True))
        for span in _spans(step, flight, spans)
    ]
    found.sort(key=lambda span: (span.start_s, span.end_s, span.lane))
    return Steps(title, float(end), tuple(found))


def _spans(step: int, flight: Flight, spans: Spans) -> list[Span]:
    found = []
    for number, (begin, end) in spans.items():
        if not end >= begin:
            continue  # there was nothing to do
        if number == LEAVING:
            found.append(Span(step, "down", "leave", "pages that leave", float(begin), float(end)))
            continue
        task = flight.program.tasks[number]
        count = flight.counts.get(number - (task.verb == "far" and task.each), 1)
        name = flight.program.subject(task)
        lane, verb = task.lane, verb_of(task)
        found.append(Span(step, lane, verb, name, float(begin), float(end), count))
    return found
