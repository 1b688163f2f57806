"""Seconds of one plan's units where some are cut, for its steps as the timeline plays them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np

from helm.compiler.budget import stage_bytes
from helm.compiler.candidate import Candidate
from helm.compiler.counts import Step
from helm.compiler.cut_memory import CutMemory
from helm.compiler.cut_price import HOMES, ROLES, price_unit
from helm.compiler.cut_space import KINDS, CutModel, Layouts, cut_model, decode_attention_s
from helm.compiler.cut_tables import CutTable
from helm.compiler.cut_visits import visiting_seconds
from helm.compiler.prefill import Prefill
from helm.compiler.problem import Space
from helm.compiler.setting import Device, Setting
from helm.compiler.times import ATTENTION, F64, unit_s
from helm.model.graph import Unit
from helm.plan.schema import Plan
from helm.plan.units import CPU, PlacedUnit

UnitSeconds = Callable[[int, str], float]  # by unit of the plan and device


class CutSeconds:
    """Of a plan whose candidate is cut."""

    def __init__(self, setting: Setting, plan: Plan, best: Candidate, space: Space) -> None:
        cuts, use = cut_model(setting.model, setting.classes, space.columns), best.cut
        assert use is not None
        assert isinstance(cuts, CutModel)
        self._setting, self._plan, self._cuts, self._use = setting, plan, cuts, use
        self._layers = dict.fromkeys(u.layer for u in plan.units if u.layer is not None)
        self._class = dict(zip(self._layers, setting.classes.member.tolist(), strict=True))
        places = zip(
            (cuts.heads, cuts.elements, cuts.rows), (use.heads, use.elements, use.rows), strict=True
        )
        self._ways = [int(np.searchsorted(marks, count)) for marks, count in places]
        self._of = Layouts(*(
            np.array([n]) for n in (best.cpu_blocks, use.layers, HOMES.index(use.home), *self._ways)
        ))  # fmt: skip

    def decode(self, context: int) -> UnitSeconds:
        """In a step in which each sequence has `context` positions."""
        setting = self._setting
        seconds = decode_attention_s(setting, context)
        return self._seconds(
            Step(setting.batch, 1, setting.batch),
            lambda kind: {site: each[kind : kind + 1] for site, each in seconds.items()},
        )

    def prompt(self, prefill: Prefill, step: int) -> UnitSeconds:
        """In a step of the prompts in which nothing visits, or of what does not."""
        tokens, outputs = int(prefill.tokens[step]), int(prefill.outputs[step])
        sites = {"cpu": prefill.cpu, "accelerator": prefill.accelerator}
        return self._seconds(
            Step(tokens, tokens, outputs=outputs),
            lambda kind: {s: e[kind, step : step + 1, ATTENTION] for s, e in sites.items()},
        )

    def visiting(self, prefill: Prefill, step: int) -> Callable[[int, str], float]:
        """Seconds of the tasks of a layer that visits, by its first unit and by verb."""
        memory = CutMemory(prefill.setting, self._cuts, stage_bytes(prefill.setting), True)
        some = np.arange(prefill.steps) == step

        @functools.cache
        def seconds(kind: int, cut: bool) -> Mapping[str, F64]:
            if cut:
                return visiting_seconds(prefill, self._cuts, memory, self._of, some, kind)
            every = prefill.visiting_seconds(kind)
            return {
                n: np.broadcast_to(each, prefill.steps)[some][None] for n, each in every.items()
            }

        def of(unit: int, verb: str) -> float:
            layer = self._plan.units[unit].layer
            assert layer is not None
            cut = list(self._layers).index(layer) >= int(self._of.cpu[0])
            return float(seconds(self._class[layer], cut)[verb][0, 0])

        return of

    def _seconds(self, step: Step, attention: Callable[[int], Mapping[str, F64]]) -> UnitSeconds:
        @functools.cache
        def parts(kind: int, which: int) -> Mapping[str, F64]:
            table = self._cuts.layers[kind][which] if which < 2 else self._cuts.head
            nothing = {"cpu": np.zeros(1), "accelerator": np.zeros(1)}
            seconds = attention(kind) if which == 0 else nothing
            way, home = self._ways[which], HOMES.index(self._use.home) if which < 2 else 0
            narrow = CutTable(table.model, table.unit, table.shares, table.marks[[0, way, -1]])
            return price_unit(self._setting, narrow, step, seconds).parts[home]

        def of(number: int, device: str) -> float:
            unit = self._plan.units[number]
            if unit.kind == "head" and step.output_rows == 0:
                return 0.0
            role = unit.name.rsplit(".", 1)[-1]
            kind = 0 if unit.layer is None else self._class[unit.layer]
            if role in ROLES:
                which = KINDS.index(unit.kind) if unit.layer is not None else 2
                return float(parts(kind, which)[role][0, 1])
            return self._whole_s(unit, kind, device, step, attention)

        return of

    def _whole_s(
        self, unit: PlacedUnit, kind: int, device: str, step: Step,
        attention: Callable[[int], Mapping[str, F64]],
    ) -> float:  # fmt: skip
        setting = self._setting
        at: Device | None = setting.cpu if device == CPU else setting.accelerator
        assert at is not None
        own = Unit(unit.name, unit.kind, unit.layer, unit.ops)
        seconds = float(unit_s(setting.model, own, step, at).sum())
        if unit.kind == "attention":
            seconds += float(attention(kind)[at.site][0])
        return seconds
