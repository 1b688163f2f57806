"""Tasks and plans of the search's oracle, and the plain sums that all of it is made of.

Shares with helm only the graph and the counts per op; profiles arrive as parsed JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

from helm.compiler.counts import CostedGraph, Step
from helm.model.graph import Attention, Layer, Linear, Unit

F32 = 4
CLASSES = {"c8.s32": "q8", "c4.km32": "q4"}  # of formats whose rates have other names


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
    visit_steps: tuple[int, ...] = ()
    watermark: float = 0.8
    visits: bool = True  # whether the CPU's weights may visit the accelerator
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


def held_as(task: Task, name: str, site: str) -> str:
    """The format of a weight on a device."""
    own = task.model.formats[name]
    return task.model.cpu_formats.get(name, own) if site == "cpu" else own


def weight_bytes(format: str, rows: int, cols: int) -> int:
    """Of a matrix, or of a vector of one row."""
    plain = {"f32": 4, "f16": 2, "bf16": 2}
    if format in plain:
        return plain[format] * rows * cols
    if format == "bf16c":
        escapes = rows * cols // 256 + 64
        return rows * (192 * math.ceil(cols / 128) + 8) + 4 * escapes
    size = 0  # strips of 16 rows, spans of 256 columns: scales, then codes
    for _ in range(0, rows, 16):
        for begin in range(0, cols, 256):
            groups = math.ceil(min(256, cols - begin) / 32)
            if format == "c8.s32":
                size += math.ceil(groups / 2) * 64 + groups * 512
            else:
                assert format == "c4.km32"
                size += 2 * math.ceil(groups / 4) * 64 + 64 + groups * 256
    return size


def reading(rates: dict[str, Any], kind: str) -> float:
    """Bytes/s of one token; bf16c's by the bytes of bf16."""
    if kind == "bf16c":
        return rates["matvec_bytes_per_s"]["bf16"] * interpolate(rates["compressed_ratio"], 1)
    return rates["matvec_bytes_per_s"][kind]


def beside(task: Task) -> Task:
    """The task's machine while both devices read the same memory."""
    share = task.profile["link"]["rate_while_both_compute"]
    sites = {site: {**task.profile[site], "left": share} for site in ("cpu", "accelerator")}
    return dataclasses.replace(task, profile={**task.profile, **sites})


def reads(task: Task, site: str, kind: str) -> float:
    """Bytes/s of weights where some lie in mapped files, while another device may read, too."""
    rates, mapped = device(task, site), task.mapped if site == "cpu" else 0.0

    def alone(one: str) -> float:
        rate = reading(rates, one)
        return 1 / ((1 - mapped) / rate + mapped / (rate * rates.get("mapped_matvec_ratio", 1)))

    return left_of(rates, alone(kind), [alone(one) for one in ("f32", "f16", "bf16")
                                        if one in rates["matvec_bytes_per_s"]])  # fmt: skip


def left_of(rates: dict[str, Any], rate: float, plain: list[float]) -> float:
    return min(rate, max(rate, *plain) * rates.get("left", 1.0))


def products(rates: dict[str, Any], kind: str) -> dict[str, float]:
    """tokens -> FLOP/s"""
    if kind != "bf16c":
        return rates["matmul_flops"][kind]
    ratios = rates["compressed_ratio"]
    most = max(map(int, ratios))

    def ratio(tokens: int) -> float:  # no gain is taken for granted where none was measured
        found = interpolate(ratios, tokens)
        return found if tokens <= most else min(1.0, found)

    plain = rates["matmul_flops"]["bf16"]
    return {tokens: rate * ratio(int(tokens)) for tokens, rate in plain.items()}


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
                held = held_as(task, part.weight, site)
                kind = CLASSES.get(held, held)
                height, width = task.model.graph.tensors[part.weight]
                rows = task.model.rows(op.out, step)
                rate = interpolate(products(rates, kind), rows)
                compute += 2 * rows * height * width / rate
                size = weight_bytes("bf16" if held == "bf16c" else held, height, width)
                if part.bias:
                    size += F32 * height
                memory += size / reads(task, site, kind)
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
    plain = [reading(rates, kind) for kind in ("f32", "f16", "bf16")
             if kind in rates["matvec_bytes_per_s"]]  # fmt: skip
    return max(flops / rate, size / left_of(rates, rates["attention_bytes_per_s"][dtype], plain))


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


def places(task: Task) -> list[Unit | Layer]:
    """What a search places as a whole: the embedding, every layer, the head."""
    first, *units, last = task.model.graph.units
    layers: dict[int | None, list[Unit]] = {}
    for unit in units:
        layers.setdefault(unit.layer, []).append(unit)
    return [first, *(Layer(tuple(parts)) for parts in layers.values()), last]


def hidden_of(task: Task) -> int:
    widths = {value.name: value.width for value in task.model.graph.values}
    return widths[task.model.graph.units[-1].ops[0].input]


def vocab_of(task: Task) -> int:
    widths = {value.name: value.width for value in task.model.graph.values}
    return widths[task.model.graph.logits]
