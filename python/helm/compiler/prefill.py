"""Prices the prefill of every layer partition at once. Knows no memory limit and no objective.

Time to first token is that of the whole batch: until the last of its prompts has a token.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.decode import Priced, crossing_s, saved_s, spread_s
from helm.compiler.layers import prefill_layers, visiting_body, visiting_seconds
from helm.compiler.overflow import Bools, PrefillFar, alike, prefill_far
from helm.compiler.program import pattern
from helm.compiler.setting import Device, Setting, Site, unit_times
from helm.compiler.timeline import Flight, Seconds, Spread, onward, played
from helm.compiler.times import (
    ATTENTION,
    DEVICE_TERMS,
    F64,
    FIXED,
    I64,
    LINK,
    TERMS,
    VISIT,
    Queries,
    attention_s,
    attentions,
    causal_pairs,
    position_bytes,
    prefill_queries,
    visible,
)
from helm.model.graph import Layer


@dataclass(frozen=True)
class Prefill:
    """What all prefill modes share; arrays are per step unless said otherwise."""

    setting: Setting
    queries: Queries
    tokens: I64  # [steps]
    outputs: I64  # [steps] prompts that end in the step
    cpu: F64  # [classes, steps, DEVICE_TERMS]
    accelerator: F64  # [classes, steps, DEVICE_TERMS], attention over pages that are there
    embedding: dict[str, F64]  # site -> [steps, DEVICE_TERMS]
    head: dict[str, F64]  # site -> [steps, DEVICE_TERMS]

    @property
    def steps(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def far(self) -> PrefillFar:
        """Where pages are."""
        return prefill_far(self.setting.pool, self.queries, self.setting.workload.prompt)

    @property
    def page_bytes(self) -> I64:
        """[classes] of the pages of one KV block of a layer."""
        model, size = self.setting.model, self.setting.limits.page_tokens
        each = [attentions(layer) for layer in self.setting.classes.units]
        return np.array([size * sum(position_bytes(model, op) for op in ops) for ops in each])

    def visiting_seconds(self, kind: int) -> dict[str, Seconds]:
        """[steps] of a layer of a class that visits."""
        past = np.bincount(self.queries.step, self.queries.past)
        layer, run_s = self.setting.classes.units[kind], self.accelerator[kind].sum(axis=1)
        return visiting_seconds(self.setting, layer, past, self.tokens, run_s)

    @functools.cached_property
    def visiting(self) -> F64:
        return _visiting(self)

    @functools.cached_property
    def spread(self) -> _Spread | None:
        if self.setting.accelerator is None or not self.far.left.any():
            return None
        setting = self.setting
        key = (
            setting.batch,
            setting.workload.prompt,
            setting.limits.step_tokens,
            len(setting.pages),
        )
        return setting.once(key, _spread, self)

    @functools.cached_property
    def front(self) -> dict[bool, F64]:
        """Whether the CPU's blocks visit the accelerator -> [rows, steps] seconds of the CPU up to
        its last block."""
        ends = np.outer(~self.setting.rows.embedded, self.embedding["cpu"].sum(axis=1))
        ends = ends + self.setting.cpu.step_s
        return {True: ends, False: ends + self.setting.counts()[0] @ self.cpu.sum(axis=2)}

    @functools.cached_property
    def visit_from(self) -> I64:
        setting = self.setting
        key = "visit from", setting.cpu.threads, setting.limits.step_tokens
        return setting.once(key, _visit_from, setting)

    def visit_choices(self) -> list[int]:
        """The least tokens of a step in which weights visit: one for each size of step that there
        is, but for those that a decode step may have too."""
        return sorted({t for t in self.tokens.tolist() if t > self.setting.most_sequences})

    def visit_tokens(self, row: int, least: int) -> int:
        """What a plan states so that weights visit in steps of at least `least` tokens, in no
        shorter one and in no decode step: about from where visits are faster."""
        below = [int(size) for size in self.tokens if size < least]
        above = max(self.setting.most_sequences, *below, 0) + 1
        return min(max(int(self.visit_from[row]), above), least)


def prepare(setting: Setting) -> Prefill:
    """Fills steps with the batch's prompts and times each kind of unit in each."""
    work = setting.workload
    queries = prefill_queries(work.prompt, setting.batch, setting.limits.step_tokens)
    ends = queries.past + queries.tokens == work.prompt
    return _prepared(setting, queries, np.bincount(queries.step, ends).astype(np.int64))


def _prepared(setting: Setting, queries: Queries, outputs: I64) -> Prefill:
    """With what each step has."""
    tokens = np.bincount(queries.step, queries.tokens).astype(np.int64)
    steps = list(zip(tokens.tolist(), outputs.tolist(), strict=True))
    kinds = {
        step: unit_times(setting, Step(step[0], step[0], outputs=step[1])) for step in set(steps)
    }

    def by_step(units: str) -> F64:
        """[steps, ...]"""
        return np.stack([kinds[step][units] for step in steps])

    sites = ["cpu"] + ([] if setting.accelerator is None else ["accelerator"])
    devices: dict[str, Device | None] = {
        "cpu": setting.cpu,
        "accelerator": setting.accelerator,
    }
    linear = {site: by_step(f"{site} blocks").swapaxes(0, 1) for site in sites}
    for site in sites:
        for index, unit in enumerate(setting.classes.units):
            device = devices[site]
            assert device is not None
            linear[site][index, :, ATTENTION] += _attention(setting, unit, queries, device)
    return Prefill(
        setting,
        queries,
        tokens,
        outputs,
        linear["cpu"],
        linear.get("accelerator", np.zeros_like(linear["cpu"])),
        {site: by_step(f"{site} embedding") for site in sites},
        {site: by_step(f"{site} head") * (outputs > 0)[:, None] for site in sites},
    )


def _attention(setting: Setting, unit: Layer, queries: Queries, device: Device) -> F64:
    """[steps] seconds over pages in the device's own memory."""
    seconds = np.zeros(queries.steps)
    for op in attentions(unit):
        runs = attention_s(
            setting.model,
            op,
            queries.tokens,
            causal_pairs(op, queries),
            visible(op, queries),
            device,
        )
        seconds += np.bincount(queries.step, runs)
    return seconds


@dataclass(frozen=True)
class _Spread:
    """Arrays [rows, steps, pages], of kept choices of pages; place: among those, of all. layers: of
    the accelerator; copies_s: of pages that visit; leaving_s: of blocks that leave before the step;
    waits: [steps, pages] see `PrefillFar`."""

    place: I64
    layers: Spread
    copies_s: F64
    leaving_s: F64
    waits: Bools


def _spread(prefill: Prefill) -> _Spread:
    """Copies to host memory go before those of visiting pages, in one queue."""
    setting, link, far = prefill.setting, prefill.setting.link, prefill.far
    assert link is not None
    kept, place = alike(np.asarray(far.left.any(axis=0)))
    some = dataclasses.replace(setting, pages=setting.pages[kept])
    far = PrefillFar(far.far[:, kept], far.left[:, kept], far.waits[:, kept])
    layer_s, embedding = prefill.accelerator.sum(axis=2), prefill.embedding["accelerator"]
    layers = prefill_layers(some, prefill.queries, far, prefill.outputs, layer_s)
    bodies = [layer.body("stream") for layer in layers]
    spread = spread_s(some, bodies, prefill.tokens[:, None], embedding.sum(axis=1)[:, None])
    starts = np.flatnonzero(np.diff(prefill.queries.step, prepend=-1))
    split = np.asarray(
        np.add.reduceat(far.far, starts, axis=0) > 0
    )  # else the layers are in one piece
    _, rest = setting.counts()
    main = np.where(split, spread.main, (rest @ layer_s)[:, :, None])
    copies = np.einsum("rc,csp->rsp", rest, np.stack([layer.copies_s for layer in layers]))
    leaving = (rest @ prefill.page_bytes)[:, None, None] * far.left / link.to_host_bytes_per_s
    pages = np.where(split, spread.pages, 0.0)
    return _Spread(place, Spread(main, pages, spread.until), copies, leaving, far.waits)


def _paged(prefill: Prefill, spread: _Spread, visits: Bools) -> F64:
    """[rows, pages] seconds that spread pages add. visits: [steps] whether weights do."""
    each = ((~visits, False), (visits, True))
    return np.asarray(sum(_extra(prefill, spread, *one) for one in each if one[0].any()))


def _extra(prefill: Prefill, spread: _Spread, some: Bools, visit: bool) -> F64:
    """[rows, pages] seconds that spread pages add in `some` [steps], one after the other."""
    setting = prefill.setting
    assert setting.accelerator is not None
    front = prefill.front[visit][:, some, None]
    layers = Spread(*(each[:, some] for each in spread.layers))
    _, rest = setting.counts()
    whole = (rest @ prefill.accelerator[:, some].sum(axis=2))[:, :, None]
    if visit:
        main, link = prefill.visiting[:, :, some, None].swapaxes(0, 1)
        layers, whole = Spread(main + layers.main, layers.pages, link), whole + main
    up = crossing_s(setting, "cpu", prefill.tokens[some], prefill.outputs[some], visit)[0]
    first = (up + setting.accelerator.step_s)[:, :, None]
    seconds = (front, first, layers, 0.0, 0.0)
    leaving, waits = spread.leaving_s[:, some], spread.waits[some]
    flight = Flight(pattern(False, "none"), seconds, leaving_s=leaving, waits=waits)
    extra = played([flight], 1)[1] - front - first - whole
    return np.asarray((extra * setting.rows.has_blocks[:, None, None]).sum(axis=1)[:, spread.place])


def _without_cpu(prefill: Prefill, head: Site) -> F64:
    """[TERMS, rows] of all units on their devices but the CPU's layers."""
    setting, rows, accelerator = prefill.setting, prefill.setting.rows, prefill.setting.accelerator
    base = np.zeros((len(TERMS), len(rows.boundary)))
    base[:DEVICE_TERMS] += np.outer(prefill.embedding["cpu"].sum(axis=0), ~rows.embedded)
    at = 0 if head == "cpu" else DEVICE_TERMS
    base[at : at + DEVICE_TERMS] += prefill.head[head].sum(axis=0)[:, None]
    base[FIXED] += prefill.steps * setting.cpu.step_s
    if accelerator is not None:
        own = slice(DEVICE_TERMS, 2 * DEVICE_TERMS)
        base[own] += (setting.counts()[1] @ prefill.accelerator.sum(axis=1)).T
        base[own] += np.outer(prefill.embedding["accelerator"].sum(axis=0), rows.embedded)
        used = rows.uses_accelerator(head)
        base[own.start + FIXED] += prefill.steps * accelerator.step_s * used
    return base


def least_prefill_s(prefill: Prefill, head: Site, visit: bool) -> F64:
    """[rows] no way to prefill takes less, whatever the pages. visit: weights may visit, and take
    as long as they come and as they run; else both devices may work at once."""
    base, (counts, _) = _without_cpu(prefill, head), prefill.setting.counts()
    lanes = base[: 2 * DEVICE_TERMS].reshape(2, DEVICE_TERMS, -1).sum(axis=1)
    cpu_s = counts @ prefill.cpu.sum(axis=2)
    if visit:
        come_s = counts @ [prefill.visiting_seconds(i)["visit"] for i in range(len(prefill.cpu))]
        run_s = counts @ prefill.accelerator.sum(axis=2)
        cpu_s = np.minimum(cpu_s, np.maximum(come_s[:, None], run_s))
    lanes[0] += cpu_s.sum(axis=1)
    return np.asarray(lanes.sum(axis=0) if visit else lanes.max(axis=0))


def price_prefill(
    prefill: Prefill, head: Site, overlap: bool = False, visit_least: int | None = None
) -> Priced:
    """Seconds until every prompt has its first token.

    overlap: the CPU's stage of one step runs beside the accelerator's of the step before.
    visit_least: in steps of at least so many tokens the CPU's blocks compute on the accelerator,
    which their weights visit; not together with overlap.
    """
    setting, rows = prefill.setting, prefill.setting.rows
    base, (counts, _) = _without_cpu(prefill, head), prefill.setting.counts()
    visits = np.zeros(prefill.steps, bool)
    paged = np.zeros((len(rows.boundary), len(setting.pages)))
    if visit_least is not None:
        visits = prefill.tokens >= visit_least
        base[VISIT] += prefill.visiting[:, 0, visits].sum(axis=1)
    for some, visit in ((~visits, False), (visits, True)):
        crossing = crossing_s(setting, head, prefill.tokens[some], prefill.outputs[some], visit)
        base[LINK] += (crossing[0] + crossing[1]).sum(axis=1)
    key = setting.batch, setting.cpu.threads, setting.limits.step_tokens
    if prefill.spread is not None:  # the same wherever the head lies
        paged = setting.once(("paged", *key, visit_least), _paged, prefill, prefill.spread, visits)
    base[:DEVICE_TERMS] += (counts @ prefill.cpu[:, ~visits].sum(axis=1)).T
    saved = np.zeros_like(paged)
    if overlap:
        both = (rows.has_blocks & ~rows.embedded)[:, None]
        serial = base.sum(axis=0)[:, None] + paged
        overlapped_s = setting.once(("overlapped", *key), _overlapped_s, prefill)[head]
        saved = np.where(both, saved_s(serial, overlapped_s), 0.0)
    return Priced(base, np.zeros_like(paged), paged, saved)


def _visiting(prefill: Prefill) -> F64:
    """[rows, 2, steps] when the accelerator and the link to it are done with the layers of the
    CPU that visit."""
    setting = prefill.setting
    bodies = [visiting_body(prefill.visiting_seconds(i)) for i in range(len(prefill.cpu))]
    return onward(bodies, setting.classes.member.tolist())[setting.rows.boundary, :2]


def _visit_from(setting: Setting) -> I64:
    """[rows] the least power of two from which on the blocks of a step at the start of a prompt
    are faster visiting the accelerator than on the CPU; step_tokens if there is none below."""
    most = setting.limits.step_tokens
    sizes = 1 << np.arange(most.bit_length())
    own = dataclasses.replace(setting, batch=1, pages=setting.pages[:1])
    ones = np.ones_like(sizes)
    each = _prepared(own, Queries(0 * sizes, sizes, np.arange(len(sizes))), ones)
    cpu = setting.counts()[0] @ each.cpu.sum(axis=2)
    slower = each.visiting[:, 0] >= cpu  # [rows, sizes]
    first = len(sizes) - np.argmax(slower[:, ::-1], axis=1)  # behind the last size that is
    first = np.where(slower.any(axis=1), first, 0)
    return np.append(sizes, most)[first]


def _overlapped_s(prefill: Prefill) -> dict[Site, F64]:
    """By the head's place, [rows, pages] until the last step has ended where two are on their way
    at once. The CPU has only a part of its rate beside copies of the step before, and of what
    leaves before its own."""
    setting, spread = prefill.setting, prefill.spread
    accelerator, link = setting.accelerator, setting.link
    assert accelerator is not None
    assert link is not None
    _, rest = setting.counts()
    whole = rest @ prefill.accelerator.sum(axis=2)
    heads: tuple[Site, ...] = "accelerator", "cpu"
    sized = prefill.tokens, prefill.outputs
    up, down = np.stack([crossing_s(setting, head, *sized) for head in heads], axis=1)
    tail = np.zeros((2, 1, prefill.steps))
    tail[1] += prefill.head["cpu"].sum(axis=1)
    down[0] += prefill.head["accelerator"].sum(axis=1)
    flights, copying = [], np.zeros((1, 1))
    for step in range(prefill.steps):
        front: F64 = prefill.front[False][:, step, None]
        layers: Seconds | Spread = whole[:, step, None]
        leaving, waits = np.zeros((1, 1)), np.zeros(1, bool)
        if spread is not None:
            layers = Spread(*(each[:, step] for each in spread.layers))
            leaving, waits = spread.leaving_s[:, step], spread.waits[step]
            front = link.beside_copies(front, copying + leaving)
            copying = spread.copies_s[:, step]
        first = up[..., step, None] + accelerator.step_s
        seconds = (front, first, layers, down[..., step, None], tail[..., step, None])
        flight = Flight(pattern(False, "none"), seconds, leaving_s=leaving, waits=waits)
        flights.append(flight)
    end = np.asarray(played(flights, 2)[1])
    end = end if spread is None else end[..., spread.place]
    return dict(zip(heads, end, strict=True))
