"""The oracle of the search: prices and enumerates every plan with plain loops, one at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import naive_overflow
from helm.model.graph import Attention
from naive_rates import (
    F32,
    Plan,
    Task,
    attend,
    hidden_of,
    kv_size,
    layer_ops,
    pair_count,
    places,
    seen_positions,
    unit_seconds,
    vocab_of,
)


def cache_of(task: Task, plan: Plan) -> naive_overflow.Cache:
    total = task.batch * math.ceil(task.context / task.page_tokens)
    return naive_overflow.Cache(task.batch * plan.pages, total, task.page_tokens, task.watermark)


def decode_seconds(task: Task, plan: Plan, context: int) -> float:
    if plan.groups == 1:
        return sum(decode_step(task, plan, context)[:2])
    small, large = task.batch // 2, task.batch - task.batch // 2
    steps = [decode_step(dataclasses.replace(task, batch=n), plan, context) for n in (large, small)]
    waits = "accelerator" in plan.devices[1:-1] and plan.overflow == "cpu"
    if waits and any(naive_overflow.after_prompts(cache_of(task, plan), task.batch, context)):
        return sum(cpu + own for cpu, own, _ in steps)  # the caller attends for the accelerator
    cpu, own, copy = zip(*steps, strict=True)
    lost = 1 - task.profile["link"]["cpu_rate_while_copying"]
    whole = max(
        sum(cpu) + lost * sum(copy), sum(own),
        cpu[0] + own[0] + lost * copy[1], cpu[1] + own[1] + lost * copy[0],
    )  # fmt: skip
    together = sum(cpu) + sum(own) - whole
    return whole - together + together / task.profile["link"]["rate_while_both_compute"]


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


def decode_step(task: Task, plan: Plan, context: int) -> tuple[float, float, float]:
    """(seconds of the CPU, of the accelerator with its copies, of copies of visiting pages)"""
    link = task.profile["link"]
    busy = {"cpu": task.profile["cpu"]["step_s"], "accelerator": 0.0, "copies": 0.0}
    far = naive_overflow.after_prompts(cache_of(task, plan), task.batch, context)
    for unit, site in zip(places(task), plan.devices, strict=True):
        other = unit_seconds(task, unit, site, task.batch, task.batch, task.batch)
        busy[site] += other
        for op in layer_ops(unit):
            seen = seen_positions(op, context - 1, 1)
            if site == "cpu":
                busy[site] += attend(task, op, site, 1, task.batch * seen, task.batch * seen)
            else:
                layer, copy = decode_layer(task, plan, op, context, far, other)
                busy[site] += layer - other
                busy["copies"] += copy
    if "accelerator" in plan.devices:
        busy["accelerator"] += task.profile["accelerator"]["step_s"]
        there, back = link["to_accelerator_bytes_per_s"], link["to_host_bytes_per_s"]
        width = 1 if plan.devices[0] == "accelerator" else hidden_of(task)
        last = vocab_of(task) if plan.devices[-1] == "accelerator" else hidden_of(task)
        crossing = F32 * task.batch * (width / there + last / back)
        busy["accelerator"] += 2 * link["latency_s"] + crossing
    return busy["cpu"], busy["accelerator"], busy["copies"]


def launch_seconds(task: Task, plan: Plan) -> float:
    """Of one more op; the published placement, with no pages there, has none."""
    op_s: float = task.profile["accelerator"]["op_s"]
    return op_s if plan.pages else 0.0


def decode_layer(
    task: Task, plan: Plan, op: Attention, context: int, far: list[int], other: float
) -> tuple[float, float]:
    """(seconds of a layer on the accelerator, of copies to it); other: without attention"""
    link, batch = task.profile["link"], task.batch
    there = link["to_accelerator_bytes_per_s"]
    seen = seen_positions(op, context - 1, 1)
    runs = [naive_overflow.visits(n, task.page_tokens, context, context - seen) for n in far]
    away, pages = sum(run.seen for run in runs), sum(run.pages for run in runs)
    near = batch * seen - away
    own = attend(task, op, "accelerator", 1, near, near)
    if not any(far):
        return other + own, 0.0
    launch = launch_seconds(task, plan)
    if plan.overflow == "stream":
        copied = sum(run.copied for run in runs)
        copy = pages * link["latency_s"] + copied * kv_size(task, op) / there
        visiting = attend(task, op, "accelerator", 1, away, away) + pages * launch
        rest = other + 2 * launch + own
        return naive_overflow.layer_seconds(pages, copy, visiting, rest), copy
    width = {value.name: value.width for value in task.model.graph.values}[op.input]
    host = task.profile["cpu"]
    asked = link["latency_s"] + F32 * batch * width / link["to_host_bytes_per_s"]
    found = host["step_s"] + 2 * host["op_s"] + attend(task, op, "cpu", 1, away, away)
    back = link["latency_s"] + F32 * batch * op.heads * (op.head_dim + 2) / there
    return other + 2 * launch + max(own, asked + found) + back, 0.0


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
    units, devices = places(task), plan.devices
    steps = fill_steps(task, plan.step_tokens)
    away = naive_overflow.through_prefill(cache_of(task, plan), steps)
    first, second = [], []
    total = 0.0
    for runs, gone in zip(steps, away, strict=True):
        tokens = sum(count for _, count in runs)
        visits = plan.least is not None and tokens >= plan.least
        stage = {"cpu": 0.0, "accelerator": 0.0}
        stage[devices[0]] += unit_seconds(task, units[0], devices[0], tokens, 0)
        for unit, site in zip(units[1:-1], devices[1:-1], strict=True):
            if site == "accelerator":
                stage[site] += split_block_seconds(task, plan, unit, runs, gone)
            elif not visits:
                stage[site] += block_seconds(task, unit, site, runs)
        first.append(stage["cpu"])
        second.append(stage["accelerator"])
        total += task.profile["cpu"]["step_s"]
        ends = prompt_ends(task, runs)
        if ends:
            total += unit_seconds(task, units[-1], devices[-1], ends, ends)
        if "accelerator" in devices:
            total += task.profile["accelerator"]["step_s"]
            total += prefill_link(task, plan, tokens, ends, visits)
        if visits:
            total += stream_seconds(task, plan, runs)
    return total + combine(task, plan, first, second, list(zip(steps, away, strict=True)))


def prompt_ends(task: Task, runs: list[tuple[int, int]]) -> int:
    return sum(past + count == task.prompt for past, count in runs)


def block_without_attention(task: Task, unit: Any, site: str, runs: list[tuple[int, int]]) -> float:
    tokens = sum(count for _, count in runs)
    return unit_seconds(task, unit, site, tokens, prompt_ends(task, runs))


def block_seconds(task: Task, unit: Any, site: str, runs: list[tuple[int, int]]) -> float:
    """With all of its KV there."""
    total = block_without_attention(task, unit, site, runs)
    for op, (past, count) in itertools.product(layer_ops(unit), runs):
        seen = seen_positions(op, past, count)
        total += attend(task, op, site, count, pair_count(op, past, count), seen)
    return total


def page_visits(
    task: Task, op: Attention, runs: list[tuple[int, int]], gone: naive_overflow.Away
) -> list[naive_overflow.Visits]:
    found = []
    for (past, count), far in zip(runs, gone.far, strict=True):
        hidden = past + count - seen_positions(op, past, count)
        found.append(naive_overflow.visits(far, task.page_tokens, past, hidden))
    return found


def split_block_seconds(
    task: Task, plan: Plan, unit: Any, runs: list[tuple[int, int]], gone: naive_overflow.Away
) -> float:
    """On the accelerator, with pages that visit from host memory and others that leave."""
    link, launch = task.profile["link"], launch_seconds(task, plan)
    whole = block_seconds(task, unit, "accelerator", runs)
    total = whole
    for op in layer_ops(unit):
        page = kv_size(task, op)
        found = page_visits(task, op, runs, gone)
        pages = sum(run.pages for run in found)
        if any(gone.far):
            rest = block_without_attention(task, unit, "accelerator", runs) + 2 * launch
            visiting = pages * launch
            for (past, count), far, run in zip(runs, gone.far, found, strict=True):
                end = min(far * task.page_tokens, past)
                beyond = sum(
                    max(0, end - max(0, query - op.window + 1 if op.window else 0))
                    for query in range(past, past + count)
                )
                pairs, seen = pair_count(op, past, count), seen_positions(op, past, count)
                rest += attend(task, op, "accelerator", count, pairs - beyond, seen - run.seen)
                visiting += attend(task, op, "accelerator", count, beyond, run.seen)
            copied = page * sum(run.copied for run in found)
            copy = pages * link["latency_s"] + copied / link["to_accelerator_bytes_per_s"]
            total = naive_overflow.layer_seconds(pages, copy, visiting, rest)
            total = total if pages else rest
        leaving = gone.left * task.page_tokens * page / link["to_host_bytes_per_s"]
        total += leaving if pages else max(0.0, leaving - whole)
    return total


def combine(
    task: Task, plan: Plan, first: list[float], second: list[float],
    steps: list[tuple[list[tuple[int, int]], naive_overflow.Away]],
) -> float:  # fmt: skip
    if not plan.overlap:
        return sum(first) + sum(second)
    done_first = done_second = 0.0
    attentions = [
        op
        for unit, site in zip(places(task), plan.devices, strict=True)
        if site == "accelerator"
        for op in layer_ops(unit)
    ]
    for cpu, own, (runs, gone) in zip(first, second, steps, strict=True):
        copies = gone.left or any(
            run.pages for op in attentions for run in page_visits(task, op, runs, gone)
        )
        if gone.waits:
            done_first = max(done_first, done_second)
        done_first += cpu / (task.profile["link"]["cpu_rate_while_copying"] if copies else 1.0)
        done_second = max(done_first, done_second) + own
    return done_second


def visits(task: Task, plan: Plan, runs: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """(load, work) seconds of every block of the CPU in one step"""
    link, found = task.profile["link"], []
    there, back = link["to_accelerator_bytes_per_s"], link["to_host_bytes_per_s"]
    for unit, site in zip(places(task)[1:-1], plan.devices[1:-1], strict=True):
        if site == "accelerator":
            continue
        load = link["latency_s"] + task.model.weight_bytes([unit]) / there
        work = block_seconds(task, unit, "accelerator", runs)
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


def prefill_link(task: Task, plan: Plan, tokens: int, ends: int, visits: bool) -> float:
    """One step's activations to the accelerator, and those or logits back. What a last block
    hands to a head are the rows of prompts that end."""
    link, devices = task.profile["link"], plan.devices
    sizes = []
    if visits or "accelerator" in devices[1:-1]:
        width = 1 if devices[0] == "accelerator" else hidden_of(task)
        sizes.append((tokens * width, "to_accelerator_bytes_per_s"))
    elif ends:
        sizes.append((ends * hidden_of(task), "to_accelerator_bytes_per_s"))
    if ends:
        width = hidden_of(task) if devices[-1] == "cpu" else vocab_of(task)
        sizes.append((ends * width, "to_host_bytes_per_s"))
    return sum(float(link["latency_s"] + F32 * floats / link[rate]) for floats, rate in sizes)


def has_room(task: Task, plan: Plan) -> bool:
    """Whether the accelerator holds what any step of an overflowing cache writes."""
    if "accelerator" not in plan.devices[1:-1]:
        return True
    sequences, each = max(1, task.batch), math.ceil(task.context / task.page_tokens)
    new = math.ceil(max(plan.step_tokens, sequences) / task.page_tokens)
    return plan.pages >= each or plan.pages * task.batch >= new + 2 * sequences


def plans(task: Task, kv: str = "any") -> list[Plan]:
    blocks = len(places(task)) - 2
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
    return [plan for plan in found if kv == "host" or has_room(task, plan)]


def prefills(task: Task, devices: list[str]) -> list[tuple[bool, int | None, int]]:
    """(overlap, least, step_tokens)"""
    found: list[tuple[bool, int | None, int]] = [(False, None, task.step_tokens)]
    if devices[0] == "cpu" and "accelerator" in devices[1:-1]:
        found.append((True, None, task.step_tokens))
    if not task.visits or "cpu" not in devices[1:-1] or "accelerator" not in devices:
        return found
    for step_tokens in (task.step_tokens, *task.visit_steps):
        longer = step_tokens != task.step_tokens
        if longer and not task.step_tokens < step_tokens < 2 * task.prompt * task.batch:
            continue  # shorter, or a smaller power of two holds all prompts
        for runs in fill_steps(task, step_tokens):
            least = sum(count for _, count in runs)
            if least > task.batch:
                found.append((False, least, step_tokens))
    return list(dict.fromkeys(found))
