"""Finds the fastest layouts with cut layers, beside those of whole layers that a search has.

Layers come in three kinds: the first lie on the CPU, then some are cut alike, the rest lie on the
accelerator. That is as good as any share for each layer: times above the lower convex hull of all
shares are never chosen, and a point of the hull is a mixture of two kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from helm.compiler.budget import Budget, memory_bytes, missing
from helm.compiler.candidate import BOTH, Candidate, CutUse, Missing, goals, predicted
from helm.compiler.choices import Choice
from helm.compiler.cut.memory import CutMemory
from helm.compiler.cut.price import CutPrices, StepPrice
from helm.compiler.cut.ways import HOMES, CutModel, Layouts, cut_model
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.times import F64, I64, TERMS
from helm.machine.profile import Profile
from helm.plan.records import Workload
from helm.plan.units import CPU

_COUNTS = 32  # of layers that are cut, about
_HEADS = 2  # on each side of the balance that are tried, besides none and all
_FEW = 2  # cut layers between whole ones on both sides
_FIRST, _PLAYED = 384, 32  # layouts that are looked at closely, and whose visits are played


class CutSearch:
    """Of a model on a machine. choices: of whole layers, whose settings and prompts are these too.
    reason: why nothing can be cut, else ""."""

    def __init__(self, choices: Sequence[Choice], space: Space, profile: Profile) -> None:
        self._choices, self._space, self._profile = choices, space, profile
        self.reason = ""
        if profile.accelerator is None:
            self.reason = "the machine has no GPU"
        elif space.uncut or space.kv == "host" or space.one_boundary:
            self.reason = space.uncut or "its KV cache may not lie on the GPU"
        else:
            setting = choices[0].setting
            found = cut_model(setting.model, setting.classes, space.columns)
            self.reason = found if isinstance(found, str) else ""
            self._ways = () if isinstance(found, str) else tuple(self._made(found))

    def _made(self, cuts: CutModel) -> Iterator[Way]:
        """Every way to run prompts, for every number of sequences."""
        prices: dict[int, CutPrices] = {}
        seen = set[int]()
        for choice in self._choices:
            setting, prefill = choice.setting, choice.steps
            if id(prefill) in seen:
                continue  # with the head elsewhere
            seen.add(id(prefill))
            price = prices.setdefault(setting.batch, CutPrices(setting, cuts))
            memory = CutMemory(setting, cuts, choice.each, choice.mode == "stream")
            leasts = [None] if choice.mode == "compute" else prefill.visit_choices()
            for least in leasts:
                yield Way(choice, least, price, memory)

    def best(
        self, limits: ResourceLimits, workload: Workload, batches: Collection[int]
    ) -> list[Candidate]:
        """The best layout of each way to run prompts, the best of all first; what fits before what
        does not."""
        if self.reason:
            return []
        available = memory_bytes(self._profile, limits)
        scans = (
            _Scan(way, limits, workload, available, self._space)
            for way in self._ways
            if way.batch in batches
        )
        found = [one for scan in scans if (one := scan.best()) is not None]
        return [make() for _, make in sorted(found, key=lambda one: one[0])]


class Way:
    """One way to run prompts, with what layouts take then. least: weights of the CPU visit in steps
    of at least so many tokens; None: in none."""

    def __init__(
        self, choice: Choice, least: int | None, prices: CutPrices, memory: CutMemory
    ) -> None:
        self.choice, self.least, self._prices, self.memory = choice, least, prices, memory
        self.cuts, self.batch = prices.cuts, choice.setting.batch
        self.visits = least is not None and bool((choice.steps.tokens >= least).any())

    @functools.cached_property
    def prompts(self) -> list[StepPrice]:
        return self._prices.prompts(self.choice.steps, self.least)

    def decode(self, context: int) -> StepPrice:
        return self._prices.decode(context)

    def ttft_s(self, of: Layouts, *, quick: bool = False) -> F64:
        """[layouts]"""
        each = [price.seconds(of, self.memory, quick=quick) for price in self.prompts]
        return np.asarray(sum(each))

    def candidate(
        self, of: Layouts, limits: ResourceLimits, workload: Workload, available: tuple[int, int]
    ) -> Candidate:
        """Of the one layout, for the limits and the workload that it was found for."""
        setting, cuts, prefill = self.choice.setting, self.cuts, self.choice.steps
        heads, elements, rows = (ways.marks.tolist() for ways in cuts.units)
        cpu, cut, home, head, element, row = (int(each[0]) for each in of.arrays)
        use = CutUse(
            layers=cut, heads=heads[head], of_heads=heads[-1], elements=elements[element],
            of_elements=elements[-1], rows=rows[row], of_rows=rows[-1], home=HOMES[home],
        )  # fmt: skip
        items = self.memory.items(of)
        budget = Budget(*({n: each[:, None] for n, each in own.items()}
                          for own in (items.cpu, items.accelerator)))  # fmt: skip
        lacks = [int(each[0]) for each in missing(items, available, limits)]
        expected, full = (self.decode(n) for n in (workload.expected_context, workload.context))
        terms = expected.terms(of, self.memory), sum(p.terms(of, self.memory) for p in self.prompts)
        named = [dict(zip(TERMS, map(float, own), strict=True)) for own in terms]
        ttft_s = float(self.ttft_s(of)[0])
        decode_s, full_s = (float(p.seconds(of, self.memory)[0]) for p in (expected, full))
        # A row of the layouts of whole layers, from where all that visits does.
        at = 1 + cpu + cut
        least, kv_blocks = self.least, setting.pages_of(workload.context)
        return Candidate(
            blocks=cuts.blocks,
            cpu_blocks=cpu,
            embedding=CPU,
            head="cpu" if use.rows == use.of_rows else BOTH if use.rows else "accelerator",
            kv_blocks=kv_blocks,
            accelerator_kv_blocks=kv_blocks,
            overflow="stream",
            kv=None,
            decode_groups=1,
            prefill_mode=self.choice.mode,
            prefill_overlap=False,
            step_tokens=setting.limits.step_tokens,
            stream_tokens=0 if least is None else prefill.visit_tokens(at, least),
            stream_pages=0 if least is None else setting.visit_pages,
            threads=setting.cpu.threads,
            sequences=setting.batch,
            predicted=predicted(workload, self.batch, *named, ttft_s, decode_s, full_s),
            memory=budget.at(0, 0),
            missing=Missing(*lacks),
            objective_s=goals(workload, self.batch, ttft_s, decode_s)[0],
            cut=use,
        )


class _Scan:
    """All layouts of one way to run prompts."""

    def __init__(
        self, way: Way, limits: ResourceLimits, workload: Workload, available: tuple[int, int],
        space: Space,
    ) -> None:  # fmt: skip
        self._way, self._cuts, self._space = way, way.cuts, space
        self._limits, self._workload, self._available = limits, workload, available
        self._decode = way.decode(workload.expected_context)
        self._blocks = way.cuts.blocks

    def best(self) -> tuple[Any, Any] | None:
        """What is to be least of it, and how to make a candidate of it."""
        first = self._coarse()
        if not len(first):
            return None
        every = self._around(self._sorted(first, quick=True)[0].at(np.s_[:_FIRST]))
        found, keys = self._sorted(every, quick=True)
        if self._way.visits:
            found, keys = self._sorted(found.at(np.s_[:_PLAYED]), quick=False)
        one = found.at(np.s_[:1])
        args = self._limits, self._workload, self._available
        return tuple(keys[0]), lambda: self._way.candidate(one, *args)

    def _sorted(self, of: Layouts, *, quick: bool) -> tuple[Layouts, F64]:
        """The best first: what lacks least, and then is fastest; with these numbers."""
        lacks = sum(missing(self._way.memory.items(of), self._available, self._limits))
        decode = self._decode.seconds(of, self._way.memory)
        ttft = self._way.ttft_s(of, quick=quick)
        first, second = goals(self._workload, self._way.batch, ttft, decode)
        order = np.lexsort((second, first, lacks))
        return of.at(order), np.stack([lacks, first, second], axis=1)[order]

    # --- layouts ---------------------------------------------------------------------------------

    def _coarse(self) -> Layouts:
        """Every number of layers on the CPU, or about that, with such heads, rows and elements on
        the CPU as are best within memory, by and large."""
        found = [self._with_elements(self._grid(home)) for home in (0, 1) if self._allows(home)]
        return self._chosen(_joined([*found, self._grid_of_whole_layers()]))

    def _chosen(self, of: Layouts) -> Layouts:
        """Those that have what is asked for: where something must be cut, not units that lie as a
        whole on two devices."""
        if self._space.policy != "cut":
            return of
        heads, elements, rows = (
            ways.inside(at)
            for ways, at in zip(self._cuts.units, (of.heads, of.elements, of.rows), strict=True)
        )
        return of.at((of.cut > 0) & (heads | elements) | rows)

    def _allows(self, home: int) -> bool:
        return any(ways.pieces[home] for ways in self._cuts.units[:2])

    def _grid(self, home: int) -> Layouts:
        blocks, step = self._blocks, max(1, self._blocks // _COUNTS)
        pairs = {
            (cpu, cut)
            for cut in {*range(1, _FEW + 1), *range(_FEW + 1, blocks, step), blocks}
            if cut <= blocks
            for cpu in (range(0, blocks - cut + 1, step) if cut <= _FEW else (0, blocks - cut))
        }
        return _product(np.array(sorted(pairs), np.int64), home, self._near_heads(home), self._some_rows())

    def _grid_of_whole_layers(self) -> Layouts:
        """Where the head alone is cut."""
        counts = np.arange(self._blocks + 1)
        rows = [n for n in self._some_rows() if 0 < n < self._cuts.head.last]
        return _product(np.stack([counts, np.zeros_like(counts)], axis=1), 0, [0], rows)

    def _near_heads(self, home: int) -> list[int]:
        ways = self._cuts.units[0]
        if not ways.pieces[home]:
            return [0, ways.last]
        times = self._decode.layers.totals[0][0, home]
        balance = int(np.argmin(times[1:-1])) + 1
        near = range(max(0, balance - _HEADS), min(ways.last, balance + _HEADS) + 1)
        return sorted({0, ways.last, *near})

    def _some_rows(self) -> list[int]:
        head = self._cuts.head
        if not head.pieces[0]:
            return [0, head.last]
        balance = int(np.argmin(self._decode.head.sum(axis=0)[1:-1])) + 1
        return sorted({0, head.last, balance, (balance + head.last) // 2})

    def _with_elements(self, of: Layouts) -> Layouts:
        """Those of the balance, within what both memories allow; and none, and all."""
        attention, mlp, _ = self._cuts.units
        home = int(of.home[0])
        none, full = of.with_(elements=0), of.with_(elements=mlp.last)
        made = [none.at(none.heads > 0), full.at(full.heads < attention.last)]
        if not mlp.pieces[home]:
            return _joined(made)
        times = self._decode.layers.totals[1][:, home].mean(axis=0)
        balance = int(np.argmin(times[1:-1])) + 1
        least, most = self._within(of)
        made.append(of.with_(elements=np.clip(np.minimum(np.maximum(balance, least), np.maximum(most, 1)), 1, mlp.last - 1)))
        shares = (0.0, 0.5, 1.0) if self._workload.objective != "decode" else (0.0,)
        for share in shares:
            at = np.rint(least + share * (most - least)).astype(np.int64)
            made.append(of.with_(elements=np.clip(at, 1, mlp.last - 1)))
        return _joined(made)

    def _within(self, of: Layouts) -> tuple[I64, I64]:
        """[layouts] the fewest elements on the CPU with which the accelerator holds the rest, the
        most with which the CPU holds them: bytes are in proportion, but for alignment."""
        marks, limits = self._cuts.units[1].marks, self._limits
        ends = [self._way.memory.items(of.with_(elements=n)) for n in (1, len(marks) - 2)]
        bounds = [
            ([sum(each.cpu.values()) for each in ends], self._available[0]),
            ([sum(each.accelerator.values()) for each in ends], self._available[1]),
            ([each.accelerator["weights"] for each in ends], limits.accelerator_weights_bytes),
        ]
        span = max(1, int(marks[-2] - marks[1]))
        cpu, *own = (
            marks[1] + (room - low) * span / np.where(high == low, np.inf, high - low)
            for (low, high), room in bounds
            if room is not None
        )
        least = np.searchsorted(marks, np.max(own, axis=0) - _SLACK, side="left")
        most = np.searchsorted(marks, cpu + _SLACK, side="right") - 1
        return np.clip(least, 1, len(marks) - 2), np.clip(most, 0, len(marks) - 2)

    def _around(self, of: Layouts) -> Layouts:
        """Layouts and their neighbours: more and fewer elements, as exactly as memory allows."""
        mlp, head, made = self._cuts.units[1], self._cuts.head, [of]
        inner = of.at((of.cut > 0) & mlp.inside(of.elements))
        if len(inner):
            least, most = self._within(inner)
            for at in (least - 1, least, least + 1, most, most + 1, inner.elements + 1, inner.elements - 1):
                made.append(inner.with_(elements=np.clip(at, 1, mlp.last - 1)))
        rows = of.at(head.inside(of.rows))
        for step in (-5, -2, -1, 1, 2, 5):
            made.append(rows.with_(rows=np.clip(rows.rows + step, 1, head.last - 1)))
        cut = of.at(of.cut > 0)
        for cpu, more in ((-1, 1), (1, -1), (0, 1), (0, -1), (1, 0), (-1, 0)):
            counts = cut.cpu + cpu, cut.cut + more
            there = (counts[0] >= 0) & (counts[1] > 0) & (sum(counts) <= self._blocks)
            made.append(cut.with_(cpu=counts[0], cut=counts[1]).at(there))
        columns = np.unique(np.stack(_joined(made).arrays), axis=1)
        return self._chosen(Layouts(*columns))


_SLACK = 1e-6


def _product(pairs: I64, home: int, heads: Sequence[int], rows: Sequence[int]) -> Layouts:
    """Of (layers on the CPU, cut) with all heads and rows; no elements."""
    pair, head, row = (
        each.ravel()
        for each in np.meshgrid(
            np.arange(len(pairs)), np.array(heads, np.int64), np.array(rows, np.int64), indexing="ij"
        )
    )
    nothing = np.zeros(len(pair), np.int64)
    return Layouts(pairs[pair, 0], pairs[pair, 1], nothing + home, head, nothing, row)


def _joined(parts: Iterable[Layouts]) -> Layouts:
    return Layouts(
        *(
            np.concatenate(each).astype(np.int64)
            for each in zip(*(p.arrays for p in parts), strict=True)
        )
    )
