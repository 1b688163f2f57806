"""Prices decode steps of every layer partition at once. Knows no memory limit and no objective.

A layout is a row: where the embedding lies and how many blocks, from the first, lie on the CPU.
Arrays run over rows and over `pages`, the KV blocks per sequence and layer for which the
accelerator has slots.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from helm.compiler.counts import CostedGraph, Step
from helm.compiler.overflow import EXTRA_OPS, Bools, Pool, decode_far, visiting_s
from helm.compiler.problem import KvPlace, Overflow, ResourceLimits, Space
from helm.compiler.times import (
    ATTENTION,
    DEVICE_TERMS,
    F64,
    FIXED,
    I64,
    LINK,
    OVERFLOW,
    TERMS,
    BlockClasses,
    Queries,
    attention_s,
    attentions,
    classify,
    position_bytes,
    unit_s,
    visible,
)
from helm.machine.profile import Profile
from helm.machine.rates import AcceleratorProfile, CpuProfile, LinkProfile
from helm.model.graph import Attention
from helm.plan.records import Workload

Site = Literal["cpu", "accelerator"]
_F32 = 4
_VISITING_TOKENS = 8192  # of prompts that are longer than planned
_MOST_PAGES = 128  # choices of `pages` that are tried; finer steps change little


@dataclass(frozen=True)
class Rows:
    """Layouts: boundary[r] blocks on the CPU, embedded[r]: the embedding is on the accelerator."""

    boundary: I64
    embedded: Bools
    blocks: int

    @property
    def has_blocks(self) -> Bools:
        """Whether the accelerator holds any block."""
        return np.asarray(self.boundary < self.blocks)

    def uses_accelerator(self, head: Site) -> Bools:
        return np.asarray(self.has_blocks | self.embedded | (head == "accelerator"))


@dataclass(frozen=True)
class Priced:
    """Seconds [TERMS, rows] that no page choice changes, and those it does: `attention` and
    `overflow` [rows, pages] of the accelerator, `overlap` [rows, pages], at most 0."""

    base: F64
    attention: F64
    overflow: F64
    overlap: F64

    @functools.cached_property
    def total(self) -> F64:
        """[rows, pages]"""
        paged = self.attention + self.overflow + self.overlap
        return np.asarray(self.base.sum(axis=0)[:, None] + paged)

    @property
    def cpu(self) -> F64:
        """[rows, 1] of the CPU alone."""
        return np.asarray(self.base[:DEVICE_TERMS].sum(axis=0)[:, None])

    @property
    def accelerator(self) -> F64:
        """[rows, pages] of the accelerator and its copies, which queue on one stream."""
        return np.asarray(self.total - self.overlap - self.cpu)

    def terms(self, row: int, page: int) -> dict[str, float]:
        """The terms of one candidate, by name; they add up to its total."""
        values = self.base[:, row].copy()
        values[DEVICE_TERMS + ATTENTION] += self.attention[row, page]
        values[OVERFLOW] += self.overflow[row, page]
        values[-1] += self.overlap[row, page]
        return dict(zip(TERMS, map(float, values), strict=True))


@dataclass(frozen=True)
class Setting:
    """Everything that pricing needs to know, for one thread count and one number of sequences."""

    model: CostedGraph
    cpu: CpuProfile
    accelerator: AcceleratorProfile | None
    link: LinkProfile | None
    workload: Workload
    limits: ResourceLimits
    batch: int
    rows: Rows
    pages: I64  # [pages], falling
    classes: BlockClasses = field(repr=False)
    mapped_weights: bool = False

    @property
    def hidden(self) -> int:
        """Width of the value that crosses between stages."""
        return self.width(getattr(self.model.graph.units[-1].ops[0], "input"))  # noqa: B009

    @property
    def vocab(self) -> int:
        return self.width(self.model.graph.logits)

    def width(self, value: str) -> int:
        """Floats of one row of a value."""
        return next(v.width for v in self.model.graph.values if v.name == value)

    @property
    def most_sequences(self) -> int:
        """As many as may have a row in one step."""
        return max(self.limits.sequences, self.batch)

    def pages_of(self, tokens: int) -> int:
        """KV blocks of one layer that hold `tokens` positions."""
        return -(-tokens // self.limits.page_tokens)

    @property
    def pool(self) -> Pool:
        """The accelerator's KV blocks; a choice of slots for each of `pages`."""
        limits, blocks = self.limits, self.batch * self.pages_of(self.workload.context)
        slots = self.batch * self.pages
        return Pool(slots, blocks, self.batch, limits.page_tokens, limits.watermark)

    @functools.cached_property
    def decode_units(self) -> dict[str, F64]:
        """`unit_times` of a decode step, which has attention apart: no context changes them."""
        return unit_times(self, Step(self.batch, 1, self.batch))

    @functools.cached_property
    def halves(self) -> tuple[Setting, Setting]:
        """Of the sequences, in two groups; one and the same if they are equal."""
        sizes = (self.batch + 1) // 2, self.batch // 2
        of = {size: dataclasses.replace(self, batch=size) for size in sizes}
        return of[sizes[0]], of[sizes[1]]

    @functools.cached_property
    def known_attention(self) -> dict[tuple[Overflow, int], tuple[F64, F64]]:
        """What `_decode_attention` found before: the same for both sites of the head."""
        return {}

    @property
    def visit_bytes_per_s(self) -> float:
        """Of the CPU's weights on their way to the accelerator."""
        assert self.link is not None
        if self.mapped_weights and not self.link.locks_mapped:
            return self.link.pageable_to_accelerator_bytes_per_s
        return self.link.to_accelerator_bytes_per_s

    @property
    def visit_pages(self) -> int:
        """Page slots for a layer of the batch's prompts while its weights visit: of those planned
        for, and of longer ones that people send, as the context allows."""
        longest = max(self.workload.prompt, min(self.workload.context, _VISITING_TOKENS))
        return self.batch * self.pages_of(longest)

    def counts(self) -> tuple[F64, F64]:
        """[rows, classes] blocks on the CPU and on the accelerator."""
        first = self.classes.before([int(k) for k in self.rows.boundary])
        return first, self.classes.before([self.rows.blocks])[0] - first


def make_setting(
    model: CostedGraph,
    profile: Profile,
    workload: Workload,
    limits: ResourceLimits,
    threads: int,
    batch: int,
    *,
    space: Space | None = None,
    classes: BlockClasses | None = None,
) -> Setting:
    """The rows are all layouts: all on the accelerator first, then by boundary."""
    space = space or Space()
    kv: KvPlace = space.kv
    blocks = len(model.graph.layers)
    boundary = np.arange(blocks + 1)
    embedded = np.zeros(blocks + 1, bool)
    if profile.accelerator is None:
        kv, boundary, embedded = "host", boundary[-1:], embedded[-1:]
    else:
        boundary, embedded = np.insert(boundary, 0, 0), np.insert(embedded, 0, True)
    return Setting(
        model,
        profile.cpu.complete.with_threads(threads),
        None if profile.accelerator is None else profile.accelerator.complete,
        profile.link,
        workload,
        limits,
        batch,
        Rows(boundary, embedded, blocks),
        page_choices(workload.context, limits.page_tokens, kv),
        classify(model) if classes is None else classes,
        space.mapped_weights,
    )


def page_choices(context: int, page_tokens: int, kv: KvPlace = "any") -> I64:
    """From all KV blocks of a sequence down to none, evenly thinned when there are many."""
    most = -(-context // page_tokens)
    if kv != "any":
        return np.array([most if kv == "device" else 0], np.int64)
    choices = np.round(np.linspace(most, 0, min(most, _MOST_PAGES) + 1))
    return np.array(sorted(set(choices.tolist()), reverse=True), np.int64)


def crossing_s(setting: Setting, head: Site, tokens: I64, outputs: I64, visit: bool = False) -> F64:
    """[rows] seconds on the link of steps that have `tokens` [steps] and `outputs` [steps] rows of
    logits: token ids or activations to the accelerator, activations or logits back. Between the
    last block and the head only activations whose logits are asked for cross. visit: the CPU's
    blocks compute on the accelerator."""
    rows, link = setting.rows, setting.link
    if link is None or len(tokens) == 0:
        return np.zeros(len(rows.boundary))
    blocks = rows.has_blocks | visit
    asked, asking = int(outputs.sum()), int((outputs > 0).sum())
    activation = _F32 * setting.hidden
    sent = np.where(rows.embedded, _F32, activation) * np.where(blocks, tokens.sum(), asked)
    copies = np.where(blocks, len(tokens), asking) + asking
    returned = asked * (_F32 * setting.vocab if head == "accelerator" else activation)
    moving = sent / link.to_accelerator_bytes_per_s + returned / link.to_host_bytes_per_s
    return np.where(rows.uses_accelerator(head), copies * link.latency_s + moving, 0.0)


def device_base(setting: Setting, head: Site, unit_times: dict[str, F64], counts: F64) -> F64:
    """[TERMS, rows] of one step's units on their devices. unit_times: "<site> blocks"
    [classes, DEVICE_TERMS], "<site> embedding" and "<site> head" [DEVICE_TERMS]."""
    rows = setting.rows
    base = np.zeros((len(TERMS), len(rows.boundary)))
    total = setting.classes.before([rows.blocks])[0]
    base[:DEVICE_TERMS] += (counts @ unit_times["cpu blocks"]).T
    base[:DEVICE_TERMS] += np.outer(unit_times["cpu embedding"], ~rows.embedded)
    if setting.accelerator is not None:
        own = slice(DEVICE_TERMS, 2 * DEVICE_TERMS)
        base[own] += ((total - counts) @ unit_times["accelerator blocks"]).T
        base[own] += np.outer(unit_times["accelerator embedding"], rows.embedded)
    at = 0 if head == "cpu" else DEVICE_TERMS
    base[at : at + DEVICE_TERMS] += unit_times[f"{head} head"][:, None]
    return base


def unit_times(setting: Setting, step: Step) -> dict[str, F64]:
    """Times of every kind of unit on both devices for `device_base`."""
    first, last = setting.model.graph.units[0], setting.model.graph.units[-1]
    found: dict[str, F64] = {}
    for site, device in (("cpu", setting.cpu), ("accelerator", setting.accelerator)):
        if device is None:
            continue
        blocks = [unit_s(setting.model, unit, step, device) for unit in setting.classes.units]
        found[f"{site} blocks"] = np.array(blocks).reshape(-1, DEVICE_TERMS)
        found[f"{site} embedding"] = unit_s(setting.model, first, step, device)
        found[f"{site} head"] = unit_s(setting.model, last, step, device)
    return found


def price_decode(
    setting: Setting, head: Site, overflow: Overflow, context: int, groups: int = 1
) -> Priced:
    """Until each of `batch` sequences has one token; each has `context` positions by then.

    overflow "stream": pages in host memory visit the accelerator, copied ahead of the attention;
    "cpu": the CPU attends to them where they lie, at the same time as the accelerator to its own,
    and the partial results are merged. groups 2: half of the sequences is at the CPU while the
    other half is at the accelerator, but for steps in which the CPU attends for it.
    """
    if groups == 1:
        return _decode_step(setting, head, overflow, context)[0]
    one, other = setting.halves
    first, first_copy = step = _decode_step(one, head, overflow, context)
    second, second_copy = step if other is one else _decode_step(other, head, overflow, context)
    serial = first.total + second.total
    # Each device is given to one group after the other, and each group waits for itself. While
    # pages are copied the CPU keeps only a part of its rate.
    link = setting.link
    slow = 0.0 if link is None else 1.0 - link.cpu_rate_while_copying
    period = np.maximum.reduce(
        [
            first.cpu + second.cpu + slow * (first_copy + second_copy),
            first.accelerator + second.accelerator,
            first.total + slow * second_copy,
            second.total + slow * first_copy,
        ]
    )
    if link is not None:  # while both work each keeps a part of its rate
        period = period + (serial - period) * (1.0 / link.rate_while_both_compute - 1.0)
    away = setting.rows.has_blocks[:, None] & (setting.pool.far_blocks(context) > 0)
    alone = away & (overflow == "cpu")
    return Priced(
        first.base + second.base,
        first.attention + second.attention,
        first.overflow + second.overflow,
        np.where(alone, 0.0, period - serial),
    )


def _decode_step(
    setting: Setting, head: Site, overflow: Overflow, context: int
) -> tuple[Priced, F64]:
    """The step, and [rows, pages] seconds in which pages are copied to the accelerator."""
    batch = setting.batch
    counts, rest = setting.counts()
    times = setting.decode_units
    base = device_base(setting, head, times, counts)
    used = setting.rows.uses_accelerator(head)
    if (overflow, context) not in setting.known_attention:
        setting.known_attention[overflow, context] = _decode_attention(setting, overflow, context)
    on_cpu, paged = setting.known_attention[overflow, context]
    base[ATTENTION] += counts @ on_cpu
    base[FIXED] += setting.cpu.step_s
    if setting.accelerator is not None:
        base[DEVICE_TERMS + FIXED] += setting.accelerator.step_s * used
        base[LINK] += crossing_s(setting, head, np.array([batch]), np.array([batch]))
    own, extra, copies = np.einsum("rc,ctp->trp", rest, paged)
    return Priced(base, own, extra, np.zeros_like(own)), copies


def _decode_attention(setting: Setting, overflow: Overflow, context: int) -> tuple[F64, F64]:
    """Seconds of a block of each class: [classes] on the CPU; `_overflow_s` [classes, 3, pages]."""
    query = Queries(np.array([context - 1]), np.array([1]), np.array([0]))
    classes = setting.classes.units
    on_cpu = np.zeros(len(classes))
    paged = np.zeros((len(classes), 3, len(setting.pages)))
    for index, unit in enumerate(classes):
        for op in attentions(unit):
            seen = int(visible(op, query)[0])
            on_cpu[index] += _decode_s(setting, op, np.array(setting.batch * seen), setting.cpu)
            if setting.accelerator is not None:
                other = float(setting.decode_units["accelerator blocks"][index].sum())
                paged[index] += _overflow_s(setting, op, seen, context, other, overflow)
    return on_cpu, paged


def _decode_s(
    setting: Setting, op: Attention, positions: I64, device: CpuProfile | AcceleratorProfile
) -> F64:
    """positions: of all sequences together."""
    return attention_s(setting.model, op, 1, np.asarray(positions, np.float64), positions, device)


def _overflow_s(
    setting: Setting, op: Attention, seen: int, context: int, other_s: float, overflow: Overflow
) -> F64:
    """[3, pages] accelerator attention over what its memory holds, what the rest adds, and the
    time of copies to it; seen: positions of one sequence, other_s: the layer without attention."""
    link, device, cpu = setting.link, setting.accelerator, setting.cpu
    assert link is not None
    assert device is not None
    far = decode_far(setting.pool, context, context - seen)
    own = _decode_s(setting, op, setting.batch * seen - far.seen, device)
    launch = device.op_s * setting.pool.executed
    pieces, copy = EXTRA_OPS * launch, np.zeros_like(own)
    if overflow == "stream":
        size = far.copied * position_bytes(setting.model, op)
        copy = far.pages * link.latency_s + size / link.to_accelerator_bytes_per_s
        attend = _decode_s(setting, op, far.seen, device) + far.pages * launch
        extra = visiting_s(far.pages, copy, attend, other_s + pieces + own) - other_s - own
    else:
        query = _F32 * setting.batch * setting.width(op.input)
        partial = _F32 * setting.batch * op.heads * (op.head_dim + 2)
        down = link.latency_s + query / link.to_host_bytes_per_s
        up = link.latency_s + partial / link.to_accelerator_bytes_per_s
        there = cpu.step_s + 2 * cpu.op_s + _decode_s(setting, op, far.seen, cpu)
        extra = pieces + np.maximum(own, down + there) - own + up
    return np.stack([own, np.where(far.blocks > 0, extra, 0.0), copy])
