"""Which rows of a matrix stay on the accelerator where the others visit it: their bytes, and units
of a plan that have them apart. Knows no time and no machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.base.formats import FORMATS
from helm.compiler.counts import CostedGraph
from helm.compiler.cut.units import CutUnits
from helm.compiler.setting import F32
from helm.model.graph import Graph, Linear, Op, Part, Unit
from helm.plan.units import PlacedUnit
from helm.plan.weights import TensorPart

_ROWS = 16  # matrices are split at multiples of so many, as packed formats are


@dataclass(frozen=True)
class Matrix:
    """Of a unit. splits: whether some of its rows may stay; else all do, or none. bias: whether its
    rows have one, which stays, split likewise."""

    name: str
    rows: int
    cols: int
    format: str
    splits: bool
    bias: bool

    def stays(self, share: Any) -> Any:
        """How many rows, the first ones. share: of all; a number or an array."""
        some = np.floor(np.asarray(share) * (self.rows // _ROWS)).astype(np.int64) * _ROWS
        return np.where(np.asarray(share) >= 1.0, self.rows, some * self.splits)

    def visiting_bytes(self, share: Any, alignment: int) -> Any:
        return _aligned(
            FORMATS[self.format].bytes(self.rows - self.stays(share), self.cols), alignment
        )

    def staying_bytes(self, share: Any, alignment: int) -> Any:
        """With the bias."""
        rows = self.stays(share)
        size = _aligned(FORMATS[self.format].bytes(rows, self.cols), alignment)
        if not self.bias:
            return size
        return size + sum(_aligned(F32 * part, alignment) for part in (rows, self.rows - rows))


def _aligned(size: Any, alignment: int) -> Any:
    return -(-size // alignment) * alignment


def matrices_of(model: CostedGraph, unit: Unit | PlacedUnit, splits: bool) -> list[Matrix]:
    """What is read as rows; vectors stay on the accelerator. splits: whether rows may be apart."""
    tensors, found = model.graph.tensors, dict[str, Matrix]()
    for op in unit.ops:
        parts = op.parts if isinstance(op, Linear) else ()
        biased = {part.weight for part in parts if part.bias is not None}
        for name in op.weight_names():
            if len(tensors[name]) > 1:
                rows, cols = tensors[name]
                own = model.format(name, "accelerator"), splits and bool(parts), name in biased
                found[name] = Matrix(name, rows, cols, *own)
    return list(found.values())


def visiting_names(
    units: Iterable[Unit | PlacedUnit], shapes: Mapping[str, tuple[Any, ...]]
) -> frozenset[str]:
    """Of units of the accelerator of which nothing but vectors stays, the tensors that visit."""
    names = {name for unit in units for op in unit.ops for name in op.weight_names()}
    return frozenset(name for name in names if len(shapes[name]) > 1)


def split_units(
    model: CostedGraph, units: Iterable[PlacedUnit], shares: Mapping[str, float], splits: bool
) -> tuple[CutUnits, frozenset[str]]:
    """The units of a plan, and the tensors that visit. shares: by kind of unit, what of its
    matrices stays. splits: see `matrices_of`."""
    graph, made, visiting = model.graph, list[PlacedUnit](), set[str]()
    shapes, parts = dict[str, tuple[int, ...]](graph.tensors), dict[str, TensorPart]()

    def rows_of(name: str, low: int, high: int) -> str:
        whole = graph.tensors[name]
        ranges = ", ".join([f"{low}:{high}", *(f"0:{size}" for size in whole[1:])])
        own = f"{name}[{ranges}]"
        shapes[own], parts[own] = (high - low, *whole[1:]), TensorPart(name, whole, low, 0)
        return own

    for unit in units:
        split = dict[str, int]()  # rows that stay, of what is in two parts
        of = matrices_of(model, unit, splits) if unit.kind in shares else ()
        for matrix in of:
            first, name = int(matrix.stays(shares[unit.kind])), matrix.name
            if 0 < first < matrix.rows:
                split[name], name = first, rows_of(name, first, matrix.rows)
            if first < matrix.rows:
                visiting.add(name)
        ops = list[Op]()
        for op in unit.ops:
            if isinstance(op, Linear):
                op = dataclasses.replace(
                    op,
                    parts=tuple(
                        one for part in op.parts for one in _apart(part, split, rows_of, graph)
                    ),
                )
            ops.append(op)
        made.append(dataclasses.replace(unit, ops=tuple(ops)))
    read = {name for unit in made for op in unit.ops for name in op.weight_names()}
    order = {name: place for place, name in enumerate(graph.tensors)}

    def place(name: str) -> tuple[int, int]:
        part = parts.get(name)
        return (order[name], 0) if part is None else (order[part.tensor], part.row)

    return CutUnits(
        tuple(made),
        graph.values,
        {name: shapes[name] for name in sorted(read, key=place)},
        {name: part for name, part in parts.items() if name in read},
        graph.kv.layers,
    ), frozenset(visiting)


def _apart(
    part: Part, split: Mapping[str, int], rows_of: Callable[[str, int, int], str], graph: Graph
) -> Iterator[Part]:
    """Both parts of a part, or itself."""
    if part.weight not in split:
        yield part
        return
    first, rows = split[part.weight], graph.tensors[part.weight][0]
    for span in ((0, first), (first, rows)):
        bias = None if part.bias is None else rows_of(part.bias, *span)
        yield Part(rows_of(part.weight, *span), bias)
