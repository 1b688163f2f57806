"""Cuts layers and the head between two devices: from a graph to units, values, parts of tensors and
KV entries. Knows no family, no machine and no time.

The CPU takes the first KV heads of an attention, the first intermediate elements of an mlp, the
first rows of the vocabulary; the accelerator the rest. The home of a cut unit keeps the residual:
it adds its own share, then the partial sum of the other device, its guest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from helm.compiler.cut_shares import ACCELERATOR, Shares, head_shares, shares_of, size_of
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
Range = tuple[int, int]


@dataclass(frozen=True)
class Rectangle:
    """Rows and columns of a checkpoint's tensor from row and col on. shape: of these, `whole` of
    the tensor; col is 0 of a vector."""

    tensor: str
    whole: tuple[int, ...]
    row: int
    col: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        rows = f"{self.row}:{self.row + self.shape[0]}"
        if len(self.shape) == 1:
            return f"{self.tensor}[{rows}]"
        return f"{self.tensor}[{rows}, {self.col}:{self.col + self.shape[1]}]"


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

    def graph(self, whole: Graph) -> Graph:
        """The same model with these units in place of its own."""
        units = tuple(Unit(u.name, u.kind, u.layer, u.ops) for u in self.units)
        kv = dataclasses.replace(whole.kv, layers=self.kv)
        return dataclasses.replace(
            whole, units=units, values=self.values, tensors=self.tensors, kv=kv
        )


class Cutter:
    """Makes the units of a cut of one graph. places: names of the CPU and of the other device."""

    def __init__(self, graph: Graph, places: tuple[str, str] = (CPU, ACCELERATOR)) -> None:
        self._graph, self._places = graph, places
        self._widths = {v.name: v for v in graph.values}
        self._values: dict[str, Value] = {}
        self._parts: dict[str, Rectangle] = {}
        self._kv: list[KvLayer] = []

    def units(self, cut: Cut) -> CutUnits:
        """Raises ValueError for a unit that cannot be cut as asked."""
        graph, placed = self._graph, list[PlacedUnit]()
        placed.append(self._whole(graph.units[0], self._places[cut.embedding != CPU]))
        for layer, own in zip(graph.layers, cut.layers, strict=True):
            for unit in layer.units:
                placed += self.layer_unit(unit, own)
        placed += self.head(graph.units[-1], cut.rows)
        used = {name for unit in placed for op in unit.ops for name in op.uses()}
        known = {**self._widths, **self._values}
        names = {name for unit in placed for op in unit.ops for name in op.weight_names()}
        shapes = {**graph.tensors, **{name: part.shape for name, part in self._parts.items()}}
        return CutUnits(
            tuple(placed),
            tuple(value for name, value in known.items() if name in used),
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
        window = next(e.window for e in self._graph.kv.layers if e.layer == layer)
        self._kv.append(KvLayer(layer, first, count, window))
        return len(self._kv) - 1

    def layer_unit(self, unit: Unit, own: LayerCut) -> list[PlacedUnit]:
        """An attention or an mlp."""
        size, wanted = size_of(unit), own.heads if unit.kind == "attention" else own.elements
        if wanted >= size or wanted <= 0:
            return [self._whole(unit, self._places[wanted <= 0])]
        shares = shares_of(unit)
        if isinstance(shares, str):
            raise ValueError(f"{unit.name}: {shares}")
        if own.home not in shares.homes:
            raise ValueError(f"{unit.name}: its home is not {own.home}")
        ranges = ((0, wanted), (wanted, size))
        home = int(own.home != CPU)
        lane = _attention_lane if unit.kind == "attention" else _mlp_lane
        entries = [0, 0]
        if unit.kind == "attention":
            assert unit.layer is not None
            entries = [self._entry(unit.layer, a, b - a) for a, b in ranges]
        lanes = [lane(self, shares, span, entries[i], i == home) for i, span in enumerate(ranges)]
        assert shares.last is not None
        add = Add(self._partial(shares.last.out), shares.last.out)
        return self._units(unit, home, shares.begin, lanes, (add, *shares.end))

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

    def head(self, unit: Unit, rows: int) -> list[PlacedUnit]:
        """rows: on the CPU."""
        shares = head_shares(unit)
        size = self._widths[self._graph.logits].width
        if not 0 < rows < size:
            return [self._whole(unit, self._places[rows <= 0])]
        if isinstance(shares, str):
            raise ValueError(f"{unit.name}: {shares}")
        outs, lanes = [], []
        for span in ((0, rows), (rows, size)):
            outs.append(self.value(shares.first.out, span, span[1] - span[0]))
            lanes.append([self.rows_of(shares.first, [span], outs[-1])])
        end = (Concat(tuple(outs), shares.first.out), *shares.end)
        return self._units(unit, 0, shares.begin, lanes, end)

    @property
    def ranges(self) -> dict[str, Value]:
        """Values made so far that are ranges of others."""
        return {name: value for name, value in self._values.items() if name.endswith("]")}

    # --- for lanes ---------------------------------------------------------------------------

    def value(self, of: str, span: Range, width: int) -> str:
        """The name of a range of a value."""
        name = f"{of}[{span[0]}:{span[1]}]"
        self._values[name] = Value(name, width, self._widths[of].rows)
        return name

    def _partial(self, of: str) -> str:
        whole = self._widths[of]
        name = PARTIAL if whole.rows == "tokens" else f"{PARTIAL}_out"
        self._values[name] = Value(name, whole.width, whole.rows)
        return name

    def rows_of(self, op: Linear, spans: Sequence[Range], out: str) -> Linear:
        """The product of some of its stacked rows."""
        parts, row = list[Part](), 0
        bounds = []
        for part in op.parts:
            height = self._graph.tensors[part.weight][0]
            bounds.append((part, row, row + height))
            row += height
        for low, high in spans:
            for part, first, last in bounds:
                start, end = max(low, first) - first, min(high, last) - first
                if start < end:
                    bias = None if part.bias is None else self.part(part.bias, (start, end))
                    parts.append(Part(self.part(part.weight, (start, end)), bias))
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
        if shape == whole:
            return name
        made = Rectangle(name, whole, rows[0], spans[1][0] if len(spans) > 1 else 0, shape)
        self._parts[made.name] = made
        return made.name


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
    kept = sorted(
        (offset + low * heads * dim, offset + high * heads * dim, name)
        for offset, heads, name in (
            (op.q_offset, each, "q_offset"), (op.k_offset, 1, "k_offset"),
            (op.v_offset, 1, "v_offset"),
        )
    )  # fmt: skip
    spans = [(a, b) for a, b, _ in kept]
    fed = cutter.value(op.input, span, sum(b - a for a, b in spans))
    names, at = {}, 0
    for a, b, name in kept:
        names[name] = at
        at += b - a
    made: list[Op] = [cutter.rows_of(shares.first, spans, fed)]
    attended = cutter.value(op.out, span, (high - low) * each * dim)
    current = op.out
    for each_op in shares.inner:
        if isinstance(each_op, Attention):
            heads = {"heads": (high - low) * each, "kv_heads": high - low, "layer": entry}
            made.append(dataclasses.replace(op, input=fed, out=attended, **heads, **names))
        elif isinstance(each_op, Select):
            current = each_op.out
            selected = cutter.value(current, span, (high - low) * each * dim)
            made.append(Select(attended, selected))
            attended = selected
        else:
            made += _moved(each_op, spans, fed, dim)
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
    runs, at = list[list[int]](), 0
    for a, b in spans:
        low, high = max(a, start), min(b, start + count * dim)
        if low < high:
            new = at + low - a
            if runs and runs[-1][1] == new:
                runs[-1][1] = new + high - low
            else:
                runs.append([new, new + high - low])
        at += b - a
    made: list[Op] = []
    for a, b in runs:
        heads = (b - a) // dim
        if isinstance(op, Norm):
            own = {"input": value, "out": value, "in_offset": a, "out_offset": a}
            made.append(dataclasses.replace(op, **own, groups=heads))  # type: ignore[arg-type]
        else:
            made.append(dataclasses.replace(op, value=value, offset=a, heads=heads))
    return made


def _mlp_lane(cutter: Cutter, shares: Shares, span: Range, _: int, home: bool) -> list[Op]:
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
