"""How long the tasks of a layer take whose weights or pages come from host memory, by class of
layer. Knows no placement and no schedule.

The keys are the verbs of tasks, see `helm.compiler.task.Task`; of a copy, its lane.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from helm.compiler.beside import decode_attention_beside, slowdown, slower_s
from helm.compiler.counts import Step
from helm.compiler.overflow import Far, PrefillFar, decode_far, far_pairs, run_far
from helm.compiler.problem import Overflow
from helm.compiler.program import layer_tasks
from helm.compiler.setting import F32, Device, Setting
from helm.compiler.task import DOWN, UP, Task
from helm.compiler.timeline import Flight, Seconds, body
from helm.compiler.times import (
    F64,
    I64,
    Queries,
    attention_s,
    attentions,
    before_attention_s,
    causal_pairs,
    position_bytes,
    visible,
)
from helm.machine.rates import LinkProfile
from helm.model.graph import Attention, Layer
from helm.plan.units import CPU


@dataclass(frozen=True)
class SpreadLayer:
    """A layer of the accelerator whose pages lie in both memories. seconds: [..., pages] of its
    tasks. far: which pages come, near_s: of attention to the others, copies_s: of all copies."""

    seconds: dict[str, Seconds]
    far: Far
    near_s: F64
    copies_s: F64

    def body(self, overflow: Overflow) -> F64:
        """See `helm.compiler.timeline.body`."""
        tasks = layer_tasks(False, "visit" if overflow == "stream" else "cpu")
        return body(tasks, [self.seconds[key(task)] for task in tasks], self.far.pages)


def visits_s(flight: Flight) -> Seconds:
    """Seconds in which weights come that visit in every step."""
    pairs = zip(flight.program.tasks, flight.seconds, strict=True)
    return np.asarray(sum(np.asarray(s) for task, s in pairs if task.verb == "visit"))


def beside_copies(link: LinkProfile, flight: Flight, copies_s: Seconds) -> Flight:
    """The step where the CPU has only a part of its rate beside copies."""
    pairs = list(zip(flight.program.tasks, map(np.asarray, flight.seconds), strict=True))
    own = [s for task, s in pairs if task.lane == CPU]
    cpu_s = np.asarray(flight.begin_s + sum(own), np.float64)
    slow_s = link.beside_copies(cpu_s, np.asarray(copies_s))
    factor = np.divide(slow_s, cpu_s, out=np.ones_like(slow_s), where=cpu_s > 0)
    seconds = [s * factor if task.lane == CPU else s for task, s in pairs]
    return dataclasses.replace(flight, seconds=seconds, begin_s=flight.begin_s * factor)


def key(task: Task) -> str:
    return task.lane if task.verb == "copy" else task.verb


def positions_s(setting: Setting, op: Attention, positions: I64, device: Device) -> F64:
    """Seconds of attention of a decode step to positions of all sequences together."""
    return attention_s(setting.model, op, 1, np.asarray(positions, np.float64), positions, device)


def decode_queries(context: int) -> Queries:
    return Queries(np.array([context - 1]), np.array([1]), np.array([0]))


def decode_attention_s(setting: Setting, context: int, device: Device) -> F64:
    """[classes] seconds of attention of one layer in a decode step, all pages being there."""
    query, batch = decode_queries(context), setting.batch
    return np.array(
        [
            sum(
                float(positions_s(setting, op, batch * visible(op, query), device)[0])
                for op in attentions(layer)
            )
            for layer in setting.classes.units
        ]
    )


def decode_layers(setting: Setting, overflow: Overflow, context: int) -> list[SpreadLayer]:
    """[classes] in a decode step in which each sequence has `context` positions."""
    batch, device = setting.batch, setting.accelerator
    assert device is not None
    there: Device = device if overflow == "stream" else setting.cpu
    step, found = Step(batch, 1, batch), []
    for index, layer in enumerate(setting.classes.units):
        whole = setting.decode_units["accelerator blocks"][index].sum()
        before = _before_s(setting, index, step)
        for op in attentions(layer):
            seen = int(visible(op, decode_queries(context))[0])
            far = decode_far(setting.pool, context, context - seen)
            near = positions_s(setting, op, batch * seen - far.seen, device)
            attend = positions_s(setting, op, far.seen, there)
            found.append(_spread(setting, op, whole, before, near, attend, far, overflow))
    return found


def prefill_layers(
    setting: Setting, queries: Queries, lies: PrefillFar, outputs: I64, layer_s: F64
) -> list[SpreadLayer]:
    """[classes] in the steps of prompts, arrays [steps, pages]. outputs: [steps]. layer_s:
    [classes, steps] with all pages there."""
    device = setting.accelerator
    assert device is not None
    starts = np.flatnonzero(np.diff(queries.step, prepend=-1))

    def by_step(values: F64 | I64) -> F64:
        """[steps, ...] sums of [runs, ...]"""
        return np.asarray(np.add.reduceat(values, starts, axis=0))

    tokens, past, found = queries.tokens[:, None], queries.past[:, None], []
    sizes = list(zip(by_step(queries.tokens).tolist(), outputs.tolist(), strict=True))
    for kind, (layer, whole) in enumerate(zip(setting.classes.units, layer_s, strict=True)):
        first = {n: _before_s(setting, kind, Step(n[0], n[0], outputs=n[1])) for n in set(sizes)}
        before = np.array([first[n] for n in sizes])[:, None]
        for op in attentions(layer):

            def attend(pairs: F64, positions: I64, op: Attention = op) -> F64:
                return by_step(attention_s(setting.model, op, tokens, pairs, positions, device))

            seen, pairs = visible(op, queries)[:, None], causal_pairs(op, queries)[:, None]
            hidden = queries.past + queries.tokens - seen[:, 0]
            far = run_far(setting.pool, lies.far, queries.past, hidden)
            end = np.minimum(lies.far * setting.limits.page_tokens, past)
            beyond = far_pairs(end, past, tokens, op.window)
            near = attend(pairs - beyond, seen - far.seen)
            rest = whole[:, None] - attend(pairs, seen)
            all_runs = Far(*(by_step(getattr(far, f.name)).astype(np.int64) for f in fields(Far)))
            away = attend(beyond, far.seen)
            found.append(_spread(setting, op, rest, before, near, away, all_runs, "stream"))
    return found


def _before_s(setting: Setting, kind: int, step: Step) -> float:
    """Seconds on the accelerator before the attention of a layer of a class."""
    assert setting.accelerator is not None
    args = setting.model, setting.classes.units[kind], step, setting.accelerator
    return setting.once(("before", kind, step), before_attention_s, *args)


def _spread(
    setting: Setting, op: Attention, whole_s: Seconds, before_s: Seconds, near_s: F64, far_s: F64,
    far: Far, overflow: Overflow,
) -> SpreadLayer:  # fmt: skip
    """whole_s: without attention to cached positions; before_s: of what comes before attention."""
    link, device = setting.link, setting.accelerator
    assert link is not None
    assert device is not None
    op_s = device.op_s * setting.pool.executed  # two more ops empty the partial results
    stage_s = (device.stage_s or 0.0) * setting.pool.executed
    near_s = np.asarray(near_s, np.float64)
    seconds: dict[str, Any] = {
        "before": before_s + device.op_s + 2 * op_s + stage_s,
        "near": near_s + device.op_s + stage_s,
        "after": whole_s - before_s - 2 * device.op_s + stage_s,
    }
    if overflow == "stream":
        size, pages = far.copied * position_bytes(setting.model, op), np.maximum(1, far.pages)
        copies = far.pages * link.page_s + size / link.to_accelerator_bytes_per_s
        seconds |= {"page": copies / pages, "far": far_s / pages + op_s + stage_s}
        return SpreadLayer(seconds, far, near_s, copies)
    query, partial = (setting.batch * size for size in asked_bytes(setting, op))
    down = link.latency_s + query / link.to_host_bytes_per_s
    wait = begin_asked_s(setting)
    own_s = seconds["near"]
    own = slowdown(own_s, own_s + near_s * (decode_attention_beside(setting, op, 1) - 1.0))
    left_s = np.maximum(0.0, own_s - down - wait)  # once the CPU has been asked
    far_beside_s = far_s * decode_attention_beside(setting, op, 0)
    slower, far_slower = slower_s(left_s, left_s * own, far_s, far_beside_s)
    seconds |= {
        DOWN: down,
        "near": own_s + slower,
        "far": wait + far_s + far_slower,
        UP: link.latency_s + partial / link.to_accelerator_bytes_per_s,
    }
    return SpreadLayer(seconds, far, near_s, np.zeros_like(near_s))


def asked_bytes(setting: Setting, op: Attention) -> tuple[int, int]:
    """Of a row for which the CPU attends: what goes down to it, and the partial result."""
    return F32 * setting.width(op.input), F32 * op.heads * (op.head_dim + 2)


def begin_asked_s(setting: Setting) -> float:
    """Until the CPU attends to what has come down: it waits for the accelerator as at a step's
    end."""
    assert setting.accelerator is not None
    return setting.accelerator.step_s + setting.cpu.step_s + 2 * setting.cpu.op_s


def visiting_seconds(
    setting: Setting, layer: Layer, past: I64 | int, tokens: I64 | int, run_s: Seconds,
    weights: Any = None, share: Any = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """[..., steps] of a layer whose weights visit, its K and V of `past` positions coming along and
    those of `tokens` going back. weights: bytes that come, None: all; share: of its KV."""
    link = setting.link
    assert link is not None
    kv = share * sum(position_bytes(setting.model, op) for op in attentions(layer))
    size = setting.model.weight_bytes([layer]) if weights is None else weights
    return {
        "visit": link.latency_s + size / setting.visit_bytes_per_s,
        "cached": kv * past / link.to_accelerator_bytes_per_s,
        "run": run_s,
        "written": kv * tokens / link.to_host_bytes_per_s,
    }


def visiting_body(seconds: Mapping[str, Seconds]) -> F64:
    """See `helm.compiler.timeline.body`."""
    tasks: Sequence[Task] = layer_tasks(True, "none")
    return body(tasks, [seconds[key(task)] for task in tasks])
