"""Every way to cut a model's layers and head, at once, and how layers are laid out. Knows no limit
of memory, no time, and ranks nothing.

Ways are how much of a unit the CPU has, from nothing to all of it: KV heads, intermediate elements
or rows of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helm.compiler.candidate import CutUse
from helm.compiler.counts import CostedGraph
from helm.compiler.cut.shares import ACCELERATOR, Shares, priced_shares, size_of
from helm.compiler.cut.units import Cutter
from helm.compiler.memory import DEVICE_ALIGNMENT
from helm.compiler.overflow import Bools
from helm.compiler.times import I64, BlockClasses, attentions
from helm.model.graph import Layer, Unit
from helm.model.mixture_ops import Experts
from helm.plan.units import CPU

HOMES = (CPU, ACCELERATOR)
_MOST_WAYS = 256
_HEAD_WAYS = 32
_KINDS = ("attention", "mlp")
Pieces = Mapping[str, Unit]  # by role


@dataclass(frozen=True)
class Ways:
    """Of one unit. marks: how much the CPU has. pieces: by home, of the ways but the first and the
    last, with an element for each in their sizes; none where the unit has no such home."""

    unit: Unit
    marks: I64
    pieces: tuple[Pieces, Pieces]

    @property
    def last(self) -> int:
        return len(self.marks) - 1

    def inside(self, ways: I64) -> Bools:
        """Whether both devices have some."""
        return np.asarray((ways > 0) & (ways < self.last))

    def on(self, lane: int | None, home: int) -> list[Unit]:
        """The pieces on the CPU, on the accelerator, or all."""
        pieces = self.pieces[home].items()
        return [piece for role, piece in pieces if lane in (None, lane_of(role, home))]

    def padded(self, nothing: Any, inner: Any, all_: Any) -> Any:
        """[..., ways] of [...], [..., ways - 2] or what becomes that, and [...]."""
        first, last = (np.asarray(end)[..., None] for end in (nothing, all_))
        middle = np.broadcast_to(inner, (*np.shape(nothing), self.last - 1))
        return np.concatenate([first, middle, last], axis=-1)


def lane_of(role: str, home: int) -> int:
    """0: on the CPU, 1: on the accelerator."""
    return 1 - home if role == "guest" else home


@dataclass(frozen=True)
class CutModel:
    """layers: of each class, attention and mlp; whole: they stay whole, each on a device. model:
    costs them and their pieces."""

    model: CostedGraph
    classes: BlockClasses
    layers: tuple[tuple[Ways, Ways], ...]
    head: Ways
    whole: bool

    @property
    def units(self) -> tuple[Ways, Ways, Ways]:
        """An attention, an mlp and the head."""
        return (*self.layers[0], self.head)

    def tables(self, lane: int | None, count: Callable[[Sequence[Unit]], Any]) -> tuple[Any, Any]:
        """Of attention and mlp, [classes, homes, ways]: count of the units on a lane, None: on
        both."""

        def table(ways: Ways, home: int) -> Any:
            whole = count([ways.unit])
            nothing, all_ = whole * (lane != 0), whole * (lane != 1)
            return ways.padded(nothing, count(ways.on(lane, home)), all_)

        attention, mlp = (
            np.array([[table(ways[kind], home) for home in (0, 1)] for ways in self.layers])
            for kind in (0, 1)
        )
        return attention, mlp

    @functools.cached_property
    def host_bytes(self) -> tuple[I64, I64]:
        """Of weights, as `tables` has them: the CPU's in its memory."""
        return self.tables(0, self.model.host_bytes)

    @functools.cached_property
    def device_bytes(self) -> tuple[I64, I64]:
        """The accelerator's in its memory."""
        return self.tables(1, self._device_bytes)

    @functools.cached_property
    def visiting_bytes(self) -> tuple[I64, I64]:
        """The CPU's in the accelerator's memory, which they visit."""
        return self.tables(0, self._device_bytes)

    @functools.cached_property
    def coming_bytes(self) -> tuple[I64, I64]:
        """The CPU's on their way there."""
        return self.tables(0, self.model.weight_bytes)

    def _device_bytes(self, units: Iterable[Unit]) -> int:
        return self.model.weight_bytes(units, DEVICE_ALIGNMENT)

    @property
    def blocks(self) -> int:
        return len(self.classes.member)

    @functools.cached_property
    def totals(self) -> I64:
        """[classes] layers."""
        return np.bincount(self.classes.member, minlength=len(self.layers))

    def counts(self, of: Layouts) -> tuple[I64, I64, I64]:
        """[layouts, classes] layers on the CPU, cut, on the accelerator."""
        if "counts" not in of.known:
            before = self.classes.before(range(self.blocks + 1)).astype(np.int64)
            ends = before[of.cpu], before[of.cpu + of.cut], before[self.blocks]
            of.known["counts"] = ends[0], ends[1] - ends[0], ends[2] - ends[1]
        found: tuple[I64, I64, I64] = of.known["counts"]
        return found


@dataclass(frozen=True)
class Layouts:
    """columns: [6, layouts], each with a property: layers from the first on the CPU, then so many
    that are cut, the rest on the accelerator; home of those that are cut, see `HOMES`; ways of
    their heads and elements, and of the head's rows. The embedding is on the CPU. known: what was
    found of them, whatever the way to run prompts."""

    columns: I64
    known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    cpu = property(lambda self: self.columns[0])
    cut = property(lambda self: self.columns[1])
    home = property(lambda self: self.columns[2])
    heads = property(lambda self: self.columns[3])
    elements = property(lambda self: self.columns[4])
    rows = property(lambda self: self.columns[5])

    def __len__(self) -> int:
        return len(self.columns[0])

    def at(self, chosen: I64 | Bools | slice) -> Layouts:
        return Layouts(self.columns[:, chosen])

    def with_(self, **fields: I64 | int) -> Layouts:
        """With other numbers, by property."""
        names = ("cpu", "cut", "home", "heads", "elements", "rows")
        rows = (fields.get(name, own) for name, own in zip(names, self.columns, strict=True))
        return Layouts(np.stack([np.broadcast_to(row, len(self)) for row in rows]))


def cut_use(cuts: CutModel, of: Layouts) -> CutUse:
    """Of the one layout."""
    heads, elements, rows = (ways.marks.tolist() for ways in cuts.units)
    _, cut, home, head, element, row = (int(each[0]) for each in of.columns)
    return CutUse(
        layers=cut, heads=heads[head], of_heads=heads[-1], elements=elements[element],
        of_elements=elements[-1], rows=rows[row], of_rows=rows[-1], home=HOMES[home],
    )  # fmt: skip


def cut_model(model: CostedGraph, classes: BlockClasses, columns: int) -> CutModel | str:
    """columns: a multiple of which columns of weights are cut. Why nothing can be cut, where so."""
    if any(tuple(unit.kind for unit in layer.units) != _KINDS for layer in classes.units):
        return "its layers are not an attention and an mlp each"
    whole = any(isinstance(op, Experts) for op in model.graph.ops())
    sizes = {tuple(map(size_of, layer.units)) for layer in classes.units}
    if len(sizes) != 1 and not whole:
        return "its layers are not all of one size"
    shares = [[priced_shares(layer.units[kind]) for layer in classes.units] for kind in (0, 1)]
    reasons = [each for own in shares for each in own if isinstance(each, str)]
    if len(reasons) == 2 * len(classes.units) and not whole:
        return reasons[0]
    marks = [_head_marks(classes.units, columns), _element_marks(classes.units, columns)]
    marks[1][-1] = max(size for _, size in sizes)
    for kind in (0, 1):  # all alike, as one cut is that of all layers
        if whole or any(isinstance(each, str) for each in shares[kind]):
            marks[kind] = marks[kind][[0, -1]]
    cutter = Cutter(model.graph)
    layers = tuple(
        (_ways(cutter, layer.units[0], marks[0]), _ways(cutter, layer.units[1], marks[1]))
        for layer in classes.units
    )
    head = _ways(cutter, model.graph.units[-1], _row_marks(model))
    return CutModel(cutter.costed(model), classes, layers, head, whole)


def _ways(cutter: Cutter, unit: Unit, marks: I64) -> Ways:
    shares, pieces = priced_shares(unit), list[dict[str, Unit]]()
    if isinstance(shares, str):
        marks = marks[[0, -1]]
    for home in HOMES:
        pieces.append({})
        if len(marks) > 2 and isinstance(shares, Shares) and home in shares.homes:
            for piece in cutter.pieces(unit, marks[1:-1], home):
                role = piece.name.rpartition(".")[2]
                pieces[-1][role] = Unit(piece.name, piece.kind, piece.layer, piece.ops)
    return Ways(unit, marks, (pieces[0], pieces[1]))


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
