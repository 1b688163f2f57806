"""The oracle of the search: enumerates every plan, and prices one at a time by an event loop."""

from __future__ import annotations

import dataclasses
import itertools
import math

from naive_steps import Batch, decode_batch, fill_steps, prefill_batches
from naive_timeline import Step, period, run

from naive_rates import Plan, Task, beside, places


def decode_seconds(task: Task, plan: Plan, context: int) -> float:
    if plan.groups == 1:
        return run([decode_batch(task, plan, context).step()], 1)
    small, large = task.batch // 2, task.batch - task.batch // 2
    groups = [
        decode_batch(dataclasses.replace(task, batch=n), plan, context) for n in (large, small)
    ]
    alone = sum(run([group.step()], 1) for group in groups)
    whole = decode_batch(task, plan, context)
    if whole.site == "cpu":
        return alone  # the caller attends for the accelerator
    copying = [group.copies_s() for group in reversed(groups)]
    steps = [slowed(*one) for one in zip(groups, copying, strict=True)]
    together = max(0.0, alone - period(steps))
    disturbed = [dataclasses.replace(group, task=beside(group.task)) for group in groups]
    plain = [group.step() for group in groups]
    cpu, cpu_slow = (sum(map(cpu_s, each)) for each in (plain, [one.step() for one in disturbed]))
    other = alone - cpu
    other_slow = sum(run([one.step()], 1) for one in disturbed) - cpu_slow
    cpu_factor = 1 + min(1.0, together / sum(map(cpu_s, steps))) * (cpu_slow / cpu - 1)
    factor = 1 + min(1.0, together / other) * (other_slow / other - 1) if other else 1.0
    for step in steps:
        step.begin_s *= cpu_factor
        lanes = [one.lane for one in step.program.tasks]
        step.seconds = [
            s * (cpu_factor if lane == "cpu" else factor)
            for s, lane in zip(step.seconds, lanes, strict=True)
        ]
    return min(alone, period(steps))


def cpu_s(step: Step) -> float:
    tasks = zip(step.seconds, step.program.tasks, strict=True)
    return step.begin_s + sum(s for s, one in tasks if one.lane == "cpu")


def slowed(batch: Batch, copies_s: float):
    """The step where the CPU has only a part of its rate beside so much copying."""
    step, rate = batch.step(), batch.task.profile["link"]["cpu_rate_while_copying"]
    lanes = [one.lane for one in step.program.tasks]
    own = cpu_s(step)
    factor = min(1 / rate, 1 + (1 - rate) * copies_s / own) if own else 1.0
    step.begin_s *= factor
    step.seconds = [
        s * factor if lane == "cpu" else s for s, lane in zip(step.seconds, lanes, strict=True)
    ]
    return step


def prefill_seconds(task: Task, plan: Plan) -> float:
    batches = prefill_batches(task, plan)
    alone = sum(run([batch.step()], 1) for batch in batches)
    if not plan.overlap:
        return alone
    steps, copying = [], 0.0
    for batch in batches:
        step = batch.step()
        rate = task.profile["link"]["cpu_rate_while_copying"]
        front = step.begin_s + step.seconds[0]
        slow = min(front / rate, front + (1 - rate) * (copying + step.leaving_s))
        step.seconds[0] = slow - step.begin_s
        copying = batch.copies_s()
        steps.append(step)
    return min(alone, run(steps, 2))


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
        return [Plan(["cpu"] * (blocks + 2), 0, "visit", step_tokens=task.step_tokens)]
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
