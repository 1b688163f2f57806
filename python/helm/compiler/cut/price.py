"""How long steps of layouts with cut layers take, all at once: a decode step, and the prompts. Each
is what the timeline plays of the layout's program, as tests say. Knows no limit of memory and ranks
nothing.

A unit that is cut begins and ends at its home: the other device has nothing to do before and after.
So one thing follows the other: embedding, layers of the CPU, those that are cut, those of the
accelerator, head; between them what crosses.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.cut.unit_price import crossing_s, lanes, unit_terms
from helm.compiler.cut.ways import CutModel, Layouts, Ways
from helm.compiler.layers import decode_attention_s, visiting_body, visiting_seconds
from helm.compiler.overflow import Bools
from helm.compiler.prefill import Prefill
from helm.compiler.setting import Setting
from helm.compiler.times import (
    ATTENTION,
    DEVICE_TERMS,
    F64,
    FIXED,
    I64,
    LINK,
    TERMS,
    VISIT,
    unit_s,
)
from helm.model.graph import Unit

StepKind = tuple[Step, list[int]]  # steps that are alike but for attention, by place


class Resting:
    """The layers in steps in which nothing visits, together. attention, mlp: [TERMS, classes,
    homes, ways]."""

    def __init__(self, cuts: CutModel, attention: F64, mlp: F64) -> None:
        self._cuts, self._tables = cuts, (attention, mlp)
        # Seconds [classes, homes, ways].
        self.attention_s, self.mlp_s = attention.sum(axis=0), mlp.sum(axis=0)

    @functools.cached_property
    def cpu_s(self) -> tuple[F64, F64]:
        """The part of both in which the CPU computes."""
        attention, mlp = (table[:DEVICE_TERMS].sum(axis=0) for table in self._tables)
        return attention, mlp

    def terms(self, of: Layouts) -> F64:
        """[TERMS, layouts]"""
        return self._summed(of, *self._tables)

    def seconds(self, of: Layouts, quick: bool) -> F64:
        """[layouts]"""
        return self._summed(of, self.attention_s, self.mlp_s)

    def _summed(self, of: Layouts, attention: F64, mlp: F64) -> F64:
        own, cut, there = self._cuts.counts(of)
        whole = (attention[..., 0, -1] + mlp[..., 0, -1]) @ own.T
        whole = whole + (attention[..., 1, 0] + mlp[..., 1, 0]) @ there.T
        each = attention[..., of.home, of.heads] + mlp[..., of.home, of.elements]
        with np.errstate(invalid="ignore"):
            return np.asarray(whole + np.where(cut.T > 0, cut.T * each, 0.0).sum(axis=-2))


class Visiting:
    """The layers in `some` steps of prompts, in which weights of the CPU visit. kinds: see
    `CutPrices`. Steps that are alike are priced once: times[i] of them."""

    def __init__(
        self, cuts: CutModel, prefill: Prefill, some: Bools, kinds: Sequence[StepKind]
    ) -> None:
        self._cuts, self._setting = cuts, prefill.setting
        past = np.bincount(prefill.queries.step, prefill.queries.past)[some]
        alone = prefill.accelerator[:, some]
        own = np.empty(len(past))  # the kind of each step
        for kind, (_, at) in enumerate(kinds):
            own[at] = kind
        each = np.column_stack([own, past, *alone[..., ATTENTION]])
        _, first, self._times = np.unique(each, axis=0, return_index=True, return_counts=True)
        self._alone, self._past = alone[:, first], past[first]
        self._tokens = prefill.tokens[some][first]
        self._steps = [kinds[int(kind)][0] for kind in own[first]]

    @property
    def alone_s(self) -> F64:
        """[classes] of a layer on the accelerator, in all of the steps."""
        return np.asarray(self._times @ self._alone.sum(axis=2).T)

    def least_s(self, room: int) -> float:
        """Of any layout with so many bytes on the accelerator."""
        cuts, rate = self._cuts, self._setting.visit_bytes_per_s
        size = sum(table[:, 0, -1] for table in cuts.coming_bytes)
        come_s = max(0, int(cuts.totals @ size) - room) / rate
        return max(float(cuts.totals @ self.alone_s), float(self._times.sum()) * come_s)

    def terms(self, of: Layouts) -> F64:
        """[TERMS, layouts]"""
        found = np.zeros((len(TERMS), len(of)))
        own = self._times @ self._alone
        found[DEVICE_TERMS : 2 * DEVICE_TERMS] = (self._cuts.counts(of)[2] @ own).T
        found[VISIT] = self._end_s(of) @ self._times
        return found

    def seconds(self, of: Layouts, quick: bool) -> F64:
        """[layouts]; quick: about those."""
        end = (self._about_s(of) if quick else self._end_s(of)) @ self._times
        return np.asarray(end + self._cuts.counts(of)[2] @ self.alone_s)

    def _end_s(self, of: Layouts) -> F64:
        """[layouts, steps] when the accelerator is done with what the CPU has layers of."""
        kinds = range(len(self._alone))
        whole, cut = (
            [visiting_body(self._seconds(some, kind)) for kind in kinds]
            for some in (self._whole(of), of)
        )
        state = np.zeros((4, len(of), len(self._tokens)))
        for layer in range(int((of.cpu + of.cut).max(initial=0))):
            kind = int(self._cuts.classes.member[layer])
            there = (layer < of.cpu)[:, None]
            after = (np.where(there, whole[kind], cut[kind]) + state[None]).max(axis=1)
            state = np.where((layer < of.cpu + of.cut)[:, None], after, state)
        return np.asarray(state[0])

    def _whole(self, of: Layouts) -> Layouts:
        """With all of the layers that are cut on the CPU."""
        attention, mlp, _ = self._cuts.units
        return of.with_(home=0, heads=attention.last, elements=mlp.last)

    def _seconds(self, of: Layouts, kind: int) -> dict[str, F64]:
        """[layouts, steps] of the tasks of a cut layer of a class."""
        run = self._of(self._runs, of, kind) + self._alone[kind, :, ATTENTION]
        marks, layer = self._cuts.units[0].marks, self._cuts.classes.units[kind]
        sizes, share = self._of(self._cuts.coming_bytes, of, kind), marks[of.heads] / marks[-1]
        found = visiting_seconds(
            self._setting, layer, self._past, self._tokens, run, sizes[:, None], share[:, None]
        )
        return {name: np.broadcast_to(each, run.shape) for name, each in found.items()}

    @staticmethod
    def _of(tables: tuple[Any, Any], of: Layouts, kind: int) -> F64:
        """[layouts, ...] of attention and mlp of a class together."""
        attention, mlp = (table[kind] for table in tables)
        return np.asarray(attention[of.home, of.heads] + mlp[of.home, of.elements])

    @functools.cached_property
    def _runs(self) -> tuple[F64, F64]:
        """[classes, homes, ways, steps] of attention and mlp there, but for attention itself."""
        model, device = self._cuts.model, lanes(self._setting)[1]

        def seconds(units: Sequence[Unit], step: Step) -> F64:
            each = [unit_s(model, unit, step, device).sum(axis=0) for unit in units]
            return np.asarray(sum(each), np.float64)

        each = {
            step: self._cuts.tables(None, functools.partial(seconds, step=step))
            for step in dict.fromkeys(self._steps)
        }
        attention, mlp = (
            np.stack([each[step][kind] for step in self._steps], axis=-1) for kind in (0, 1)
        )
        return attention, mlp

    def _about_s(self, of: Layouts) -> F64:
        """[layouts, steps] what the accelerator, or the link, does in all, and a layer besides."""
        whole, cut, _ = self._cuts.counts(of)
        main, up = np.zeros((2, len(of), len(self._tokens)))
        for kind in range(len(self._alone)):
            for count, some in ((cut, of), (whole, self._whole(of.at(np.s_[:1])))):
                seconds, count = self._seconds(some, kind), count[:, kind, None]
                main += count * (seconds["cached"] + seconds["run"] + seconds["written"])
                up += count * (seconds["visit"] + seconds["cached"])
        layers = np.maximum(1, of.cpu + of.cut)[:, None]
        return np.asarray(np.maximum(main + up / layers, up + main / layers))


@dataclass(frozen=True)
class StepPrice:
    """Of steps together. head: [TERMS, ways]; ends: [TERMS] of the embedding and of what begins a
    step. tokens, outputs: [steps]."""

    cuts: CutModel
    setting: Setting
    layers: Resting | Visiting
    head: F64
    ends: F64
    tokens: I64
    outputs: I64

    def seconds(self, of: Layouts, *, quick: bool = False) -> F64:
        """[layouts]; quick: about those of visits."""
        ends = self.head.sum(axis=0)[of.rows] + self.ends.sum()
        return np.asarray(self.layers.seconds(of, quick) + ends + self._crossings(of))

    def terms(self, of: Layouts) -> F64:
        """[TERMS] of the first layout."""
        total = self.layers.terms(of)[:, 0] + self.head[:, of.rows[0]] + self.ends
        total[LINK] += self._crossings(of)[0]
        return np.asarray(total)

    def _crossings(self, of: Layouts) -> F64:
        """[layouts] seconds of the residual, and of logits. It crosses between neighbouring units
        of which one has it on the CPU, the other on the accelerator."""
        visit, cut, head = isinstance(self.layers, Visiting), of.cut > 0, of.rows == 0
        rest = (of.cpu + of.cut < self.cuts.blocks) | visit
        ways = zip(self.cuts.units[:2], (of.heads, of.elements), strict=True)
        attention, mlp = (
            visit | np.where(own.inside(way), of.home == 1, way == 0) for own, way in ways
        )

        def seconds(rows: I64, to: Any, width: int = self.setting.hidden) -> Any:
            each = [
                sum(crossing_s(self.setting, n, width, up) for n in rows.tolist())
                for up in (False, True)
            ]
            return np.where(to, each[1], each[0])

        total = np.where(cut, attention, rest) * seconds(self.tokens, True)
        last = cut & ~rest  # behind its attention are the rows of logits alone
        inner = (of.cut - last) * seconds(self.tokens, mlp) + last * seconds(self.outputs, mlp)
        inner = inner + (of.cut - 1) * seconds(self.tokens, attention)
        total = total + np.where(cut & (attention != mlp), inner, 0.0)
        total = total + (cut & rest & ~mlp) * seconds(self.tokens, True)
        total = total + (((cut & mlp) | rest) != head) * seconds(self.outputs, head)
        return np.asarray(total + head * seconds(self.outputs, False, self.setting.vocab))


class CutPrices:
    """Of one number of sequences."""

    def __init__(self, setting: Setting, cuts: CutModel) -> None:
        self.setting, self.cuts = setting, cuts

    @functools.cache  # noqa: B019  # of few contexts
    def decode(self, context: int) -> StepPrice:
        """Of a step in which each sequence has `context` positions."""
        setting, units = self.setting, self.setting.decode_units
        own, there = (
            decode_attention_s(setting, context, lane)[:, None] for lane in lanes(setting)
        )
        one, kinds = np.array([setting.batch]), [(Step(setting.batch, 1, setting.batch), [0])]
        ends = units["cpu embedding"], units["cpu head"], units["accelerator head"]
        return self._price(kinds, self._resting(kinds, own, there), ends, one, one)

    def prompts(self, prefill: Prefill, least: int | None) -> list[StepPrice]:
        """Of the steps of fewer than `least` tokens, and of the others, in which weights of the
        CPU visit; of all where it is None."""
        visits = np.zeros(prefill.steps, bool) if least is None else prefill.tokens >= least
        found = []
        for some, visit in ((~visits, False), (visits, True)):
            if not some.any():
                continue
            sizes = list(
                zip(prefill.tokens[some].tolist(), prefill.outputs[some].tolist(), strict=True)
            )
            kinds: list[StepKind] = [
                (Step(n[0], n[0], outputs=n[1]), [i for i, size in enumerate(sizes) if size == n])
                for n in dict.fromkeys(sizes)
            ]
            layers: Resting | Visiting
            if visit:
                layers = Visiting(self.cuts, prefill, some, kinds)
            else:
                attention = (own[:, some, ATTENTION] for own in (prefill.cpu, prefill.accelerator))
                layers = self._resting(kinds, *attention)
            ends = [
                each[some].sum(axis=0)
                for each in (
                    prefill.embedding["cpu"],
                    prefill.head["cpu"],
                    prefill.head["accelerator"],
                )
            ]
            sized = prefill.tokens[some], prefill.outputs[some]
            found.append(self._price(kinds, layers, ends, *sized))
        return found

    def _resting(self, kinds: Sequence[StepKind], own_s: F64, there_s: F64) -> Resting:
        """own_s, there_s: [classes, steps] of attention on the CPU and on the accelerator."""
        nothing, tables = np.zeros(own_s.shape[1]), list[F64]()
        for kind in (0, 1):
            by_class = [
                self._terms(ways[kind], kinds, *(both if kind == 0 else (nothing, nothing)))
                for ways, *both in zip(self.cuts.layers, own_s, there_s, strict=True)
            ]
            tables.append(np.stack(by_class).transpose(2, 0, 1, 3))
        return Resting(self.cuts, *tables)

    def _terms(self, ways: Ways, kinds: Sequence[StepKind], own_s: F64, there_s: F64) -> F64:
        """[homes, TERMS, ways] of all steps. Those that are alike are priced once."""
        setting, found = self.setting, list[F64]()
        for step, at in kinds:
            pairs = own_s[at] + 1j * there_s[at]  # which sort faster than columns
            each, times = np.unique(pairs, return_counts=True)
            key = "cut", ways.unit.name, step, setting.cpu.threads, each.tobytes()
            args = setting, self.cuts.model, ways, step, (each.real, each.imag)
            found.append(times @ setting.once(key, unit_terms, *args))
        return np.asarray(sum(found))

    def _price(
        self, kinds: Sequence[StepKind], layers: Resting | Visiting, units: Sequence[F64],
        tokens: I64, outputs: I64,
    ) -> StepPrice:  # fmt: skip
        """kinds: steps, and the places of those that are alike but for attention. units: the
        embedding, and a whole head on the CPU and on the accelerator."""
        ends, own, there = (np.pad(each, (0, len(TERMS) - DEVICE_TERMS)) for each in units)
        for lane, device in enumerate(lanes(self.setting)):
            ends[lane * DEVICE_TERMS + FIXED] += len(tokens) * device.step_s
        ways, inner = self.cuts.head, np.zeros((len(TERMS), len(self.cuts.head.marks)))
        if some := [kind for kind in kinds if kind[0].output_rows]:
            nothing = np.zeros(len(tokens))
            inner = self._terms(ways, some, nothing, nothing)[0]
        head = ways.padded(np.roll(there, DEVICE_TERMS), inner[:, 1:-1], own)
        return StepPrice(self.cuts, self.setting, layers, head, ends, tokens, outputs)
