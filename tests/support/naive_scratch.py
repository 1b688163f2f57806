"""The oracle of scratch: what stages need besides weights, KV pages and activations, counted with
plain loops. Shares nothing with the runtime's formulas but the constants that they state."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from helm.model.graph import (
    Attention,
    Experts,
    Graph,
    Linear,
    Norm,
    Op,
    PositionEmbedding,
    Rope,
    Route,
    Unit,
)  # fmt: skip
from helm.plan.kv import KvSpec
from helm.plan.schema import Limits

F32 = 4
PACKING = 1 << 20  # packed panels of a matrix, in any instruction set
LINE, PAGE, DEVICE = 64, 4096, 256
BLAS = 32 << 20
PANEL = 32 << 20  # of packed weights in 16 bits, at most, in strips of 16 rows
KEY_BLOCK = 128
QUERIES = 32  # that one worker attends at once
GRID = 512  # blocks that fill a GPU
SPLIT_KEYS = 64


def up(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def activations(graph: Graph, units: Iterable[Unit], limits: Limits) -> int:
    """Buffers of all values that the units touch."""
    touched = {name for unit in units for op in unit.ops for name in op.uses()}
    rows = {"tokens": limits.step_tokens, "outputs": limits.step_outputs}
    return sum(up(F32 * v.width * rows[v.rows], DEVICE) for v in graph.values if v.name in touched)


def of_cpu(graph: Graph, units: list[Unit], limits: Limits, kv: KvSpec, threads: int) -> int:
    """Scratch of the CPU."""
    ops = [op for unit in units for op in unit.ops]
    if not ops:
        return 0
    total = turns(graph, limits, kv) + attending(ops, limits, kv, threads, _others(graph, ops))
    if any(isinstance(op, Rope) for op in ops):
        for table in graph.rope:
            total += 2 * up(F32 * limits.step_tokens * len(table.inv_freq), LINE)
    packed = [
        F32 * _rows(graph, op.input, limits) * up(_width(graph, op.input), 32)
        for op in ops
        if isinstance(op, Linear)
    ]
    rooms = [_room(graph, op, limits) for op in ops if isinstance(op, Experts)]
    return total + max([*packed, *rooms], default=0)


def _room(graph: Graph, op: Experts, limits: Limits) -> int:
    """What a mixture's experts share: the input and what they make of it, also in eight bits, and
    lists of pairs of a token and one of its experts."""
    rows, width = _rows(graph, op.input, limits), _width(graph, op.input)
    pairs = rows * op.chosen
    sizes = (
        64 * rows * math.ceil(width / 32), F32 * pairs * op.size,
        64 * pairs * math.ceil(op.size / 32), *[F32 * (op.experts + 1)] * 2, *[F32 * pairs] * 2,
    )  # fmt: skip
    return sum(up(size, LINE) for size in sizes)


def attending(ops: list[Op], limits: Limits, kv: KvSpec, threads: int, others: int = 0) -> int:
    """Each thread's share and, for every sequence, page and KV head, a partial result. others:
    what a thread needs for something else."""
    share, partials = max(PACKING, others), 0
    for op in ops:
        if isinstance(op, Attention):
            group = op.heads // op.kv_heads
            kernel = PACKING + 256 * F32 * (op.head_dim + 64)
            share = max(share, kernel + 2 * F32 * _partial(QUERIES * group, op.head_dim))
            pages = limits.sequences * math.ceil(limits.context / kv.page_tokens)
            partials = max(partials, pages * op.kv_heads * F32 * _partial(group, op.head_dim))
    return threads * up(share, PAGE) + up(partials, LINE)


def _others(graph: Graph, ops: list[Op]) -> int:
    """The input of a product of eight tokens in eight bits, 64 bytes for every 32 columns, or a row
    of positions."""
    needs = [0]
    for op in ops:
        if isinstance(op, Linear):
            needs.append(8 * 64 * math.ceil(_width(graph, op.input) / 32))
        elif isinstance(op, PositionEmbedding):
            needs.append(F32 * _width(graph, op.out))
        elif isinstance(op, Experts):  # results twice, and eight rows of an input
            rows = 8 * max(_width(graph, op.input), op.size)
            needs.append(PACKING + F32 * (2 * 2 * 8 * 1024 + rows))
        elif isinstance(op, Route):
            needs.append(4 * F32 * _width(graph, op.input))
    return max(needs)


def turns(graph: Graph, limits: Limits, kv: KvSpec) -> int:
    """Where an i8 cache holds keys without their bias: cosines and sines of each block of keys of
    the context, and of each place in a block."""
    if kv.dtype != "i8" or not any(bias_of(graph, unit) for unit in graph.units):
        return 0
    blocks = math.ceil(limits.context / kv.page_tokens) * math.ceil(kv.page_tokens / KEY_BLOCK)
    rows = blocks + KEY_BLOCK
    return up(sum(up(F32 * rows * 2 * len(t.inv_freq), LINE) for t in graph.rope), PAGE)


def bias_of(graph: Graph, unit: Unit) -> str | None:
    """The bias that all keys of the unit's attention have in common: that of the product that made
    them, unless a norm, or a rope of neighbours, came between."""
    found = None
    attention = next((op for op in unit.ops if isinstance(op, Attention)), None)
    if attention is None:
        return None
    keys = range(attention.k_offset, attention.k_offset + attention.kv_heads * attention.head_dim)
    for op in unit.ops[: unit.ops.index(attention)]:
        if isinstance(op, Linear) and op.out == attention.input:
            end = 0
            for part in op.parts:
                end += graph.tensors[part.weight][0]
                if keys.start < end:
                    found = part.bias
                    break
        elif isinstance(op, Norm) and op.out == attention.input:
            normed = range(op.out_offset, op.out_offset + op.groups * op.size)
            if normed.start < keys.stop and keys.start < normed.stop:
                found = None
        elif isinstance(op, Rope) and op.value == attention.input and op.pairs == "neighbours":
            turned = range(op.offset, op.offset + op.heads * op.head_dim)
            if turned.start < keys.stop and keys.start < turned.stop:
                found = None
    return found


def of_far_pages(
    graph: Graph, units: Iterable[Unit], limits: Limits, kv: KvSpec, threads: int
) -> int:
    """Scratch of the CPU where it attends to pages of the accelerator's layers, with the biases of
    keys that it then needs."""
    ops = [op for unit in units for op in unit.ops]
    total = turns(graph, limits, kv) + attending(ops, limits, kv, threads)
    if kv.dtype == "i8":
        biases = [bias for unit in graph.units if (bias := bias_of(graph, unit))]
        total += sum(up(F32 * graph.tensors[name][0], LINE) for name in biases)
    return total


def of_accelerator(
    graph: Graph, units: list[Unit], limits: Limits, kv: KvSpec, packed: bool = False
) -> int:
    """Scratch of CUDA on any GPU, or of the simulated accelerator, which has one thread."""
    ops = [op for unit in units for op in unit.ops]
    if not ops:
        return 0
    inputs = [op.input for op in ops if isinstance(op, Linear)]
    many = [name for name in inputs if _rows(graph, name, limits) > 8]
    blocks = limits.sequences * math.ceil(limits.context / kv.page_tokens)
    tables = [limits.step_tokens] * 3 + [limits.step_outputs, 6 * limits.sequences, 6 * blocks]
    tables += [(blocks + 1) * len(kv.layers), *(len(table.inv_freq) for table in graph.rope)]
    narrow = [2 * _rows(graph, n, limits) * _width(graph, n) for n in many]
    for op in ops:
        if isinstance(op, Experts):
            narrow.append(F32 * _rows(graph, op.input, limits) * op.chosen * op.size)
    panels = [0]
    for op in ops if packed else []:
        if isinstance(op, Linear):
            rows, width = _rows(graph, op.input, limits), _width(graph, op.input)
            narrow.append(min(rows, 8) * 48 * math.ceil(width / 32))
            if rows > 8:
                strips = math.ceil(sum(graph.tensors[p.weight][0] for p in op.parts) / 16)
                panels.append(min(strips, max(1, PANEL // (32 * width))) * 32 * width)
    places = 2 if limits.sequences > 1 else 1  # of the two sub-batches of a step
    parts = (
        places * up(sum(F32 * words + 16 for words in tables), DEVICE),
        BLAS if many else 0,
        max(narrow, default=0),
        max(panels),
        max((_splits(op, limits) for op in ops if isinstance(op, Attention)), default=0),
    )
    simulated = of_cpu(graph, units, limits, kv, 1)
    return max(sum(up(part, DEVICE) for part in parts), simulated)


def _splits(op: Attention, limits: Limits) -> int:
    geometry = (op.heads, op.kv_heads, op.head_dim)
    return _most_partials(*geometry, limits.context, limits.step_tokens, limits.sequences)


@functools.cache
def _most_partials(
    heads: int, kv_heads: int, head_dim: int, context: int, step_tokens: int, sequences: int
) -> int:
    """Partial attention of the steps of every size, of prompts and of one token per sequence."""
    most = 0
    for tokens in range(1, step_tokens + 1):
        grids = [math.ceil(tokens * (heads // kv_heads) / 32) * kv_heads]
        if tokens <= sequences:
            grids.append(tokens * kv_heads)
        for grid in grids:
            splits = 1
            while splits * 2 * grid <= GRID and splits * 2 <= math.ceil(context / SPLIT_KEYS):
                splits *= 2
            if splits > 1:
                most = max(most, tokens * splits * heads * F32 * (head_dim + 2))
    return most


def _rows(graph: Graph, name: str, limits: Limits) -> int:
    (value,) = (v for v in graph.values if v.name == name)
    return limits.step_tokens if value.rows == "tokens" else limits.step_outputs


def _width(graph: Graph, name: str) -> int:
    (value,) = (v for v in graph.values if v.name == name)
    return value.width


def _partial(rows: int, head_dim: int) -> int:
    """Floats: maximum, sum and output of each (query, head) pair."""
    return 2 * up(rows, 16) + up(rows * head_dim, 16)
