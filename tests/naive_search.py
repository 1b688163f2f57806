"""The oracle of the search: prices and enumerates every plan with plain loops, one at a time.

Shares with helm only the graph and the counts per op; profiles arrive as parsed JSON.
"""

from __future__ import annotations

import dataclasses
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


@dataclass
class Plan:
    devices: list[str]  # of every unit
    pages: int  # KV blocks per sequence and layer on the accelerator
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


def decode_seconds(task: Task, plan: Plan, context: int) -> float:
    if plan.groups == 1:
        return sum(decode_step(task, plan, context))
    small, large = task.batch // 2, task.batch - task.batch // 2
    steps = [decode_step(dataclasses.replace(task, batch=n), plan, context) for n in (large, small)]
    pages = math.ceil(task.context / task.page_tokens)
    if "accelerator" in plan.devices[1:-1] and plan.pages < pages:
        return sum(map(sum, steps))
    cpu, own = zip(*steps, strict=True)
    return max(sum(cpu), sum(own), *map(sum, steps))


def alternation(steps: list[tuple[float, float]], rounds: int) -> float:
    """Seconds per round of groups that pass through the CPU and then the accelerator, again and
    again, in order and one at a time on each; by simulation, without its first half."""
    cpu_free = own_free = 0.0
    back, ends = [0.0] * len(steps), []
    for _ in range(rounds):
        for group, (cpu, own) in enumerate(steps):
            cpu_free = max(cpu_free, back[group]) + cpu
            own_free = max(own_free, cpu_free) + own
            back[group] = own_free
        ends.append(own_free)
    half = rounds // 2
    return (ends[-1] - ends[half - 1]) / (rounds - half)


def decode_step(task: Task, plan: Plan, context: int) -> tuple[float, float]:
    """(seconds of the CPU, of the accelerator with its copies)"""
    units, link = task.model.graph.units, task.profile["link"]
    busy = {"cpu": task.profile["cpu"]["step_s"], "accelerator": 0.0}
    for unit, site in zip(units, plan.devices, strict=True):
        busy[site] += unit_seconds(task, unit, site, task.batch, task.batch)
        for op in layer_ops(unit):
            seen = seen_positions(op, context - 1, 1)
            if site == "cpu":
                busy[site] += attend(task, op, site, 1, task.batch * seen, task.batch * seen)
            else:
                busy[site] += decode_attention(task, plan, op, seen)
    if "accelerator" in plan.devices:
        busy["accelerator"] += task.profile["accelerator"]["step_s"]
        there, back = link["to_accelerator_bytes_per_s"], link["to_host_bytes_per_s"]
        width = 1 if plan.devices[0] == "accelerator" else hidden_of(task)
        last = vocab_of(task) if plan.devices[-1] == "accelerator" else hidden_of(task)
        crossing = F32 * task.batch * (width / there + last / back)
        busy["accelerator"] += 2 * link["latency_s"] + crossing
    return busy["cpu"], busy["accelerator"]


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


def fill_steps(task: Task, step_tokens: int) -> list[list[tuple[int, int]]]:
    """Token by token: steps of runs (past, tokens)."""
    steps: list[list[tuple[int, int]]] = [[]]
    used = 0
    for _ in range(task.batch):
        fresh = True
        for position in range(task.prompt):
            if used == step_tokens:
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
    steps = fill_steps(task, plan.step_tokens)
    first, second = [], []
    total = 0.0
    for runs in steps:
        tokens = sum(count for _, count in runs)
        streams = plan.least is not None and tokens >= plan.least
        stage = {"cpu": 0.0, "accelerator": 0.0}
        stage[devices[0]] += unit_seconds(task, units[0], devices[0], tokens, 0)
        for unit, site in zip(units[1:-1], devices[1:-1], strict=True):
            if site == "accelerator" or not streams:
                stage[site] += block_seconds(task, plan, unit, site, runs, site == "accelerator")
        first.append((stage["cpu"], tokens, runs))
        second.append(stage["accelerator"])
        total += task.profile["cpu"]["step_s"]
        ends = sum(past + count == task.prompt for past, count in runs)
        if ends:
            total += unit_seconds(task, units[-1], devices[-1], ends, ends)
        if "accelerator" in devices:
            total += task.profile["accelerator"]["step_s"]
            total += prefill_link(task, plan, tokens, ends)
        if streams:
            total += stream_seconds(task, plan, runs)
    return total + combine(task, plan, first, second)


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


def visits(task: Task, plan: Plan, runs: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """(load, work) seconds of every block of the CPU in one step"""
    link, found = task.profile["link"], []
    there, back = link["to_accelerator_bytes_per_s"], link["to_host_bytes_per_s"]
    for unit, site in zip(task.model.graph.units[1:-1], plan.devices[1:-1], strict=True):
        if site == "accelerator":
            continue
        load = link["latency_s"] + task.model.weight_bytes([unit]) / there
        work = block_seconds(task, plan, unit, "accelerator", runs, False)
        for op, (past, count) in itertools.product(layer_ops(unit), runs):
            work += kv_size(task, op) * (past / there + count / back)
        found.append((load, work))
    return found


def stream_seconds(task: Task, plan: Plan, runs: list[tuple[int, int]]) -> float:
    blocks = visits(task, plan, runs)
    return sum(map(max, blocks)) + min(blocks[0])


def two_buffers(blocks: list[tuple[float, float]]) -> float:
    """When the last block is done if blocks are loaded one after the other, each into the buffer
    that the block before last has left, and computed in order."""
    loaded = done = before = 0.0
    for load, work in blocks:
        loaded = max(loaded, before) + load
        before, done = done, max(done, loaded) + work
    return done


def prefill_link(task: Task, plan: Plan, tokens: int, ends: int) -> float:
    """One step's activations to the accelerator, and those or logits back."""
    link, devices, hidden = task.profile["link"], plan.devices, hidden_of(task)
    width = 1 if devices[0] == "accelerator" else hidden
    total = link["latency_s"] + F32 * tokens * width / link["to_accelerator_bytes_per_s"]
    if devices[-1] == "cpu":
        total += link["latency_s"] + F32 * tokens * hidden / link["to_host_bytes_per_s"]
    elif ends:
        logits = F32 * ends * vocab_of(task)
        total += link["latency_s"] + logits / link["to_host_bytes_per_s"]
    return total


def weights(task: Task, plan: Plan, site: str) -> int:
    """Every tensor once on each device that has a unit reading it."""
    names = set()
    for unit, where in zip(task.model.graph.units, plan.devices, strict=True):
        if where == site:
            for op in unit.ops:
                names.update(op.weight_names())
    if site == "accelerator":
        return sum(padded(task, name) for name in names)
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


def plans(task: Task, kv: str = "device") -> list[Plan]:
    blocks = len(task.model.graph.units) - 2
    most = math.ceil(task.context / task.page_tokens)
    if task.profile["accelerator"] is None:
        return [Plan(["cpu"] * (blocks + 2), 0, "stream", step_tokens=task.step_tokens)]
    found = []
    for k, embedding, head in itertools.product(
        range(blocks + 1), ("cpu", "accelerator"), ("cpu", "accelerator")
    ):
        if embedding == "accelerator" and k > 0:
            continue
        devices = [embedding, *["cpu"] * k, *["accelerator"] * (blocks - k), head]
        held = {"device": [most], "host": [0], "any": range(most + 1)}[kv]
        for pages, overflow, prefill, groups in itertools.product(
            held, ("stream", "cpu"), prefills(task, devices), (1, 2)
        ):
            if groups == 2 and (task.batch == 1 or len(set(devices)) == 1):
                continue
            found.append(Plan(devices, pages, overflow, *prefill, groups))
    return found


def prefills(task: Task, devices: list[str]) -> list[tuple[bool, int | None, int]]:
    """(overlap, least, step_tokens)"""
    found: list[tuple[bool, int | None, int]] = [(False, None, task.step_tokens)]
    if devices[0] == "cpu" and "accelerator" in devices[1:-1]:
        found.append((True, None, task.step_tokens))
    if "cpu" not in devices[1:-1] or "accelerator" not in devices:
        return found
    for step_tokens in (task.step_tokens, *task.stream_steps):
        longer = step_tokens != task.step_tokens
        if longer and not task.step_tokens < step_tokens < 2 * task.prompt * task.batch:
            continue  # shorter, or a smaller power of two holds all prompts
        for runs in fill_steps(task, step_tokens):
            least = sum(count for _, count in runs)
            if least > task.batch:
                found.append((False, least, step_tokens))
    return list(dict.fromkeys(found))


def sizes(task: Task, plan: Plan) -> dict[str, int]:
    """Everything on each device, without reserves. Activations and scratch are those that helm
    states; weights, KV pages and staging are counted here."""
    from helm.compiler import memory
    from helm.plan_format import KvSpec, Limits

    graph, kv = task.model.graph, task.model.graph.kv
    most = max(1, task.batch)
    limits = Limits(task.context, max(plan.step_tokens, most), most, most)
    tokens = min(task.page_tokens, task.context)
    spec = KvSpec(task.model.kv_dtype, tokens, kv.layers, kv.kv_heads, kv.head_dim, 0)
    on_cpu = [unit for unit, site in zip(graph.units, plan.devices, strict=True) if site == "cpu"]
    own = [unit for unit in graph.units if unit not in on_cpu]
    visiting = [u for u in on_cpu if u in graph.units[1:-1]] if plan.least is not None else []
    threads = task.profile["cpu"]["threads"]
    found = kv_bytes(task, plan)
    for site, units in (("cpu", on_cpu), ("accelerator", [*own, *visiting])):
        found[site] += weights(task, plan, site) + memory.activation_bytes(graph, units, limits)
    found["cpu"] += memory.workspace_bytes(graph, on_cpu, limits, spec, threads)
    found["accelerator"] += memory.accelerator_workspace_bytes(
        graph, [*own, *visiting], limits, spec
    )
    if own and on_cpu:
        found["cpu"] += 2 * F32 * limits.step_tokens * hidden_of(task)
    if plan.devices[-1] == "accelerator":
        found["cpu"] += 2 * F32 * most * vocab_of(task)
    all_pages = math.ceil(task.context / task.page_tokens)
    if "accelerator" in plan.devices[1:-1] and plan.pages < all_pages:
        found["accelerator"] += 2 * task.batch * spec.page_bytes
    if visiting:
        names = [{n for op in unit.ops for n in op.weight_names()} for unit in visiting]
        largest = max(sum(padded(task, name) for name in unit) for unit in names)
        pages = task.batch * math.ceil(task.prompt / task.page_tokens)
        found["accelerator"] += 2 * largest + pages * spec.page_bytes
    return found


def padded(task: Task, name: str) -> int:
    """A weight's bytes on the accelerator."""
    return math.ceil(task.model.tensor_bytes(name) / 256) * 256
