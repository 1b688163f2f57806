"""Finds the fastest layouts with cut layers, beside those of whole layers that a search has.

Layers come in three kinds: the first lie on the CPU, then some are cut alike, the rest lie on the
accelerator. That is as good as any share for each layer: times above the lower convex hull of all
shares are never chosen, and a point of the hull is a mixture of two kinds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from helm.compiler.budget import Budget, memory_bytes, missing
from helm.compiler.candidate import BOTH, Candidate, Missing, goals, predicted
from helm.compiler.choices import Choice
from helm.compiler.cut.bound import least_s
from helm.compiler.cut.memory import CutMemory
from helm.compiler.cut.price import CutPrices, Resting, StepPrice
from helm.compiler.cut.ways import CutModel, Layouts, Ways, cut_model, cut_use
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.times import F64, I64, TERMS
from helm.machine.profile import Profile
from helm.plan.records import Workload
from helm.plan.units import CPU

_COUNTS = 16  # of layers that are cut, about
_HEADS = 2  # on each side of the balance that are tried, besides none and all
_FEW = 2  # cut layers between whole ones on both sides
_KEPT = (256, 64, 16)  # layouts around which others are tried, in turn, until none is better
_PLAYED = 32  # whose visits are played
_SLACK = 1e-6
_FAR = 1.1  # neighbours are better than a layout of the coarse grid by less than half of that
Key = tuple[float, ...]
# What neighbours have more of: layers on the CPU, cut ones, home, heads, elements, rows.
_STEPS = np.array([
    *([a, b, 0, 0, 0, 0] for a, b in ((-1, 1), (1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))),
    *([0, 0, n, 0, 0, 0] for n in (-1, 1)),
    *([0, 0, 0, n, 0, 0] for n in (-1, 1)),
    *([0, 0, 0, 0, n, 0] for n in (-4, -1, 0, 1, 4)),
    *([0, 0, 0, 0, 0, n] for n in (-5, -2, -1, 1, 2, 5)),
], np.int64).T  # fmt: skip


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
        seen = set[tuple[int, str]]()
        for choice in self._choices:
            setting, prefill = choice.setting, choice.steps
            if (id(prefill), choice.mode) in seen:
                continue  # with the head elsewhere
            seen.add((id(prefill), choice.mode))
            price = prices.setdefault(setting.batch, CutPrices(setting, cuts))
            memory = CutMemory(setting, cuts, choice.each, choice.mode == "visit")
            leasts = [None] if choice.mode == "compute" else prefill.visit_choices()
            for least in leasts:
                yield Way(choice, least, price, memory)

    def best(
        self, limits: ResourceLimits, workload: Workload, batches: Collection[int], below_s: float
    ) -> Candidate | None:
        """The best layout of all ways to run prompts; where nothing fits, what lacks least. None if
        none is below so many seconds."""
        if self.reason:
            return None
        available, scans = memory_bytes(self._profile, limits), list[_Scan]()
        ways = [way for way in self._ways if way.batch in batches]
        bounds = [(way.least_s(workload, available[1]), way) for way in ways]
        least_s = below_s
        for bound_s, way in sorted(bounds, key=lambda one: one[0]):
            if bound_s >= least_s:
                break
            scan = _Scan(way, limits, workload, available, self._space, bound_s)
            if len(scan.found):
                scans.append(scan)
                least_s = min(least_s, scan.fitting_s)
        scans.sort(key=lambda scan: tuple(scan.keys[0]))
        best: tuple[Key, Callable[[], Candidate]] | None = None
        for scan in scans:
            # Of what is far from the best no neighbour is better.
            far = scan.fitting_s > scans[0].fitting_s * _FAR or scan.bound_s >= least_s
            if best is None or not far:
                best = min(filter(None, (best, scan.best())), key=lambda one: one[0])
                least_s = min(least_s, best[0][1]) if best[0][0] == 0 else least_s
        return None if best is None else best[1]()


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

    def least_s(self, workload: Workload, available: int) -> float:
        """The objective of any layout is no less, within so many bytes of the accelerator."""
        there, room = self.memory.there, self.memory.room(available)
        ttft_s = sum(least_s(price, there, room) for price in self.prompts)
        decode_s = least_s(self.decode(workload.expected_context), there, room)
        return float(goals(workload, self.batch, ttft_s, decode_s)[0])

    def ttft_s(self, of: Layouts, *, quick: bool = False) -> F64:
        """[layouts]"""
        each = [price.seconds(of, quick=quick) for price in self.prompts]
        return np.asarray(sum(each))

    def candidate(
        self, of: Layouts, limits: ResourceLimits, workload: Workload, available: tuple[int, int]
    ) -> Candidate:
        """Of the one layout, for the limits and the workload that it was found for."""
        setting, cuts, prefill = self.choice.setting, self.cuts, self.choice.steps
        use, cpu = cut_use(cuts, of), int(of.cpu[0])
        items = self.memory.items(of)
        budget = Budget(*({n: each[:, None] for n, each in own.items()}
                          for own in (items.cpu, items.accelerator)))  # fmt: skip
        lacks = [int(each[0]) for each in missing(items, available, limits)]
        expected, full = (self.decode(n) for n in (workload.expected_context, workload.context))
        prefill_terms = np.sum([price.terms(of) for price in self.prompts], axis=0)
        named = [
            dict(zip(TERMS, terms.tolist(), strict=True))
            for terms in (expected.terms(of), prefill_terms)
        ]
        ttft_s, decode_s, full_s = (
            float(s[0]) for s in (self.ttft_s(of), expected.seconds(of), full.seconds(of))
        )
        # A row of the layouts of whole layers, from where all that visits does.
        at = 1 + cpu + use.layers
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
            visit_tokens=0 if least is None else prefill.visit_tokens(at, least),
            visit_pages=0 if least is None else setting.visit_pages,
            threads=setting.cpu.threads,
            sequences=setting.batch,
            predicted=predicted(workload, self.batch, (ttft_s, decode_s, full_s), named),
            memory=budget.at(0, 0),
            missing=Missing(*lacks),
            objective_s=goals(workload, self.batch, ttft_s, decode_s)[0],
            cut=use,
        )


class _Scan:
    """All layouts of one way to run prompts. found, keys: those of a coarse grid, see `_sorted`.
    bound_s: the objective of any."""

    def __init__(
        self, way: Way, limits: ResourceLimits, workload: Workload, available: tuple[int, int],
        space: Space, bound_s: float,
    ) -> None:  # fmt: skip
        self.bound_s = bound_s
        self._way, self._cuts, self._space = way, way.cuts, space
        self._limits, self._workload, self._available = limits, workload, available
        self._decode = way.decode(workload.expected_context)
        assert isinstance(self._decode.layers, Resting)
        self._times = self._decode.layers
        self._blocks = way.cuts.blocks
        last = [ways.last for ways in self._cuts.units]
        self._most = np.array([self._blocks, self._blocks, 1, *last])  # of each column
        self.found, self.keys = self._sorted(self._coarse(), quick=True)

    @property
    def fitting_s(self) -> float:
        """The objective of the best that fits, infinite where none does."""
        return float(self.keys[0, 1]) if self.keys[0, 0] == 0 else np.inf

    def best(self) -> tuple[Key, Callable[[], Candidate]]:
        """What is to be least of it, and how to make a candidate of it."""
        found, keys = self.found, self.keys
        best, counts = None, itertools.chain(_KEPT, itertools.repeat(_KEPT[-1]))
        while best != (best := tuple(keys[0])):
            around = self._around(found.at(np.s_[: next(counts)]))
            found, keys = self._sorted(around, quick=True)
        if self._way.visits:
            found, keys = self._sorted(found.at(np.s_[:_PLAYED]), quick=False)
        one = found.at(np.s_[:1])
        args = self._limits, self._workload, self._available
        return tuple(keys[0].tolist()), lambda: self._way.candidate(one, *args)

    def _sorted(self, of: Layouts, *, quick: bool) -> tuple[Layouts, F64]:
        """The best first: what lacks least, and then is fastest; with these numbers. Where enough
        fit, others are left out."""
        lacks = np.sum(missing(self._way.memory.items(of), self._available, self._limits), axis=0)
        if (lacks == 0).sum() >= _KEPT[0]:
            of, lacks = of.at(lacks == 0), lacks[lacks == 0]
        decode = self._decode.seconds(of)
        ttft = self._way.ttft_s(of, quick=quick)
        first, second = goals(self._workload, self._way.batch, ttft, decode)
        order = np.lexsort((second, first, lacks))
        return of.at(order), np.stack([lacks, first, second], axis=1)[order]

    # --- layouts ---------------------------------------------------------------------------------

    def _coarse(self) -> Layouts:
        """Every number of layers on the CPU, or about that, with such heads, rows and elements on
        the CPU as are best within memory, by and large."""
        blocks, step = self._blocks, max(1, self._blocks // _COUNTS)
        pairs = {
            (cpu, cut)
            for cut in {*range(1, _FEW + 1), *range(_FEW + 1, blocks, step), blocks}
            if cut <= blocks
            for cpu in (range(0, blocks - cut + 1, step) if cut <= _FEW else (0, blocks - cut))
        }
        attention, mlp, head = self._cuts.units
        rows = self._near(head, self._decode.head.sum(axis=0), 0)
        found = [_grid([(n, 0) for n in range(blocks + 1)], 0, [0], rows)]
        for home in (0, 1):
            if self._cuts.whole:  # attentions on one device, mlps on the other
                every = [(a, b - a) for a in range(blocks) for b in range(a + 1, blocks + 1)]
                found.append(_grid(every, home, [1 - home], rows).with_(elements=home))
            elif attention.pieces[home] or mlp.pieces[home]:
                times = self._times.attention_s[0, home]
                heads = self._near(attention, times, home, _HEADS)
                found += self._with_elements(_grid(sorted(pairs), home, heads, rows), home)
        return self._chosen(found)

    @staticmethod
    def _near(ways: Ways, times: F64, home: int, near: int | None = None) -> list[int]:
        """None, all, and about what is fastest; or without near that, and between it and all."""
        if not ways.pieces[home]:
            return [0, ways.last]
        best = int(np.argmin(times[1:-1])) + 1
        some = [best, (best + ways.last) // 2]
        if near is not None:
            some = list(range(max(0, best - near), min(ways.last, best + near) + 1))
        return sorted({0, ways.last, *some})

    def _with_elements(self, of: Layouts, home: int) -> list[Layouts]:
        """None, all, what is fastest within what memory allows, and the least and the most that it
        allows."""
        mlp = self._cuts.units[1]
        if not mlp.pieces[home]:
            return [of, of.with_(elements=mlp.last)]
        times = self._times.mlp_s[:, home].mean(axis=0)
        least, most = self._within(of)
        best = np.clip(np.argmin(times[1:-1]) + 1, least, np.maximum(most, least))
        some = (0, mlp.last, np.asarray(best), least, (least + most) // 2, most)
        return [of.with_(elements=each) for each in some]

    def _within(self, of: Layouts) -> tuple[I64, I64]:
        """[layouts] the fewest elements on the CPU with which the accelerator holds the rest, the
        most with which the CPU holds them: bytes are in proportion, but for alignment."""
        marks, limits = self._cuts.units[1].marks, self._limits
        ends = [of.with_(elements=n).columns for n in (1, len(marks) - 2)]
        items = self._way.memory.items(Layouts(np.concatenate(ends, axis=1)))

        def bound(sizes: I64, room: int) -> F64:
            low, high = sizes.reshape(2, -1)
            rise = np.where(high == low, np.inf, high - low)
            return np.asarray(marks[1] + (room - low) * (marks[-2] - marks[1]) / rise)

        cpu, own = (
            bound(np.asarray(sum(each.values())), room)
            for each, room in zip((items.cpu, items.accelerator), self._available, strict=True)
        )
        if limits.accelerator_weights_bytes is not None:
            weights = items.accelerator["weights"]
            own = np.maximum(own, bound(weights, limits.accelerator_weights_bytes))
        least = np.searchsorted(marks, own - _SLACK, side="left")
        most = np.searchsorted(marks, cpu + _SLACK, side="right") - 1
        return np.clip(least, 1, len(marks) - 2), np.clip(most, 1, len(marks) - 2)

    def _around(self, of: Layouts) -> Layouts:
        """Layouts and their neighbours, these also with as few and as many elements as memory
        allows."""
        near = Layouts((of.columns[:, :, None] + _STEPS[:, None]).reshape(6, -1))
        there = ((near.columns >= 0) & (near.columns <= self._most[:, None])).all(axis=0)
        near = near.at(there & (near.cpu + near.cut <= self._blocks))
        inner = near.at((near.cut > 0) & self._cuts.units[1].inside(near.elements))
        inner, made = self._distinct(inner.with_(elements=0)), [of, near]
        if len(inner):
            made += [inner.with_(elements=each) for each in self._within(inner)]
        return self._chosen(made)

    def _chosen(self, parts: Iterable[Layouts]) -> Layouts:
        """Each once, where layers or the head lie on two devices, with a home that they can have.
        Where something must be cut, units that lie there as a whole are not enough."""
        of = Layouts(np.concatenate([each.columns for each in parts], axis=1))
        of.columns[2:5] *= of.cut > 0
        of = self._distinct(of)
        places = zip(self._cuts.units, (of.heads, of.elements, of.rows), strict=True)
        inside = np.stack([ways.inside(at) for ways, at in places])
        homes = np.array([[bool(each) for each in ways.pieces] for ways in self._cuts.units[:2]])
        own = (of.heads > 0) | (of.elements > 0)
        there = (of.heads < self._cuts.units[0].last) | (of.elements < self._cuts.units[1].last)
        some = np.where(of.cut > 0, own & there, inside[2])
        some &= (~inside[:2] | homes[:, of.home]).all(axis=0)
        if self._space.policy == "cut" and not self._cuts.whole:
            some &= inside.any(axis=0)
        return of.at(some)

    def _distinct(self, of: Layouts) -> Layouts:
        places = np.ravel_multi_index(of.columns, (self._most + 1).tolist())
        return of.at(np.unique(places, return_index=True)[1])


def _grid(
    pairs: Sequence[tuple[int, int]], home: int, heads: Sequence[int], rows: Sequence[int]
) -> Layouts:
    """Of (layers on the CPU, cut) with all heads and rows; no elements."""
    found = [(*pair, home, n, 0, row) for pair in pairs for n in heads for row in rows]
    return Layouts(np.array(found, np.int64).T)
