"""Prices the prefill of every layer partition at once. Knows no memory limit and no objective.

Time to first token is that of the whole batch: until the last of its prompts has a token.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.decode import Priced, Setting, Site, crossing_s, unit_times
from helm.compiler.overflow import (
    EXTRA_OPS,
    Bools,
    PrefillFar,
    far_pairs,
    prefill_far,
    run_far,
    visiting_s,
)
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
from helm.machine.rates import AcceleratorProfile, CpuProfile
from helm.model.graph import Attention, Layer
from helm.plan.records import Workload


@dataclass(frozen=True)
class Prefill:
    """What all prefill modes share; arrays are per step unless said otherwise."""

    setting: Setting
    queries: Queries
    tokens: I64  # [steps]
    outputs: I64  # [steps] prompts that end in the step
    cpu: F64  # [classes, steps, DEVICE_TERMS]
    accelerator: F64  # [classes, steps, DEVICE_TERMS], attention over pages that are there
    overflow: F64  # [classes, steps, pages] what pages in host memory add
    copies: Bools  # [classes, steps, pages] whether pages are read from there or leave for it
    waits: Bools  # [steps, pages] see `PrefillFar`
    embedding: dict[str, F64]  # site -> [steps, DEVICE_TERMS]
    head: dict[str, F64]  # site -> [DEVICE_TERMS], all steps in which a prompt ends

    @property
    def steps(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def overlap_s(self) -> F64:
        return _overlap_s(self)

    @functools.cached_property
    def visit_from(self) -> I64:
        return _visit_from(self.setting)

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
    tokens = np.bincount(queries.step, queries.tokens).astype(np.int64)
    ends = queries.past + queries.tokens == work.prompt
    outputs = np.bincount(queries.step, ends).astype(np.int64)
    steps = list(zip(tokens.tolist(), outputs.tolist(), strict=True))
    kinds = {
        step: unit_times(setting, Step(step[0], step[0], outputs=step[1])) for step in set(steps)
    }

    def by_step(units: str) -> F64:
        """[steps, ...]"""
        return np.stack([kinds[step][units] for step in steps])

    sites = ["cpu"] + ([] if setting.accelerator is None else ["accelerator"])
    devices: dict[str, CpuProfile | AcceleratorProfile | None] = {
        "cpu": setting.cpu,
        "accelerator": setting.accelerator,
    }
    linear = {site: by_step(f"{site} blocks").swapaxes(0, 1) for site in sites}
    for site in sites:
        for index, unit in enumerate(setting.classes.units):
            device = devices[site]
            assert device is not None
            linear[site][index, :, ATTENTION] += _attention(setting, unit, queries, device)
    shape = (len(setting.classes.units), len(tokens), len(setting.pages))
    overflow, copies = np.zeros(shape), np.zeros(shape, bool)
    waits = np.zeros(shape[1:], bool)
    if setting.accelerator is not None and setting.pool.overflows.any():
        lies = prefill_far(setting.pool, queries, work.prompt)
        waits = lies.waits
        for index, unit in enumerate(setting.classes.units):
            whole = linear["accelerator"][index].sum(axis=1)
            overflow[index], copies[index] = _overflow(setting, unit, queries, lies, whole)
    return Prefill(
        setting,
        queries,
        tokens,
        outputs,
        linear["cpu"],
        linear.get("accelerator", np.zeros_like(linear["cpu"])),
        overflow,
        copies,
        waits,
        {site: by_step(f"{site} embedding") for site in sites},
        {site: by_step(f"{site} head")[outputs > 0].sum(axis=0) for site in sites},
    )


def _attention(
    setting: Setting, unit: Layer, queries: Queries, device: CpuProfile | AcceleratorProfile
) -> F64:
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


def _overflow(
    setting: Setting, unit: Layer, queries: Queries, lies: PrefillFar, whole_s: F64
) -> tuple[F64, Bools]:
    """[steps, pages] what it adds to whole_s [steps], the block with attention over pages that
    are all there, that some visit from host memory and others leave for it; and whether any do.

    Copies to host memory go before those of visiting pages, and hide behind the block where none
    visit.
    """
    link, device = setting.link, setting.accelerator
    assert link is not None
    assert device is not None
    starts = np.flatnonzero(np.diff(queries.step, prepend=-1))

    def by_step(values: F64 | I64) -> F64:
        """[steps, ...] sums of [runs, ...]"""
        return np.asarray(np.add.reduceat(values, starts, axis=0))

    launch = device.op_s * setting.pool.executed
    split = by_step(lies.far) > 0  # the block runs in pieces
    extra = np.zeros(split.shape)
    copies = lies.left > 0
    tokens, past = queries.tokens[:, None], queries.past[:, None]
    for op in attentions(unit):

        def attend(pairs: F64, positions: I64, op: Attention = op) -> F64:
            return attention_s(setting.model, op, tokens, pairs, positions, device)

        seen, pairs = visible(op, queries), causal_pairs(op, queries)
        hidden = queries.past + queries.tokens - seen
        far = run_far(setting.pool, lies.far, queries.past, hidden)
        end = np.minimum(lies.far * setting.limits.page_tokens, past)
        beyond = far_pairs(end, past, tokens, op.window)
        whole = by_step(attend(pairs[:, None], seen[:, None]))
        near = by_step(attend(pairs[:, None] - beyond, seen[:, None] - far.seen))
        visits = by_step(far.pages).astype(np.int64)
        size = by_step(far.copied) * position_bytes(setting.model, op)
        copy = visits * link.latency_s + size / link.to_accelerator_bytes_per_s
        visiting = by_step(attend(beyond, far.seen)) + visits * launch
        other = whole_s[:, None] - whole + near + EXTRA_OPS * launch
        pieces = visiting_s(visits, copy, visiting, other) - whole_s[:, None]
        extra += np.where(split, pieces, 0.0)
        page = setting.limits.page_tokens * position_bytes(setting.model, op)
        leaving = lies.left * page / link.to_host_bytes_per_s
        extra += np.where(visits > 0, leaving, np.maximum(0.0, leaving - whole_s[:, None]))
        copies |= visits > 0
    return extra, copies


def price_prefill(
    prefill: Prefill, head: Site, overlap: bool = False, visit_least: int | None = None
) -> Priced:
    """Seconds until every prompt has its first token.

    overlap: the CPU's stage of one step runs beside the accelerator's of the step before.
    visit_least: in steps of at least so many tokens the CPU's blocks compute on the accelerator,
    which their weights visit; not together with overlap.
    """
    setting = prefill.setting
    rows, accelerator = setting.rows, setting.accelerator
    counts, rest = setting.counts()
    base = np.zeros((len(TERMS), len(rows.boundary)))
    base[:DEVICE_TERMS] += np.outer(prefill.embedding["cpu"].sum(axis=0), ~rows.embedded)
    at = 0 if head == "cpu" else DEVICE_TERMS
    base[at : at + DEVICE_TERMS] += prefill.head[head][:, None]
    base[FIXED] += prefill.steps * setting.cpu.step_s
    if accelerator is not None:
        own = slice(DEVICE_TERMS, 2 * DEVICE_TERMS)
        base[own] += (rest @ prefill.accelerator.sum(axis=1)).T
        base[own] += np.outer(prefill.embedding["accelerator"].sum(axis=0), rows.embedded)
        used = rows.uses_accelerator(head)
        base[own.start + FIXED] += prefill.steps * accelerator.step_s * used
    visits = np.zeros(prefill.steps, bool)
    if visit_least is not None:
        visits = prefill.tokens >= visit_least
        base[VISIT] += _visit_s(prefill, visits)
    for some, visit in ((~visits, False), (visits, True)):
        base[LINK] += crossing_s(setting, head, prefill.tokens[some], prefill.outputs[some], visit)
    base[:DEVICE_TERMS] += (counts @ prefill.cpu[:, ~visits].sum(axis=1)).T
    paged = rest @ prefill.overflow.sum(axis=1)
    saved = prefill.overlap_s if overlap else np.zeros_like(paged)
    return Priced(base, np.zeros_like(paged), paged, saved)


def _visit_s(prefill: Prefill, visits: Bools) -> F64:
    """[rows] seconds for the CPU's blocks to visit the accelerator in the steps that `visits`
    [steps] says. While one block computes, its K and V of earlier positions and of this step
    crossing the link, the next is loaded; of the first either the load or, if that is shorter,
    the computation is exposed."""
    setting, queries = prefill.setting, prefill.queries
    link = setting.link
    assert link is not None
    past = np.bincount(queries.step, queries.past)  # [steps]
    visit, exposed = [], []
    for index, unit in enumerate(setting.classes.units):
        kv = sum(position_bytes(setting.model, op) for op in attentions(unit))
        weights = setting.model.weight_bytes([unit])
        load = link.latency_s + weights / setting.visit_bytes_per_s
        work = prefill.accelerator[index].sum(axis=1) + kv * (
            past / link.to_accelerator_bytes_per_s + prefill.tokens / link.to_host_bytes_per_s
        )
        visit.append(np.maximum(load, work)[visits].sum())
        exposed.append(np.minimum(load, work)[visits].sum())
    first = exposed[setting.classes.member[0]]
    counts, _ = setting.counts()
    return np.asarray(counts @ np.array(visit) + np.where(setting.rows.boundary > 0, first, 0.0))


def _visit_from(setting: Setting) -> I64:
    """[rows] the least power of two from which on the blocks of a step at the start of a prompt
    are faster visiting the accelerator than on the CPU; step_tokens if there is none below."""
    most = setting.limits.step_tokens
    found = np.full(len(setting.rows.boundary), most, np.int64)
    faster = np.ones(len(found), bool)
    for tokens in reversed([1 << i for i in range(most.bit_length())]):
        prompt = dataclasses.replace(
            setting, workload=Workload(tokens, 1), batch=1, pages=setting.pages[:1]
        )
        one = prepare(prompt)
        faster &= _visit_s(one, np.ones(1, bool)) < setting.counts()[0] @ one.cpu.sum(axis=(1, 2))
        found[faster] = tokens
    return found


def _overlap_s(prefill: Prefill) -> F64:
    """[rows, pages] what running both stages side by side saves, negative: the makespan of steps
    that pass through the CPU and then the accelerator, less the sum of their times.

    While pages cross the CPU keeps only its rate beside copies.
    """
    setting = prefill.setting
    accelerator, link = setting.accelerator, setting.link
    counts, rest = setting.counts()
    zero = np.zeros((len(counts), len(setting.pages)))
    if accelerator is None or link is None:
        return zero
    rows = setting.rows
    first = counts @ prefill.cpu.sum(axis=2) + np.outer(
        ~rows.embedded, prefill.embedding["cpu"].sum(axis=1)
    )
    second = rest @ prefill.accelerator.sum(axis=2)
    here = rest > 0  # [rows, classes]
    done_first, done_second, serial = zero.copy(), zero.copy(), zero.copy()
    for step in range(prefill.steps):
        paged = second[:, step, None] + rest @ prefill.overflow[:, step]
        copies = (here[:, :, None] & prefill.copies[:, step]).any(axis=1)
        slow = np.where(copies, 1.0 / link.cpu_rate_while_copying, 1.0)
        done_first = np.where(prefill.waits[step], np.maximum(done_first, done_second), done_first)
        done_first += first[:, step, None] * slow
        done_second = np.maximum(done_first, done_second) + paged
        serial += first[:, step, None] + paged
    both = rows.has_blocks & ~rows.embedded
    return np.where(both[:, None], np.maximum(done_first, done_second) - serial, 0.0)
