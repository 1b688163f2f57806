"""Prices decode steps of every layer partition at once. Knows no memory limit and no objective."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helm.compiler.beside import slowdown
from helm.compiler.layers import decode_attention_s, decode_layers
from helm.compiler.overflow import alike
from helm.compiler.problem import Overflow
from helm.compiler.program import pattern
from helm.compiler.setting import F32, Setting, Site
from helm.compiler.timeline import Flight, Seconds, Spread, backward, period_s
from helm.compiler.times import ATTENTION, DEVICE_TERMS, F64, FIXED, I64, LINK, OVERFLOW, TERMS

_LEAST_S = 1e-12


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


def crossing_s(
    setting: Setting, head: Site, tokens: I64, outputs: I64, visit: bool = False
) -> tuple[F64, F64]:
    """[rows, steps] seconds on the link, up and down, of steps that have `tokens` [steps] and
    `outputs` [steps] rows of logits: token ids or activations to the accelerator, activations or
    logits back. Between the last block and the head only activations whose logits are asked for
    cross. visit: the CPU's blocks compute on the accelerator."""
    rows, link = setting.rows, setting.link
    if link is None:
        nothing = np.zeros((len(rows.boundary), len(tokens)))
        return nothing, nothing
    blocks = (rows.has_blocks | visit)[:, None]
    activation = F32 * setting.hidden
    sent = np.where(blocks, tokens, outputs)
    size = sent * np.where(rows.embedded, F32, activation)[:, None]
    returned = outputs * (F32 * setting.vocab if head == "accelerator" else activation)
    used = rows.uses_accelerator(head)[:, None]
    up = (sent > 0) * link.latency_s + size / link.to_accelerator_bytes_per_s
    down = (outputs > 0) * link.latency_s + returned / link.to_host_bytes_per_s
    return np.asarray(used * up), np.asarray(used * down)


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
    whole = Priced(
        first.base + second.base,
        first.attention + second.attention,
        first.overflow + second.overflow,
        np.zeros_like(first.overlap),
    )
    away = setting.pool.far_blocks(context) > 0
    if setting.link is None:
        return whole
    kept, place = alike(away & (overflow == "stream"))
    tail = setting.decode_units["cpu head"].sum() if head == "cpu" else 0.0
    cpus, owns = [], []
    for priced, copies in ((first, second_copy), (second, first_copy)):
        cpus.append(setting.link.beside_copies(priced.cpu, copies[:, kept]))
        owns.append(priced.accelerator[:, kept])  # with copies, which are in the same queue
    serial, period = whole.total[:, kept], _alternating_s(cpus, owns, tail)
    if setting.beside is not setting:
        slow = [_decode_step(half.beside, head, overflow, context)[0] for half in (one, other)]
        both = serial - period
        cpu = _slower(both, cpus, [first.cpu, second.cpu], [half.cpu for half in slow])
        alone_s, slow_s = (
            [p.accelerator[:, kept] for p in each] for each in ((first, second), slow)
        )
        own = _slower(both, owns, alone_s, slow_s)
        period = _alternating_s([s * cpu for s in cpus], [s * own for s in owns], tail * cpu)
    saved = saved_s(serial, period)[:, place]
    alone = setting.rows.has_blocks[:, None] & away & (overflow == "cpu")
    return dataclasses.replace(whole, overlap=np.where(alone, 0.0, saved))


def _alternating_s(cpu_s: Sequence[F64], own_s: Sequence[F64], tail_s: Seconds) -> F64:
    """Until both groups have taken a step: one is at the CPU, whose last is tail_s, while the other
    is at the accelerator."""
    steps = ((cpu - tail_s, 0.0, own, 0.0, tail_s) for cpu, own in zip(cpu_s, own_s, strict=True))
    return period_s([Flight(pattern(False, "none"), seconds) for seconds in steps])


def _slower(
    both_s: F64, own_s: Sequence[F64], alone_s: Sequence[F64], beside_s: Sequence[F64]
) -> F64:
    """How many times as long a device takes for both groups, own_s undisturbed, of which the other
    works for both_s, too. alone_s, beside_s: its steps without copies, undisturbed and disturbed
    all the time."""
    share = np.minimum(1.0, both_s / np.maximum(_LEAST_S, sum(own_s)))
    return np.asarray(1.0 + share * (slowdown(sum(alone_s), sum(beside_s)) - 1.0))


def saved_s(serial_s: F64, overlapped_s: F64) -> F64:
    """What overlap saves, negative; nothing where that is rounding."""
    saved = overlapped_s - serial_s
    return np.where(saved < -1e-12 * serial_s, saved, 0.0)


def _decode_step(
    setting: Setting, head: Site, overflow: Overflow, context: int
) -> tuple[Priced, F64]:
    """The step, and [rows, pages] seconds in which pages are copied to the accelerator."""
    batch, threads = setting.batch, setting.cpu.threads
    base = decode_base(setting, head).copy()
    base[ATTENTION] += setting.counts()[0] @ cpu_attention_s(setting, context)
    shape = (len(setting.rows.boundary), len(setting.pages))
    own = extra = copies = np.zeros(shape)
    if setting.accelerator is not None:
        # What the CPU attends to takes other times with other threads.
        key = (overflow, batch, context, threads * (overflow == "cpu"))
        own, extra, copies = setting.once(key, _far_decode, setting, overflow, context)
    return Priced(base, own, extra, np.zeros(shape)), copies


def decode_base(setting: Setting, head: Site) -> F64:
    """[TERMS, rows] of a step without attention, not to be changed."""
    return setting.once(("step", setting.cpu.threads, setting.batch, head), _base, setting, head)


def _base(setting: Setting, head: Site) -> F64:
    base = device_base(setting, head, setting.decode_units, setting.counts()[0])
    base[FIXED] += setting.cpu.step_s
    if setting.accelerator is not None:
        used = setting.rows.uses_accelerator(head)
        base[DEVICE_TERMS + FIXED] += setting.accelerator.step_s * used
        one = np.array([setting.batch])
        up, down = crossing_s(setting, head, one, one)
        base[LINK] += (up + down)[:, 0]
    return base


def cpu_attention_s(setting: Setting, context: int) -> F64:
    """[classes] of a layer of the CPU."""
    key = setting.cpu.threads, setting.batch, context
    return setting.once(key, decode_attention_s, setting, context, setting.cpu)


def _far_decode(setting: Setting, overflow: Overflow, context: int) -> tuple[F64, F64, F64]:
    """[rows, pages] seconds: attention of the accelerator's layers to its own pages, what the
    other pages add, and their copies."""
    away = setting.pool.far_blocks(context) > 0
    kept, place = alike(away)
    some = dataclasses.replace(setting, pages=setting.pages[kept])
    layers = decode_layers(some, overflow, context)
    _, rest = setting.counts()
    whole = rest @ setting.decode_units["accelerator blocks"].sum(axis=1)
    own = rest @ np.stack([layer.near_s for layer in layers])
    embedding = setting.decode_units["accelerator embedding"].sum()
    bodies = [layer.body(overflow) for layer in layers]
    spread = spread_s(some, bodies, np.array([setting.batch]), embedding)
    end = np.maximum(spread.main, spread.until + spread.pages)
    extra = np.where(away[kept], end - whole[:, None] - own, 0.0)
    copies = rest @ np.stack([layer.copies_s for layer in layers])
    return own[:, place], extra[:, place], copies[:, place]


def spread_s(setting: Setting, bodies: Sequence[F64], tokens: I64, embedding_s: Seconds) -> Spread:
    """[rows, ...] of the rows' layers on the accelerator. While it embeds, pages come already:
    `tokens` in embedding_s, both [...] without pages."""
    rows, link, device = setting.rows, setting.link, setting.accelerator
    assert link is not None
    assert device is not None
    ends = backward(bodies, setting.classes.member.tolist())
    main, pages = ends[rows.blocks - rows.boundary, :2].swapaxes(0, 1)
    pages[rows.embedded] -= embedding_s
    until = np.zeros(main.shape)
    ids = link.latency_s + F32 * tokens / link.to_accelerator_bytes_per_s
    until[rows.embedded] -= device.step_s + ids
    return Spread(main, pages, until)
