"""The oracle of memory: everything on each device, unit by unit and tensor by tensor."""

from __future__ import annotations

import math

import naive_scratch
from helm.base.formats import FORMATS
from helm.plan.kv import KvSpec
from helm.plan.schema import Limits
from naive_rates import (
    F32,
    Plan,
    Task,
    held_as,
    hidden_of,
    kv_size,
    layer_ops,
    places,
    vocab_of,
    weight_bytes,
)


def weights(task: Task, plan: Plan, site: str) -> int:
    """Every tensor once on each device that has a unit reading it."""
    names = set()
    for unit, where in zip(places(task), plan.devices, strict=True):
        if where == site:
            for op in unit.ops:
                names.update(op.weight_names())
    if site == "accelerator":
        return sum(padded(task, name) for name in names)
    return sum(held(task, name, site) for name in names)


def kv_bytes(task: Task, plan: Plan) -> dict[str, int]:
    """Where no page of the accelerator overflows, a layer with a window has those of the largest
    window and a step's tokens, for every sequence."""
    most = task.batch * math.ceil(task.context / task.page_tokens)
    size = min(task.page_tokens, task.context)
    window = max(op.window for unit in task.model.graph.units for op in layer_ops(unit))
    tokens = window - 1 + max(plan.step_tokens, task.batch)
    few = most
    if "accelerator" not in plan.devices[1:-1] or task.batch * plan.pages == most:
        # The most pages that so many positions lie in: those of the first and last are cut.
        few = min(most, task.batch * max(1, 1 + math.ceil((tokens - 1) / size)))
    found = {"cpu": 0, "accelerator": 0}
    for unit, site in zip(places(task), plan.devices, strict=True):
        for op in layer_ops(unit):
            page = size * kv_size(task, op)
            if op.window and few < most:
                found[site] += few * page
                continue
            here = task.batch * plan.pages if site == "accelerator" else 0
            found["accelerator"] += here * page
            found["cpu"] += (most - here) * page
    return found


def sizes(task: Task, plan: Plan) -> dict[str, int]:
    """Everything on each device, without reserves."""
    graph, kv = task.model.graph, task.model.graph.kv
    most = max(1, task.batch)
    tokens = max(plan.step_tokens, most)
    outputs = max(most, min(tokens, 8))  # 7 guesses for a sequence
    limits = Limits(task.context, tokens, outputs, most)
    tokens = min(task.page_tokens, task.context)
    spec = KvSpec(task.model.kv_dtype, tokens, kv.layers, kv.kv_heads, kv.head_dim, 0)
    units = places(task)
    on_cpu = [unit for unit, site in zip(units, plan.devices, strict=True) if site == "cpu"]
    own = [unit for unit in units if unit not in on_cpu]
    visiting = [u for u in on_cpu if u in units[1:-1]] if plan.least is not None else []
    threads = task.profile["cpu"]["threads"]
    found = kv_bytes(task, plan)
    for site, units in (("cpu", on_cpu), ("accelerator", [*own, *visiting])):
        found[site] += weights(task, plan, site) + naive_scratch.activations(graph, units, limits)
    found["cpu"] += naive_scratch.of_cpu(graph, on_cpu, limits, spec, threads)
    found["accelerator"] += naive_scratch.of_accelerator(
        graph,
        [*own, *visiting],
        limits,
        spec,
        any(FORMATS[name].packed for name in task.model.formats.values()),
    )
    if own and on_cpu:
        blocks = visiting or any(unit in places(task)[1:-1] for unit in own)
        crossing = limits.step_tokens if blocks and plan.devices[0] == "cpu" else outputs
        found["cpu"] += 2 * F32 * crossing * hidden_of(task)
    if plan.devices[-1] == "accelerator":
        found["cpu"] += 2 * F32 * outputs * vocab_of(task)
    all_pages = math.ceil(task.context / task.page_tokens)
    if "accelerator" in plan.devices[1:-1] and plan.pages < all_pages:
        ops = [op for unit in graph.units for op in layer_ops(unit)]
        widths = {value.name: value.width for value in graph.values}
        partial = F32 * max(op.heads * (op.head_dim + 2) for op in ops)
        found["accelerator"] += 2 * spec.page_bytes
        found["accelerator"] += 2 * 256 * math.ceil(limits.step_tokens * partial / 256)
        found["cpu"] += most * (partial + F32 * max(widths[op.input] for op in ops))
        blocks = places(task)[1:-1]
        found["cpu"] += naive_scratch.of_far_pages(graph, blocks, limits, spec, threads)
        if most > 1 and not visiting:  # the second sub-batch of a split step
            second = Limits(task.context, most, most, most)
            found["accelerator"] += naive_scratch.activations(graph, own, second)
            found["accelerator"] += 2 * 256 * math.ceil(most * partial / 256)
            found["cpu"] += most * (partial + F32 * max(widths[op.input] for op in ops))
            found["cpu"] += most * F32 * hidden_of(task) * bool(on_cpu)
    if visiting:
        names = [{n for op in unit.ops for n in op.weight_names()} for unit in visiting]
        largest = max(sum(padded(task, name) for name in unit) for unit in names)
        longest = task.context if task.context <= 8192 else max(task.prompt, 8192)
        pages = task.batch * math.ceil(longest / task.page_tokens)
        found["accelerator"] += 2 * largest + pages * spec.page_bytes
    if own:  # while weights go up, what steps need is not there yet
        loaded = weights(task, plan, "cpu") + 2 * threads * largest_read(task, threads)
        found["cpu"] = max(found["cpu"], loaded)
    return found


def largest_read(task: Task, threads: int) -> int:
    """A transfer of whole rows or strips, of an eighth to all of 8 MiB of f32 elements."""
    room = (64 << 20) / (2 * threads)
    elements = int(min(max(room, 1 << 20), 8 << 20)) // F32
    largest = 0
    for name, shape in task.model.graph.tensors.items():
        rows, cols = shape if len(shape) == 2 else (shape[0], 1)
        format = held_as(task, name, "accelerator")
        strip = 16 if FORMATS[format].packed else 1
        count = strip
        while count < rows and (count + strip) * cols <= elements:
            count += strip
        largest = max(largest, weight_bytes(format, min(count, rows), cols))
    return largest


def padded(task: Task, name: str) -> int:
    """A weight's bytes on the accelerator."""
    return math.ceil(held(task, name, "accelerator") / 256) * 256


def held(task: Task, name: str, site: str) -> int:
    """A weight's bytes on a device."""
    shape = task.model.graph.tensors[name]
    rows, cols = shape if len(shape) == 2 else (1, *shape)
    return weight_bytes(held_as(task, name, site), rows, cols)
