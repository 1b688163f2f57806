"""The oracle of the search: prices and enumerates every plan with plain loops, one at a time.

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
    cpu_reserve: int = 0
    own_reserve: int = 0


@dataclass
class Plan:
    devices: list[str]  # of every unit
    pages: int  # KV blocks per sequence and layer on the accelerator
    overflow: str
    mode: str
    overlap: bool


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


def unit_seconds(task: Task, unit: Any, site: str, tokens: int, outputs: int) -> float:
    """Without attention over the cache, which depends on where its pages are."""
    rates, total = device(task, site), 0.0
    step = Step(tokens, tokens, 1, outputs)
    for op in unit.ops:
        total += rates["op_s"]
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
                memory += size / rates["matvec_bytes_per_s"][dtype]
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
    return 2 * op.kv_heads * op.head_dim * (4 if task.model.kv_dtype == "f32" else 2)


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


def decode_seconds(task: Task, plan: Plan, context: int) -> float:
    units, link, total = task.model.graph.units, task.profile["link"], 0.0
    for unit, site in zip(units, plan.devices, strict=True):
        total += unit_seconds(task, unit, site, task.batch, task.batch)
        for op in layer_ops(unit):
            seen = seen_positions(op, context - 1, 1)
            if site == "cpu":
                total += attend(task, op, site, 1, task.batch * seen, task.batch * seen)
            else:
                total += decode_attention(task, plan, op, seen)
    total += task.profile["cpu"]["step_s"]
    if "accelerator" in plan.devices:
        total += task.profile["accelerator"]["step_s"]
        there, back = link["to_accelerator_bytes_per_s"], link["to_host_bytes_per_s"]
        width = 1 if plan.devices[0] == "accelerator" else hidden_of(task)
        last = vocab_of(task) if plan.devices[-1] == "accelerator" else hidden_of(task)
        total += 2 * link["latency_s"] + F32 * task.batch * (width / there + last / back)
    return total


def decode_attention(task: Task, plan: Plan, op: Attention, seen: int) -> float:
    link, batch = task.profile["link"], task.batch
    held = min(seen, plan.pages * task.page_tokens)
    away = seen - held
    own = attend(task, op, "accelerator", 1, batch * held, batch * held)
    if away == 0:
        return own
    if plan.overflow == "stream":
        size = batch * away * kv_size(task, op)
        load = link["latency_s"] + size / link["to_accelerator_bytes_per_s"]
        return max(load, attend(task, op, "accelerator", 1, batch * seen, batch * seen))
    sent = F32 * batch * (op.heads + 2 * op.kv_heads) * op.head_dim / link["to_host_bytes_per_s"]
    back = F32 * batch * op.heads * (op.head_dim + 2) / link["to_accelerator_bytes_per_s"]
    other = attend(task, op, "cpu", 1, batch * away, batch * away)
    return max(own, 2 * link["latency_s"] + sent + back + other)


def fill_steps(task: Task) -> list[list[tuple[int, int]]]:
    """Token by token: steps of runs (past, tokens)."""
    steps: list[list[tuple[int, int]]] = [[]]
    used = 0
    for _ in range(task.batch):
        fresh = True
        for position in range(task.prompt):
            if used == task.step_tokens:
                steps.append([])
                used, fresh = 0, True
            if fresh:
                steps[-1].append((position, 0))
                fresh = False
            past, tokens = steps[-1][-1]
            steps[-1][-1] = (past, tokens + 1)
            used += 1
    return steps


def prefill_seconds(task: Task, plan: Plan) -> float:
    units, devices = task.model.graph.units, plan.devices
    steps = fill_steps(task)
    streams = plan.mode != "compute" and "cpu" in devices[1:-1]
    uses = "accelerator" in devices or streams
    first, second = [], []
    total = 0.0
    for runs in steps:
        tokens = sum(count for _, count in runs)
        stage = {"cpu": 0.0, "accelerator": 0.0}
        stage[devices[0]] += unit_seconds(task, units[0], devices[0], tokens, 0)
        for unit, site in zip(units[1:-1], devices[1:-1], strict=True):
            if site == "cpu" and streams:
                continue
            stage[site] += block_seconds(task, plan, unit, site, runs, site == "accelerator")
        first.append((stage["cpu"], tokens, runs))
        second.append(stage["accelerator"])
        total += task.profile["cpu"]["step_s"]
        if uses:
            total += task.profile["accelerator"]["step_s"]
        ends = sum(past + count == task.prompt for past, count in runs)
        if ends:
            total += unit_seconds(task, units[-1], devices[-1], ends, ends)
    total += combine(task, plan, first, second)
    if streams:
        total += stream_seconds(task, plan, steps)
    if uses:
        total += prefill_link(task, plan, steps, streams)
    return total


def block_seconds(
    task: Task, plan: Plan, unit: Any, site: str, runs: list[tuple[int, int]], overflows: bool
) -> float:
    link = task.profile["link"]
    total = unit_seconds(task, unit, site, sum(count for _, count in runs), 0)
    for op, (past, count) in itertools.product(layer_ops(unit), runs):
        seen = seen_positions(op, past, count)
        own = attend(task, op, site, count, pair_count(op, past, count), seen)
        if overflows:
            held = plan.pages * task.page_tokens
            away, size = max(0, seen - held), kv_size(task, op)
            if away:
                load = link["latency_s"] + away * size / link["to_accelerator_bytes_per_s"]
                own = max(own, load)
            leaving = sum(1 for position in range(past, past + count) if position >= held)
            own = max(own, leaving * size / link["to_host_bytes_per_s"])
        total += own
    return total


def combine(task: Task, plan: Plan, first: list[Any], second: list[float]) -> float:
    if not plan.overlap:
        return sum(seconds for seconds, _, _ in first) + sum(second)
    done_first = done_second = 0.0
    attentions = [
        op
        for unit, site in zip(task.model.graph.units, plan.devices, strict=True)
        if site == "accelerator"
        for op in layer_ops(unit)
    ]
    for (seconds, _, runs), own in zip(first, second, strict=True):
        copies = any(
            seen_positions(op, past, count) > plan.pages * task.page_tokens
            for op in attentions
            for past, count in runs
        )
        slow = 1 / task.profile["link"]["cpu_rate_while_copying"] if copies else 1.0
        done_first += seconds * slow
        done_second = max(done_first, done_second) + own
    return done_second


def stream_seconds(task: Task, plan: Plan, steps: list[list[tuple[int, int]]]) -> float:
    link, total, exposed = task.profile["link"], 0.0, None
    there, back = link["to_accelerator_bytes_per_s"], link["to_host_bytes_per_s"]
    for unit, site in zip(task.model.graph.units[1:-1], plan.devices[1:-1], strict=True):
        if site == "accelerator":
            continue
        kv = sum(kv_size(task, op) for op in layer_ops(unit))
        load = link["latency_s"] + task.model.weight_bytes([unit]) / there
        compute = [block_seconds(task, plan, unit, "accelerator", runs, False) for runs in steps]
        stored = [sum(count for _, count in runs) * kv / back for runs in steps]
        loads = [load + sum(past for past, _ in runs) * kv / there for runs in steps]
        if plan.mode == "stream_prompt":
            compute, stored, loads = [sum(compute)], [sum(stored)], [load]
        total += sum(map(max, loads, compute, stored))
        if exposed is None:
            exposed = min(loads[0], compute[0])
    return total + (exposed or 0.0)


def prefill_link(
    task: Task, plan: Plan, steps: list[list[tuple[int, int]]], streams: bool
) -> float:
    link, devices, hidden = task.profile["link"], plan.devices, hidden_of(task)
    ends = [[past + count == task.prompt for past, count in runs] for runs in steps]
    ending = [sum(n for _, n in runs) for runs, end in zip(steps, ends, strict=True) if any(end)]
    sending = [sum(count for _, count in runs) for runs in steps]
    if "accelerator" not in devices[:-1] and not streams:
        sending = ending  # the head alone is there
    width = 1 if devices[0] == "accelerator" else hidden
    total = sum(
        link["latency_s"] + F32 * n * width / link["to_accelerator_bytes_per_s"] for n in sending
    )
    back = F32 * sum(ending) * hidden
    if devices[-1] == "accelerator":
        back = F32 * task.batch * vocab_of(task)
    return total + len(ending) * link["latency_s"] + back / link["to_host_bytes_per_s"]


def weights(task: Task, plan: Plan, site: str) -> int:
    """Every tensor once on each device that has a unit reading it."""
    names = set()
    for unit, where in zip(task.model.graph.units, plan.devices, strict=True):
        if where == site:
            for op in unit.ops:
                names.update(op.weight_names())
    return sum(task.model.tensor_bytes(name) for name in names)


def kv_bytes(task: Task, plan: Plan) -> dict[str, int]:
    most = math.ceil(task.context / task.page_tokens)
    found = {"cpu": 0, "accelerator": 0}
    for unit, site in zip(task.model.graph.units, plan.devices, strict=True):
        for op in layer_ops(unit):
            page = task.batch * min(task.page_tokens, task.context) * kv_size(task, op)
            here = plan.pages if site == "accelerator" else 0
            found["accelerator"] += here * page
            found["cpu"] += (most - here) * page
    return found


def plans(task: Task) -> list[Plan]:
    blocks = len(task.model.graph.units) - 2
    most = math.ceil(task.context / task.page_tokens)
    if task.profile["accelerator"] is None:
        return [Plan(["cpu"] * (blocks + 2), 0, "stream", "compute", False)]
    found = []
    modes = [
        ("compute", False),
        ("compute", True),
        ("stream_step", False),
        ("stream_prompt", False),
    ]
    for k, embedding, head in itertools.product(
        range(blocks + 1), ("cpu", "accelerator"), ("cpu", "accelerator")
    ):
        if embedding == "accelerator" and k > 0:
            continue
        devices = [embedding, *["cpu"] * k, *["accelerator"] * (blocks - k), head]
        for pages, overflow, (mode, overlap) in itertools.product(
            range(most + 1), ("stream", "cpu"), modes
        ):
            if (k == 0 and mode != "compute") or (k == blocks and pages):
                continue
            if overlap and (k == blocks or embedding == "accelerator"):
                continue
            found.append(Plan(devices, pages, overflow, mode, overlap))
    return found


def sizes(task: Task, plan: Plan) -> dict[str, int]:
    """Everything on each device. Activations and scratch are those that helm states; weights, KV
    pages and staging are counted here."""
    from helm.compiler.memory import activation_bytes, workspace_bytes
    from helm.plan_format import KvSpec, Limits

    graph, kv = task.model.graph, task.model.graph.kv
    most = max(1, task.batch)
    limits = Limits(task.context, max(task.step_tokens, most), most, most)
    tokens = min(task.page_tokens, task.context)
    spec = KvSpec(task.model.kv_dtype, tokens, kv.layers, kv.kv_heads, kv.head_dim, 0)
    blocks = graph.units[1:-1]
    on_cpu = [unit for unit, site in zip(graph.units, plan.devices, strict=True) if site == "cpu"]
    own = [unit for unit in graph.units if unit not in on_cpu]
    visiting = [unit for unit in on_cpu if unit in blocks] if plan.mode != "compute" else []
    kv_size_of = kv_bytes(task, plan)
    found = {}
    for site, units in (("cpu", on_cpu), ("accelerator", [*own, *visiting])):
        threads = task.profile["cpu"]["threads"] if site == "cpu" else 1
        total = weights(task, plan, site) + kv_size_of[site]
        total += activation_bytes(graph, units, limits)
        if any(unit in blocks for unit in units):
            ops = [op for unit in blocks for op in unit.ops]
            total += workspace_bytes(graph, ops, limits, spec, threads)
        found[site] = total
    if own or visiting:
        found["cpu"] += task.cpu_reserve + 2 * F32 * limits.step_tokens * hidden_of(task)
        found["accelerator"] += task.own_reserve
    all_pages = math.ceil(task.context / task.page_tokens)
    if any(unit in blocks for unit in own) and plan.pages < all_pages:
        found["accelerator"] += 2 * task.batch * spec.page_bytes
    if visiting:
        largest = max(task.model.weight_bytes([unit]) for unit in visiting)
        position = max(sum(kv_size(task, op) for op in layer_ops(unit)) for unit in blocks)
        if plan.mode == "stream_prompt":
            position += F32 * hidden_of(task)
        found["accelerator"] += 2 * largest + task.batch * task.prompt * position
    return found
