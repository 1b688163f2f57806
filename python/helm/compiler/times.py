"""Roofline times of units on one device. Knows rates and counts, no placement and no schedule.

An op takes max(FLOPs / rate(format class, tokens), bytes / bandwidth) plus a fixed cost. Times are
kept apart by what bounds them; index `TERMS` for the meaning of a position.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from helm.base.formats import DTYPES, kv_position_bytes, tensor_bytes, uncompressed
from helm.compiler.counts import CostedGraph, Step
from helm.machine.rates import DeviceProfile, rate_class
from helm.model.graph import (
    Attention,
    Layer,
    Linear,
    Op,
    Unit,
)
from helm.model.mixture_ops import Experts

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Seconds = float | F64

_NEAR_BANDWIDTH = 0.8  # a product within a fifth of its bytes' time is called memory bound
_ATTENTION_OPS = 3  # that attention counts as: append, attend, merge, each a barrier or launch
_EXPERTS_OPS = 4  # that experts count as: sort, gate and up, round, down
# Tokens of an expert that a product takes at once, of elements and of packed weights.
_EXPERT_TOKENS, _PACKED_EXPERT_TOKENS = 8, 64
_DEVICE_TERMS = ("memory_s", "compute_s", "attention_s", "elementwise_s", "fixed_s")
MEMORY, COMPUTE, ATTENTION, ELEMENTWISE, FIXED = range(5)
DEVICE_TERMS = len(_DEVICE_TERMS)
# link_s: crossings of activations. overflow_s: what KV pages in host memory add to attention.
# stream_s: weights visiting the accelerator, with what they hide. overlap_s: time saved (<= 0)
# by running the CPU's and the accelerator's stage of neighbouring chunks at once.
TERMS = (
    *(f"cpu_{name}" for name in _DEVICE_TERMS),
    *(f"accelerator_{name}" for name in _DEVICE_TERMS),
    "link_s",
    "overflow_s",
    "stream_s",
    "overlap_s",
)
LINK, OVERFLOW, VISIT, OVERLAP = range(2 * DEVICE_TERMS, 2 * DEVICE_TERMS + 4)


def linear_s(
    model: CostedGraph, op: Linear, rows: int, device: DeviceProfile
) -> tuple[Seconds, Seconds]:
    """Seconds that its bytes and its FLOPs take; it takes the greater, and a fixed cost. Arrays
    where the shapes of its weights are of arrays."""
    compute: Seconds = 0.0
    memory: Seconds = 0.0
    for part in op.parts:
        held = model.format(part.weight, device.site)
        kind = rate_class(held)
        height, width = model.graph.tensors[part.weight]
        size = tensor_bytes(uncompressed(held), (height, width))  # as rates of bf16c count it
        if part.bias is not None:
            size = size + model.tensor_bytes(part.bias)
        compute = compute + 2.0 * rows * height * width / float(device.matmul_rate(kind, rows))
        memory = memory + size / device.rate("matvec_bytes_per_s", kind)
    return memory, compute


def experts_s(
    model: CostedGraph, op: Experts, rows: int, device: DeviceProfile
) -> tuple[float, float]:
    """The same of experts, of which those are read that `rows` tokens are expected to have."""
    compute = memory = 0.0
    expected = op.expected(rows)
    each = max(1, round(rows * op.chosen / expected))  # tokens of an expert
    for name in op.matrices():
        held = model.format(name, device.site)
        kind = rate_class(held)
        height, width = model.graph.tensors[name]
        size = tensor_bytes(uncompressed(held), (height, width)) / op.experts
        flops = 2.0 * rows * op.chosen * height * width / op.experts
        at_once = min(each, _EXPERT_TOKENS if kind in DTYPES else _PACKED_EXPERT_TOKENS)
        compute += flops / float(device.matmul_rate(kind, at_once))
        memory += expected * size / device.rate("matvec_bytes_per_s", kind)
    return memory, compute


def is_memory_bound(compute_s: Any, memory_s: Any) -> Any:
    """Of products that take the greater of the two."""
    return np.less_equal(_NEAR_BANDWIDTH * compute_s, memory_s)


def unit_s(model: CostedGraph, unit: Unit | Layer, step: Step, device: DeviceProfile) -> F64:
    """[DEVICE_TERMS, ...] seconds of `unit`; of attention only the fixed cost, see `attention_s`.
    Has more axes where sizes in the unit are arrays."""
    times: list[Any] = [0.0] * DEVICE_TERMS
    for op in unit.ops:
        if isinstance(op, Attention):
            times[FIXED] += attention_fixed_s(op, step, device)
            continue
        times[FIXED] += device.op_s
        if isinstance(op, (Linear, Experts)):
            rows = model.rows(op.out, step)
            if rows:
                if isinstance(op, Linear):
                    memory, compute = linear_s(model, op, rows, device)
                else:
                    memory, compute = experts_s(model, op, rows, device)
                bound = is_memory_bound(compute, memory)
                seconds = np.maximum(memory, compute)
                times[MEMORY] = times[MEMORY] + np.where(bound, seconds, 0.0)
                times[COMPUTE] = times[COMPUTE] + np.where(bound, 0.0, seconds)
            if isinstance(op, Experts):
                times[FIXED] += device.op_s * (_EXPERTS_OPS - 1)
                moved = model.op_cost(op, step).activation_bytes
                times[ELEMENTWISE] = times[ELEMENTWISE] + moved / device.activation_bytes_per_s
        else:
            cost = model.op_cost(op, step)
            size = cost.activation_bytes + cost.weight_bytes
            times[ELEMENTWISE] = times[ELEMENTWISE] + size / device.activation_bytes_per_s
    return np.array(np.broadcast_arrays(*times))


def before_attention_s(
    model: CostedGraph, layer: Layer, step: Step, device: DeviceProfile
) -> float:
    """Seconds of the ops of a layer before its attention."""
    ops = tuple(itertools.takewhile(lambda op: not isinstance(op, Attention), layer.ops))
    first = dataclasses.replace(layer.units[0], ops=ops)
    return float(unit_s(model, first, step, device).sum())


def attention_fixed_s(op: Attention, step: Step, device: DeviceProfile) -> float:
    queries = step.tokens - step.sequences  # none in a decode step
    return device.op_s * _ATTENTION_OPS + device.attention_query_s * op.heads * queries


@dataclass(frozen=True)
class Queries:
    """New tokens of sequences, one entry per run of a sequence: `tokens` after `past` positions.

    step[i] says in which step the run is. Arrays are [runs].
    """

    past: I64
    tokens: I64
    step: I64

    @property
    def steps(self) -> int:
        return int(self.step[-1]) + 1


def prefill_queries(prompt: int, batch: int, step_tokens: int) -> Queries:
    """How `batch` prompts fill steps of at most `step_tokens`, one prompt after the other."""
    past, tokens, step = [], [], []
    room, at = step_tokens, 0
    for _ in range(batch):
        done = 0
        while done < prompt:
            if room == 0:
                room, at = step_tokens, at + 1
            count = min(room, prompt - done)
            past.append(done)
            tokens.append(count)
            step.append(at)
            done, room = done + count, room - count
    return Queries(*(np.array(column, np.int64) for column in (past, tokens, step)))


def visible(op: Attention, queries: Queries) -> I64:
    """[runs] cached positions that at least one query of the run attends to."""
    context = queries.past + queries.tokens
    return np.minimum(context, op.window + queries.tokens - 1) if op.window else context


def causal_pairs(op: Attention, queries: Queries) -> F64:
    """[runs] (query, key) pairs within causality and the window."""

    def total(count: I64) -> F64:
        inside = np.minimum(count, op.window) if op.window else count
        return inside * (inside + 1.0) / 2.0 + (count - inside) * float(op.window)

    return total(queries.past + queries.tokens) - total(queries.past)


def position_bytes(model: CostedGraph, op: Attention) -> int:
    """K and V of one position of the op's layer."""
    return kv_position_bytes(model.kv_dtype, op.kv_heads, op.head_dim)


def attention_s(
    model: CostedGraph,
    op: Attention,
    queries: int | I64,
    pairs: F64,
    positions: F64 | I64,
    device: DeviceProfile,
) -> F64:
    """Seconds to attend `pairs` (query, key) pairs over `positions` cached positions, any shape;
    queries: of one sequence, each with every head."""
    flops = 4.0 * op.heads * op.head_dim * pairs
    size = np.asarray(positions, np.float64) * position_bytes(model, op)
    return np.asarray(
        np.maximum(
            flops / device.attention_rate(model.kv_dtype, queries * (op.heads // op.kv_heads)),
            size / device.rate("attention_bytes_per_s", model.kv_dtype),
        )
    )


@dataclass(frozen=True)
class BlockClasses:
    """Layers that cost the same share a class. member: [layers] class of each layer; one layer
    stands for each class."""

    member: I64
    units: tuple[Layer, ...]

    def before(self, boundaries: Sequence[int] | I64) -> F64:
        """[boundaries, classes] how many layers of each class lie before each boundary."""
        return np.asarray(self._before[np.asarray(boundaries)])

    @functools.cached_property
    def _before(self) -> F64:
        counts = np.zeros((len(self.member) + 1, len(self.units)))
        counts[np.arange(1, len(self.member) + 1), self.member] = 1.0
        return np.asarray(np.cumsum(counts, axis=0))


def classify(model: CostedGraph) -> BlockClasses:
    """The classes of all layers."""
    seen: dict[tuple[object, ...], int] = {}
    units: list[Layer] = []
    member = []
    for layer in model.graph.layers:
        key = tuple(_shape(model, op) for op in layer.ops)
        if key not in seen:
            seen[key] = len(units)
            units.append(layer)
        member.append(seen[key])
    return BlockClasses(np.array(member, np.int64), tuple(units))


def _shape(model: CostedGraph, op: Op) -> tuple[object, ...]:
    """Everything about `op` that its cost depends on."""
    weights = tuple(
        (model.graph.tensors[n], model.format(n), model.format(n, "cpu")) for n in op.weight_names()
    )
    fields = (field.name for field in dataclasses.fields(op) if field.name not in op.names)
    return (op.op, weights, tuple(getattr(op, name) for name in fields))


def attentions(unit: Unit | Layer) -> list[Attention]:
    return [op for op in unit.ops if isinstance(op, Attention)]
