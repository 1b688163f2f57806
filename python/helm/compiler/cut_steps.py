"""Seconds of whole steps of layouts with cut layers: a decode step, and the prompts. Knows no limit
of memory and ranks nothing.

One thing follows the other: embedding, layers of the CPU, those that are cut, those of the
accelerator, head; between them what crosses.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.cut_memory import CutMemory
from helm.compiler.cut_price import UnitPrice
from helm.compiler.cut_space import (
    CutModel,
    CutTimes,
    Layouts,
    decode_times,
    head_price,
    prefill_times,
)
from helm.compiler.cut_visits import quick_end_s, visiting_end_s
from helm.compiler.overflow import Bools
from helm.compiler.prefill import Prefill
from helm.compiler.setting import F32, Setting
from helm.compiler.times import DEVICE_TERMS, F64, FIXED, I64, LINK, TERMS, VISIT


@dataclass(frozen=True)
class StepCosts:
    """Of the steps of one kind together. ends: [DEVICE_TERMS] of the embedding on the CPU and of a
    whole head there and on the accelerator; count: of the steps; tokens, outputs: [steps]."""

    times: CutTimes
    embedding: F64
    heads: tuple[F64, F64]
    tokens: I64
    outputs: I64


class CutSteps:
    """Of one setting."""

    def __init__(self, setting: Setting, cuts: CutModel) -> None:
        self.setting, self.cuts = setting, cuts
        self._blocks = len(setting.classes.member)

    # --- decode ----------------------------------------------------------------------------------

    @functools.cache  # noqa: B019  # of few contexts
    def decode(self, context: int) -> StepCosts:
        units, one = self.setting.decode_units, np.array([self.setting.batch])
        heads = units["cpu head"], units["accelerator head"]
        times = decode_times(self.setting, self.cuts, context)
        return StepCosts(times, units["cpu embedding"], heads, one, one)

    def prompts(self, prefill: Prefill, some: Bools) -> StepCosts | None:
        """Of `some` steps, in which nothing visits."""
        times = prefill_times(prefill, self.cuts, some)
        if times is None:
            return None
        return self._costs(prefill, some, times)

    def _costs(self, prefill: Prefill, some: Bools, times: CutTimes) -> StepCosts:
        heads = [prefill.head[site][some].sum(axis=0) for site in ("cpu", "accelerator")]
        embedding = prefill.embedding["cpu"][some].sum(axis=0)
        chosen = prefill.tokens[some], prefill.outputs[some]
        return StepCosts(times, embedding, (heads[0], heads[1]), *chosen)

    def seconds(self, costs: StepCosts, memory: CutMemory, of: Layouts) -> F64:
        """[layouts] of all steps in which nothing visits."""
        times, counts = costs.times, memory.counts(of)
        cut = times.attention[:, of.home, of.heads] + times.mlp[:, of.home, of.elements]
        total = counts[0] @ times.on_cpu + counts[2] @ times.on_accelerator
        total = total + np.where(counts[1].T > 0, counts[1].T * cut, 0.0).sum(axis=0)
        up, down = self._crossings(costs.tokens, costs.outputs, of, visit=False)
        fixed = len(costs.tokens) * self._begin_s + float(costs.embedding.sum())
        return np.asarray(total + fixed + self._head_s(costs, of) + up + down)

    @property
    def _begin_s(self) -> float:
        device = self.setting.accelerator
        assert device is not None
        return self.setting.cpu.step_s + device.step_s

    def _head_s(self, costs: StepCosts, of: Layouts) -> F64:
        ways = costs.times.head.copy()
        ways[0], ways[-1] = costs.heads[1].sum(), costs.heads[0].sum()
        return ways[of.rows]

    def _crossings(self, tokens: I64, outputs: I64, of: Layouts, visit: bool) -> tuple[F64, F64]:
        """[layouts] seconds of what crosses between layers, and to and from a whole head."""
        setting, link = self.setting, self.setting.link
        assert link is not None
        rest = (of.cpu + of.cut < self._blocks) | visit
        there = rest | (of.cut > 0) & (of.home == 1)  # the residual, at the last layer
        whole = of.rows == 0  # the head is on the accelerator
        hidden = F32 * setting.hidden

        def seconds(rows: I64, width: int, rate: float) -> float:
            return float(((rows > 0) * link.latency_s + rows * width / rate).sum())

        rates = link.to_accelerator_bytes_per_s, link.to_host_bytes_per_s
        up = np.where(there, seconds(tokens, hidden, rates[0]), 0.0)
        up += np.where(~there & whole, seconds(outputs, hidden, rates[0]), 0.0)
        logits = seconds(outputs, F32 * setting.vocab, rates[1])
        down = np.where(whole, logits, np.where(there, seconds(outputs, hidden, rates[1]), 0.0))
        if visit:
            return up, down
        # Where the first or the last unit that is not at home lies beside its like, the residual
        # does not cross twice between them.
        first = (of.cut > 0) & (of.home == 1) & (of.heads == len(self.cuts.heads) - 1)
        away = np.where(of.home == 1, len(self.cuts.elements) - 1, 0)
        last = (of.cut > 0) & (of.elements == away)
        onward = last & (of.home == 0) & rest
        over = last & ~rest & np.where(of.home == 1, ~whole, whole)
        for some, rows in ((first | onward, tokens), (first & onward, tokens), (over, outputs)):
            up = up - np.where(some, seconds(rows, hidden, rates[0]), 0.0)
            down = down - np.where(some, seconds(rows, hidden, rates[1]), 0.0)
        return up, down

    # --- prompts whose steps visit ---------------------------------------------------------------

    def visiting_s(
        self, prefill: Prefill, memory: CutMemory, of: Layouts, some: Bools, *, quick: bool
    ) -> F64:
        """[layouts] of `some` steps. quick: a lower bound."""
        end = (quick_end_s if quick else visiting_end_s)(prefill, self.cuts, memory, of, some)
        counts = memory.counts(of)
        rest = counts[2] @ prefill.accelerator[:, some].sum(axis=(1, 2))
        costs = self._ends(prefill, some)
        up, down = self._crossings(costs.tokens, costs.outputs, of, visit=True)
        fixed = len(costs.tokens) * self._begin_s + float(costs.embedding.sum())
        return np.asarray(end.sum(axis=1) + rest + fixed + self._head_s(costs, of) + up + down)

    def _ends(self, prefill: Prefill, some: Bools) -> StepCosts:
        """Of the visiting steps, of which no layer is priced."""
        key = ("cut ends", self.setting.batch, self.setting.cpu.threads, len(prefill.tokens),
               some.tobytes())  # fmt: skip
        known = self.setting.known
        if key not in known:
            known[key] = self._only_ends(prefill, some)
        found: StepCosts = known[key]
        return found

    def _only_ends(self, prefill: Prefill, some: Bools) -> StepCosts:
        sizes = zip(prefill.tokens[some].tolist(), prefill.outputs[some].tolist(), strict=True)
        kinds = [(Step(n[0], n[0], outputs=n[1]), 1) for n in sizes if n[1]]
        head, none = head_price(self.setting, self.cuts, kinds), np.zeros((1, 2, 2))
        rows = np.zeros(len(self.cuts.rows)) if head is None else head.total[0][0]
        return self._costs(prefill, some, CutTimes(none, none, rows, (), head))

    # --- terms -----------------------------------------------------------------------------------

    def terms(self, costs: StepCosts, memory: CutMemory, of: Layouts) -> F64:
        """[TERMS] of the first of `of`."""
        counts = [each[0] for each in memory.counts(of)]
        home = int(of.home[0])
        ways = (int(of.heads[0]), int(of.elements[0]))
        total = np.zeros(len(TERMS))
        for index, prices in enumerate(costs.times.prices):
            for price, way in zip(prices, ways, strict=True):
                total += counts[0][index] * price.terms[0][:, 0, -1]
                total += counts[2][index] * price.terms[1][:, 0, 0]
                if counts[1][index]:
                    total += counts[1][index] * price.terms[home][:, 0, way]
        return total + self._end_terms(costs, of, visit=False)

    def _end_terms(self, costs: StepCosts, of: Layouts, *, visit: bool) -> F64:
        """Of the first layout: of everything but the layers."""
        device, total = self.setting.accelerator, np.zeros(len(TERMS))
        assert device is not None
        total[FIXED] += len(costs.tokens) * self.setting.cpu.step_s
        total[DEVICE_TERMS + FIXED] += len(costs.tokens) * device.step_s
        total[:DEVICE_TERMS] += costs.embedding
        way, last = int(of.rows[0]), len(self.cuts.rows) - 1
        if way in (0, last):
            at = DEVICE_TERMS if way == 0 else 0
            total[at : at + DEVICE_TERMS] += costs.heads[way == 0]
        elif costs.times.head_price is not None:
            head: UnitPrice = costs.times.head_price
            total += head.terms[0][:, 0, way]
        up, down = self._crossings(costs.tokens, costs.outputs, of, visit)
        total[LINK] += float(up[0] + down[0])
        return total

    def visiting_terms(self, prefill: Prefill, memory: CutMemory, of: Layouts, some: Bools) -> F64:
        """[TERMS] of the first of `of`."""
        total = self._end_terms(self._ends(prefill, some), of, visit=True)
        own = prefill.accelerator[:, some].sum(axis=1)
        total[DEVICE_TERMS : 2 * DEVICE_TERMS] += memory.counts(of)[2][0] @ own
        total[VISIT] += float(visiting_end_s(prefill, self.cuts, memory, of, some).sum())
        return total
