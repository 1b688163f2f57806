"""Layers that both devices share, while what the accelerator has of their matrices visits it in
every step: what that takes, and how long steps are. Ranks no policies.

Each layer is cut as in `helm.compiler.cut`, all alike, with the CPU as home. The head stays on the
accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from helm.compiler.budget import Budget
from helm.compiler.choices import Choice
from helm.compiler.counts import Step
from helm.compiler.cut.memory import CutMemory
from helm.compiler.cut.price import CutPrices, Resting, StepPrice
from helm.compiler.cut.unit_price import crossing_s, lanes, share_unit
from helm.compiler.cut.units import ROLES, Cut, CutUnits, LayerCut, cut_units
from helm.compiler.cut.ways import CutModel, Layouts
from helm.compiler.layers import beside_copies, decode_attention_s, visits_s
from helm.compiler.memory import DEVICE_ALIGNMENT, aligned
from helm.compiler.program import lowered
from helm.compiler.task import Program, Task
from helm.compiler.timeline import Flight, Seconds, played
from helm.compiler.times import ATTENTION, F64, I64, VISIT, unit_s
from helm.compiler.visits.rows import visiting_names
from helm.model.graph import Unit
from helm.plan.units import CPU

BUFFERS = 2  # an accelerator is done with its share early, so that more bring nothing
_KINDS = ("attention", "mlp")
Sized = list[tuple[Step, list[int]]]  # steps that are alike but for attention, by place


class SharedLayers:
    """Of one choice of whole layers, whose setting and prompts are these too."""

    def __init__(self, choice: Choice, cuts: CutModel) -> None:
        self.choice, self.setting, self.cuts = choice, choice.setting, cuts
        self._prices = CutPrices(choice.setting, cuts)
        self._memory = CutMemory(choice.setting, cuts, choice.each, visits=False)

    @functools.cached_property
    def layouts(self) -> Layouts:
        """Every one of which both devices have some of each layer."""
        attention, mlp, _ = self.cuts.units
        heads, elements = np.indices((attention.last + 1, mlp.last + 1)).reshape(2, -1)
        some = (heads > 0) | (elements > 0)
        some &= (heads < attention.last) | (elements < mlp.last)
        for ways, at in ((attention, heads), (mlp, elements)):
            some &= ~ways.inside(at) | bool(ways.pieces[0])
        nothing = np.zeros_like(heads)
        all_ = np.full_like(heads, self.cuts.blocks)
        return Layouts(np.stack([nothing, all_, nothing, heads, elements, nothing])[:, some])

    # --- bytes -----------------------------------------------------------------------------------

    def _bytes(self, of: Layouts, alignment: int) -> I64:
        """[kinds, classes, layouts] that visit in a step, each tensor a multiple of alignment."""
        model = self.cuts.model

        def size(units: Sequence[Unit]) -> I64:
            names = visiting_names(units, model.graph.tensors)
            each = (aligned(model.tensor_bytes(name), alignment) for name in names)
            return np.asarray(sum(each), np.int64)

        tables = self.cuts.tables(1, size)
        places = of.heads, of.elements
        return np.stack([own[:, 0, at] for own, at in zip(tables, places, strict=True)])

    def visiting_bytes(self, of: Layouts) -> I64:
        """[layouts] of all layers."""
        return np.asarray(self._each_layer(self._bytes(of, 1)).sum(axis=0))

    def buffer_bytes(self, of: Layouts) -> I64:
        """[layouts] of a buffer of the ring: what visits any unit fits."""
        return np.asarray(self._bytes(of, DEVICE_ALIGNMENT).max(axis=(0, 1)))

    def budget(self, of: Layouts) -> Budget:
        """What both devices hold; [layouts]."""
        items, size = self._memory.items(of), self._bytes(of, DEVICE_ALIGNMENT)
        own, cpu = dict(items.accelerator), dict(items.cpu)
        own["weights"] = own["weights"] - self._each_layer(size).sum(axis=0)
        own["staging"] = own["staging"] + BUFFERS * self.buffer_bytes(of)
        cpu["weights"] = cpu["weights"] + self.visiting_bytes(of)
        return Budget(cpu, own)

    def _each_layer(self, by_class: I64) -> I64:
        """[kinds, layouts] of all layers, of [kinds, classes, layouts]."""
        return np.asarray(by_class[:, self.cuts.classes.member].sum(axis=1))

    # --- about how long --------------------------------------------------------------------------

    def about_s(self, of: Layouts, context: int) -> F64:
        """[layouts] of a decode step's layers, once they are steady: what comes, or, by the
        corrected balance, what both devices do one after the other."""
        price, come = self._prices.decode(context), self._come_s(of).sum(axis=0)
        assert isinstance(price.layers, Resting)
        places, both = (of.heads, of.elements), (price.layers.attention_s, price.layers.mlp_s)
        chain_s, cpu_s = (
            sum(own[:, 0, at] for own, at in zip(tables, places, strict=True))
            for tables in (both, price.layers.cpu_s)
        )
        assert self.setting.link is not None
        slower_s = self.setting.link.beside_copies(cpu_s, come) - cpu_s
        return np.asarray(
            np.maximum(chain_s + slower_s, come)[self.cuts.classes.member].sum(axis=0)
        )

    def about_ttft_s(self, of: Layouts) -> F64:
        """[layouts] of the prompts: the devices, or what comes."""
        come = self._come_s(of)[:, self.cuts.classes.member].sum(axis=(0, 1))
        prices = self._prices.prompts(self.choice.steps, None)
        alone = sum(price.seconds(of) for price in prices)
        return np.asarray(np.maximum(alone, self.choice.steps.steps * come))

    def _come_s(self, of: Layouts) -> F64:
        """[kinds, classes, layouts] until what a unit lacks has come."""
        link, size = self.setting.link, self._bytes(of, 1)
        assert link is not None
        seconds = link.latency_s + size / self.setting.visit_bytes_per_s
        return np.where(size > 0, seconds, 0.0)

    # --- how long --------------------------------------------------------------------------------

    def decode_terms(self, one: Layouts, context: int) -> F64:
        """[TERMS] of a step in which each sequence has `context` positions, of the one layout."""
        batch = self.setting.batch
        attention = [decode_attention_s(self.setting, context, each)[:, None]
                     for each in lanes(self.setting)]  # fmt: skip
        kinds: Sized = [(Step(batch, 1, batch), [0])]
        step = self._flight(one, kinds, attention)
        return self._terms([self._prices.decode(context)], one, step)

    def prefill_terms(self, one: Layouts) -> F64:
        """[TERMS] until every prompt has its first token."""
        prefill = self.choice.steps
        sizes = list(zip(prefill.tokens.tolist(), prefill.outputs.tolist(), strict=True))
        kinds: Sized = [
            (Step(n[0], n[0], outputs=n[1]), [i for i, size in enumerate(sizes) if size == n])
            for n in dict.fromkeys(sizes)
        ]
        attention = [own[:, :, ATTENTION] for own in (prefill.cpu, prefill.accelerator)]
        steps = self._flight(one, kinds, attention)
        return self._terms(self._prices.prompts(prefill, None), one, steps)

    def _terms(self, prices: Sequence[StepPrice], one: Layouts, steps: Flight) -> F64:
        """What the layout takes where all rests, and what visits add."""
        terms = np.sum([price.terms(one) for price in prices], axis=0)
        terms[VISIT] += float(np.sum(played([steps], 1)[1])) - terms.sum()
        return np.asarray(terms)

    @functools.lru_cache(1)  # noqa: B019  # of the layout that was found
    def _program(self, heads: int, elements: int) -> tuple[CutUnits, Program]:
        graph = self.setting.model.graph
        made = cut_units(graph, Cut(CPU, (LayerCut(heads, elements),) * self.cuts.blocks, 0))
        widths = {value.name: value.width for value in made.values}
        lacking = [unit.device != CPU and unit.layer is not None for unit in made.units]
        return made, lowered(made.units, widths, graph.logits, False, "none", (), lacking, BUFFERS)

    def _flight(
        self, one: Layouts, kinds: Sized, attention: Sequence[F64]
    ) -> Flight:  # fmt: skip
        """All steps at once, as if each were alone. attention: [classes, steps] on both devices."""
        marks = [int(ways.marks[at[0]]) for ways, at in
                 zip(self.cuts.units[:2], (one.heads, one.elements), strict=True)]  # fmt: skip
        made, program = self._program(*marks)
        setting, link, values = self.setting, self.setting.link, {v.name: v for v in made.values}
        assert link is not None
        come, count = self._come_s(one)[..., 0], attention[0].shape[1]
        layers = dict.fromkeys(u.layer for u in made.units if u.layer is not None)
        classes = dict(zip(layers, self.cuts.classes.member.tolist(), strict=True))

        @functools.cache
        def runs_s(kind: int, member: int) -> dict[str, F64]:
            own = [each[member] for each in attention]
            way = int((one.heads, one.elements)[kind][0])
            return self._runs_s(kind, member, way, kinds, own)

        @functools.cache
        def end_s(number: int) -> F64:
            unit, found = made.units[number], np.zeros(count)
            device = lanes(setting)[unit.device != CPU]
            plain = Unit(unit.name, unit.kind, unit.layer, unit.ops)
            for step, at in kinds:
                if unit.kind != "head" or step.output_rows:
                    found[at] = unit_s(setting.model, plain, step, device).sum()
            return found

        def unit_seconds(number: int) -> F64:
            unit = made.units[number]
            if unit.layer is None:
                return end_s(number)
            role = unit.name.rpartition(".")[2]
            every = runs_s(_KINDS.index(unit.kind), classes[unit.layer])
            return every[role if role in ROLES else ""]

        def task_s(task: Task) -> Seconds:
            if task.verb == "copy":
                value, found = values[task.value], np.zeros(count)
                for step, at in kinds:
                    rows = step.tokens if value.rows == "tokens" else step.output_rows
                    found[at] = crossing_s(setting, rows, value.width, task.lane == "up")
                return found
            assert task.units is not None
            first, last = task.units
            if task.verb == "visit":
                unit = made.units[first]
                assert unit.layer is not None
                return float(come[_KINDS.index(unit.kind), classes[unit.layer]])
            return np.asarray(sum(unit_seconds(number) for number in range(first, last + 1)))

        seconds = [task_s(task) for task in program.tasks]
        begin_s = sum(device.step_s for device in lanes(setting))
        flight = Flight(program, seconds, begin_s=begin_s)
        return beside_copies(link, flight, visits_s(flight))

    def _runs_s(
        self, kind: int, member: int, way: int, kinds: Sized, attention: Sequence[F64]
    ) -> dict[str, F64]:
        """[steps] by role, or "" of a unit that is whole."""
        setting, model, ways = self.setting, self.cuts.model, self.cuts.layers[member][kind]
        found = dict[str, F64]()
        for step, at in kinds:
            own = [each[at] if kind == 0 else np.zeros(len(at)) for each in attention]
            if ways.inside(np.array(way)):
                shared = share_unit(setting, model, ways.pieces[0], 0, step, (own[0], own[1]))
                each = {
                    role: times.sum(axis=0)[..., way - 1] for role, times in shared.times.items()
                }
            else:
                lane = int(way == 0)
                alone = unit_s(model, ways.unit, step, lanes(setting)[lane]).sum()
                each = {"": alone + own[lane]}
            for role, seconds in each.items():
                found.setdefault(role, np.zeros(len(attention[0])))[at] = seconds
        return found
