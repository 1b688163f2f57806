"""How long a decode step takes in which two devices share each layer op by op: the accelerator has
some ops in a row, whose weights and KV visit it, the CPU has those before and behind. Ranks
nothing.

All choices of the row are priced at once, [rows]; layers are split alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.layers import decode_attention_s, decode_queries
from helm.compiler.overflow import Bools
from helm.compiler.setting import F32, Device, Setting
from helm.compiler.times import (
    ATTENTION,
    DEVICE_TERMS,
    F64,
    FIXED,
    LINK,
    TERMS,
    VISIT,
    position_bytes,
    unit_s,
    visible,
)
from helm.compiler.visits.ring import Group, Piece, lanes_s, step_s
from helm.model.graph import Attention, Layer, Op

_BUFFERS = 2  # that each hold a layer


class Ops:
    """Of one number of sequences."""

    def __init__(self, setting: Setting, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """ranges: of the ops that the accelerator has in a layer, first and behind the last; None:
        every one."""
        self.setting = setting
        self._step = Step(setting.batch, 1, setting.batch)
        self.count = count = min(len(layer.ops) for layer in setting.classes.units)
        every = [(i, j) for i in range(count) for j in range(i + 1, count + 1)]
        self.ranges = np.array([(0, 0), *every] if ranges is None else ranges)  # [rows, 2]

    def names(self, row: int) -> tuple[str, ...]:
        """Of the ops that the accelerator has in a layer."""
        first, end = self.ranges[row]
        return tuple(op.op for op in self.setting.classes.units[0].ops[first:end])

    def groups(self, context: int) -> list[Group]:
        """A group for each layer, whose seconds are [rows]."""
        return self._layers(context, np.zeros((len(TERMS), len(self.ranges))))[0]

    def terms(self, context: int) -> F64:
        """[TERMS, rows] of a step in which each sequence has `context` positions."""
        setting, own = self.setting, slice(DEVICE_TERMS, 2 * DEVICE_TERMS)
        total = np.zeros((len(TERMS), len(self.ranges)))
        groups, crossings = self._layers(context, total)
        cpu, there = setting.decode_units["cpu embedding"], setting.decode_units["accelerator head"]
        total[:DEVICE_TERMS] += cpu[:, None]
        total[own] += there[:, None]
        total[FIXED] += setting.cpu.step_s
        assert setting.accelerator is not None
        assert setting.link is not None
        total[own.start + FIXED] += setting.accelerator.step_s
        up, down = setting.link.to_accelerator_bytes_per_s, setting.link.to_host_bytes_per_s
        logits = F32 * setting.batch * setting.vocab / down
        ends = 2 * setting.link.latency_s + F32 * setting.batch * setting.hidden / up + logits
        total[LINK] += crossings + ends
        busy = lanes_s(groups)
        total[VISIT] += np.maximum(
            0.0, step_s(groups, _BUFFERS) - busy["cpu"] - busy["accelerator"]
        )
        return total

    def _layers(self, context: int, total: F64) -> tuple[list[Group], F64]:
        """Every layer as a group, and [rows] seconds of what crosses in them all. total: takes the
        terms of both devices."""
        setting, found, crossings = self.setting, list[Group](), np.zeros(len(self.ranges))
        counts = np.bincount(setting.classes.member, minlength=len(setting.classes.units))
        for kind, layer in enumerate(setting.classes.units):
            group, terms, crossing = self._layer(kind, layer, context)
            total += counts[kind] * terms
            crossings += counts[kind] * crossing
            found.append(group)
        return [found[kind] for kind in setting.classes.member.tolist()], crossings

    def _layer(self, kind: int, layer: Layer, context: int) -> tuple[Group, F64, F64]:
        setting, terms = self.setting, np.zeros((len(TERMS), len(self.ranges)))
        link, device = setting.link, setting.accelerator
        assert link is not None
        assert device is not None
        first, end = self.ranges.T
        ops, there = layer.ops, [(first <= at) & (at < end) for at in range(len(layer.ops))]
        both: tuple[Device, Device] = (setting.cpu, device)
        alone = [[self._op_terms(kind, layer, op, lane, context) for lane in both] for op in ops]
        up = [
            np.where(own, self._come_s(op, context), 0.0)
            for op, own in zip(ops, there, strict=True)
        ]
        on_cpu, coming = np.zeros(len(self.ranges)), np.sum(up, axis=0)
        for own, (cpu, _) in zip(there, alone, strict=True):
            on_cpu += np.where(own, 0.0, cpu.sum())
        slower = np.ones(len(self.ranges))
        np.divide(link.beside_copies(on_cpu, coming), on_cpu, out=slower, where=on_cpu > 0)
        pieces, crossing = list[Piece](), np.zeros(len(self.ranges))
        for at, (op, own, (cpu, gpu), come) in enumerate(zip(ops, there, alone, up, strict=True)):
            terms[:DEVICE_TERMS] += cpu[:, None] * np.where(own, 0.0, slower)
            terms[DEVICE_TERMS : 2 * DEVICE_TERMS] += gpu[:, None] * own
            handed = self._crossing_s(op, there[at - 1], own)
            crossing += handed
            pieces.append(
                Piece(
                    op.op,
                    accelerator_s=np.where(own, gpu.sum() + handed, 0.0),
                    cpu_s=np.where(own, 0.0, cpu.sum() * slower + handed),
                    up_s=come,
                )
            )
        return pieces, terms, crossing

    def _op_terms(self, kind: int, layer: Layer, op: Op, device: Device, context: int) -> F64:
        """[DEVICE_TERMS] of one op alone."""
        alone = dataclasses.replace(layer.units[0], ops=(op,))
        found = unit_s(self.setting.model, alone, self._step, device).astype(np.float64)
        if isinstance(op, Attention):
            found[ATTENTION] += decode_attention_s(self.setting, context, device)[kind]
        return found

    def _come_s(self, op: Op, context: int) -> float:
        """Seconds until the accelerator has what the op reads of host memory."""
        setting, link = self.setting, self.setting.link
        assert link is not None
        size = sum(setting.model.tensor_bytes(name) for name in op.weight_names())
        seconds = link.latency_s + size / setting.visit_bytes_per_s if size else 0.0
        if isinstance(op, Attention):
            seen = setting.batch * int(visible(op, decode_queries(context))[0])
            kv = seen * position_bytes(setting.model, op) / link.to_accelerator_bytes_per_s
            seconds += link.latency_s + kv
        return seconds

    def _crossing_s(self, op: Op, before: Bools, own: Bools) -> F64:
        """[rows] of what an op reads and of the residual, where the op before is elsewhere."""
        link, setting = self.setting.link, self.setting
        assert link is not None
        size = F32 * setting.batch * (setting.width(op.uses()[0]) + setting.hidden)
        up = link.latency_s + size / link.to_accelerator_bytes_per_s
        down = link.latency_s + size / link.to_host_bytes_per_s
        return np.where(before == own, 0.0, np.where(own, up, down))
