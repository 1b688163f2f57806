"""What the shares of a unit that is cut take, for every way to cut it at once: seconds on a device
and bytes there. Knows no placement and no schedule.

Arrays are [ways]: how much of the unit the CPU has, from nothing to all of it, as a table's
`marks` say in KV heads, intermediate elements or rows of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helm.base.formats import FORMATS, uncompressed
from helm.compiler.counts import CostedGraph, Step
from helm.compiler.cut_shares import Shares, priced_shares
from helm.compiler.memory import DEVICE_ALIGNMENT
from helm.compiler.setting import F32, Device
from helm.compiler.times import (
    ATTENTION,
    COMPUTE,
    DEVICE_TERMS,
    ELEMENTWISE,
    F64,
    FIXED,
    I64,
    MEMORY,
    attention_fixed_s,
    memory_bound,
    unit_s,
)
from helm.machine.rates import rate_class
from helm.model.graph import Activation, Attention, Linear, Norm, Op, Rope, Select, Unit

HOST, GUEST_SIDE = 0, 1  # lanes: the CPU takes the first range, the accelerator the second


@dataclass(frozen=True)
class _Piece:
    """A rectangle of a weight, and its bias, in every way."""

    weight: str
    bias: str | None
    rows: I64
    cols: I64


@dataclass(frozen=True)
class CutTable:
    """marks: see above. shares: None where the unit is not cut, which leaves the ends alone."""

    model: CostedGraph
    unit: Unit
    shares: Shares | None
    marks: I64

    @property
    def size(self) -> int:
        return int(self.marks[-1])

    @functools.cached_property
    def attention(self) -> Attention | None:
        return next((op for op in self.unit.ops if isinstance(op, Attention)), None)

    def share(self, lane: int) -> F64:
        """Of the whole, that a lane has."""
        return np.asarray((self.size - self.marks if lane else self.marks) / self.size)

    def _span(self, lane: int) -> tuple[I64, I64]:
        ends = np.full_like(self.marks, self.size)
        return (self.marks, ends) if lane else (np.zeros_like(self.marks), self.marks)

    def _intervals(self, lane: int) -> list[tuple[I64, I64]]:
        """Of what the first product makes, those that a lane has."""
        low, high = self._span(lane)
        op = self.attention
        if op is not None:
            each = op.heads // op.kv_heads * op.head_dim
            units = [(op.q_offset, each), (op.k_offset, op.head_dim), (op.v_offset, op.head_dim)]
        else:
            gated = any(isinstance(op, Activation) and op.gated for op in self.unit.ops)
            units = [(0, 1), (self.size, 1)] if gated else [(0, 1)]
        return [(start + low * width, start + high * width) for start, width in sorted(units)]

    def _first(self, lane: int) -> list[_Piece]:
        assert self.shares is not None
        shapes, pieces, row = self.model.graph.tensors, list[_Piece](), 0
        for part in self.shares.first.parts:
            height, width = shapes[part.weight]
            for low, high in self._intervals(lane):
                rows = np.minimum(high, row + height) - np.maximum(low, row)
                rows = np.maximum(0, rows)
                if rows.any():
                    cols = np.full_like(rows, width)
                    pieces.append(_Piece(part.weight, part.bias, rows, cols))
            row += height
        return pieces

    def _last(self, lane: int, home: bool) -> list[_Piece]:
        assert self.shares is not None
        if self.shares.last is None:
            return []
        [part] = self.shares.last.parts
        height, width = self.model.graph.tensors[part.weight]
        low, high = self._span(lane)
        cols = (high - low) * (width // self.size)
        rows = np.where(cols > 0, height, 0)
        return [_Piece(part.weight, part.bias if home else None, rows, cols)]

    def _bytes(self, format: str, rows: I64, cols: I64) -> I64:
        return np.where(rows * cols > 0, _matrix_bytes(format, tuple(rows), tuple(cols)), 0)

    def _bias_bytes(self, piece: _Piece) -> I64:
        if piece.bias is None:
            return np.zeros_like(piece.rows)
        return F32 * piece.rows

    # --- seconds -----------------------------------------------------------------------------

    def lane_s(self, lane: int, device: Device, step: Step, home: bool, attention_s: float) -> F64:
        """[DEVICE_TERMS, ways] of a lane's share. attention_s: of all of its attention there."""
        assert self.shares is not None
        times = np.zeros((DEVICE_TERMS, len(self.marks)))
        share = self.share(lane)
        first = self.shares.first
        self._add_product(times, self._first(lane), self.model.rows(first.out, step), device)
        for op in self.shares.inner:
            if isinstance(op, Attention):
                times[FIXED] += attention_fixed_s(op, step, device, share)
                times[ATTENTION] += attention_s * share
                continue
            times[FIXED] += device.op_s
            times[ELEMENTWISE] += self._inner_bytes(op, step, lane) / device.activation_bytes_per_s
        last = self.shares.last
        if last is not None:
            pieces = self._last(lane, home)
            self._add_product(times, pieces, self.model.rows(last.out, step), device)
        if home:
            times += self._plain_s(self.shares.apart, device, step)[:, None]
        return times

    def _add_product(self, times: F64, pieces: Sequence[_Piece], rows: int, device: Device) -> None:
        times[FIXED] += device.op_s
        if not rows or not pieces:
            return
        compute = memory = np.zeros(len(self.marks))
        for piece in pieces:
            held = self.model.format(piece.weight, device.site)
            kind = rate_class(held)
            size = self._bytes(uncompressed(held), piece.rows, piece.cols) + self._bias_bytes(piece)
            flops = 2.0 * rows * piece.rows * piece.cols
            compute = compute + flops / float(device.matmul_rate(kind, rows))
            memory = memory + size / device.rate("matvec_bytes_per_s", kind)
        bound = memory_bound(compute, memory)
        seconds = np.maximum(compute, memory)
        times[MEMORY] += np.where(bound, seconds, 0.0)
        times[COMPUTE] += np.where(bound, 0.0, seconds)

    def _inner_bytes(self, op: Op, step: Step, lane: int) -> F64:
        """Moved by an elementwise op of a lane."""
        cost = self.model.op_cost(op, step)
        if isinstance(op, (Norm, Rope)):  # of q and k, or of a part of them
            start = op.in_offset if isinstance(op, Norm) else op.offset
            count = op.groups if isinstance(op, Norm) else op.heads
            dim = op.size if isinstance(op, Norm) else op.head_dim
            inside = [
                np.maximum(0, np.minimum(high, start + count * dim) - np.maximum(low, start))
                for low, high in self._intervals(lane)
            ]
            return np.asarray(
                cost.weight_bytes + cost.activation_bytes * sum(inside) / (count * dim)
            )
        assert isinstance(op, (Activation, Select))
        return np.asarray(cost.activation_bytes * self.share(lane))

    def _plain_s(self, ops: Sequence[Op], device: Device, step: Step) -> F64:
        return unit_s(self.model, dataclasses.replace(self.unit, ops=tuple(ops)), step, device)

    def begin_s(self, device: Device, step: Step) -> F64:
        """[DEVICE_TERMS] at home."""
        assert self.shares is not None
        return self._plain_s(self.shares.begin, device, step)

    def end_s(self, device: Device, step: Step) -> F64:
        """[DEVICE_TERMS] at home, with the sum, or the head's parts put together."""
        assert self.shares is not None
        times = self._plain_s(self.shares.end, device, step)
        last = self.shares.last or self.shares.first
        moved = (2 if self.shares.last is None else 3) * F32 * self.rows(last, step)
        times[ELEMENTWISE] += moved * self.width(last) / device.activation_bytes_per_s
        times[FIXED] += device.op_s
        return times

    def rows(self, op: Linear, step: Step) -> int:
        return self.model.rows(op.out, step)

    def width(self, op: Linear) -> int:
        """Of what it makes."""
        return sum(self.model.graph.tensors[part.weight][0] for part in op.parts)

    # --- bytes -------------------------------------------------------------------------------

    def lane_bytes(self, lane: int, home: bool, visiting: bool = False) -> I64:
        """Of the weights that a lane holds, 0 where it has nothing of the unit. visiting: of the
        CPU's, as they lie on the accelerator when they visit."""
        assert self.shares is not None
        site = "accelerator" if lane else "cpu"
        unit = DEVICE_ALIGNMENT if lane or visiting else 1
        total = np.zeros(len(self.marks), np.int64)
        for piece in (*self._first(lane), *self._last(lane, home)):
            size = self._bytes(self.model.format(piece.weight, site), piece.rows, piece.cols)
            for each in (size, self._bias_bytes(piece)):
                total += -(-each // unit) * unit
        inner = self._whole_bytes(self.shares.inner, lane or visiting)
        return np.where(self.share(lane) > 0, total + inner, 0)

    def home_bytes(self, lane: int, visiting: bool = False) -> int:
        """Of what begins and ends the unit, on the device of a lane."""
        assert self.shares is not None
        ops = (*self.shares.begin, *self.shares.end, *self.shares.apart)
        return self._whole_bytes(ops, lane or visiting)

    def unit_bytes(self, lane: int, visiting: bool = False) -> int:
        """Of the whole unit there."""
        return self._whole_bytes(self.unit.ops, lane or visiting)

    def _whole_bytes(self, ops: Sequence[Op], there: int | bool) -> int:
        unit = dataclasses.replace(self.unit, ops=tuple(ops))
        if there:
            return self.model.weight_bytes([unit], DEVICE_ALIGNMENT)
        return self.model.host_bytes([unit])


@functools.lru_cache(maxsize=4096)
def _matrix_bytes(format: str, rows: tuple[int, ...], cols: tuple[int, ...]) -> I64:
    held = FORMATS[format]
    if len(set(cols)) == 1:
        return np.asarray(held.bytes(np.asarray(rows, np.int64), int(cols[0])))  # type: ignore[arg-type]
    return np.array([held.bytes(int(r), int(c)) for r, c in zip(rows, cols, strict=True)], np.int64)


def make_table(model: CostedGraph, unit: Unit, marks: I64) -> CutTable:
    """marks: ascending, from 0 to all; those alone where the unit cannot be cut."""
    shares = priced_shares(unit)
    if isinstance(shares, str):
        return CutTable(model, unit, None, marks[[0, -1]])
    return CutTable(model, unit, shares, marks)
