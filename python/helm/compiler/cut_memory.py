"""Itemises the memory of layouts with cut layers, all at once. Knows no times and no objective."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from helm.compiler.budget import (
    Items,
    StageBytes,
    accelerator_reserve,
    geometry,
    host_reserve_bytes,
    subset_of,
)
from helm.compiler.cut import Cutter, LayerCut
from helm.compiler.cut_price import HOMES
from helm.compiler.cut_space import CutModel
from helm.compiler.cut_tables import CutTable
from helm.compiler.memory import DEVICE_ALIGNMENT, aligned, value_rows
from helm.compiler.overflow import Bools
from helm.compiler.setting import F32, Setting
from helm.compiler.times import I64
from helm.model.graph import Unit
from helm.plan.units import CPU, PlacedUnit

_SLOTS = 2  # steps on their way at once


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

    def at(self, chosen: object) -> Layouts:
        return Layouts(*(each[chosen] for each in self.arrays))

    @property
    def arrays(self) -> tuple[I64, ...]:
        return (self.cpu, self.cut, self.home, self.heads, self.elements, self.rows)


@dataclass(frozen=True)
class _Shared:
    """A unit that is cut: the names of its values on each device, and of what it has ranges of the
    width for one head or element and the rows."""

    names: tuple[frozenset[str], frozenset[str]]
    ranges: Mapping[str, tuple[int, int]]


_NOTHING = _Shared((frozenset(), frozenset()), {})


class CutMemory:
    """Of one setting. visits: whether weights of the CPU visit the accelerator in prompts."""

    def __init__(self, setting: Setting, cuts: CutModel, each: StageBytes, visits: bool) -> None:
        self._setting, self._cuts, self._each, self._visits = setting, cuts, each, visits
        self._spec, self._limits = geometry(setting)
        self._graph = setting.model.graph
        self._rows = value_rows(self._graph, self._limits)
        self._blocks = len(self._graph.layers)
        self._before = setting.classes.before(range(self._blocks + 1)).astype(np.int64)

    # --- bytes by way ----------------------------------------------------------------------------

    @functools.cached_property
    def _units(self) -> tuple[I64, I64]:
        """Of attention and mlp: [classes, lanes, homes, ways] bytes of weights."""
        found = []
        for kind in (0, 1):
            tables = [own[kind] for own in self._cuts.layers]
            found.append(np.stack([
                [[_way_bytes(table, lane, home == lane) for home in (0, 1)] for lane in (0, 1)]
                for table in tables
            ]))  # fmt: skip
        return found[0], found[1]

    @functools.cached_property
    def _head(self) -> I64:
        """[lanes, ways], of a tensor that the embedding shares on the CPU nothing."""
        table, model = self._cuts.head, self._setting.model
        first, last = self._graph.units[0], self._graph.units[-1]
        own = _way_bytes(table, 0, True)
        shared = {n for op in first.ops for n in op.weight_names()}
        shared &= {n for op in last.ops for n in op.weight_names()}
        if shared:  # the first rows lie in the embedding's
            beside = model.host_bytes([first, last]) - model.host_bytes([first])
            [name] = [part.weight for part in table.shares.first.parts] if table.shares else [""]
            if model.formats.get(name, "") and model.format(name, "cpu") != "bf16c":
                own[1:] = beside
            own[-1] = beside
        return np.stack([own, _way_bytes(table, 1, False)])

    @functools.cached_property
    def _layers(self) -> I64:
        """[lanes, classes] of whole layers."""
        model, classes = self._setting.model, self._setting.classes.units
        return np.array([
            [model.host_bytes([layer]) for layer in classes],
            [model.weight_bytes([layer], DEVICE_ALIGNMENT) for layer in classes],
        ])  # fmt: skip

    # --- counts ----------------------------------------------------------------------------------

    def counts(self, of: Layouts) -> tuple[I64, I64, I64]:
        """[layouts, classes] layers on the CPU, cut, on the accelerator."""
        ends = self._before[of.cpu], self._before[of.cpu + of.cut], self._before[self._blocks]
        return ends[0], ends[1] - ends[0], ends[2] - ends[1]

    # --- items -----------------------------------------------------------------------------------

    def weights(self, of: Layouts, lane: int) -> I64:
        """Bytes [layouts] on the CPU or the accelerator."""
        counts = self.counts(of)
        whole = counts[2 if lane else 0] @ self._layers[lane]
        attention, mlp = self._units
        cut = attention[:, lane, of.home, of.heads] + mlp[:, lane, of.home, of.elements]
        ends = self._setting.model.host_bytes(self._graph.units[:1]) if lane == 0 else 0
        total = whole + (counts[1] * cut.T).sum(axis=1) + self._head[lane, of.rows] + ends
        return np.asarray(total)

    def by_elements(self, of: Layouts) -> tuple[I64, I64]:
        """[ways] what changes with the mlp's elements of the first of `of`, on both devices."""
        count, home = self.counts(of)[1][0], int(of.home[0])
        last = of.cpu[0] + of.cut[0] == self._blocks
        found = []
        for lane in (0, 1):
            before, both, alone = self._range_bytes(1, home, lane)
            ranges = (both if of.cut[0] > 1 else alone) if last else before
            found.append(count @ self._units[1][:, lane, home] + ranges)
        return found[0], found[1]

    def kv(self, of: Layouts) -> tuple[I64, I64]:
        """Bytes on both: whole pages of whole contexts."""
        setting, heads = self._setting, self._cuts.heads
        most = setting.batch * setting.pages_of(setting.workload.context) * self._spec.unit_bytes
        rest = self._blocks - of.cpu - of.cut
        own = of.cpu * heads[-1] + of.cut * heads[of.heads]
        there = rest * heads[-1] + of.cut * (heads[-1] - heads[of.heads])
        return most * own, most * there

    def items(self, of: Layouts) -> tuple[Items, Items]:
        """Everything that the CPU and the accelerator must hold for the full context."""
        setting, each = self._setting, self._each
        host_kv, own_kv = self.kv(of)
        places = self._stages(of)
        on_cpu, own = subset_of(places[0]), subset_of(places[1])
        cpu: Items = {
            "weights": self.weights(of, 0),
            "kv": host_kv,
            "activations": self._activations(of, 0),
            "workspace": each.workspace[on_cpu],
            "staging": self._host_staging(of),
        }
        weights = self.weights(of, 1)
        taken = np.asarray(sum(cpu.values()))
        loading = (weights > 0) * each.uploading - (taken - cpu["weights"])
        used = np.ones(len(of), bool)
        reserve = host_reserve_bytes(setting, taken[:, None], used)[:, 0]
        cpu["reserve"] = np.maximum(reserve, loading)
        return cpu, {
            "weights": weights,
            "kv": own_kv,
            "activations": self._activations(of, 1),
            "workspace": each.accelerator_workspace[own],
            "staging": self._device_staging(of),
            "reserve": np.full(len(of), accelerator_reserve(setting)),
        }

    def _stages(self, of: Layouts) -> tuple[tuple[Bools, ...], tuple[Bools, ...]]:
        """As `helm.compiler.budget.Stages`, of both devices."""
        cut, last = of.cpu + of.cut, self._blocks - 1
        head = self._cuts.rows[of.rows]
        every = np.ones(len(of), bool)
        # Of a cut layer a device may hold nothing only where its units are whole elsewhere.
        shares = self._has(of)
        cpu_before = (of.cpu > 0) & (last > 0) | shares[0] & (of.cpu < last) & (of.cut > 0)
        cpu_last = (of.cpu > last) | shares[0] & (cut > last) & (of.cut > 0)
        own_before = (cut < last) | shares[1] & (of.cpu < last) & (of.cut > 0)
        own_last = (cut <= last) | shares[1] & (of.cut > 0)
        if self._visits:
            own_before, own_last = every & (last > 0), every
        return (
            (every, cpu_before, cpu_last, head > 0),
            (~every, own_before, own_last, head < self._cuts.rows[-1]),
        )

    def _has(self, of: Layouts) -> tuple[Bools, Bools]:
        """Whether each device has some of a cut layer."""
        own = (of.heads > 0) | (of.elements > 0) | (of.home == 0)
        heads, elements = len(self._cuts.heads) - 1, len(self._cuts.elements) - 1
        there = (of.heads < heads) | (of.elements < elements) | (of.home == 1)
        return own, there

    def _host_staging(self, of: Layouts) -> I64:
        """Page-locked memory of two steps: what crosses in each direction, and logits."""
        limits, setting = self._limits, self._setting
        hidden = F32 * setting.hidden
        rows, size = self._cuts.rows[of.rows], self._cuts.rows[-1]
        logits = F32 * limits.step_outputs * np.where(rows < size, size - rows, 0)
        crossing = np.where(of.cut > 0, limits.step_tokens, limits.step_outputs) * hidden
        rest = of.cpu + of.cut < self._blocks
        up = np.where(rest, limits.step_tokens * hidden, crossing)
        apart = np.where(rows == 0, logits, 0)  # of the whole head
        down = np.maximum(crossing, np.where(rows > 0, logits, 0))
        return np.asarray(_SLOTS * (up + down + apart))

    def _device_staging(self, of: Layouts) -> I64:
        """Where weights visit, two layers and a layer's pages of the batch's prompts."""
        if not self._visits:
            return np.zeros(len(of), np.int64)
        attention, mlp = self._visiting
        cut = (attention[of.home, of.heads] + mlp[of.home, of.elements]) * (of.cut > 0)
        whole = int(self._layers[1].max()) * (of.cpu > 0)
        pages = self._setting.visit_pages * self._spec.page_bytes
        visits = (of.cpu > 0) | (of.cut > 0)
        return np.asarray(visits * (2 * np.maximum(cut, whole) + pages))

    @functools.cached_property
    def _visiting(self) -> tuple[I64, I64]:
        """[homes, ways] the most bytes of the CPU's tensors of a layer that is cut, as they lie
        on the accelerator."""
        found = []
        for kind in (0, 1):
            tables = [own[kind] for own in self._cuts.layers]
            found.append(
                np.stack(
                    [
                        np.max([_way_bytes(t, 0, home == 0, True) for t in tables], axis=0)
                        for home in (0, 1)
                    ]
                )
            )
        return found[0], found[1]

    def visiting_bytes(self, of: Layouts, kind: int) -> I64:
        """What comes up of a cut layer of a class, [layouts], without alignment."""
        attention, mlp = self._units
        own = attention[kind, 0, of.home, of.heads] + mlp[kind, 0, of.home, of.elements]
        return np.asarray(own)

    # --- activations -----------------------------------------------------------------------------

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

    def _activations(self, of: Layouts, lane: int) -> I64:
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
        sizes = [self._fixed(lane, *(int(flag[i]) for flag in flags)) for i in first.tolist()]
        total = np.array(sizes, np.int64)[place.reshape(-1)]
        for kind in (0, 1):
            for home in (0, 1):
                before, both, alone = self._range_bytes(kind, home, lane)
                at = ways[kind]
                size = np.where(k_before, np.where(k_last, both[at], before[at]), alone[at])
                total += size * ((of.cut > 0) & (of.home == home))
        return total + self._sized(self._head_sample.ranges, self._cuts.head, lane)[of.rows]

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int, int], tuple[I64, I64, I64]]:
        return {}

    def _range_bytes(self, kind: int, home: int, lane: int) -> tuple[I64, I64, I64]:
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

    def _fixed(
        self, lane: int, before: int, last: int, cut_before: int, cut_last: int, home: int,
        attention: int, mlp: int, head: int,
    ) -> int:  # fmt: skip
        """Bytes of the values that are no ranges. attention, mlp, head: 1 all on the accelerator,
        2 shared, 3 all on the CPU."""
        graph, names = self._graph, set[str]()
        whole = 1 if lane else 3
        if lane == 0:
            names |= _names(graph.units[0])
        for there, is_last, cut in ((before, 0, cut_before), (last, 1, cut_last)):
            units = graph.layers[-1 if is_last else 0].units
            for kind, state in enumerate((attention, mlp)):
                visits = self._visits and lane == 1
                if there or (cut and (state == whole or (visits and state == 3))):
                    names |= _names(units[kind])
                if cut and state == 2:
                    names |= self._samples[kind, is_last, home].names[lane]
                    if visits:
                        names |= self._samples[kind, is_last, home].names[0]
        if head == whole:
            names |= _names(graph.units[-1])
        if head == 2:
            names |= self._head_sample.names[lane]
        sizes = {v.name: v.width for v in graph.values}
        total = 0
        for name in names:
            of = name if name in sizes else None
            width = sizes[name] if of else self._setting.hidden
            rows = self._rows[name] if of else self._partial_rows(name)
            total += aligned(F32 * width * rows)
        return total

    def _partial_rows(self, name: str) -> int:
        return self._limits.step_outputs if name.endswith("_out") else self._limits.step_tokens


def aligned_all(sizes: I64) -> I64:
    return -(-sizes // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT


def _names(unit: Unit) -> set[str]:
    return {name for op in unit.ops for name in op.uses()}


def _way_bytes(table: CutTable, lane: int, home: bool, visiting: bool = False) -> I64:
    """[ways] of the weights of a unit on a device, its home or not; or of the CPU's as they visit
    the accelerator."""
    sizes = np.zeros(len(table.marks), np.int64)
    if table.shares is not None:
        sizes = table.lane_bytes(lane, home, visiting)
        sizes = sizes + (table.home_bytes(lane, visiting) if home else 0)
    sizes[0] = table.unit_bytes(1) if lane else 0
    sizes[-1] = 0 if lane else table.unit_bytes(0, visiting)
    return sizes
