"""Seconds of steps by their rows, in each mode, of every layer partition at once; and the rate that
requests reach which come and go. What the runtime has of it is `helm.plan.predictor`, where
`cpp/serve/predictor.cc` has the same sums. Chooses nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from helm.compiler.beside import decode_attention_beside, slowdown, slower_s
from helm.compiler.counts import Step
from helm.compiler.decode import crossing_s, device_base
from helm.compiler.layers import asked_bytes, begin_asked_s
from helm.compiler.setting import Setting, Site, unit_times
from helm.compiler.times import (
    DEVICE_TERMS,
    F64,
    I64,
    Seconds,
    attention_s,
    attentions,
    position_bytes,
)
from helm.plan.predictor import AttentionTimes, Predictor

StepMode = Literal["near", "joint", "split"]
# As `cpp/serve/step_mode.h` and `cpp/serve/pacer.h` have them.
MOST_SKIPS = 4  # steps for which a far row is passed over
SLOWDOWN, LEAST_TARGET_S, LEAST_ROWS = 2.25, 0.05, 4
# Powers of two up to 2048, and what lies between two of them.
_ROWS = tuple(sorted({2**n for n in range(12)} | {3 * 2**n for n in range(10)}))
_BY_LAYOUT = (
    "cpu_s", "near_s", "far_s", "near_beside_s", "far_beside_s", "cpu_pair_s", "pair_s",
)  # fmt: skip


@functools.cache
def executed_modes() -> tuple[StepMode, ...]:
    """Those that the runtime executes; plans promise no other."""
    from helm import _helm

    return tuple(_helm.EXECUTED_MODES)


@dataclass(frozen=True)
class _Attention:
    """See AttentionTimes; [layouts], and tables [counts, layouts]."""

    window: int
    layers: F64
    cpu_s: F64
    near_s: F64
    far_s: F64
    near_beside_s: F64
    far_beside_s: F64
    cpu_pair_s: F64
    pair_s: F64

    def seen(self, positions: Seconds) -> Seconds:
        """Of so many positions, those that a query sees."""
        return np.minimum(positions, self.window) if self.window else positions

    def pairs(self, past: F64, tokens: F64) -> F64:
        """Of a chunk of `tokens` after `past` positions."""

        def to(end: F64) -> F64:
            inside = np.asarray(self.seen(end), np.float64)
            return np.asarray(inside * (inside + 1) / 2 + (end - inside) * self.window)

        return to(past + tokens) - to(past)


@dataclass(frozen=True)
class StepPrices:
    """See Predictor; [layouts], tables [counts, layouts], and numbers that no layout changes."""

    rows: tuple[int, ...]
    cpu_s: F64
    accelerator_s: F64
    accelerator_beside_s: F64
    head_s: F64
    attention: tuple[_Attention, ...]
    step_s: F64
    block_to_host_s: F64
    block_to_accelerator_s: F64
    prompt_row_s: F64
    parts_s: float = 0.0
    near_part_s: float = 0.0
    ask_s: float = 0.0
    ask_row_s: float = 0.0
    answer_s: float = 0.0
    answer_row_s: float = 0.0

    def record(self, layout: int) -> Predictor:
        """What a plan with this layout says."""

        def one(values: F64) -> Any:
            picked = values[..., layout]
            return float(picked) if picked.ndim == 0 else tuple(map(float, picked))

        kinds = tuple(
            AttentionTimes(
                kind.window,
                int(kind.layers[layout]),
                *(one(getattr(kind, name)) for name in _BY_LAYOUT),
            )
            for kind in self.attention
        )
        return Predictor(
            self.rows,
            one(self.cpu_s),
            one(self.accelerator_s),
            one(self.accelerator_beside_s),
            one(self.head_s),
            kinds,
            one(self.step_s),
            one(self.prompt_row_s),
            self.parts_s,
            self.near_part_s,
            self.ask_s,
            self.ask_row_s,
            self.answer_s,
            self.answer_row_s,
            one(self.block_to_host_s),
            one(self.block_to_accelerator_s),
        )

    def steady_rate(
        self, mode: StepMode, near: F64, far: F64, prompt: int, output: int, chunk: F64 | float
    ) -> F64:
        """[layouts, n] tokens/s while near[n] and far[n] requests of so many tokens decode, and as
        many prompts begin as requests end: some steps have `chunk` rows of prompts, [layouts, n] or
        a number. In the others far rows take part or, if that is better and they do not wait for
        long, do not."""
        far = np.zeros_like(near) if mode == "near" else far
        each = prompt / output
        chunk = np.maximum(chunk, (near + far) * each)
        length = prompt + output / 2
        chunk = np.broadcast_to(chunk, (len(self.step_s), len(near)))
        with_s = self._step_s(mode, near, far, chunk, prompt, length)
        best = np.zeros_like(with_s)
        for others in (far, np.zeros_like(far)):  # far rows of steps without prompts
            with np.errstate(divide="ignore", invalid="ignore"):
                tokens = (near + others) / (1 - each / chunk * (far - others))
                share = tokens * each / chunk
                without = self._step_s(mode, near, others, 0 * chunk, prompt, length)
                rate = tokens / (share * with_s + (1 - share) * without)
            waits = (others < far) & (share * (MOST_SKIPS + 1) < 1)
            best = np.maximum(best, np.where((near + others > 0) & ~waits, rate, 0.0))
        return best

    def paced_chunk(self, near: F64, prompt: int, output: int) -> F64:
        """[layouts, n] rows of prompts that a step has beside so many near requests, by the rule of
        `cpp/serve/pacer.h`: those that take no more than a few times a step without."""
        length = prompt + output / 2
        counts = [n for n in self.rows if n <= prompt] or [1]
        nothing = np.zeros((len(self.step_s), len(near)))
        alone = self._step_s("near", near, 0 * near, nothing, prompt, length)
        target = np.maximum(SLOWDOWN * alone, LEAST_TARGET_S)
        chosen = nothing + min(counts[-1], LEAST_ROWS)
        for count in counts:
            taken = self._step_s("near", near, 0 * near, nothing + count, prompt, length)
            chosen = np.where(taken <= target, np.maximum(chosen, count), chosen)
        return chosen

    def _step_s(
        self, mode: StepMode, near: F64, far: F64, chunk: F64, prompt: int, length: float
    ) -> F64:
        """[layouts, n] seconds of a step with chunk[layouts, n] rows of prompts."""
        tokens = np.clip(chunk, 1.0, prompt)  # of one prompt
        past, count = (prompt - tokens) / 2, chunk / tokens
        batches = (near + chunk, far + 0 * chunk) if mode == "split" else (near + chunk + far,)
        own = [self._at(self.accelerator_s, rows) for rows in batches]
        seconds = self.step_s[:, None] + self._at(self.head_s, near + far + chunk / prompt)
        seconds = seconds + self.prompt_row_s[:, None] * chunk
        for rows in batches:
            seconds += self._at(self.cpu_s, rows)
        seconds += 0.0 if mode == "split" else own[0]
        asked = far > 0
        for kind in self.attention:
            layers, seen = kind.layers[:, None], np.asarray(kind.seen(length))
            seconds += kind.cpu_s[:, None] * (near + far) * seen
            seconds += self._prompt_s(kind.cpu_pair_s, kind.cpu_s, kind, past, tokens, count)
            own_s, own_beside_s = (
                each[:, None] * near * seen
                + self._prompt_s(kind.pair_s, each, kind, past, tokens, count)
                for each in (kind.near_s, kind.near_beside_s)
            )
            attend, attend_beside = (
                each[:, None] * far * seen for each in (kind.far_s, kind.far_beside_s)
            )
            ask = layers * asked * (self.ask_s + self.ask_row_s * far)
            answer = layers * asked * (self.answer_s + self.answer_row_s * far)
            if mode == "split":
                share = layers / np.maximum(1.0, self._layers[:, None])
                one, other = own[0] * share, ask + attend + answer
                one_beside = self._at(self.accelerator_beside_s, batches[0]) * share
                more, other_more = slower_s(one, one_beside, other, ask + attend_beside + answer)
                seconds += np.maximum(one + more, other + other_more)
                seconds += own[1] * share + own_s + 2 * layers * asked * self.parts_s
                continue
            part_s = layers * asked * self.near_part_s
            own_s, own_beside_s = own_s + part_s, own_beside_s + part_s
            left = np.maximum(0.0, own_s - ask)  # once the CPU has been asked
            left_beside = left * slowdown(own_s, own_beside_s)
            more, other_more = slower_s(left, left_beside, attend, attend_beside)
            seconds += np.maximum(own_s + more, ask + attend + other_more + answer)
            seconds += layers * asked * self.parts_s
        return np.asarray(seconds)

    @property
    def _layers(self) -> F64:
        return np.asarray(sum(kind.layers for kind in self.attention))

    def _prompt_s(
        self, pair_s: F64, position_s: F64, kind: _Attention, past: F64, chunk: F64, count: F64
    ) -> F64:
        seen = past + chunk
        seen = np.minimum(seen, kind.window + chunk - 1) if kind.window else seen
        compute = kind.pairs(past, chunk) * self._at(pair_s, chunk)
        return np.asarray(count * np.maximum(compute, position_s[:, None] * seen))

    def _at(self, table: F64, rows: F64) -> F64:
        """[layouts, n] in a line between the counts, beyond the last of the last two; 0 of none."""
        counts, layouts = np.array(self.rows, np.float64), table.shape[1]
        rows = np.broadcast_to(rows, (layouts, np.shape(rows)[-1]))
        if len(counts) == 1:
            found = np.broadcast_to(table[0][:, None], rows.shape)
        else:
            high = np.clip(np.searchsorted(counts, rows), 1, len(counts) - 1)
            share = (np.maximum(rows, 1.0) - counts[high - 1]) / (counts[high] - counts[high - 1])
            at = np.arange(layouts)[:, None]
            found = table[high - 1, at] + share * (table[high, at] - table[high - 1, at])
        return np.where(rows > 0, found, 0.0)


def step_prices(setting: Setting, head: Site) -> StepPrices:
    """Of the setting's layouts; the same for any number of sequences."""
    known = ("steps", setting.cpu.threads, head)
    if known not in setting.known:
        setting.known[known] = _step_prices(setting, head)
    found: StepPrices = setting.known[known]
    return found


def steady_seconds(setting: Setting, head: Site) -> F64:
    """[layouts, pages] for all of the workload's requests in the best mode, in the KV blocks of the
    setting's sequences: what requests find no room near are far, or wait."""
    work, pool, each = setting.workload, setting.pool, blocks_of_request(setting)
    # The last as all are of layouts without layers there.
    slots, places = np.unique(np.append(pool.slots, pool.blocks), return_inverse=True)
    near = np.minimum(work.batch, slots // each)
    far = np.minimum(work.batch - near, (pool.blocks - slots) // each)
    known = ("steady", setting.cpu.threads, head, tuple(near), tuple(far))
    if known not in setting.known:
        prices = step_prices(setting, head)
        rates = rates_by_mode(prices, near, far, work.prompt, work.output)
        setting.known[known] = np.max([*rates.values()], axis=0)
    best = setting.known[known][:, places]
    best = np.where(setting.rows.has_blocks[:, None], best[:, :-1], best[:, -1:])
    with np.errstate(divide="ignore"):
        return np.asarray(work.batch * work.output / best)


def blocks_of_request(setting: Setting) -> int:
    """KV blocks of a request that has all of its tokens."""
    return setting.pages_of(setting.workload.prompt + setting.workload.output)


def rates_by_mode(
    prices: StepPrices, near: I64, far: I64, prompt: int, output: int
) -> dict[StepMode, F64]:
    """[layouts, n] tokens/s in the modes that are executed, with chunks of prompts as the runtime
    has them."""
    counts = near.astype(np.float64), far.astype(np.float64)
    chunk = prices.paced_chunk(np.maximum(counts[0], 1.0), prompt, output)
    return {
        mode: prices.steady_rate(mode, *counts, prompt, output, chunk) for mode in executed_modes()
    }


def _step_prices(setting: Setting, head: Site) -> StepPrices:
    most = min(setting.limits.step_tokens, _ROWS[-1])
    rows = (*(count for count in _ROWS if count < most), most)
    cpu, own, heads = _linear(setting, head, rows)
    beside = own if setting.beside is setting else _linear(setting.beside, head, rows)[1]
    device, link, layers = setting.accelerator, setting.link, setting.counts()
    asked = np.array([
        sum(op.heads for op in attentions(layer)) for layer in setting.classes.units
    ], np.float64)  # fmt: skip
    prompt_row_s = layers[0] @ asked * setting.cpu.attention_query_s
    step_s = np.full(len(prompt_row_s), setting.cpu.step_s)
    if device is None or link is None:
        none = np.zeros_like(step_s)
        return StepPrices(
            rows,
            cpu,
            own,
            beside,
            heads,
            _attention(setting, rows),
            step_s,
            none,
            none,
            prompt_row_s,
        )
    position = np.array([
        sum(position_bytes(setting.model, op) for op in attentions(layer))
        for layer in setting.classes.units
    ], np.float64)  # fmt: skip
    block = layers[1] @ position * setting.limits.page_tokens
    ops = [op for layer in setting.classes.units for op in attentions(layer)]
    asks, answers = map(max, zip(*(asked_bytes(setting, op) for op in ops), strict=True))
    stage_s = device.stage_s or 0.0
    return StepPrices(
        rows=rows,
        cpu_s=cpu,
        accelerator_s=own,
        accelerator_beside_s=beside,
        head_s=heads,
        attention=_attention(setting, rows),
        step_s=step_s + setting.rows.uses_accelerator(head) * device.step_s,
        block_to_host_s=block / link.to_host_bytes_per_s,
        block_to_accelerator_s=block / link.to_accelerator_bytes_per_s,
        prompt_row_s=prompt_row_s + layers[1] @ asked * device.attention_query_s,
        parts_s=device.op_s + 2 * stage_s,
        near_part_s=device.op_s + stage_s,
        ask_s=link.latency_s + begin_asked_s(setting),
        ask_row_s=asks / link.to_host_bytes_per_s,
        answer_s=link.latency_s,
        answer_row_s=answers / link.to_accelerator_bytes_per_s,
    )


def _linear(setting: Setting, head: Site, rows: tuple[int, ...]) -> tuple[F64, F64, F64]:
    """[counts, layouts] of all but attention by device, crossings with the CPU, and of the head."""
    shape = (len(rows), len(setting.rows.boundary))
    cpu, own, heads = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    up, down = crossing_s(setting, head, np.array(rows), np.array(rows))
    for i, count in enumerate(rows):
        units = unit_times(setting, Step(count, 1, count))
        base = device_base(setting, head, units, setting.counts()[0])
        last = units[f"{head} head"].sum()
        cpu[i] = base[:DEVICE_TERMS].sum(axis=0) + up[:, i]
        own[i] = base[DEVICE_TERMS : 2 * DEVICE_TERMS].sum(axis=0)
        (cpu if head == "cpu" else own)[i] -= last
        heads[i] = last + down[:, i]
    return cpu, own, heads


def _attention(setting: Setting, rows: tuple[int, ...]) -> tuple[_Attention, ...]:
    """By window."""
    on_cpu, own = setting.counts()
    cpu, device = setting.cpu, setting.accelerator or setting.cpu
    none, one = np.zeros(1), np.ones(1)
    nothing = np.zeros(len(on_cpu))
    found: dict[int, list[Any]] = {}
    for number, layer in enumerate(setting.classes.units):
        for op in attentions(layer):

            def seconds(queries: int, positions: F64, at: Any, op: Any = op) -> float:
                return float(attention_s(setting.model, op, queries, one, positions, at)[0])

            here, there = on_cpu[:, number], own[:, number]
            position = [seconds(1, one, at) for at in (cpu, device)]
            pairs = [np.array([seconds(n, none, at) for n in rows]) for at in (cpu, device)]
            sums = found.setdefault(op.window, [nothing] * 6 + [np.zeros((len(rows), 1))] * 2)
            near_s, far_s = there * position[1], there * position[0]
            more = (there, here * position[0], near_s, far_s,
                    near_s * decode_attention_beside(setting, op, 1),
                    far_s * decode_attention_beside(setting, op, 0),
                    np.outer(pairs[0], here), np.outer(pairs[1], there))  # fmt: skip
            sums[:] = [before + added for before, added in zip(sums, more, strict=True)]
    return tuple(_Attention(window, *sums) for window, sums in found.items())
