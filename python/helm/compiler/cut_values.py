"""Bytes of the values that layouts with cut layers have on each device, all at once. Knows no
weights and no times."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from helm.compiler.budget import geometry
from helm.compiler.cut import PARTIAL, Cutter, LayerCut
from helm.compiler.cut_price import HOMES
from helm.compiler.cut_space import CutModel, Layouts
from helm.compiler.cut_tables import CutTable
from helm.compiler.memory import DEVICE_ALIGNMENT, aligned, value_rows
from helm.compiler.setting import F32, Setting
from helm.compiler.times import I64
from helm.model.graph import Unit
from helm.plan.units import CPU, PlacedUnit


@dataclass(frozen=True)
class _Shared:
    """A unit that is cut: the names of its values on each device, and of what it has ranges of the
    width for one head or element and the rows."""

    names: tuple[frozenset[str], frozenset[str]]
    ranges: Mapping[str, tuple[int, int]]


_NOTHING = _Shared((frozenset(), frozenset()), {})


class CutValues:
    """Of one setting. visits: whether weights of the CPU visit the accelerator in prompts."""

    def __init__(self, setting: Setting, cuts: CutModel, visits: bool) -> None:
        self._setting, self._cuts, self._visits = setting, cuts, visits
        _, self._limits = geometry(setting)
        self._graph = setting.model.graph
        self._rows = value_rows(self._graph, self._limits)
        self._blocks = len(self._graph.layers)

    @functools.cached_property
    def _samples(self) -> dict[tuple[int, int, int], _Shared]:
        """By (kind, whether of the last layer, home)."""
        found = {}
        for last, layer in ((0, self._graph.layers[0]), (1, self._graph.layers[-1])):
            for kind, unit in enumerate(layer.units):
                for home in (0, 1):
                    found[kind, last, home] = self._sample(unit, kind, home)
        return found

    def _sample(self, unit: Unit, kind: int, home: int) -> _Shared:
        table = self._cuts.layers[0][kind]
        if table.shares is None or HOMES[home] not in table.shares.homes or len(table.marks) < 3:
            return _NOTHING
        mark = int(table.marks[1])
        cutter = Cutter(self._graph)
        return self._split(cutter, cutter.layer_unit(unit, LayerCut(mark, mark, HOMES[home])), mark)

    def _split(self, cutter: Cutter, made: Sequence[PlacedUnit], size: int) -> _Shared:
        """size: of the range of the CPU."""
        names: tuple[set[str], set[str]] = (set(), set())
        for unit in made:
            names[unit.device != CPU].update(name for op in unit.ops for name in op.uses())
        rows = {"tokens": self._limits.step_tokens, "outputs": self._limits.step_outputs}
        ranges = {
            name.rpartition("[")[0]: (value.width // size, rows[value.rows])
            for name, value in cutter.ranges.items()
            if name.rpartition("[")[2].startswith("0:")
        }
        kept = [frozenset(n for n in each if n not in cutter.ranges) for each in names]
        return _Shared((kept[0], kept[1]), ranges)

    @functools.cached_property
    def _head_sample(self) -> _Shared:
        table = self._cuts.head
        if table.shares is None or len(table.marks) < 3:
            return _NOTHING
        mark, cutter = int(table.marks[1]), Cutter(self._graph)
        return self._split(cutter, cutter.head(self._graph.units[-1], mark), mark)

    def _of_whole_units(self, of: Layouts, lane: int) -> I64:
        """Where no layer is cut within its units, which may differ from layer to layer."""
        classes = self._setting.classes
        before = classes.before(range(self._blocks + 1)).astype(np.int64)
        ends = [before[of.cpu], before[of.cpu + of.cut], before[self._blocks][None]]
        there = np.stack([ends[0] > 0, ends[1] > ends[0], ends[2] > ends[1]])  # [parts, layouts, c]
        if lane and self._visits:
            there = there.any(axis=0, keepdims=True)
        head = 1 + (of.rows > 0) + (of.rows == len(self._cuts.rows) - 1)
        flags = np.column_stack([head, of.heads, of.elements, *there])
        unique, place = np.unique(flags, axis=0, return_inverse=True)
        sizes = []
        for row in unique.tolist():
            names = set(self._head_names(lane, row[0]))
            for part, shown in enumerate(np.array(row[3:], bool).reshape(len(there), -1)):
                # Of layers on the CPU, those on both devices, those on the accelerator.
                own = (bool(row[1 + kind]) != bool(lane) for kind in (0, 1))
                kinds = own if part == 1 else [len(there) == 1 or part == 2 * lane] * 2
                for kind, here in enumerate(kinds):
                    for layer in np.flatnonzero(shown) if here else ():
                        names |= _names(classes.units[layer].units[kind])
            sizes.append(sum(map(self._value_bytes, names)))
        return np.array(sizes, np.int64)[place.reshape(-1)]

    def _head_names(self, lane: int, head: int) -> frozenset[str]:
        """With those of the embedding."""
        names = frozenset() if lane else _names(self._graph.units[0])
        if head == (1 if lane else 3):
            names |= _names(self._graph.units[-1])
        return names | (self._head_sample.names[lane] if head == 2 else frozenset())

    def bytes(self, of: Layouts, lane: int) -> I64:
        if self._cuts.whole:
            ranges = self._sized(self._head_sample.ranges, self._cuts.head, lane)
            return self._of_whole_units(of, lane) + ranges[of.rows]
        last, cut = self._blocks - 1, of.cpu + of.cut
        marks = (self._cuts.heads, self._cuts.elements)
        ways = (of.heads, of.elements)
        states = [1 + (w > 0) + (w == len(m) - 1) for w, m in zip(ways, marks, strict=True)]
        head = 1 + (of.rows > 0) + (of.rows == len(self._cuts.rows) - 1)
        k_before = (of.cut > 0) & (of.cpu < last)
        k_last = (of.cut > 0) & (cut > last)
        if lane == 0:
            whole_before, whole_last = (of.cpu > 0) & (last > 0), of.cpu > last
        else:
            whole_before, whole_last = cut < last, cut <= last
            if self._visits:
                whole_before = whole_before | (of.cpu > 0) & (last > 0)
                whole_last = whole_last | (of.cpu > last)
        flags = [whole_before, whole_last, k_before, k_last, of.home, *states, head]
        code = np.zeros(len(of), np.int64)
        for flag in flags:
            code = code * 4 + flag
        _, first, place = np.unique(code, return_index=True, return_inverse=True)
        sizes = [self._fixed(lane, tuple(int(flag[i]) for flag in flags)) for i in first.tolist()]
        total = np.array(sizes, np.int64)[place.reshape(-1)]
        for kind in (0, 1):
            for home in (0, 1):
                before, both, alone = self.range_bytes(kind, home, lane)
                at = ways[kind]
                size = np.where(k_before, np.where(k_last, both[at], before[at]), alone[at])
                total += size * ((of.cut > 0) & (of.home == home))
        return total + self._sized(self._head_sample.ranges, self._cuts.head, lane)[of.rows]

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int, int], tuple[I64, I64, I64]]:
        return {}

    def range_bytes(self, kind: int, home: int, lane: int) -> tuple[I64, I64, I64]:
        """[ways] of the ranges of layers but the last, with the last, of the last alone."""
        key = (kind, home, lane)
        if key not in self._known:
            table = self._cuts.layers[0][kind]
            before, last = (self._samples[kind, which, home].ranges for which in (0, 1))
            sizes = [self._sized(r, table, lane) for r in (before, {**before, **last}, last)]
            self._known[key] = (sizes[0], sizes[1], sizes[2])
        return self._known[key]

    def _sized(self, ranges: Mapping[str, tuple[int, int]], table: CutTable, lane: int) -> I64:
        """[ways] on a device; on the accelerator also those of layers that visit it."""
        counts = [table.size - table.marks if lane else table.marks]
        if table is self._cuts.head and lane == 0:  # puts both together
            counts.append(table.size - table.marks)
        elif lane and self._visits and table is not self._cuts.head:
            counts.append(table.marks)
        total = np.zeros(len(table.marks), np.int64)
        for width, rows in ranges.values():
            for count in counts:
                total += aligned_all(F32 * rows * width * count)
        total[[0, -1]] = 0
        return total

    def _fixed(self, lane: int, flags: tuple[int, ...]) -> int:
        """Bytes of the values that are no ranges."""
        key = (lane, *flags)
        if key not in self._sizes:
            if (self._visits, *key) not in self._cuts.known:
                self._cuts.known[self._visits, *key] = self._used(lane, *flags)
            names = self._cuts.known[self._visits, *key]
            self._sizes[key] = sum(map(self._value_bytes, names))
        return self._sizes[key]

    @functools.cached_property
    def _sizes(self) -> dict[tuple[int, ...], int]:
        return {}

    def _used(
        self, lane: int, before: int, last: int, cut_before: int, cut_last: int, home: int,
        attention: int, mlp: int, head: int,
    ) -> set[str]:  # fmt: skip
        """Names of values. before, last: whether whole layers but the last, and the last, are
        there. attention, mlp, head: 1 all on the accelerator, 2 shared, 3 all on the CPU."""
        graph, names = self._graph, set(self._head_names(lane, head))
        whole, visits = 1 if lane else 3, self._visits and lane == 1
        for there, is_last, cut in ((before, 0, cut_before), (last, 1, cut_last)):
            units = graph.layers[-1 if is_last else 0].units
            for kind, state in enumerate((attention, mlp)):
                if there or (cut and (state == whole or (visits and state == 3))):
                    names |= _names(units[kind])
                if cut and state == 2:
                    own = self._samples[kind, is_last, home].names
                    names |= own[lane] | (own[0] if visits else frozenset())
        return names

    def _value_bytes(self, name: str) -> int:
        return self._bytes[name]

    @functools.cached_property
    def _bytes(self) -> dict[str, int]:
        """Of every value of the graph, and of partial sums."""
        partial = {name: self._setting.hidden * self._partial_rows(name)
                   for name in (PARTIAL, f"{PARTIAL}_out")}  # fmt: skip
        sizes = {value.name: value.width * self._rows[value.name] for value in self._graph.values}
        return {name: aligned(F32 * size) for name, size in (sizes | partial).items()}

    def _partial_rows(self, name: str) -> int:
        return self._limits.step_outputs if name.endswith("_out") else self._limits.step_tokens


def aligned_all(sizes: I64) -> I64:
    return -(-sizes // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT


@functools.cache
def _names(unit: Unit) -> frozenset[str]:
    return frozenset(name for op in unit.ops for name in op.uses())
