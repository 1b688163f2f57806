"""Bytes that units need on a device besides weights and KV pages. Knows no machine and no plan.

The runtime allocates exactly the activations and at most the workspace stated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from helm.base.formats import FORMATS
from helm.model.graph import Attention, Graph, Op, Unit
from helm.plan.kv import KvSpec
from helm.plan.schema import Limits

DEVICE_ALIGNMENT = 256  # of every activation, and of every weight on an accelerator
# Of the buffers of all threads together from which weights go up, and of one.
_UPLOAD_BYTES, _LEAST_UPLOAD_BYTES, _MOST_UPLOAD_BYTES = 64 << 20, 1 << 20, 8 << 20


def aligned(size: int, alignment: int = DEVICE_ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def activation_bytes(graph: Graph, units: Iterable[Unit], limits: Limits) -> int:
    """Buffers of the values that `units` read or write."""
    used = {value for unit in units for op in unit.ops for value in op.uses()}
    sizes = value_rows(graph, limits)
    return sum(aligned(4 * v.width * sizes[v.name]) for v in graph.values if v.name in used)


def workspace_bytes(
    graph: Graph, units: Iterable[Unit], limits: Limits, kv: KvSpec, threads: int
) -> int:
    """An upper bound of the scratch of the CPU's stages, 0 without units: per-thread packing and
    partial attention, the packed inputs of one product, one partial result per (sequence, KV head,
    page), the step's rotary tables, and those of keys that are held without their bias."""
    return int(graph.footprint.workspace(_kinds(graph, units), "cpu", limits, kv, threads))


def accelerator_workspace_bytes(
    graph: Graph, units: Iterable[Unit], limits: Limits, kv: KvSpec, *, packed: bool
) -> int:
    """An upper bound of the scratch of an accelerator's stages, 0 without units: cuBLAS's own, the
    inputs of products narrowed to 16 bit, partial attention and the step's tables, or what the
    simulated accelerator takes. packed: there may be packed weights, which become a matrix for
    cuBLAS panel by panel."""
    kinds, count = _kinds(graph, units), graph.footprint.workspace
    return int(count(kinds, "accelerator", limits, kv, threads=1, packed=packed))


@dataclass(frozen=True)
class OverflowBytes:
    """What a plan needs besides pages where KV of the accelerator's layers overflows: on the
    accelerator partial results of attention and two pages that visit, in host memory queries and
    partial results that cross, and the scratch of attention there. Results and queries are those of
    both sub-batches where a step may be split."""

    activations: int
    visiting: int
    host_staging: int
    host_workspace: int


def split_limits(limits: Limits, *, visits: bool) -> Limits:
    """Of the second sub-batch of a split step: a row of each sequence. None of one alone, and none
    where weights visit: no step is split then."""
    rows = 0 if visits or limits.sequences == 1 else limits.sequences
    return replace(limits, step_tokens=rows, step_outputs=rows)


def overflow_bytes(
    graph: Graph, units: Iterable[Unit], limits: Limits, kv: KvSpec, threads: int, split_rows: int
) -> OverflowBytes:
    """units: those with attention on the accelerator. split_rows: of the second sub-batch of a
    split step. Of host_workspace an upper bound."""
    units = list(units)
    widths = {value.name: value.width for value in graph.values}
    own = _attentions(op for unit in units for op in unit.ops)
    partial = 4 * max(op.heads * (op.head_dim + 2) for op in own)
    queries = 4 * max(widths[op.input] for op in own)
    return OverflowBytes(
        activations=2 * sum(aligned(n * partial) for n in (limits.step_tokens, split_rows)),
        visiting=2 * kv.page_bytes,
        host_staging=(1 + (split_rows > 0)) * limits.sequences * (queries + partial),
        host_workspace=graph.footprint.far_workspace(_kinds(graph, units), limits, kv, threads),
    )


def upload_bytes(graph: Graph, formats: Mapping[str, str], threads: int) -> int:
    """Page-locked host memory while weights in these formats are loaded to an accelerator: two
    buffers per thread, each of the largest read. A read has whole rows, or strips, of one weight.
    At most; of the weights that go up alone it may be less."""
    most = min(max(_UPLOAD_BYTES // (2 * threads), _LEAST_UPLOAD_BYTES), _MOST_UPLOAD_BYTES)
    reads = [0]
    for held, shape in {(formats[name], shape) for name, shape in graph.tensors.items()}:
        rows, cols = shape if len(shape) == 2 else (shape[0], 1)
        unit = FORMATS[held].row_unit
        units = max(1, most // 4 // cols // unit)
        reads.append(FORMATS[held].bytes(min(rows, units * unit), cols))
    return 2 * threads * max(reads)


def _kinds(graph: Graph, units: Iterable[Unit]) -> list[str]:
    """Names of units that stand for all of these."""
    return list({graph.kinds[unit.name].name for unit in units})


def _attentions(ops: Iterable[Op]) -> list[Attention]:
    return [op for op in ops if isinstance(op, Attention)]


def value_rows(graph: Graph, limits: Limits) -> dict[str, int]:
    rows = {"tokens": limits.step_tokens, "outputs": limits.step_outputs}
    return {value.name: rows[value.rows] for value in graph.values}
