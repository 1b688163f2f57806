"""What the parts of steps take beside a disk, as if all lay in memory. Knows neither what lies on
disk nor a memory limit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.decode import crossing_s
from helm.compiler.disk_steps import StepTimes, VisitingLayer, VisitingTimes, ends_s
from helm.compiler.layers import decode_attention_s
from helm.compiler.overflow import Bools
from helm.compiler.prefill import Prefill, prepare
from helm.compiler.problem import Mode
from helm.compiler.setting import Setting, Site
from helm.compiler.times import ATTENTION, DEVICE_TERMS, F64, FIXED, LINK, TERMS, VISIT, unit_s
from helm.model.graph import Attention, Unit

_VERBS = ("cached", "run", "written")


@dataclass(frozen=True)
class Layout:
    """A row of the setting with the head there. sites: by unit of the graph. mode: "visit" where
    layers of the CPU visit the accelerator in long steps. memory: as if all weights of the CPU lay
    there."""

    row: int
    head: Site
    sites: tuple[Site, ...]
    mode: Mode
    memory: dict[str, dict[str, int]]

    @property
    def alone(self) -> bool:
        """The CPU."""
        return "accelerator" not in self.sites


@dataclass(frozen=True)
class PricedSteps:
    """Times and their terms [TERMS]: of a decode step at the expected and at the full context, and
    of each step of prompts."""

    decode: tuple[StepTimes, F64]
    full: tuple[StepTimes, F64]
    prompts: Sequence[tuple[StepTimes | VisitingTimes, F64]]


class Priced:
    """Times of a setting's steps as if all lay in memory, and their terms [TERMS]."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def leasts(self, layout: Layout) -> Sequence[int | None]:
        """Of tokens of a step of prompts in which layers visit, the choices; None: in no step."""
        return [None] if layout.mode == "compute" else self.prefill.visit_choices()

    def steps(self, layout: Layout, least: int | None) -> PricedSteps:
        work = self.setting.workload
        expected, full = work.expected_context, work.context
        prompts = [self._prompt(layout, least, i) for i in range(self.prefill.steps)]
        return PricedSteps(self._decode(layout, expected), self._decode(layout, full), prompts)

    def _decode(self, layout: Layout, context: int) -> tuple[StepTimes, F64]:
        batch, setting = self.setting.batch, self.setting
        attention = {
            device.site: decode_attention_s(setting, context, device)
            for device in (setting.cpu, setting.accelerator)
            if device is not None
        }
        return self._computing(layout, Step(batch, 1, batch), attention)

    def _prompt(
        self, layout: Layout, least: int | None, number: int
    ) -> tuple[StepTimes | VisitingTimes, F64]:
        prefill = self.prefill
        tokens, outputs = int(prefill.tokens[number]), int(prefill.outputs[number])
        step = Step(tokens, tokens, outputs=outputs)
        every = {"cpu": prefill.cpu, "accelerator": prefill.accelerator}
        attention = {site: own[:, number, ATTENTION] for site, own in every.items()}
        if least is None or tokens < least:
            return self._computing(layout, step, attention)
        return self._visiting(layout, step, attention, number)

    @functools.cached_property
    def prefill(self) -> Prefill:
        return prepare(self.setting)

    def _computing(
        self, layout: Layout, step: Step, attention: Mapping[str, F64]
    ) -> tuple[StepTimes, F64]:
        """attention: by site, [classes] of a layer."""
        each = self._units(layout.sites, step, attention)
        terms, seconds = each.sum(axis=0), each.sum(axis=1)
        terms[FIXED] += self.setting.cpu.step_s
        if not layout.alone:
            first = layout.sites.index("accelerator")
            seconds[first] += sum(self._beside(layout, step, terms))
        return StepTimes(self.setting.cpu.step_s, seconds.tolist()), terms

    def _visiting(
        self, layout: Layout, step: Step, attention: Mapping[str, F64], number: int
    ) -> tuple[VisitingTimes, F64]:
        """number: of the step."""
        setting, units = self.setting, self.setting.model.graph.units
        on_cpu = np.array([site == "cpu" for site in layout.sites])
        visits = on_cpu & np.array([unit.layer is not None for unit in units])
        sites: list[Site] = ["cpu" if stays else "accelerator" for stays in on_cpu & ~visits]
        each = self._units(sites, step, attention)
        seconds, terms = each.sum(axis=1), each[~visits].sum(axis=0)
        terms[FIXED] += setting.cpu.step_s
        up_s, down_s = self._beside(layout, step, terms, visits=True)
        times = VisitingTimes(
            begin_s=setting.cpu.step_s + float(seconds[0]),
            up_s=up_s,
            layers=self._visitors(visits, number),
            rest_s=float(seconds[~on_cpu].sum()),
            down_s=down_s,
            end_s=float(seconds[-1]) if on_cpu[-1] else 0.0,
        )
        terms[VISIT] = ends_s([times], (), 0, 1.0)[0] - terms.sum()  # as if all lay in memory
        return times, terms

    @functools.cached_property
    def _visiting_seconds(self) -> list[dict[str, Any]]:
        """[classes]"""
        return [self.prefill.visiting_seconds(kind) for kind in range(len(self.prefill.cpu))]

    @functools.cached_property
    def _copy_s(self) -> dict[str, float]:
        """By unit."""
        model, rate = self.setting.model, self.setting.visit_bytes_per_s
        return {unit.name: model.weight_bytes([unit]) / rate for unit in model.graph.units}

    def _visitors(self, visits: Bools, number: int) -> list[VisitingLayer]:
        """visits: by unit. number: of the step."""
        setting, model = self.setting, self.setting.model
        assert setting.link is not None
        found = list[VisitingLayer]()
        places = {unit.name: place for place, unit in enumerate(model.graph.units)}
        for layer, kind in zip(model.graph.layers, setting.classes.member.tolist(), strict=True):
            own = [(places[unit.name], unit) for unit in layer.units]
            if not visits[own[0][0]]:
                break
            copies = [(place, self._copy_s[unit.name]) for place, unit in own]
            times = self._visiting_seconds[kind]
            cached, run, written = (float(times[verb][number]) for verb in _VERBS)
            found.append(VisitingLayer(setting.link.latency_s, copies, cached, run, written))
        return found

    def _units(self, sites: Sequence[Site], step: Step, attention: Mapping[str, F64]) -> F64:
        """[units, TERMS] of each where it runs."""
        units, known, found = self.setting.model.graph.units, dict[object, F64](), list[F64]()
        layers = dict.fromkeys(u.layer for u in units if u.layer is not None)
        kinds = dict(zip(layers, self.setting.classes.member.tolist(), strict=True))
        for unit, site in zip(units, sites, strict=True):
            kind = None if unit.layer is None else kinds[unit.layer]
            key = unit.kind, kind, site
            if key not in known:
                own = 0.0 if kind is None else attention[site][kind]
                known[key] = self._unit(unit, step, site, float(own))
            asked = unit.kind != "head" or step.output_rows > 0
            found.append(known[key] if asked else np.zeros(len(TERMS)))
        return np.array(found)

    def _beside(
        self, layout: Layout, step: Step, terms: F64, visits: bool = False
    ) -> tuple[float, float]:
        """Adds what an accelerator's part of a step takes besides its units; returns what comes
        before it, and what comes behind."""
        setting = self.setting
        assert setting.accelerator is not None
        sizes = np.array([step.tokens]), np.array([step.output_rows])
        up, down = crossing_s(setting, layout.head, *sizes, visits)
        up_s, down_s = float(up[layout.row, 0]), float(down[layout.row, 0])
        terms[LINK] += up_s + down_s
        terms[DEVICE_TERMS + FIXED] += setting.accelerator.step_s
        return up_s + setting.accelerator.step_s, down_s

    def _unit(self, unit: Unit, step: Step, site: Site, attention_s: float) -> F64:
        device = self.setting.cpu if site == "cpu" else self.setting.accelerator
        assert device is not None
        times = np.zeros(len(TERMS))
        key, model = (unit.name, step, site, self.setting.cpu.threads), self.setting.model
        times[:DEVICE_TERMS] = self.setting.once(key, unit_s, model, unit, step, device)
        if any(isinstance(op, Attention) for op in unit.ops):
            times[ATTENTION] += attention_s
        return times if site == "cpu" else np.roll(times, DEVICE_TERMS)
