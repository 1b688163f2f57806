"""Itemises the memory of layouts with cut layers, all at once. Knows no times and no objective."""

from __future__ import annotations

import functools

import numpy as np

from helm.compiler.budget import (
    Items,
    StageBytes,
    Stages,
    accelerator_reserve,
    geometry,
    host_reserve_bytes,
    subset_of,
)
from helm.compiler.cut_space import CutModel, Layouts
from helm.compiler.cut_tables import CutTable
from helm.compiler.cut_values import CutValues
from helm.compiler.memory import DEVICE_ALIGNMENT
from helm.compiler.overflow import Bools
from helm.compiler.setting import F32, Setting
from helm.compiler.times import I64, attentions

_SLOTS = 2  # steps on their way at once


class CutMemory:
    """Of one setting. visits: whether weights of the CPU visit the accelerator in prompts."""

    def __init__(self, setting: Setting, cuts: CutModel, each: StageBytes, visits: bool) -> None:
        self._setting, self._cuts, self._each, self._visits = setting, cuts, each, visits
        self._spec, self._limits = geometry(setting)
        self._graph = setting.model.graph
        self.values = CutValues(setting, cuts, visits)
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
        """[layouts, ways] what changes with the mlp's elements, on both devices; all of `of` have
        the same home."""
        count, home = self.counts(of)[1], int(of.home[0])
        last, more = (of.cpu + of.cut == self._blocks)[:, None], (of.cut > 1)[:, None]
        found = []
        for lane in (0, 1):
            before, both, alone = self.values.range_bytes(1, home, lane)
            ranges = np.where(last, np.where(more, both, alone), before)
            found.append(count @ self._units[1][:, lane, home] + ranges)
        return found[0], found[1]

    def kv(self, of: Layouts) -> tuple[I64, I64]:
        """Bytes on both: whole pages of whole contexts."""
        setting, heads = self._setting, self._cuts.heads
        most = setting.batch * setting.pages_of(setting.workload.context)
        windows = [any(op.window for op in attentions(unit)) for unit in setting.classes.units]
        pages = np.where(windows, setting.window_blocks(), most)  # [classes] of a layer
        cpu, cut, rest = (count @ pages for count in self.counts(of))
        own = cpu * heads[-1] + cut * heads[of.heads]
        there = rest * heads[-1] + cut * (heads[-1] - heads[of.heads])
        return self._spec.unit_bytes * own, self._spec.unit_bytes * there

    def items(self, of: Layouts) -> tuple[Items, Items]:
        """Everything that the CPU and the accelerator must hold for the full context."""
        setting, each = self._setting, self._each
        host_kv, own_kv = self.kv(of)
        places = self._stages(of)
        on_cpu, own = subset_of(places[0]), subset_of(places[1])
        cpu: Items = {
            "weights": self.weights(of, 0),
            "kv": host_kv,
            "activations": self.values.bytes(of, 0),
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
            "activations": self.values.bytes(of, 1),
            "workspace": each.accelerator_workspace[own],
            "staging": self._device_staging(of),
            "reserve": np.full(len(of), accelerator_reserve(setting)),
        }

    def _stages(self, of: Layouts) -> tuple[Stages, Stages]:
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
        if self._cuts.whole:  # one value at a time, as nothing is computed beside it
            part = np.where((rows > 0) & (rows < size), logits, 0)
            most = np.maximum(np.where(rest | (of.cut > 0), limits.step_tokens, 0) * hidden, part)
            most = np.maximum(most, limits.step_outputs * hidden * (rows < size))
            return np.asarray(_SLOTS * (most + np.where(rows == 0, logits, 0)))
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
