"""Tasks and plans of the search's oracle, and the plain sums that all of it is made of.

Shares with helm only the graph and the counts per op; profiles arrive as parsed JSON.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from helm.compiler.op_cost import CostedGraph, Step
from helm.graph import Attention, Linear

F32 = 4


@dataclass
class Task:
    """Numbers of the workload and the limits; profile is the JSON document."""

    model: CostedGraph
    profile: dict[str, Any]
    prompt: int
    output: int
    batch: int
    context: int
    step_tokens: int
    page_tokens: int
    stream_steps: tuple[int, ...] = ()
    watermark: float = 0.8
    mapped: float = 0.0  # share of weight bytes that the CPU reads from mapped files


@dataclass
class Plan:
    devices: list[str]  # of every unit
    pages: int  # KV blocks per sequence and layer that the accelerator has room for
    overflow: str
    overlap: bool = False
    least: int | None = None  # tokens of a step from which weights visit the accelerator
    step_tokens: int = 0
    groups: int = 1


def interpolate(table: dict[str, float], tokens: int) -> float:
    points = sorted((int(n), rate) for n, rate in table.items())
    if tokens <= points[0][0]:
        return points[0][1]
    for (n0, r0), (n1, r1) in itertools.pairwise(points):
        if tokens <= n1:
            share = math.log(tokens / n0) / math.log(n1 / n0)
            return r0 * (r1 / r0) ** share
    return points[-1][1]


def device(task: Task, site: str) -> dict[str, Any]:
    return task.profile[site]


def unit_seconds(
    task: Task, unit: Any, site: str, tokens: int, outputs: int, sequences: int = 1
) -> float:
    """Without attention over the cache, which depends on where its pages are."""
    rates, total = device(task, site), 0.0
    step = Step(tokens, tokens, 1, outputs)
    for op in unit.ops:
        total += rates["op_s"]
        if isinstance(op, Attention):
            total += 2 * rates["op_s"]
            total += (tokens - sequences) * op.heads * rates.get("attention_query_s", 0)
        cost = task.model.op_cost(op, step)
        if isinstance(op, Linear):
            if task.model.rows(op.out, step) == 0:
                continue
            compute = memory = 0.0
            for part in op.parts:
                dtype = task.model.dtypes[part.weight]
                height, width = task.model.graph.tensors[part.weight]
                rows = task.model.rows(op.out, step)
                rate = interpolate(rates["matmul_flops"][dtype], rows)
                compute += 2 * rows * height * width / rate
                size = task.model.tensor_bytes(part.weight)
                if part.bias:
                    size += task.model.tensor_bytes(part.bias)
                rate = rates["matvec_bytes_per_s"][dtype]
                mapped = task.mapped if site == "cpu" else 0.0
                memory += (1 - mapped) * size / rate
                if mapped:
                    memory += mapped * size / (rate * rates["mapped_matvec_ratio"])
            total += max(compute, memory)
        elif not isinstance(op, Attention):
            moved = cost.activation_bytes + cost.weight_bytes
            total += moved / rates["activation_bytes_per_s"]
    return total


def attend(
    task: Task, op: Attention, site: str, queries: int, pairs: float, positions: float
) -> float:
    rates, dtype = device(task, site), task.model.kv_dtype
    flops = 4 * op.heads * op.head_dim * pairs
    size = positions * kv_size(task, op)
    rate = interpolate(rates["attention_flops"][dtype], queries * op.heads // op.kv_heads)
    return max(flops / rate, size / rates["attention_bytes_per_s"][dtype])


def kv_size(task: Task, op: Attention) -> int:
    row = {"f32": 4 * op.head_dim, "i8": op.head_dim + 4}  # the integers and their scale
    return 2 * op.kv_heads * row.get(task.model.kv_dtype, 2 * op.head_dim)


def seen_positions(op: Attention, past: int, tokens: int) -> int:
    """Counted key by key."""
    low = past + tokens
    for query in range(past, past + tokens):
        low = min(low, max(0, query - op.window + 1) if op.window else 0)
    return past + tokens - low


def pair_count(op: Attention, past: int, tokens: int) -> int:
    return sum(
        min(query + 1, op.window) if op.window else query + 1
        for query in range(past, past + tokens)
    )


def layer_ops(unit: Any) -> list[Attention]:
    return [op for op in unit.ops if isinstance(op, Attention)]


def hidden_of(task: Task) -> int:
    widths = {value.name: value.width for value in task.model.graph.values}
    return widths[task.model.graph.units[-1].ops[0].input]


def vocab_of(task: Task) -> int:
    widths = {value.name: value.width for value in task.model.graph.values}
    return widths[task.model.graph.logits]
