"""What each op of a graph reads, writes and computes, in counts. Knows no machine and no time.

FLOPs are those of matrix products (linear ops and attention's two products), one multiply-add
being two. Elementwise ops count zero FLOPs: their cost is the activation bytes they move.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from helm.base.formats import FORMATS, STRIP_ROWS, KvDType, kv_position_bytes, tensor_bytes
from helm.model.graph import (
    OPS,
    Activation,
    Add,
    Attention,
    Concat,
    Embedding,
    Graph,
    Layer,
    Linear,
    Norm,
    Op,
    PositionEmbedding,
    Rope,
    Select,
    Unit,
)
from helm.model.mixture_ops import Experts, Route

_F32 = 4


@dataclass(frozen=True)
class Step:
    """One step: `tokens` new tokens, shared evenly by `sequences`, each of which has `context`
    cached positions when the step ends. outputs: rows of logits, one per sequence when None.

    causal False counts attention as the full square [tokens, context] that eager frameworks
    compute (and torch's FLOP counter counts); True counts the pairs that causality and the
    window leave, which is what the engine computes.
    """

    tokens: int
    context: int
    sequences: int = 1
    outputs: int | None = None
    causal: bool = True

    @property
    def output_rows(self) -> int:
        return self.sequences if self.outputs is None else self.outputs


@dataclass(frozen=True)
class OpCost:
    """Counts of one op or a sum of ops in one step. Bytes are those moved, not those resident:
    an embedding reads one row per token."""

    flops: int = 0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0

    def __add__(self, other: OpCost) -> OpCost:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return OpCost(*(a + b for a, b in zip(mine, others, strict=True)))


def causal_pairs(past: int, tokens: int, window: int) -> int:
    """(query, key) pairs of `tokens` queries after `past` positions; window 0: all earlier keys."""
    return _visible_sum(past + tokens, window) - _visible_sum(past, window)


def _visible_sum(count: int, window: int) -> int:
    """sum of min(j, window) for j = 1..count"""
    inside = min(count, window) if window else count
    return inside * (inside + 1) // 2 + (count - inside) * window


def visible_positions(context: int, tokens: int, window: int) -> int:
    """Cached positions that at least one of the last `tokens` queries attends to."""
    return min(context, window + tokens - 1) if window else context


@dataclass(frozen=True)
class CostedGraph:
    """A graph with the format of every tensor, which is all that counting needs. cpu_formats: of
    those that the CPU holds otherwise than the accelerator."""

    graph: Graph
    formats: Mapping[str, str]  # tensor name -> format
    kv_dtype: KvDType
    cpu_formats: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def format(self, name: str, device: str = "accelerator") -> str:
        """How a device holds a weight."""
        own = self.formats[name]
        return self.cpu_formats.get(name, own) if device == "cpu" else own

    def tensor_bytes(self, name: str, device: str = "accelerator") -> int:
        """Bytes of a weight as a device holds it."""
        return self._bytes[device == "cpu"][name]

    @functools.cached_property
    def _bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """On an accelerator and on the CPU."""
        shapes = self.graph.tensors
        there = {name: tensor_bytes(format, shapes[name]) for name, format in self.formats.items()}
        own = {name: tensor_bytes(held, shapes[name]) for name, held in self.cpu_formats.items()}
        return there, {**there, **own}

    def weight_bytes(self, units: Iterable[Unit | Layer], alignment: int = 1) -> int:
        """Bytes that `units` hold on an accelerator, where each tensor takes a multiple of
        `alignment`; a tensor they share is held once."""
        names = {name for unit in units for op in unit.ops for name in op.weight_names()}
        return sum(-(-self.tensor_bytes(name) // alignment) * alignment for name in names)

    def host_bytes(self, units: Iterable[Unit | Layer]) -> int:
        """Bytes that `units` hold in the CPU's memory; a tensor they share is held once."""
        names = {name for unit in units for op in unit.ops for name in op.weight_names()}
        return sum(self.tensor_bytes(name, "cpu") for name in names)

    @property
    def kv_position_bytes(self) -> int:
        """K and V of one position of one layer."""
        kv = self.graph.kv
        return kv_position_bytes(self.kv_dtype, kv.kv_heads, kv.head_dim)

    def unit_cost(self, unit: Unit, step: Step) -> OpCost:
        return sum((self.op_cost(op, step) for op in unit.ops), OpCost())

    def cost(self, step: Step) -> OpCost:
        """The whole step."""
        return sum((self.unit_cost(unit, step) for unit in self.graph.units), OpCost())

    def rows(self, value: str, step: Step) -> int:
        kind = self._rows[value]
        return step.tokens if kind == "tokens" else step.output_rows

    @functools.cached_property
    def _rows(self) -> dict[str, str]:
        return {value.name: value.rows for value in self.graph.values}

    def op_cost(self, op: Op, step: Step) -> OpCost:
        """What `op` costs in `step`."""
        cost: OpCost = _COUNTS[type(op)](self, op, step)
        return cost

    def _embedding(self, op: Embedding | PositionEmbedding, step: Step) -> OpCost:
        _, width = self.graph.tensors[op.table]
        row = -(-FORMATS[self.formats[op.table]].bytes(STRIP_ROWS, width) // STRIP_ROWS)
        read = step.tokens * row
        moved = 1 if isinstance(op, Embedding) else 2
        return OpCost(weight_bytes=read, activation_bytes=moved * _F32 * step.tokens * width)

    def _norm(self, op: Norm, step: Step) -> OpCost:
        weights = sum(self.tensor_bytes(name) for name in op.weight_names())
        moved = (3 if op.accumulate else 2) * _F32 * self.rows(op.out, step) * op.groups * op.size
        return OpCost(weight_bytes=weights, activation_bytes=moved)

    def _rope(self, op: Rope, step: Step) -> OpCost:
        return OpCost(activation_bytes=2 * _F32 * step.tokens * op.heads * op.rotary)

    def _activation(self, op: Activation, step: Step) -> OpCost:
        each = 2 + op.gated + op.accumulate
        moved = each * _F32 * self.rows(op.out, step) * op.size
        return OpCost(activation_bytes=moved)

    def _select(self, op: Select, step: Step) -> OpCost:
        return OpCost(activation_bytes=2 * _F32 * step.output_rows * self.width(op.out))

    def _add(self, op: Add, step: Step) -> OpCost:
        return OpCost(activation_bytes=3 * _F32 * self.rows(op.out, step) * self.width(op.out))

    def _concat(self, op: Concat, step: Step) -> OpCost:
        return OpCost(activation_bytes=2 * _F32 * self.rows(op.out, step) * self.width(op.out))

    def _linear(self, op: Linear, step: Step) -> OpCost:
        rows, flops, out_width = self.rows(op.out, step), 0, 0
        for part in op.parts:
            height, width = self.graph.tensors[part.weight]
            flops += 2 * rows * height * width
            out_width += height
        moved = self.width(op.input) + (2 if op.accumulate else 1) * out_width
        return OpCost(
            flops=flops,
            weight_bytes=sum(self.tensor_bytes(name) for name in op.weight_names()),
            activation_bytes=_F32 * rows * moved,
        )

    def _route(self, op: Route, step: Step) -> OpCost:
        rows = self.rows(op.out, step)
        moved = _F32 * rows * (self.width(op.input) + 2 * op.chosen)
        return OpCost(
            weight_bytes=sum(self.tensor_bytes(name) for name in op.weight_names()),
            activation_bytes=moved,
        )

    def _experts(self, op: Experts, step: Step) -> OpCost:
        """Of weights those of the experts that the rows are expected to have. Each pair of a row
        and an expert reads the input, makes gate, up and the activation, and adds its result."""
        rows = self.rows(op.out, step)
        pairs, width, out = rows * op.chosen, self.width(op.input), self.width(op.out)
        held = sum(self.tensor_bytes(name) for name in op.weight_names())
        return OpCost(
            flops=2 * pairs * op.size * (2 * width + out),
            weight_bytes=round(held * op.expected(rows) / op.experts),
            activation_bytes=_F32 * pairs * (2 * width + 4 * op.size + 4 * out),
        )

    def _attention(self, op: Attention, step: Step) -> OpCost:
        each = step.tokens // step.sequences
        past = step.context - each
        pairs = causal_pairs(past, each, op.window) if step.causal else each * step.context
        seen = visible_positions(step.context, each, op.window)
        position = kv_position_bytes(self.kv_dtype, op.kv_heads, op.head_dim)
        moved = 2 * (op.heads + op.kv_heads) * op.head_dim
        return OpCost(
            flops=4 * op.heads * op.head_dim * pairs * step.sequences,
            kv_read_bytes=seen * position * step.sequences,
            kv_write_bytes=step.tokens * position,
            activation_bytes=_F32 * step.tokens * moved,
        )

    def width(self, value: str) -> int:
        """Floats of one row of a value."""
        return self._widths[value]

    @functools.cached_property
    def _widths(self) -> dict[str, int]:
        return {value.name: value.width for value in self.graph.values}


# No op is free by default: one that is not here does not import.
_COUNTS: dict[type[Op], Callable[[CostedGraph, Any, Step], OpCost]] = {
    Embedding: CostedGraph._embedding,
    PositionEmbedding: CostedGraph._embedding,
    Norm: CostedGraph._norm,
    Linear: CostedGraph._linear,
    Rope: CostedGraph._rope,
    Attention: CostedGraph._attention,
    Activation: CostedGraph._activation,
    Select: CostedGraph._select,
    Add: CostedGraph._add,
    Concat: CostedGraph._concat,
    Route: CostedGraph._route,
    Experts: CostedGraph._experts,
}


def check_counted(ops: Collection[type[Op]]) -> None:
    """TypeError unless the costs of all these ops are known."""
    unknown = [op.__name__ for op in ops if op not in _COUNTS]
    if unknown:
        raise TypeError(f"{__name__} does not say what {', '.join(unknown)} cost")


check_counted(OPS.values())
