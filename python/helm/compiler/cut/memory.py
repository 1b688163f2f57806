"""Itemises the memory of layouts with cut layers, all at once. Knows no times and no objective."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from helm.compiler.budget import (
    Budget,
    Items,
    StageBytes,
    geometry,
    subset_of,
    with_reserves,
)
from helm.compiler.cut.ways import HOMES, CutModel, Layouts
from helm.compiler.memory import DEVICE_ALIGNMENT, aligned, value_rows
from helm.compiler.overflow import Bools
from helm.compiler.setting import F32, Setting
from helm.compiler.times import I64, attentions
from helm.model.graph import Layer, Unit

_SLOTS = 2  # steps on their way at once


class CutMemory:
    """Of one setting. visits: whether weights of the CPU visit the accelerator in prompts."""

    def __init__(self, setting: Setting, cuts: CutModel, each: StageBytes, visits: bool) -> None:
        self._setting, self._cuts, self._each, self._visits = setting, cuts, each, visits
        self._spec, self._limits = geometry(setting)
        self._blocks = cuts.blocks

    def items(self, of: Layouts) -> Budget:
        """Everything that the CPU and the accelerator must hold for the full context; [layouts]."""
        setting, each = self._setting, self._each
        host_kv, own_kv = self._kv(of)
        cpu: Items = {
            "weights": self._weights(of, 0),
            "kv": host_kv,
            "activations": self._activations(of, 0),
            "workspace": each.workspace[self._subset(of, 0)],
            "staging": self._host_staging(of),
        }
        own: Items = {
            "weights": self._weights(of, 1),
            "kv": own_kv,
            "activations": self._activations(of, 1),
            "workspace": each.accelerator_workspace[self._subset(of, 1)],
            "staging": self._device_staging(of),
        }
        return with_reserves(setting, each, cpu, own, np.ones(len(of), bool))

    # --- weights and KV --------------------------------------------------------------------------

    def _weights(self, of: Layouts, lane: int) -> I64:
        counts = self._cuts.counts(of)
        whole = counts[2 if lane else 0] @ self._whole[lane]
        attention, mlp = self._cuts.device_bytes if lane else self._cuts.host_bytes
        cut = attention[:, of.home, of.heads] + mlp[:, of.home, of.elements]
        return np.asarray(whole + (counts[1] * cut.T).sum(axis=1) + self._ends[lane][of.rows])

    @functools.cached_property
    def _whole(self) -> tuple[I64, I64]:
        """By lane: [classes] of whole layers."""
        layers = self._cuts.classes.units
        own, there = (np.array([self._bytes([x], lane) for x in layers]) for lane in (0, 1))
        return own, there

    def _bytes(self, units: Iterable[Unit | Layer], there: int) -> int:
        """On the device of a lane."""
        model = self._cuts.model
        return model.weight_bytes(units, DEVICE_ALIGNMENT) if there else model.host_bytes(units)

    @functools.cached_property
    def _ends(self) -> tuple[I64, I64]:
        """By lane: [ways of the head] with the embedding, and of a tensor that both share on the
        CPU nothing."""
        model, head = self._cuts.model, self._cuts.head
        embedding = model.graph.units[0]
        first, whole = (self._bytes([unit], 0) for unit in (embedding, head.unit))
        own = head.padded(0, self._bytes(head.on(0, 0), 0), whole)
        there = self._head_bytes
        shared = {name for op in embedding.ops for name in op.weight_names()}
        shared &= {name for op in head.unit.ops for name in op.weight_names()}
        if shared:
            beside = self._bytes([embedding, head.unit], 0) - first
            if all(model.format(name, "cpu") != "bf16c" for name in shared):
                own[1:] = beside  # the first rows lie in the embedding's
            own[-1] = beside
        return own + first, there

    def _kv(self, of: Layouts) -> tuple[I64, I64]:
        """Bytes on both: whole pages of whole contexts."""
        heads = self._cuts.units[0].marks
        cpu, cut, rest = (count @ self._pages for count in self._cuts.counts(of))
        own = self._spec.unit_bytes * (cpu * heads[-1] + cut * heads[of.heads])
        return own, self._spec.unit_bytes * (cpu + cut + rest) * heads[-1] - own

    @functools.cached_property
    def _pages(self) -> I64:
        """[classes] KV pages of a layer."""
        setting = self._setting
        most = setting.batch * setting.pages_of(setting.workload.context)
        windows = [any(op.window for op in attentions(unit)) for unit in setting.classes.units]
        return np.where(windows, setting.window_blocks(), most)

    @functools.cached_property
    def _head_bytes(self) -> I64:
        """[ways of the head] on the accelerator."""
        head = self._cuts.head
        return np.asarray(
            head.padded(self._bytes([head.unit], 1), self._bytes(head.on(1, 0), 1), 0)
        )

    # --- what any layout takes -------------------------------------------------------------------

    @functools.cached_property
    def there(self) -> tuple[I64, I64, I64]:
        """Bytes of weights and KV on the accelerator: of attention and mlp, [classes, homes, ways],
        of the head, [ways]."""
        attention, mlp = self._cuts.device_bytes
        heads = self._cuts.units[0].marks
        kv = self._spec.unit_bytes * self._pages[:, None, None] * (heads[-1] - heads)
        return attention + kv, mlp, self._head_bytes

    def room(self, available: int) -> int:
        """Bytes of the accelerator that weights and KV have at most. Scratch grows with the ways,
        if at all. What visits at once is no less than what is not there, by layer."""
        blocks, units = self._blocks, self._cuts.units
        ends = [sorted({0, 1, ways.last - 1, ways.last}) for ways in units]
        cut = itertools.product([0], [blocks], [0, 1], *ends)
        whole = itertools.product([blocks], [0], [0], [0], [0], ends[2])
        of = Layouts(np.array([*cut, *whole], np.int64).T)
        items = self.items(of).accelerator
        scratch = items["activations"] + items["workspace"] + items["reserve"]
        left = int(self._cuts.totals @ self._whole[1]) - available
        if not self._visits or left <= 0:
            return available - int(scratch.min())
        pages = self._setting.visit_pages * self._spec.page_bytes
        return available - int(scratch.min()) - 2 * left // blocks - pages

    # --- values ----------------------------------------------------------------------------------

    def _activations(self, of: Layouts, lane: int) -> I64:
        there = [some for some, _ in self._uses(of, lane)]
        ways, total = (of.heads, of.elements, of.rows), np.zeros(len(of), np.int64)
        for places, kind, size in self._shared_values[lane]:
            some = functools.reduce(np.logical_or, [there[place] for place in places])
            total += some * (size if kind is None else size[ways[kind]])
        return total

    @functools.cached_property
    def _shared_values(self) -> list[list[tuple[tuple[int, ...], int | None, I64]]]:
        """By lane, values that the same units use: places of these in `_uses`; of which kind of
        unit they are ranges, None: of none; bytes together, of ranges by way."""
        found, one = [], Layouts(np.zeros((6, 1), np.int64))
        for lane in (0, 1):
            used, sizes = dict[str, tuple[int, ...]](), defaultdict[Any, Any](int)
            for place, (_, units) in enumerate(self._uses(one, lane)):
                used |= {name: (*used.get(name, ()), place) for name in _names(units)}
            for name, places in used.items():
                size, kind = self._values[name]
                sizes[places, kind] += size
            found.append([(*key, size) for key, size in sizes.items()])
        return found

    @functools.cached_property
    def _values(self) -> dict[str, tuple[I64, int | None]]:
        """Bytes of every value; by way, and of which kind of unit, where it is a range."""
        graph = self._cuts.model.graph
        rows, found = value_rows(graph, self._limits), {}
        widths = {value.name: F32 * value.width for value in graph.values}
        for kind, every in enumerate((*zip(*self._cuts.layers, strict=True), (self._cuts.head,))):
            pieces = [piece for ways in every for own in ways.pieces for piece in own.values()]
            for name in _names(pieces):
                if np.ndim(widths[name]):
                    size = every[0].padded(0, aligned(widths[name] * rows[name]), 0)
                    found[name] = size, kind
        whole = {n: (aligned(w * rows[n]), None) for n, w in widths.items() if n not in found}
        return {**whole, **found}

    def _layers(self, of: Layouts, lane: int) -> tuple[tuple[Bools, Bools], tuple[Bools, Bools]]:
        """Of layers but the last, and of the last: whether there are whole ones on a lane, and cut
        ones. Whole ones of the CPU are on both where they visit."""
        last, cut = self._blocks - 1, of.cpu + of.cut
        whole = (of.cpu > 0) & (last > 0), of.cpu > last
        if lane:
            own = cut < last, cut <= last
            whole = (
                own[0] | whole[0] & self._visits,
                own[1] | whole[1] & self._visits,
            )
        shared = (of.cut > 0) & (of.cpu < last), (of.cut > 0) & (cut > last)
        return (whole[0], shared[0]), (whole[1], shared[1])

    def _uses(self, of: Layouts, lane: int) -> Iterator[tuple[Bools, list[Unit]]]:
        """Which layouts have units on a lane, and these."""
        cuts, visits = self._cuts, self._visits and lane == 1
        if lane == 0:
            yield np.ones(len(of), bool), [cuts.model.graph.units[0]]
        own, cut, there = (count.T > 0 for count in cuts.counts(of))  # [classes, layouts]
        here = (there | own & self._visits) if lane else own
        for whole, shared, layer in zip(here, cut, cuts.layers, strict=True):
            for ways, at in zip(layer, (of.heads, of.elements), strict=True):
                alone = (at == 0) | visits & (at == ways.last) if lane else at == ways.last
                yield whole | shared & alone, [ways.unit]
                inside = shared & ways.inside(at)
                for home in range(len(HOMES)):
                    yield inside & (of.home == home), ways.on(None if visits else lane, home)
        head = cuts.head
        yield of.rows == (0 if lane else head.last), [head.unit]
        yield head.inside(of.rows), head.on(lane, 0)

    def _subset(self, of: Layouts, lane: int) -> I64:
        """The place among what `StageBytes` has of all units there."""
        attention, mlp, head = self._cuts.units
        # Of a cut layer a device may hold nothing only where its units are whole elsewhere.
        has = (of.home == 0) | (of.heads > 0) | (of.elements > 0)
        if lane:
            has = (of.home == 1) | (of.heads < attention.last) | (of.elements < mlp.last)
            has |= self._visits
        before, last = (whole | shared & has for whole, shared in self._layers(of, lane))
        ends = of.rows < head.last if lane else of.rows > 0
        return subset_of((np.full(len(of), lane == 0), before, last, ends))

    # --- staging ---------------------------------------------------------------------------------

    def _host_staging(self, of: Layouts) -> I64:
        """Page-locked memory of two steps: what crosses in each direction, and logits."""
        limits, setting, rows = self._limits, self._setting, self._cuts.head.marks
        hidden = F32 * setting.hidden
        logits = F32 * limits.step_outputs * (rows[-1] - rows[of.rows])
        crossing = np.where(of.cut > 0, limits.step_tokens, limits.step_outputs) * hidden
        rest = of.cpu + of.cut < self._blocks
        up = np.where(rest, limits.step_tokens * hidden, crossing)
        apart = np.where(of.rows == 0, logits, 0)  # of the whole head
        if self._cuts.whole:  # one value at a time, as nothing is computed beside it
            part = np.where(self._cuts.head.inside(of.rows), logits, 0)
            most = np.maximum(np.where(rest | (of.cut > 0), limits.step_tokens, 0) * hidden, part)
            most = np.maximum(most, limits.step_outputs * hidden * (of.rows < self._cuts.head.last))
            return np.asarray(_SLOTS * (most + apart))
        down = np.maximum(crossing, np.where(of.rows > 0, logits, 0))
        return np.asarray(_SLOTS * (up + down + apart))

    def _device_staging(self, of: Layouts) -> I64:
        """Where weights visit, two layers and a layer's pages of the batch's prompts."""
        if not self._visits:
            return np.zeros(len(of), np.int64)
        attention, mlp = (table.max(axis=0) for table in self._cuts.visiting_bytes)
        cut = (attention[of.home, of.heads] + mlp[of.home, of.elements]) * (of.cut > 0)
        whole = int(self._whole[1].max()) * (of.cpu > 0)
        pages = self._setting.visit_pages * self._spec.page_bytes
        visits = (of.cpu > 0) | (of.cut > 0)
        return np.asarray(visits * (2 * np.maximum(cut, whole) + pages))


def _names(units: Iterable[Unit]) -> frozenset[str]:
    return frozenset(name for unit in units for op in unit.ops for name in op.uses())
