"""How long steps of layouts with cut layers take, all at once: a decode step, and the prompts. Each
is what the timeline plays of the layout's program, as tests say. Knows no limit of memory and ranks
nothing.

A unit that is cut begins and ends at its home: the other device has nothing to do before and after.
So one thing follows the other: embedding, layers of the CPU, those that are cut, those of the
accelerator, head; between them what crosses.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.compiler.counts import CostedGraph, Step
from helm.compiler.cut.memory import CutMemory
from helm.compiler.cut.ways import HOMES, CutModel, Layouts, Ways, lane_of
from helm.compiler.layers import decode_attention_s, visiting_body, visiting_seconds
from helm.compiler.overflow import Bools
from helm.compiler.prefill import Prefill
from helm.compiler.setting import F32, Device, Setting
from helm.compiler.times import (
    ATTENTION,
    DEVICE_TERMS,
    F64,
    FIXED,
    I64,
    LINK,
    MEMORY,
    OVERLAP,
    TERMS,
    VISIT,
    unit_s,
)
from helm.model.graph import Attention, Unit

_HANDED = 3  # tasks that the CPU hands over before its own share: copy, run, copy


# --- a unit ----------------------------------------------------------------------------------------


def crossing_s(setting: Setting, rows: int, width: Any, up: bool) -> Any:
    """Seconds of rows of a value on the link; nothing where it has none."""
    link = setting.link
    assert link is not None
    rate = link.to_accelerator_bytes_per_s if up else link.to_host_bytes_per_s
    return link.latency_s + F32 * rows * width / rate if rows else 0.0


@dataclass(frozen=True)
class Shared:
    """A unit that is cut, in a step. times: [DEVICE_TERMS, ...] by role, with what handing over
    and computing both at once add. sent_s, returned_s: what crosses to the guest, and back."""

    home: int
    times: Mapping[str, F64]
    sent_s: Any
    returned_s: Any

    @property
    def total(self) -> F64:
        """As the tasks are played."""
        own, guest = self.times["home"].sum(axis=0), self.times["guest"].sum(axis=0)
        ends = (self.times["begin"] + self.times["end"]).sum(axis=0)
        if self.home == 0:
            return np.asarray(ends + np.maximum(own, self.sent_s + guest + self.returned_s))
        # What comes back is behind the home's own share in the accelerator's queue.
        return np.asarray(ends + np.maximum(own + self.sent_s, self.sent_s + guest) + self.returned_s)

    @property
    def terms(self) -> F64:
        """[TERMS, ...]"""
        total = self.total
        found = np.zeros((len(TERMS), *total.shape))
        for role, times in self.times.items():
            at = lane_of(role, self.home) * DEVICE_TERMS
            found[at : at + DEVICE_TERMS] += times
        found[LINK] += self.sent_s + self.returned_s
        found[OVERLAP] = total - found.sum(axis=0)
        return found


def share_unit(
    setting: Setting, model: CostedGraph, pieces: Mapping[str, Unit], home: int, step: Step,
    attention_s: tuple[F64, F64],
) -> Shared:  # fmt: skip
    """pieces: by role. attention_s: of all heads on the CPU and on the accelerator, which have an
    axis more than sizes in pieces."""
    link, device, heads = setting.link, setting.accelerator, model.graph.kv.kv_heads
    assert link is not None
    assert device is not None
    devices: tuple[Device, Device] = setting.cpu, device
    times: dict[str, F64] = {"end": np.zeros(DEVICE_TERMS)}
    for role, piece in pieces.items():
        lane = lane_of(role, home)
        own = unit_s(model, piece, step, devices[lane])
        for op in piece.ops:
            if isinstance(op, Attention):
                attended = np.multiply.outer(attention_s[lane], op.kv_heads / heads)
                own = _wide(own, np.shape(attended))
                own[ATTENTION] += attended
        times[role] = own
    guest = pieces["guest"].ops
    sent, back = guest[0].uses()[0], guest[-1].uses()[-1]
    widths = {value.name: value.width for value in model.graph.values}
    sent_s = crossing_s(setting, model.rows(sent, step), widths[sent], home == 0)
    returned_s = crossing_s(setting, model.rows(back, step), widths[back], home == 1)
    shape = np.broadcast_shapes(*(np.shape(each)[1:] for each in times.values()), np.shape(returned_s))
    times = {role: _wide(own, shape) for role, own in times.items()}
    cpu, other = (times["home"], times["guest"]) if home == 0 else (times["guest"], times["home"])
    stage_s = getattr(device, "stage_s", None) or 0.0
    other[FIXED] += stage_s
    cpu[FIXED] += link.latency_s * (_HANDED if home == 0 else 1)
    if home == 1:
        times["end"][FIXED] += stage_s
    # The CPU is slower beside copies, and each while the other computes.
    own_s, other_s, copying = cpu.sum(axis=0), other.sum(axis=0), np.zeros(shape)
    both = np.minimum(own_s, other_s)
    if home == 0:
        copying = link.beside_copies(own_s, sent_s + returned_s) - own_s
        both = np.clip(own_s + copying - sent_s, 0.0, other_s)
    slower = both * (1.0 / link.rate_while_both_compute - 1.0)
    term = ATTENTION if pieces["guest"].kind == "attention" else MEMORY
    cpu[term] += copying + slower
    other[term] += slower
    return Shared(home, times, sent_s, returned_s)


def _wide(times: F64, shape: tuple[int, ...]) -> F64:
    """[DEVICE_TERMS, *shape], a copy."""
    own = times.reshape(DEVICE_TERMS, *(1,) * (len(shape) + 1 - times.ndim), *times.shape[1:])
    return np.array(np.broadcast_to(own, (DEVICE_TERMS, *shape)))


def _unit_terms(
    setting: Setting, model: CostedGraph, ways: Ways, step: Step, attention_s: tuple[F64, F64]
) -> F64:
    """[homes, TERMS, ways] of steps that are alike but for attention [steps], together, with the
    residual at home before and after. Infinite where a unit has no such home."""
    device, found = setting.accelerator, []
    assert device is not None
    devices: tuple[Device, Device] = setting.cpu, device
    count, whole = len(attention_s[0]), []
    for lane in (0, 1):
        own = count * unit_s(model, ways.unit, step, devices[lane])
        own[ATTENTION] += attention_s[lane].sum()
        whole.append(np.roll(_padded(own), lane * DEVICE_TERMS))
    first, last = ways.unit.ops[0].uses()[0], _into(ways)
    widths = {value.name: value.width for value in model.graph.values}
    for home in range(len(HOMES)):
        ends = [whole[1].copy(), whole[0].copy()]
        if ways.unit.kind != "head":  # there and back, where it is not at home
            for value, up in ((first, home == 0), (last, home == 1)):
                seconds = crossing_s(setting, model.rows(value, step), widths[value], up)
                ends[home][LINK] += count * seconds
        inner = np.zeros(len(TERMS))
        inner[OVERLAP] = np.inf
        if ways.pieces[home]:
            shared = share_unit(setting, model, ways.pieces[home], home, step, attention_s)
            terms = shared.terms
            inner = terms.sum(axis=1) if terms.ndim > 2 else count * terms
        else:
            inner = inner[:, None]
        found.append(ways.padded(ends[0], inner, ends[1]))
    return np.stack(found)


def _into(ways: Ways) -> str:
    """The value that a unit adds to."""
    for pieces in ways.pieces:
        if "end" in pieces:
            return pieces["end"].ops[0].uses()[-1]
    return ways.unit.ops[-1].uses()[-1]


# --- whole steps -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resting:
    """The layers in steps in which nothing visits, together. attention, mlp: [TERMS, classes, homes,
    ways]."""

    cuts: CutModel
    attention: F64
    mlp: F64

    def terms(self, of: Layouts, memory: CutMemory) -> F64:
        """[TERMS, layouts]"""
        return self._summed(of, self.attention, self.mlp)

    @functools.cached_property
    def totals(self) -> tuple[F64, F64]:
        """Seconds [classes, homes, ways] of attention and mlp."""
        return self.attention.sum(axis=0), self.mlp.sum(axis=0)

    def seconds(self, of: Layouts, memory: CutMemory, quick: bool) -> F64:
        """[layouts]"""
        return self._summed(of, *self.totals)

    def _summed(self, of: Layouts, attention: F64, mlp: F64) -> F64:
        own, cut, there = self.cuts.counts(of)
        whole = (attention[..., 0, -1] + mlp[..., 0, -1]) @ own.T
        whole = whole + (attention[..., 1, 0] + mlp[..., 1, 0]) @ there.T
        each = attention[..., of.home, of.heads] + mlp[..., of.home, of.elements]
        with np.errstate(invalid="ignore"):
            return np.asarray(whole + np.where(cut.T > 0, cut.T * each, 0.0).sum(axis=-2))


class Visiting:
    """The layers in `some` steps of prompts, in which weights of the CPU visit. kinds: see
    `CutPrices`."""

    def __init__(
        self, cuts: CutModel, prefill: Prefill, some: Bools, kinds: list[tuple[Step, I64]]
    ) -> None:
        self._cuts, self._prefill, self._some, self._kinds = cuts, prefill, some, kinds
        self._alone = prefill.accelerator[:, some]

    def terms(self, of: Layouts, memory: CutMemory) -> F64:
        """[TERMS, layouts]"""
        found = np.zeros((len(TERMS), len(of)))
        own = self._alone.sum(axis=1)
        found[DEVICE_TERMS : 2 * DEVICE_TERMS] = (self._cuts.counts(of)[2] @ own).T
        found[VISIT] = self._end_s(of, memory).sum(axis=1)
        return found

    def seconds(self, of: Layouts, memory: CutMemory, quick: bool) -> F64:
        """[layouts]; quick: at least those."""
        end = (self._least_s if quick else self._end_s)(of, memory).sum(axis=1)
        return np.asarray(end + self._cuts.counts(of)[2] @ self._alone.sum(axis=(1, 2)))

    def _end_s(self, of: Layouts, memory: CutMemory) -> F64:
        """[layouts, steps] when the accelerator is done with the layers of which the CPU has some."""
        shape = (len(of), self._alone.shape[1])
        whole, cut = list[F64](), list[F64]()
        for kind in range(len(self._alone)):
            alone = {
                name: np.broadcast_to(np.broadcast_to(each, len(self._some))[self._some], shape)
                for name, each in self._prefill.visiting_seconds(kind).items()
            }
            whole.append(visiting_body(alone))
            seconds = self._seconds(of, memory, kind).items()
            cut.append(visiting_body({n: np.broadcast_to(each, shape) for n, each in seconds}))
        state = np.zeros((4, *shape))
        for layer in range(int((of.cpu + of.cut).max(initial=0))):
            kind = int(self._cuts.classes.member[layer])
            there = (layer < of.cpu)[None, None, :, None]
            after = (np.where(there, whole[kind], cut[kind]) + state[None]).max(axis=1)
            state = np.where((layer < of.cpu + of.cut)[None, :, None], after, state)
        return np.asarray(state[0])

    def _seconds(self, of: Layouts, memory: CutMemory, kind: int) -> dict[str, Any]:
        """[layouts, steps] of the tasks of a cut layer of a class."""
        prefill, marks = self._prefill, self._cuts.units[0].marks
        past = np.bincount(prefill.queries.step, prefill.queries.past)[self._some]
        attention, mlp = self._runs[kind]
        run = attention[of.home, of.heads] + mlp[of.home, of.elements]
        return visiting_seconds(
            prefill.setting,
            self._cuts.classes.units[kind],
            past,
            prefill.tokens[self._some],
            run + self._alone[kind, :, ATTENTION],
            memory.visiting_bytes(of, kind)[:, None],
            (marks[of.heads] / marks[-1])[:, None],
        )

    @functools.cached_property
    def _runs(self) -> list[tuple[F64, F64]]:
        """By class, of attention and mlp: [homes, ways, steps] on the accelerator, all pieces."""
        model, device = self._cuts.model, self._prefill.setting.accelerator
        assert device is not None

        def table(ways: Ways) -> F64:
            found = np.zeros((len(HOMES), len(ways.marks), self._alone.shape[1]))
            for step, at in self._kinds:
                whole = unit_s(model, ways.unit, step, device).sum()
                for home, pieces in enumerate(ways.pieces):
                    each = [unit_s(model, p, step, device).sum(axis=0) for p in pieces.values()]
                    by_way = ways.padded(whole, np.asarray(sum(each)), whole)
                    found[home][:, at] = by_way[:, None]
            return found

        return [(table(own[0]), table(own[1])) for own in self._cuts.by_class]

    def _least_s(self, of: Layouts, memory: CutMemory) -> F64:
        """[layouts, steps] what the link, or the accelerator, does in all."""
        setting, counts = self._prefill.setting, self._cuts.counts(of)
        sizes = np.zeros(len(of))
        for kind, layer in enumerate(self._cuts.classes.units):
            sizes += counts[1][:, kind] * memory.visiting_bytes(of, kind)
            sizes += counts[0][:, kind] * setting.model.weight_bytes([layer])
        run = (counts[0] + counts[1]) @ self._alone.sum(axis=2)
        return np.maximum((sizes / setting.visit_bytes_per_s)[:, None], run)


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

    def seconds(self, of: Layouts, memory: CutMemory, *, quick: bool = False) -> F64:
        """[layouts]; quick: at least those of visits."""
        ends = self.head.sum(axis=0)[of.rows] + self.ends.sum()
        return np.asarray(self.layers.seconds(of, memory, quick) + ends + self._crossings(of))

    def terms(self, of: Layouts, memory: CutMemory) -> F64:
        """[TERMS] of the first layout."""
        total = self.layers.terms(of, memory)[:, 0] + self.head[:, of.rows[0]] + self.ends
        total[LINK] += self._crossings(of)[0]
        return np.asarray(total)

    def _crossings(self, of: Layouts) -> F64:
        """[layouts] seconds of what crosses between layers, and to and from a whole head."""
        setting, visit = self.setting, isinstance(self.layers, Visiting)
        attention, mlp, head = self.cuts.units
        rest = (of.cpu + of.cut < self.cuts.blocks) | visit
        there = rest | (of.cut > 0) & (of.home == 1)  # the residual, at the last layer
        whole = of.rows == 0  # the head is on the accelerator

        def seconds(rows: I64, width: int, up: bool) -> float:
            return float(sum(crossing_s(setting, n, width, up) for n in rows.tolist()))

        tokens, outputs, hidden = self.tokens, self.outputs, setting.hidden
        total = np.where(there, seconds(tokens, hidden, True), 0.0)
        total += np.where(~there & whole, seconds(outputs, hidden, True), 0.0)
        back = np.where(there, seconds(outputs, hidden, False), 0.0)
        total += np.where(whole, seconds(outputs, setting.vocab, False), back)
        if visit:
            return total
        # Where the first or the last unit that is not at home lies beside its like, the residual
        # does not cross twice between them.
        first = (of.cut > 0) & (of.home == 1) & (of.heads == attention.last)
        last = (of.cut > 0) & (of.elements == np.where(of.home == 1, mlp.last, 0))
        onward = last & (of.home == 0) & rest
        over = last & ~rest & np.where(of.home == 1, ~whole, whole)
        for some, rows in ((first | onward, tokens), (first & onward, tokens), (over, outputs)):
            both = seconds(rows, hidden, True) + seconds(rows, hidden, False)
            total -= np.where(some, both, 0.0)
        return total


class CutPrices:
    """Of one setting."""

    def __init__(self, setting: Setting, cuts: CutModel) -> None:
        self.setting, self.cuts = setting, cuts

    @functools.cache  # noqa: B019  # of few contexts
    def decode(self, context: int) -> StepPrice:
        """Of a step in which each sequence has `context` positions."""
        setting = self.setting
        own, there = (decode_attention_s(setting, context, lane) for lane in self._devices)
        units, one = setting.decode_units, np.array([setting.batch])
        heads = units["cpu head"], units["accelerator head"]
        kinds = [(Step(setting.batch, 1, setting.batch), np.array([0]))]
        layers = self._resting(kinds, (own[:, None], there[:, None]))
        return self._price(kinds, layers, units["cpu embedding"], heads, one, one)

    def prompts(self, prefill: Prefill, least: int | None) -> list[StepPrice]:
        """Of the steps of fewer than `least` tokens, and of the others, in which weights of the
        CPU visit; of all where it is None."""
        visits = np.zeros(prefill.steps, bool) if least is None else prefill.tokens >= least
        return [
            self._prompts(prefill, some, visit)
            for some, visit in ((~visits, False), (visits, True))
            if some.any()
        ]

    def _prompts(self, prefill: Prefill, some: Bools, visit: bool) -> StepPrice:
        tokens, outputs = prefill.tokens[some], prefill.outputs[some]
        sizes = list(zip(tokens.tolist(), outputs.tolist(), strict=True))
        kinds = [
            (Step(n[0], n[0], outputs=n[1]), np.flatnonzero([size == n for size in sizes]))
            for n in dict.fromkeys(sizes)
        ]
        heads = [prefill.head[site][some].sum(axis=0) for site in ("cpu", "accelerator")]
        embedding = prefill.embedding["cpu"][some].sum(axis=0)
        layers: Resting | Visiting = (
            Visiting(self.cuts, prefill, some, kinds)
            if visit
            else self._resting(
                kinds, (prefill.cpu[:, some, ATTENTION], prefill.accelerator[:, some, ATTENTION])
            )
        )
        return self._price(kinds, layers, embedding, (heads[0], heads[1]), tokens, outputs)

    @property
    def _devices(self) -> tuple[Device, Device]:
        assert self.setting.accelerator is not None
        return self.setting.cpu, self.setting.accelerator

    def _resting(self, kinds: list[tuple[Step, I64]], attention_s: tuple[F64, F64]) -> Resting:
        """kinds: steps, and which are alike but for attention. attention_s: [classes, steps] on
        both devices."""
        tables = []
        for kind, each in enumerate((attention_s, (np.zeros_like(attention_s[0]),) * 2)):
            by_class = [
                self._terms(ways[kind], kinds, own)
                for ways, *own in zip(self.cuts.by_class, *each, strict=True)
            ]
            tables.append(np.stack(by_class).transpose(2, 0, 1, 3))
        return Resting(self.cuts, *tables)

    def _terms(self, ways: Ways, kinds: list[tuple[Step, I64]], attention_s: Sequence[F64]) -> F64:
        """[homes, TERMS, ways] of all steps."""
        own, there = attention_s
        terms = [
            _unit_terms(self.setting, self.cuts.model, ways, step, (own[at], there[at]))
            for step, at in kinds
        ]
        return np.asarray(sum(terms))

    def _price(
        self, kinds: list[tuple[Step, I64]], layers: Resting | Visiting, embedding: F64,
        heads: tuple[F64, F64], tokens: I64, outputs: I64,
    ) -> StepPrice:  # fmt: skip
        """heads: of a whole one there."""
        begin, own, there = (_padded(each) for each in (embedding, heads[0], heads[1]))
        begin[FIXED] += len(tokens) * self._devices[0].step_s
        begin[DEVICE_TERMS + FIXED] += len(tokens) * self._devices[1].step_s
        there = np.roll(there, DEVICE_TERMS)
        some = [(step, at) for step, at in kinds if step.output_rows]
        inner = np.zeros((len(TERMS), len(self.cuts.head.marks)))
        if some:
            inner = self._terms(self.cuts.head, some, (np.zeros(len(tokens)),) * 2)[0]
        head = self.cuts.head.padded(there, inner[:, 1:-1], own)
        return StepPrice(self.cuts, self.setting, layers, head, begin, tokens, outputs)


def _padded(times: F64) -> F64:
    """[TERMS] of those of the CPU."""
    return np.pad(times, (0, len(TERMS) - DEVICE_TERMS))
