"""In how many ways a model's layers and head can be cut, and how long each takes in steps of one
setting. Knows no limit of memory and ranks nothing.

Ways are those of `helm.compiler.cut_tables`; times are [homes, ways] of each class of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helm.compiler.counts import CostedGraph, Step
from helm.compiler.cut_price import HOMES, UnitPrice, price_unit
from helm.compiler.cut_shares import priced_shares, size_of
from helm.compiler.cut_tables import CutTable, make_table
from helm.compiler.layers import cpu_decode_s, decode_queries, positions_s
from helm.compiler.overflow import Bools
from helm.compiler.prefill import Prefill
from helm.compiler.setting import Setting
from helm.compiler.times import ATTENTION, F64, I64, BlockClasses, attentions, visible
from helm.model.graph import (
    Attention,
    Layer,
)
from helm.model.mixture_ops import Experts

_MOST_WAYS = 256
_HEAD_WAYS = 32
KINDS = ("attention", "mlp")


@dataclass(frozen=True)
class CutModel:
    """Tables of a model: of each class its attention and its mlp, and of the head."""

    layers: tuple[tuple[CutTable, CutTable], ...]
    head: CutTable
    known: dict[Any, set[str]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def whole(self) -> bool:
        """Whether attentions and mlps stay whole, each on a device."""
        return all(own.shares is None for own in self.layers[0])

    @property
    def heads(self) -> I64:
        """KV heads that the CPU may take."""
        return self.layers[0][0].marks

    @property
    def elements(self) -> I64:
        return self.layers[0][1].marks

    @property
    def rows(self) -> I64:
        return self.head.marks


def cut_model(model: CostedGraph, classes: BlockClasses, columns: int) -> CutModel | str:
    """columns: a multiple of which columns of weights are cut. Why nothing can be cut, where so."""
    reasons = list[str]()
    sizes = set[tuple[int, int]]()
    for layer in classes.units:
        if tuple(unit.kind for unit in layer.units) != KINDS:
            return "its layers are not an attention and an mlp each"
    if any(isinstance(op, Experts) for op in model.graph.ops()):
        return _apart(model, classes)
    for layer in classes.units:
        found = [priced_shares(unit) for unit in layer.units]
        reasons += [each for each in found if isinstance(each, str)]
        sizes.add((size_of(layer.units[0]), size_of(layer.units[1])))
    if len(sizes) != 1:
        return "its layers are not all of one size"
    if len(reasons) == 2 * len(classes.units):
        return reasons[0]
    heads, elements = _head_marks(classes.units, columns), _element_marks(classes.units, columns)
    tables = tuple(
        (make_table(model, layer.units[0], heads), make_table(model, layer.units[1], elements))
        for layer in classes.units
    )
    for kind in (0, 1):  # all alike, as one cut is that of all layers
        if any(own[kind].shares is None for own in tables):
            tables = tuple(_whole(own, kind) for own in tables)
    return CutModel(tables, make_table(model, model.graph.units[-1], _row_marks(model)))


def _apart(model: CostedGraph, classes: BlockClasses) -> CutModel:
    """Of a mixture of experts: attention and experts of a layer stay whole, each on a device."""
    sizes = [max(size_of(layer.units[kind]) for layer in classes.units) for kind in (0, 1)]
    heads, elements = (np.array([0, size], np.int64) for size in sizes)
    tables = tuple(
        (
            CutTable(model, layer.units[0], None, heads),
            CutTable(model, layer.units[1], None, elements),
        )
        for layer in classes.units
    )
    head = make_table(model, model.graph.units[-1], _row_marks(model))
    return CutModel(tables, head)


def _whole(own: tuple[CutTable, CutTable], kind: int) -> tuple[CutTable, CutTable]:
    table = own[kind]
    whole = CutTable(table.model, table.unit, None, table.marks[[0, -1]])
    return (whole, own[1]) if kind == 0 else (own[0], whole)


def _head_marks(layers: tuple[Layer, ...], columns: int) -> I64:
    op = attentions(layers[0])[0]
    each = op.heads // op.kv_heads * op.head_dim
    inner = [n for n in range(1, op.kv_heads) if n * each % columns == 0]
    return np.array([0, *inner, op.kv_heads], np.int64)


def _element_marks(layers: tuple[Layer, ...], columns: int) -> I64:
    size = size_of(layers[0].units[1])
    unit = max(columns, 64) if size >= 32 * 64 else columns
    unit *= max(1, -(-size // (unit * _MOST_WAYS)))
    return np.array([*range(0, size, unit), size], np.int64)


def _row_marks(model: CostedGraph) -> I64:
    size = next(v.width for v in model.graph.values if v.name == model.graph.logits)
    unit = 16 * max(1, -(-size // (16 * _HEAD_WAYS)))
    return np.array([*range(0, size, unit), size], np.int64)


@dataclass(frozen=True)
class Layouts:
    """Arrays [layouts]: layers from the first on the CPU, then so many that are cut, the rest on
    the accelerator. home: of those that are cut, see `HOMES`. heads, elements, rows: places among
    the marks of a `CutModel`. The embedding is on the CPU."""

    cpu: I64
    cut: I64
    home: I64
    heads: I64
    elements: I64
    rows: I64

    def __len__(self) -> int:
        return len(self.cpu)

    def at(self, chosen: I64 | Bools) -> Layouts:
        return Layouts(*(np.asarray(each[chosen]) for each in self.arrays))

    @property
    def arrays(self) -> tuple[I64, ...]:
        return (self.cpu, self.cut, self.home, self.heads, self.elements, self.rows)


@dataclass(frozen=True)
class CutTimes:
    """Seconds in one kind of step, or in all steps of the prompts together. attention, mlp:
    [classes, homes, ways] within layers that are cut; head: [ways]."""

    attention: F64
    mlp: F64
    head: F64
    prices: tuple[tuple[UnitPrice, UnitPrice], ...]  # by class
    head_price: UnitPrice | None

    @property
    def on_cpu(self) -> F64:
        """[classes] of layers that lie there as a whole."""
        return np.asarray(self.attention[:, 0, -1] + self.mlp[:, 0, -1])

    @property
    def on_accelerator(self) -> F64:
        return np.asarray(self.attention[:, 1, 0] + self.mlp[:, 1, 0])


def decode_times(setting: Setting, cuts: CutModel, context: int) -> CutTimes:
    """Of a decode step in which each sequence has `context` positions."""
    seconds = decode_attention_s(setting, context)

    def attention(index: int, layer: Layer) -> Mapping[str, F64]:
        return {site: each[index : index + 1] for site, each in seconds.items()}

    step = Step(setting.batch, 1, setting.batch)
    return _times(setting, cuts, [(step, 1)], attention, lambda index: slice(None))


def decode_attention_s(setting: Setting, context: int) -> dict[str, F64]:
    """[classes] of a layer's attention, by site."""
    device = setting.accelerator
    assert device is not None
    there = [
        sum(
            float(positions_s(setting, op, setting.batch * _seen(op, context), device)[0])
            for op in attentions(layer)
        )
        for layer in setting.classes.units
    ]
    return {"cpu": cpu_decode_s(setting, context), "accelerator": np.array(there)}


def _seen(op: Attention, context: int) -> I64:
    return visible(op, decode_queries(context))


def prefill_times(prefill: Prefill, cuts: CutModel, some: Bools) -> CutTimes | None:
    """Of `some` [steps] of the prompts; None without any."""
    if not some.any():
        return None
    tokens, outputs = prefill.tokens[some].tolist(), prefill.outputs[some].tolist()
    sizes = list(zip(tokens, outputs, strict=True))
    kinds = list(dict.fromkeys(sizes))
    at = [[i for i, n in enumerate(sizes) if n == kind] for kind in kinds]
    seconds = {
        "cpu": prefill.cpu[:, some, ATTENTION],
        "accelerator": prefill.accelerator[:, some, ATTENTION],
    }

    def attention(index: int, layer: Layer) -> Mapping[str, F64]:
        return {site: every[index] for site, every in seconds.items()}

    steps = [(Step(n[0], n[0], outputs=n[1]), len(i)) for n, i in zip(kinds, at, strict=True)]
    return _times(prefill.setting, cuts, steps, attention, lambda kind: at[kind])


def _times(
    setting: Setting,
    cuts: CutModel,
    kinds: list[tuple[Step, int]],
    attention: Callable[[int, Layer], Mapping[str, F64]],
    chosen: Callable[[int], slice | list[int]],
) -> CutTimes:
    """kinds: steps, and how many are alike but for attention; chosen: which those are."""
    nothing = {"cpu": np.zeros(1), "accelerator": np.zeros(1)}
    prices = list[tuple[UnitPrice, UnitPrice]]()
    for index, layer in enumerate(setting.classes.units):
        seconds = attention(index, layer)
        first, second = cuts.layers[index]
        halves = list[UnitPrice](), list[UnitPrice]()
        for number, (step, count) in enumerate(kinds):
            own = {site: each[chosen(number)] for site, each in seconds.items()}
            halves[0].append(price_unit(setting, first, step, own))
            halves[1].append(_times_of(price_unit(setting, second, step, nothing), count))
        prices.append((_together(halves[0]), _together(halves[1])))
    head = head_price(setting, cuts, kinds)
    return CutTimes(
        np.stack([_homes(own[0]) for own in prices]),
        np.stack([_homes(own[1]) for own in prices]),
        np.zeros(len(cuts.rows)) if head is None else _homes(head)[0],
        tuple(prices),
        head,
    )


def head_price(setting: Setting, cuts: CutModel, kinds: list[tuple[Step, int]]) -> UnitPrice | None:
    """Of the head in steps, of which so many are alike; None where none has outputs."""
    nothing = {"cpu": np.zeros(1), "accelerator": np.zeros(1)}
    ends = [
        _times_of(price_unit(setting, cuts.head, step, nothing), count)
        for step, count in kinds
        if step.output_rows
    ]
    return _together(ends) if ends else None


def _homes(price: UnitPrice) -> F64:
    """[homes, ways] of the one row that `_together` leaves."""
    return np.stack([price.total[home][0] for home in range(len(HOMES))])


def _times_of(price: UnitPrice, count: int) -> UnitPrice:
    if count == 1:
        return price
    return UnitPrice(
        tuple(each * count for each in price.total),  # type: ignore[arg-type]
        tuple(each * count for each in price.terms),  # type: ignore[arg-type]
        price.parts,
    )


def _together(prices: list[UnitPrice]) -> UnitPrice:
    """The sum over all steps, as one."""
    total = [sum(p.total[home].sum(axis=0) for p in prices)[None] for home in (0, 1)]
    terms = [sum(p.terms[home].sum(axis=1) for p in prices)[:, None] for home in (0, 1)]
    return UnitPrice((total[0], total[1]), (terms[0], terms[1]), prices[0].parts)
