"""Cuts layers and the head between two devices: from a graph to units, values, parts of tensors and
KV entries. Knows no family, no machine and no time.

The CPU takes the first KV heads of an attention, the first intermediate elements of an mlp, the
first rows of the vocabulary; the accelerator the rest. The home of a cut unit keeps the residual:
it adds its own share, then the partial sum of the other device, its guest.

How much the CPU takes may be an array, an element for each of many cuts. Then the sizes in units,
values and parts are arrays as well, and names say those of the first cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.compiler.counts import CostedGraph
from helm.compiler.cut.shares import ACCELERATOR, Shares, shares_of, size_of
from helm.model.graph import (
    Activation,
    Add,
    Attention,
    Concat,
    Graph,
    KvLayer,
    Linear,
    Norm,
    Op,
    Part,
    Rope,
    Select,
    Unit,
    Value,
)
from helm.plan.units import CPU, PlacedUnit
from helm.plan.weights import TensorPart

Count = Any  # int, or an array of them
Range = tuple[Count, Count]
ROLES = ("begin", "home", "guest", "end")  # last in the name of a unit that is a piece of another


@dataclass(frozen=True)
class LayerCut:
    """heads: KV heads on the CPU, elements: of the mlp there; none or all of them leave the unit
    whole. home: the device that keeps the residual where a unit is cut."""

    heads: int
    elements: int
    home: str = CPU


@dataclass(frozen=True)
class Cut:
    """embedding: its device. layers: every layer. rows: of the vocabulary, on the CPU."""

    embedding: str
    layers: tuple[LayerCut, ...]
    rows: int


@dataclass(frozen=True)
class CutUnits:
    """What a plan says of a graph that was cut. tensors: the shapes of all that ops read, by name;
    parts: which are parts of others. kv: entries in the order of their heads."""

    units: tuple[PlacedUnit, ...]
    values: tuple[Value, ...]
    tensors: dict[str, tuple[int, ...]]
    parts: dict[str, TensorPart]
    kv: tuple[KvLayer, ...]


def cut_units(graph: Graph, cut: Cut, places: tuple[str, str] = (CPU, ACCELERATOR)) -> CutUnits:
    """The units of `graph` cut so. places: names of the two devices, which may be one. Raises
    ValueError for a unit that cannot be cut."""
    return Cutter(graph, places).units(cut)


class Cutter:
    """Makes units of one graph, and keeps what they are made of. places: see `cut_units`."""

    def __init__(self, graph: Graph, places: tuple[str, str] = (CPU, ACCELERATOR)) -> None:
        self._graph, self._places = graph, places
        self._values = {value.name: value for value in graph.values}
        self._shapes: dict[str, tuple[Count, ...]] = dict(graph.tensors)
        self._parts: dict[str, TensorPart] = {}
        self._kv: list[KvLayer] = []

    def costed(self, model: CostedGraph) -> CostedGraph:
        """The model with the tensors and values of all units that were made."""
        whole = {name: name for name in model.formats}
        whole |= {name: part.tensor for name, part in self._parts.items()}
        return costed(model, self._values.values(), self._shapes, whole)

    def units(self, cut: Cut) -> CutUnits:
        first, *_, head = self._graph.units
        placed = [self._whole(first, self._places[cut.embedding != CPU])]
        for layer, own in zip(self._graph.layers, cut.layers, strict=True):
            for unit, count in zip(layer.units, (own.heads, own.elements), strict=True):
                placed += self._unit(unit, count, size_of(unit), own.home)
        placed += self._unit(head, cut.rows, self._values[self._graph.logits].width, CPU)
        used = {name for unit in placed for op in unit.ops for name in op.uses()}
        read = {name for unit in placed for op in unit.ops for name in op.weight_names()}
        order = {name: place for place, name in enumerate(self._graph.tensors)}

        def place(name: str) -> tuple[int, ...]:
            part = self._parts.get(name)
            return (order[name],) if part is None else (order[part.tensor], part.row, part.col)

        return CutUnits(
            tuple(placed),
            tuple(value for name, value in self._values.items() if name in used),
            {name: self._shapes[name] for name in sorted(read, key=place)},
            {name: part for name, part in self._parts.items() if name in read},
            tuple(self._kv),
        )

    def _unit(self, unit: Unit, count: int, size: int, home: str) -> list[PlacedUnit]:
        if 0 < count < size:
            return self.pieces(unit, count, home)
        return [self._whole(unit, self._places[count <= 0])]

    def _whole(self, unit: Unit, device: str) -> PlacedUnit:
        ops = tuple(
            dataclasses.replace(op, layer=self._entry(unit, 0, op.kv_heads))
            if isinstance(op, Attention)
            else op
            for op in unit.ops
        )
        return PlacedUnit(unit.name, unit.kind, unit.layer, device, ops)

    def _entry(self, unit: Unit, first: Count, count: Count) -> int:
        assert unit.layer is not None
        window = next(e.window for e in self._graph.kv.layers if e.layer == unit.layer)
        self._kv.append(KvLayer(unit.layer, first, count, window))
        return len(self._kv) - 1

    def pieces(self, unit: Unit, count: Count, home: str) -> list[PlacedUnit]:
        """An attention, an mlp or the head, of which the CPU has `count` heads, elements or rows,
        some and not all of them."""
        shares = shares_of(unit)
        if isinstance(shares, str):
            raise ValueError(f"{unit.name}: {shares}")
        if home not in shares.homes:
            raise ValueError(f"{unit.name}: its home is not {home}")
        vocab, at = self._values[self._graph.logits].width, int(home != CPU)
        size = vocab if unit.kind == "head" else size_of(unit)
        spans: tuple[Range, Range] = ((0, count), (count, size))
        if unit.kind == "head":
            products = [self._head_lane(shares, span) for span in spans]
            lanes: list[list[Op]] = [[product] for product in products]
            last: Op = Concat(tuple(product.out for product in products), shares.first.out)
        else:
            lane = self._attention_lane if unit.kind == "attention" else self._mlp_lane
            lanes = [lane(unit, shares, span, i == at) for i, span in enumerate(spans)]
            assert shares.last is not None
            last = Add(self._partial(shares.last.out), shares.last.out)
        own, guest = (self._places[at], lanes[at]), (self._places[1 - at], lanes[1 - at])
        # What is handed over without waiting comes before what the host computes itself.
        middle = [("guest", *guest), ("home", *own)]
        named = [("begin", own[0], shares.begin), *middle[:: -1 if at else 1],
                 ("end", own[0], (last, *shares.end))]  # fmt: skip
        return [
            PlacedUnit(f"{unit.name}.{role}", unit.kind, unit.layer, device, tuple(ops))
            for role, device, ops in named
            if ops
        ]

    # --- what a device has of a unit -------------------------------------------------------------

    def _attention_lane(self, unit: Unit, shares: Shares, span: Range, home: bool) -> list[Op]:
        """Of the KV heads in span."""
        op = next(op for op in shares.inner if isinstance(op, Attention))
        low, high, each, dim = *span, op.heads // op.kv_heads, op.head_dim
        spans, offsets, at = list[Range](), dict[str, Any](), 0
        starts = (op.q_offset, each, "q"), (op.k_offset, 1, "k"), (op.v_offset, 1, "v")
        for offset, heads, name in sorted(starts):
            spans.append((offset + low * heads * dim, offset + high * heads * dim))
            offsets[f"{name}_offset"] = at
            at = at + (high - low) * heads * dim
        fed, width = self._value(op.input, span, at), (high - low) * each * dim
        attended = self._value(op.out, span, width)
        made: list[Op] = [self._rows_of(shares.first, spans, fed)]
        for one in shares.inner:
            if isinstance(one, Attention):
                entry = self._entry(unit, low, high - low)
                own = {"heads": (high - low) * each, "kv_heads": high - low, "layer": entry}
                made.append(dataclasses.replace(op, input=fed, out=attended, **own, **offsets))
            elif isinstance(one, Select):
                selected = self._value(one.out, span, width)
                made.append(Select(attended, selected))
                attended = selected
            else:
                made += _moved(one, spans, fed, dim)
        columns = (low * each * dim, high * each * dim)
        last = self._columns_of(shares.last, columns, attended, home)
        return [*made, *(shares.apart if home else ()), last]

    def _mlp_lane(self, unit: Unit, shares: Shares, span: Range, home: bool) -> list[Op]:
        """Of the intermediate elements in span."""
        [op] = shares.inner
        assert isinstance(op, Activation)
        low, high = span
        spans = [span, (op.size + low, op.size + high)] if op.gated else [span]
        fed = self._value(op.input, span, (high - low) * len(spans))
        out = fed if op.out == op.input else self._value(op.out, span, high - low)
        return [
            self._rows_of(shares.first, spans, fed),
            dataclasses.replace(op, input=fed, out=out, size=high - low),
            self._columns_of(shares.last, span, out, home),
        ]

    def _head_lane(self, shares: Shares, span: Range) -> Linear:
        """Of the rows in span."""
        out = self._value(shares.first.out, span, span[1] - span[0])
        return self._rows_of(shares.first, [span], out)

    def _value(self, of: str, span: Range, width: Count) -> str:
        """The name of a range of a value."""
        name = f"{of}[{_text(span)}]"
        self._values[name] = Value(name, width, self._values[of].rows)
        return name

    def _partial(self, of: str) -> str:
        whole = self._values[of]
        name = "partial" if whole.rows == "tokens" else "partial_out"
        self._values[name] = Value(name, whole.width, whole.rows)
        return name

    def _rows_of(self, op: Linear, spans: Sequence[Range], out: str) -> Linear:
        """The product of some of its stacked rows."""
        parts = list[Part]()
        for low, high in spans:
            first = 0
            for part in op.parts:
                height = self._graph.tensors[part.weight][0]
                rows = _within(low - first, height), _within(high - first, height)
                first += height
                if np.any(rows[0] < rows[1]):
                    bias = None if part.bias is None else self._part(part.bias, rows)
                    parts.append(Part(self._part(part.weight, rows), bias))
        return dataclasses.replace(op, out=out, parts=tuple(parts))

    def _columns_of(self, op: Linear | None, span: Range, input: str, home: bool) -> Linear:
        """The product of some columns: at home with the bias into the residual."""
        assert op is not None
        [part] = op.parts
        weight = self._part(part.weight, (0, self._graph.tensors[part.weight][0]), span)
        out = op.out if home else self._partial(op.out)
        return Linear(input, out, (Part(weight, part.bias if home else None),), accumulate=home)

    def _part(self, name: str, *spans: Range) -> str:
        """The name of rows, and columns if not all, of a weight: its own if that is all of it."""
        whole = self._graph.tensors[name]
        spans = (*spans, *((0, size) for size in whole[len(spans) :]))
        shape = tuple(b - a for a, b in spans)
        if all(np.all(some == full) for some, full in zip(shape, whole, strict=True)):
            return name
        made = f"{name}[{', '.join(map(_text, spans))}]"
        self._shapes[made] = shape
        self._parts[made] = TensorPart(name, whole, spans[0][0], spans[1][0] if spans[1:] else 0)
        return made


def _text(span: Range) -> str:
    return ":".join(str(end if isinstance(end, int) else end[0]) for end in span)


def _within(count: Count, most: int) -> Count:
    return min(max(count, 0), most) if isinstance(count, int) else np.clip(count, 0, most)


def _moved(op: Op, spans: Sequence[Range], value: str, dim: int) -> list[Op]:
    """An op on heads side by side, for those in spans, which now lie side by side in value."""
    assert isinstance(op, (Norm, Rope))
    start, count = (op.in_offset, op.groups) if isinstance(op, Norm) else (op.offset, op.heads)
    runs, at = list[Range](), 0
    for a, b in spans:
        low, high = (_within(end - start, count * dim) for end in (a, b))
        if np.any(low < high):
            new = at + low + start - a
            if runs and np.all(runs[-1][1] == new):
                new = runs.pop()[0]
            runs.append((new, at + high + start - a))
        at = at + b - a
    made: list[Op] = []
    for a, b in runs:
        fields: dict[str, Any] = {"value": value, "offset": a, "heads": (b - a) // dim}
        if isinstance(op, Norm):
            fields = {"input": value, "out": value, "in_offset": a, "out_offset": a}
            fields["groups"] = (b - a) // dim
        made.append(dataclasses.replace(op, **fields))
    return made


def costed(
    model: CostedGraph, values: Iterable[Value], shapes: Mapping[str, Any], whole: Mapping[str, str]
) -> CostedGraph:
    """The model with these values and tensors in place of its own. whole: of every tensor the
    model's, of which it is a part, or all."""
    graph = dataclasses.replace(model.graph, values=tuple(values), tensors=dict(shapes))
    formats = {name: model.formats[of] for name, of in whole.items()}
    own = {name: model.cpu_formats[of] for name, of in whole.items() if of in model.cpu_formats}
    return CostedGraph(graph, formats, model.kv_dtype, own)
