"""Bytes that units need on a device besides weights and KV pages. Knows no machine and no plan.

The runtime allocates exactly the activations and at most the workspace stated here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from helm.base.formats import KV_SCALE_BYTES
from helm.model.graph import Attention, Graph, Linear, Op, Rope, Unit
from helm.plan.schema import KvSpec, Limits

DEVICE_ALIGNMENT = 256  # of every activation, and of every weight on an accelerator
_PACKING_BYTES = 1 << 20  # above every tier's scratch for packed matrix panels, per thread
_PACKED_COLUMNS = 32  # to whole multiples of which inputs are packed
_FEW_TOKENS_BYTES = 16  # per column, of the input of a product of few tokens in eight bits
_KEY_BLOCK = 128  # keys that a kernel attends to at once
_QUERY_BLOCK = 32  # queries that one worker attends at once
_BLAS_BYTES = 32 << 20  # the most that cuBLAS recommends for its handle
_ATTENTION_PIECES = 512  # pieces in which a GPU attends to few rows, over all KV heads
_PROMPT_ROWS = 32  # (token, query head) pairs that a block of a GPU attends to in a prompt


def aligned(size: int, alignment: int = DEVICE_ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def activation_bytes(graph: Graph, units: Iterable[Unit], limits: Limits) -> int:
    """Buffers of the values that `units` read or write."""
    used = {value for unit in units for op in unit.ops for value in op.uses()}
    sizes = _value_rows(graph, limits)
    return sum(aligned(4 * v.width * sizes[v.name]) for v in graph.values if v.name in used)


def workspace_bytes(
    graph: Graph, units: Iterable[Unit], limits: Limits, kv: KvSpec, threads: int
) -> int:
    """An upper bound of the scratch of the CPU's stages, 0 without units: per-thread packing and
    partial attention, the packed inputs of one product, one partial result per (sequence, KV head,
    page), the step's rotary tables, and those of keys that are held without their bias."""
    ops = [op for unit in units for op in unit.ops]
    if not ops:
        return 0
    tables = 0
    if any(isinstance(op, Rope) for op in ops):
        frequencies = [len(table.inv_freq) for table in graph.rope]
        tables = sum(2 * aligned(4 * limits.step_tokens * count, 64) for count in frequencies)
    rows, widths = _value_rows(graph, limits), {v.name: v.width for v in graph.values}
    inputs = [
        4 * rows[op.input] * aligned(widths[op.input], _PACKED_COLUMNS)
        for op in ops
        if isinstance(op, Linear)
    ]
    widest = max((widths[op.input] for op in ops if isinstance(op, Linear)), default=0)
    few = _FEW_TOKENS_BYTES * aligned(widest, _PACKED_COLUMNS)
    scratch = _scratch_bytes(_attentions(ops), limits, kv, threads, few)
    return scratch + _turn_bytes(graph, limits, kv) + max(inputs, default=0) + tables


def _turn_bytes(graph: Graph, limits: Limits, kv: KvSpec) -> int:
    """Cosines and sines of every block of keys of the context and of every place in one."""
    if kv.dtype not in KV_SCALE_BYTES:
        return 0
    blocks = -(-limits.context // kv.page_tokens) * -(-kv.page_tokens // _KEY_BLOCK)
    rows = 4 * (blocks + _KEY_BLOCK)
    return aligned(sum(aligned(2 * len(t.inv_freq) * rows, 64) for t in graph.rope), 4096)


def _scratch_bytes(
    attentions: Iterable[Attention], limits: Limits, kv: KvSpec, threads: int, least: int = 0
) -> int:
    """Without rotary tables. least: what a member needs at least."""
    worker, partials = max(_PACKING_BYTES, least), 0
    pages = -(-limits.context // kv.page_tokens)
    for op in attentions:
        group, dim = op.heads // op.kv_heads, op.head_dim
        floats = 2 * _partial_floats(_QUERY_BLOCK * group, dim) + 256 * (dim + 64)
        worker = max(worker, _PACKING_BYTES + 4 * floats)
        each = 4 * _partial_floats(group, dim)
        partials = max(partials, limits.sequences * op.kv_heads * pages * each)
    return threads * aligned(worker, 4096) + aligned(partials, 64)


@dataclass(frozen=True)
class OverflowBytes:
    """What a plan needs besides pages where KV of the accelerator's layers overflows: on the
    accelerator partial results of attention and two pages that visit, in host memory queries and
    partial results that cross, and the scratch of attention there."""

    activations: int
    visiting: int
    host_staging: int
    host_workspace: int


def overflow_bytes(
    graph: Graph, units: Iterable[Unit], limits: Limits, kv: KvSpec, threads: int
) -> OverflowBytes:
    """units: those with attention on the accelerator. Of host_workspace an upper bound."""
    widths = {value.name: value.width for value in graph.values}
    own = _attentions(op for unit in units for op in unit.ops)
    partial = 4 * max(op.heads * (op.head_dim + 2) for op in own)
    queries = 4 * max(widths[op.input] for op in own)
    return OverflowBytes(
        activations=2 * aligned(limits.step_tokens * partial),
        visiting=2 * kv.page_bytes,
        host_staging=limits.sequences * (queries + partial),
        host_workspace=_scratch_bytes(own, limits, kv, threads)
        + (
            _turn_bytes(graph, limits, kv) + len(own) * queries if kv.dtype in KV_SCALE_BYTES else 0
        ),
    )


def _attentions(ops: Iterable[Op]) -> list[Attention]:
    return [op for op in ops if isinstance(op, Attention)]


def accelerator_workspace_bytes(
    graph: Graph, units: Iterable[Unit], limits: Limits, kv: KvSpec
) -> int:
    """An upper bound of the scratch of an accelerator's stages, 0 without units: cuBLAS's own, the
    inputs of products narrowed to 16 bit, partial attention and the step's tables, or what the
    simulated accelerator takes."""
    units = list(units)
    ops = [op for unit in units for op in unit.ops]
    if not ops:
        return 0
    rows, widths = _value_rows(graph, limits), {v.name: v.width for v in graph.values}
    narrow = [2 * rows[op.input] * widths[op.input] for op in ops if isinstance(op, Linear)]
    partials = [
        4 * _ATTENTION_PIECES * max(op.heads // op.kv_heads, _PROMPT_ROWS) * (op.head_dim + 2)
        for op in ops
        if isinstance(op, Attention)
    ]
    blocks = limits.sequences * -(-limits.context // kv.page_tokens)
    pages, runs = (blocks + 1) * kv.layers, limits.sequences + blocks
    frequencies = sum(len(table.inv_freq) for table in graph.rope)
    words = 3 * limits.step_tokens + limits.step_outputs + 6 * runs
    tables = 4 * (words + frequencies + pages) + 16 * (7 + len(graph.rope))  # each in 16 bytes
    parts = (_BLAS_BYTES, max(narrow, default=0), max(partials, default=0), tables)
    simulated = workspace_bytes(graph, units, limits, kv, threads=1)
    return max(sum(map(aligned, parts)), simulated)


def _value_rows(graph: Graph, limits: Limits) -> dict[str, int]:
    rows = {"tokens": limits.step_tokens, "outputs": limits.step_outputs}
    return {value.name: rows[value.rows] for value in graph.values}


def _partial_floats(rows: int, head_dim: int) -> int:
    """Of the partial attention of `rows` (query, head) pairs: maximum, sum and output."""
    return 2 * aligned(rows, 16) + aligned(rows * head_dim, 16)
