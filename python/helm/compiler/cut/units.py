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

PARTIAL = "partial"
Count = Any  # int, or an array of them
Range = tuple[Count, Count]
ROLES = ("begin", "home", "guest", "end")  # last in the name of a unit that is a piece of another


@dataclass(frozen=True)
class Rectangle:
    """Rows and columns of a checkpoint's tensor from row and col on. shape: of these, `whole` of
    the tensor; col is 0 of a vector."""

    tensor: str
    whole: tuple[int, ...]
    row: Count
    col: Count
    shape: tuple[Count, ...]

    @property
    def name(self) -> str:
        begins = (self.row, self.col)[: len(self.shape)]
        spans = (_text((at, at + n)) for at, n in zip(begins, self.shape, strict=True))
        return f"{self.tensor}[{', '.join(spans)}]"


def _text(span: Range) -> str:
    first, last = (each if isinstance(each, int) else int(np.ravel(each)[0]) for each in span)
    return f"{first}:{last}"


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
    """What a plan says of a graph that was cut. tensors: the shapes of all that ops read, parts:
    those that are rectangles of others, by name. kv: entries in the order of their heads."""

    units: tuple[PlacedUnit, ...]
    values: tuple[Value, ...]
    tensors: dict[str, tuple[int, ...]]
    parts: dict[str, Rectangle]
    kv: tuple[KvLayer, ...]


class Cutter:
    """Makes the units of a cut of one graph. places: names of the CPU and of the other device."""

    def __init__(self, graph: Graph, places: tuple[str, str] = (CPU, ACCELERATOR)) -> None:
        self._graph, self._places = graph, places
        self._widths = {v.name: v for v in graph.values}
        self._values: dict[str, Value] = {}
        self._parts: dict[str, Rectangle] = {}
        self._kv: list[KvLayer] = []

    @property
    def values(self) -> dict[str, Value]:
        """The graph's, and those that were made."""
        return {**self._widths, **self._values}

    def costed(self, model: CostedGraph) -> CostedGraph:
        """The model with what was made of its tensors and values."""
        parts = self._parts.values()
        return costed(
            model,
            self.values.values(),
            {**self._graph.tensors, **{part.name: part.shape for part in parts}},
            {**{name: name for name in model.formats}, **{p.name: p.tensor for p in parts}},
        )

    def units(self, cut: Cut) -> CutUnits:
        """Raises ValueError for a unit that cannot be cut as asked."""
        graph, placed = self._graph, list[PlacedUnit]()
        placed.append(self._whole(graph.units[0], self._places[cut.embedding != CPU]))
        for layer, own in zip(graph.layers, cut.layers, strict=True):
            for unit in layer.units:
                placed += self.layer_unit(unit, own)
        head = graph.units[-1]
        if 0 < cut.rows < self._widths[graph.logits].width:
            placed += self.pieces(head, cut.rows, CPU)
        else:
            placed.append(self._whole(head, self._places[cut.rows <= 0]))
        used = {name for unit in placed for op in unit.ops for name in op.uses()}
        names = {name for unit in placed for op in unit.ops for name in op.weight_names()}
        shapes = {**graph.tensors, **{name: part.shape for name, part in self._parts.items()}}
        return CutUnits(
            tuple(placed),
            tuple(value for name, value in self.values.items() if name in used),
            {name: shapes[name] for name in _ordered(graph, self._parts) if name in names},
            {name: part for name, part in self._parts.items() if name in names},
            tuple(self._kv),
        )

    def _whole(self, unit: Unit, device: str) -> PlacedUnit:
        ops = list(unit.ops)
        for i, op in enumerate(ops):
            if isinstance(op, Attention):
                assert unit.layer is not None
                ops[i] = dataclasses.replace(op, layer=self._entry(unit.layer, 0, op.kv_heads))
        return PlacedUnit(unit.name, unit.kind, unit.layer, device, tuple(ops))

    def _entry(self, layer: int, first: int, count: int) -> int:
        self._kv.append(KvLayer(layer, first, count))
        return len(self._kv) - 1

    def layer_unit(self, unit: Unit, own: LayerCut) -> list[PlacedUnit]:
        """An attention or an mlp."""
        size, wanted = size_of(unit), own.heads if unit.kind == "attention" else own.elements
        if 0 < wanted < size:
            return self.pieces(unit, wanted, own.home)
        return [self._whole(unit, self._places[wanted <= 0])]

    def pieces(self, unit: Unit, count: Count, home: str) -> list[PlacedUnit]:
        """Of an attention, an mlp or the head, of which the CPU has `count` heads, elements or
        rows, some and not all of them."""
        shares = shares_of(unit)
        if isinstance(shares, str):
            raise ValueError(f"{unit.name}: {shares}")
        if home not in shares.homes:
            raise ValueError(f"{unit.name}: its home is not {home}")
        at = int(home != CPU)
        if shares.last is None:
            return self._head(unit, shares, count)
        ranges = ((0, count), (count, size_of(unit)))
        if unit.kind == "attention":
            assert unit.layer is not None
            entries = [self._entry(unit.layer, a, b - a) for a, b in ranges]
            lanes = [
                _attention_lane(self, shares, span, entry, i == at)
                for i, (span, entry) in enumerate(zip(ranges, entries, strict=True))
            ]
        else:
            lanes = [_mlp_lane(self, shares, span, i == at) for i, span in enumerate(ranges)]
        add = Add(self._partial(shares.last.out), shares.last.out)
        return self._units(unit, at, shares.begin, lanes, (add, *shares.end))

    def _units(
        self, unit: Unit, home: int, begin: Sequence[Op], lanes: Sequence[Sequence[Op]],
        end: Sequence[Op],
    ) -> list[PlacedUnit]:  # fmt: skip
        """What is handed over without waiting comes before what the host computes itself."""
        own, guest = self._places[home], self._places[1 - home]
        home_s, guest_s = ("home", own, lanes[home]), ("guest", guest, lanes[1 - home])
        middle = (guest_s, home_s) if home == 0 else (home_s, guest_s)
        named = (("begin", own, begin), *middle, ("end", own, end))
        return [
            PlacedUnit(f"{unit.name}.{part}", unit.kind, unit.layer, device, tuple(ops))
            for part, device, ops in named
            if ops
        ]

    def _head(self, unit: Unit, shares: Shares, rows: Count) -> list[PlacedUnit]:
        outs, lanes = [], []
        for span in ((0, rows), (rows, self._widths[self._graph.logits].width)):
            outs.append(self.value(shares.first.out, span, span[1] - span[0]))
            lanes.append([self.rows_of(shares.first, [span], outs[-1])])
        end = (Concat(tuple(outs), shares.first.out), *shares.end)
        return self._units(unit, 0, shares.begin, lanes, end)

    # --- for lanes ---------------------------------------------------------------------------

    def value(self, of: str, span: Range, width: Count) -> str:
        """The name of a range of a value."""
        name = f"{of}[{_text(span)}]"
        self._values[name] = Value(name, width, self._widths[of].rows)
        return name

    def _partial(self, of: str) -> str:
        whole = self._widths[of]
        name = PARTIAL if whole.rows == "tokens" else f"{PARTIAL}_out"
        self._values[name] = Value(name, whole.width, whole.rows)
        return name

    def rows_of(self, op: Linear, spans: Sequence[Range], out: str) -> Linear:
        """The product of some of its stacked rows."""
        parts = list[Part]()
        for low, high in spans:
            first = 0
            for part in op.parts:
                height = self._graph.tensors[part.weight][0]
                rows = _within(low - first, height), _within(high - first, height)
                first += height
                if np.any(rows[0] < rows[1]):
                    bias = None if part.bias is None else self.part(part.bias, rows)
                    parts.append(Part(self.part(part.weight, rows), bias))
        return dataclasses.replace(op, out=out, parts=tuple(parts))

    def columns_of(self, op: Linear, span: Range, input: str, home: bool) -> Linear:
        """The product of some columns: at home with the bias into the residual."""
        [part] = op.parts
        height = self._graph.tensors[part.weight][0]
        weight = self.part(part.weight, (0, height), span)
        bias = part.bias if home else None
        out = op.out if home else self._partial(op.out)
        return Linear(input, out, (Part(weight, bias),), accumulate=home)

    def part(self, name: str, rows: Range, cols: Range | None = None) -> str:
        """The name of a rectangle of a weight, its own if that is all of it."""
        whole = self._graph.tensors[name]
        spans = (rows,) if len(whole) == 1 else (rows, (0, whole[1]) if cols is None else cols)
        shape = tuple(b - a for a, b in spans)
        if all(np.all(some == full) for some, full in zip(shape, whole, strict=True)):
            return name
        made = Rectangle(name, whole, rows[0], spans[1][0] if len(spans) > 1 else 0, shape)
        self._parts[made.name] = made
        return made.name


def _within(count: Count, most: int) -> Count:
    return min(max(count, 0), most) if isinstance(count, int) else np.clip(count, 0, most)


def _ordered(graph: Graph, parts: dict[str, Rectangle]) -> Iterable[str]:
    """Whole tensors in the graph's order, each before its parts by row and column."""
    of: dict[str, list[Rectangle]] = {}
    for part in parts.values():
        of.setdefault(part.tensor, []).append(part)
    for name in graph.tensors:
        yield name
        yield from (p.name for p in sorted(of.get(name, ()), key=lambda p: (p.row, p.col)))


def _attention_lane(
    cutter: Cutter, shares: Shares, span: Range, entry: int, home: bool
) -> list[Op]:
    """Of the KV heads in span."""
    op = next(op for op in shares.inner if isinstance(op, Attention))
    low, high, each, dim = *span, op.heads // op.kv_heads, op.head_dim
    spans, offsets, at = list[Range](), dict[str, Any](), 0
    starts = (op.q_offset, each, "q_offset"), (op.k_offset, 1, "k_offset"), (op.v_offset, 1, "v_offset")
    for offset, heads, name in sorted(starts):
        spans.append((offset + low * heads * dim, offset + high * heads * dim))
        offsets[name] = at
        at = at + (high - low) * heads * dim
    fed, width = cutter.value(op.input, span, at), (high - low) * each * dim
    attended = cutter.value(op.out, span, width)
    made: list[Op] = [cutter.rows_of(shares.first, spans, fed)]
    for one in shares.inner:
        if isinstance(one, Attention):
            heads = {"heads": (high - low) * each, "kv_heads": high - low, "layer": entry}
            made.append(dataclasses.replace(op, input=fed, out=attended, **heads, **offsets))
        elif isinstance(one, Select):
            selected = cutter.value(one.out, span, width)
            made.append(Select(attended, selected))
            attended = selected
        else:
            made += _moved(one, spans, fed, dim)
    if home:
        made += shares.apart
    assert shares.last is not None
    columns = (low * each * dim, high * each * dim)
    return [*made, cutter.columns_of(shares.last, columns, attended, home)]


def _moved(op: Op, spans: Sequence[Range], value: str, dim: int) -> list[Op]:
    """An op on heads side by side, for those in spans, which now lie side by side in value."""
    assert isinstance(op, (Norm, Rope))
    start = op.in_offset if isinstance(op, Norm) else op.offset
    count = op.groups if isinstance(op, Norm) else op.heads
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
        heads = (b - a) // dim
        if isinstance(op, Norm):
            own = {"input": value, "out": value, "in_offset": a, "out_offset": a}
            made.append(dataclasses.replace(op, **own, groups=heads))
        else:
            made.append(dataclasses.replace(op, value=value, offset=a, heads=heads))
    return made


def _mlp_lane(cutter: Cutter, shares: Shares, span: Range, home: bool) -> list[Op]:
    """Of the intermediate elements in span."""
    [op] = shares.inner
    assert isinstance(op, Activation)
    assert shares.last is not None
    low, high = span
    spans = [span, (op.size + low, op.size + high)] if op.gated else [span]
    fed = cutter.value(op.input, span, (high - low) * len(spans))
    out = fed if op.out == op.input else cutter.value(op.out, span, high - low)
    activated = dataclasses.replace(op, input=fed, out=out, size=high - low)
    return [
        cutter.rows_of(shares.first, spans, fed),
        activated,
        cutter.columns_of(shares.last, span, out, home),
    ]


def cut_units(graph: Graph, cut: Cut, places: tuple[str, str] = (CPU, ACCELERATOR)) -> CutUnits:
    """The units of `graph` cut so. places: names of the two devices, which may be one. Raises
    ValueError for a unit that cannot be cut."""
    return Cutter(graph, places).units(cut)


def costed(
    model: CostedGraph, values: Iterable[Value], shapes: Mapping[str, Any], whole: Mapping[str, str]
) -> CostedGraph:
    """The model with these values and tensors in place of its own. whole: of every tensor the
    model's, of which it is a part, or all."""
    graph = dataclasses.replace(model.graph, values=tuple(values), tensors=dict(shapes))
    formats = {name: model.formats[of] for name, of in whole.items()}
    own = {name: model.cpu_formats[of] for name, of in whole.items() if of in model.cpu_formats}
    return CostedGraph(graph, formats, model.kv_dtype, own)
