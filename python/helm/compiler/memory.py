"""Bytes that units need on a device besides weights and KV pages. Knows no machine and no plan.

The runtime allocates exactly the activations and at most the workspace stated here.
"""

from __future__ import annotations

from collections.abc import Iterable

from helm.graph import Attention, Graph, Op, Unit
from helm.plan_format import KvSpec, Limits

_PACKING_BYTES = 1 << 20  # above every tier's scratch for packed matrix panels, per thread
_QUERY_BLOCK = 32  # queries that one worker attends at once
_VALUE_FIELDS = ("input", "out", "value")


def activation_bytes(graph: Graph, units: Iterable[Unit], limits: Limits) -> int:
    """Buffers of the values that `units` read or write, in whole cache lines."""
    used = {
        getattr(op, name)
        for unit in units
        for op in unit.ops
        for name in _VALUE_FIELDS
        if hasattr(op, name)
    }
    rows = {"tokens": limits.step_tokens, "outputs": limits.step_outputs}
    return sum(_line(4 * v.width * rows[v.rows]) for v in graph.values if v.name in used)


def workspace_bytes(
    graph: Graph, ops: Iterable[Op], limits: Limits, kv: KvSpec, threads: int
) -> int:
    """An upper bound of the scratch of a stage made of `ops`: per-thread packing and partial
    attention, one partial result per (sequence, KV head, page), and the step's rotary tables."""
    worker, partials = _PACKING_BYTES, 0
    pages = -(-limits.context // kv.page_tokens)
    for op in (op for op in ops if isinstance(op, Attention)):
        group, dim = op.heads // op.kv_heads, op.head_dim
        floats = 2 * _QUERY_BLOCK * group * (dim + 32) + 256 * (dim + 64)
        worker = max(worker, _PACKING_BYTES + 4 * floats)
        partials = max(partials, 4 * limits.sequences * op.kv_heads * pages * group * (dim + 32))
    tables = sum(2 * _line(4 * limits.step_tokens * len(table.inv_freq)) for table in graph.rope)
    return threads * worker + partials + tables


def _line(size: int) -> int:
    """`size` in whole cache lines of 64 bytes."""
    return -(-size // 64) * 64
