"""Finds the fastest layouts with cut layers, beside those of whole layers that a search has.

Layers come in three kinds: the first lie on the CPU, then some are cut alike, the rest lie on the
accelerator. That is as good as any share for each layer: times above the lower convex hull of all
shares are never chosen, and a point of the hull is a mixture of two kinds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from helm.compiler.budget import Items, StageBytes, memory_bytes, stage_bytes
from helm.compiler.cut_memory import CutMemory
from helm.compiler.cut_space import CutModel, Layouts, cut_model
from helm.compiler.cut_steps import CutSteps
from helm.compiler.prefill import Prefill, prepare
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.setting import Setting
from helm.compiler.times import F64, I64, TERMS
from helm.machine.profile import Profile
from helm.plan.records import Workload

_COUNTS = 32  # of layers that are cut, about
_HEADS = 2  # on each side of the balance that are tried, besides none and all
_FEW = 2  # cut layers between whole ones on both sides
_FIRST, _PLAYED = 384, 32  # layouts that are looked at closely, and whose visits are played


@dataclass(frozen=True)
class CutWay:
    """How prompts run: visits in steps of at least so many tokens, None: in none."""

    prefill: Prefill
    visit_least: int | None


@dataclass(frozen=True)
class Found:
    """One layout with its steps. of: of length 1."""

    steps: CutSteps
    memory: CutMemory
    way: CutWay
    of: Layouts
    decode_s: float
    ttft_s: float
    lacks: int
    key: tuple[float, ...]

    @property
    def setting(self) -> Setting:
        return self.way.prefill.setting

    @property
    def items(self) -> tuple[Items, Items]:
        return self.memory.items(self.of)

    def prefill_terms(self) -> F64:
        """See `helm.compiler.times.TERMS`."""
        prefill, least = self.way.prefill, self.way.visit_least
        visits = np.zeros(prefill.steps, bool) if least is None else prefill.tokens >= least
        total = np.zeros(len(TERMS))
        rest = self.steps.prompts(prefill, ~visits)
        if rest is not None:
            total += self.steps.terms(rest, self.memory, self.of)
        if visits.any():
            total += self.steps.visiting_terms(prefill, self.memory, self.of, visits)
        return total


class CutSearch:
    """Of a model on a machine. reason: why nothing can be cut, else ""."""

    def __init__(self, settings: Iterable[Setting], space: Space, profile: Profile) -> None:
        self._settings, self._space, self._profile = tuple(settings), space, profile
        self.cuts: CutModel | None = None
        self.reason = ""
        kv = "its KV cache may not lie on the GPU"
        if profile.accelerator is None:
            self.reason = "the machine has no GPU"
        elif space.uncut or space.kv == "host" or space.one_boundary:
            self.reason = space.uncut or kv
        else:
            setting = self._settings[0]
            found = cut_model(setting.model, setting.classes, space.columns)
            self.reason = found if isinstance(found, str) else ""
            self.cuts = None if isinstance(found, str) else found
        self._steps: dict[int, CutSteps] = {}
        self._sized: dict[tuple[int, int], tuple[Prefill, StageBytes]] = {}

    def best(self, limits: ResourceLimits, workload: Workload, batches: list[int]) -> list[Found]:
        """The best layout of each way to run prompts, the best of all first; what fits before what
        does not."""
        if self.cuts is None:
            return []
        found = [
            one
            for number, setting in enumerate(self._settings)
            if setting.batch in batches
            for one in self._of(number, setting, limits, workload)
        ]
        return sorted(found, key=lambda one: one.key)

    def _of(
        self, number: int, setting: Setting, limits: ResourceLimits, workload: Workload
    ) -> Iterator[Found]:
        cuts = self.cuts
        assert cuts is not None
        if number not in self._steps:
            self._steps[number] = CutSteps(setting, cuts)
        steps = self._steps[number]
        for mode in self._space.prefill:
            for sized in self._sizes(setting, mode):
                key = (number, sized.limits.step_tokens)
                if key not in self._sized:
                    self._sized[key] = (prepare(sized), stage_bytes(sized))
                prefill, each = self._sized[key]
                memory = CutMemory(sized, cuts, each, mode == "stream")
                ways = [None] if mode == "compute" else prefill.visit_choices()
                for least in ways:
                    scan = _Scan(steps, memory, CutWay(prefill, least), limits, workload,
                                 memory_bytes(self._profile, limits), self._space)  # fmt: skip
                    one = scan.best()
                    if one is not None:
                        yield one

    def _sizes(self, setting: Setting, mode: str) -> Iterator[Setting]:
        yield setting
        if mode == "compute":
            return
        most = 1 << (setting.workload.prompt * setting.batch - 1).bit_length()
        for tokens in self._space.visit_steps:
            if setting.limits.step_tokens < tokens <= most:
                limits = dataclasses.replace(setting.limits, step_tokens=tokens)
                yield dataclasses.replace(setting, limits=limits)


class _Scan:
    """All layouts of one way to run prompts."""

    def __init__(
        self, steps: CutSteps, memory: CutMemory, way: CutWay, limits: ResourceLimits,
        workload: Workload, available: tuple[int, int], space: Space,
    ) -> None:  # fmt: skip
        self._space = space
        self._steps, self._memory, self._way = steps, memory, way
        self._limits, self._workload, self._available = limits, workload, available
        self._cuts = steps.cuts
        self._decode = steps.decode(workload.expected_context)
        least, tokens = way.visit_least, way.prefill.tokens
        self._visits = np.zeros(len(tokens), bool) if least is None else tokens >= least
        self._rest = steps.prompts(way.prefill, ~self._visits)
        self._blocks = len(steps.setting.classes.member)

    def best(self) -> Found | None:
        first = self._coarse()
        if not len(first):
            return None
        close = first.at(self._order(first, self._scores(first, quick=True))[:_FIRST])
        every = self._around(close)
        scores = self._scores(every, quick=True)
        order = self._order(every, scores)
        if self._visits.any():
            every = every.at(order[:_PLAYED])
            scores = self._scores(every, quick=False)
            order = self._order(every, scores)
        chosen = every.at(order[:1])
        lacks, decode, ttft = (float(each[order[0]]) for each in scores)
        batch = self._steps.setting.batch
        key = (lacks, *self._ranks(decode, ttft, batch))
        return Found(self._steps, self._memory, self._way, chosen, decode, ttft, int(lacks), key)

    # --- layouts ---------------------------------------------------------------------------------

    def _coarse(self) -> Layouts:
        """Every pair of counts with every cut, and as many elements on the CPU as are best within
        memory, by and large."""
        found = [self._with_elements(self._grid(home)) for home in (0, 1) if self._allows(home)]
        if self._cuts.whole:
            found = [self._grid_of_whole_units()]
        found.append(self._grid_of_whole_layers())
        return self._chosen(_joined(found))

    def _chosen(self, of: Layouts) -> Layouts:
        """Those that have what is asked for: where something must be cut, not units that lie as a
        whole on two devices."""
        if self._space.policy != "cut" or self._cuts.whole:
            return of
        inside = [
            (ways > 0) & (ways < len(marks) - 1)
            for ways, marks in (
                (of.heads, self._cuts.heads), (of.elements, self._cuts.elements),
                (of.rows, self._cuts.rows),
            )
        ]  # fmt: skip
        return of.at((of.cut > 0) & (inside[0] | inside[1]) | inside[2])

    def _allows(self, home: int) -> bool:
        times = self._decode.times
        ways = np.concatenate([times.attention[:, home, 1:-1], times.mlp[:, home, 1:-1]], axis=1)
        return bool(ways.size and np.isfinite(ways).any())

    def _grid(self, home: int) -> Layouts:
        blocks, step = self._blocks, max(1, self._blocks // _COUNTS)
        pairs = {
            (cpu, cut)
            for cut in {*range(1, _FEW + 1), *range(_FEW + 1, blocks, step), blocks}
            if cut <= blocks
            for cpu in (range(0, blocks - cut + 1, step) if cut <= _FEW else (0, blocks - cut))
        }
        heads, rows = self._near_heads(home), self._some_rows()
        grid = np.meshgrid(np.arange(len(pairs)), heads, rows, indexing="ij")
        chosen = np.array(sorted(pairs), np.int64)[grid[0].ravel()]
        count = len(chosen)
        return Layouts(
            chosen[:, 0], chosen[:, 1], np.full(count, home), grid[1].ravel(),
            np.zeros(count, np.int64), grid[2].ravel(),
        )  # fmt: skip

    def _grid_of_whole_layers(self) -> Layouts:
        """Where the head alone is cut."""
        rows = np.array([n for n in self._some_rows() if 0 < n < len(self._cuts.rows) - 1])
        cpu, rows = (each.ravel() for each in np.meshgrid(np.arange(self._blocks + 1), rows))
        nothing = np.zeros(len(cpu), np.int64)
        return Layouts(
            cpu.astype(np.int64), nothing, nothing, nothing, nothing, rows.astype(np.int64)
        )

    def _grid_of_whole_units(self) -> Layouts:
        """Attentions of the layers in the middle are on one device, mlps on the other."""
        counts = range(self._blocks + 1)
        pairs = [(cpu, end - cpu) for cpu in counts for end in counts[cpu + 1 :]]
        grid = np.meshgrid(np.arange(len(pairs)), [0, 1], self._some_rows(), indexing="ij")
        chosen, there, rows = np.array(pairs, np.int64)[grid[0].ravel()], *(
            each.ravel().astype(np.int64) for each in grid[1:]
        )  # fmt: skip
        return Layouts(chosen[:, 0], chosen[:, 1], there, 1 - there, there, rows)

    def _near_heads(self, home: int) -> list[int]:
        last = len(self._cuts.heads) - 1
        times = self._decode.times.attention[0, home]
        balance = int(np.argmin(times[1:-1])) + 1 if last > 1 else 0
        near = range(max(0, balance - _HEADS), min(last, balance + _HEADS) + 1)
        return sorted({0, last, *near}) if np.isfinite(times[balance]) else [0, last]

    def _some_rows(self) -> list[int]:
        last = len(self._cuts.rows) - 1
        times = self._decode.times.head[1:-1]
        if not times.size or not np.isfinite(times).any():
            return [0, last]
        balance = int(np.argmin(times)) + 1
        return sorted({0, last, balance, (balance + last) // 2})

    def _with_elements(self, of: Layouts) -> Layouts:
        """Those of the balance, within what both memories allow; and none, and all."""
        last, home = len(self._cuts.elements) - 1, int(of.home[0])
        times = self._decode.times.mlp[:, home]
        none, full = (dataclasses.replace(of, elements=np.full(len(of), n)) for n in (0, last))
        whole = [none.at(none.heads > 0), full.at(full.heads < len(self._cuts.heads) - 1)]
        if last < 2 or not np.isfinite(times[0, 1]):
            return _joined(whole)
        balance = int(np.argmin(times.mean(axis=0)[1:-1])) + 1
        inner = dataclasses.replace(of, elements=np.full(len(of), balance))
        least, most = self._within(inner)
        shares = {0.0, 0.5, 1.0} if self._workload.objective != "decode" else {0.0}
        made = [inner]
        for share in sorted(shares):
            at = np.rint(least + share * (most - least)).astype(np.int64)
            made.append(dataclasses.replace(inner, elements=np.clip(at, 1, last - 1)))
        at = np.clip(np.minimum(np.maximum(balance, least), np.maximum(most, 1)), 1, last - 1)
        made[0] = dataclasses.replace(inner, elements=at)
        return _joined([*whole, *made])

    def _within(self, of: Layouts) -> tuple[I64, I64]:
        """[layouts] the fewest elements on the CPU with which the accelerator holds the rest, the
        most with which the CPU holds them; by what those of `of` lack or leave."""
        slack = [
            room - total for room, total in zip(self._available, self._totals(of), strict=True)
        ]
        if self._limits.accelerator_weights_bytes is not None:
            own = self._limits.accelerator_weights_bytes - self._memory.weights(of, 1)
            slack[1] = np.minimum(slack[1], own)
        last = len(self._cuts.elements) - 1
        least, most = np.ones(len(of), np.int64), np.full(len(of), last - 1)
        order = np.argsort(of.cpu * (self._blocks + 1) + of.cut, kind="stable")
        key = (of.cpu * (self._blocks + 1) + of.cut)[order]
        starts = np.flatnonzero(np.diff(key, prepend=-1, append=-1))
        owns, theres = self._memory.by_elements(of.at(order[starts[:-1]]))
        for number, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
            at, own, there = order[begin:end], owns[number], theres[number]
            now = of.elements[at]
            # Both rise and fall with the elements but for alignment.
            want = there[now] + slack[1][at]
            least[at] = 1 + np.searchsorted(-there[1:-1], -want, side="left")
            have = own[now] + slack[0][at]
            most[at] = np.searchsorted(own[1:-1], have, side="right")
        return np.minimum(least, last - 1), np.maximum(most, 0)

    def _around(self, of: Layouts) -> Layouts:
        """Layouts and their neighbours: more and fewer elements, as exactly as memory allows."""
        last, made = len(self._cuts.elements) - 1, [of]
        inner = of.at((of.cut > 0) & (of.elements > 0) & (of.elements < last))
        if len(inner):
            least, most = self._within(inner)
            for at in (least, least + 1, most, inner.elements + 1, inner.elements - 1):
                made.append(dataclasses.replace(inner, elements=np.clip(at, 1, last - 1)))
        rows, most = of.at((of.rows > 0) & (of.rows < len(self._cuts.rows) - 1)), self._cuts.rows
        for step in (-5, -2, -1, 1, 2, 5):
            at = np.clip(rows.rows + step, 1, len(most) - 2)
            made.append(dataclasses.replace(rows, rows=at))
        cut = of.at(of.cut > 0)
        for cpu, more in ((-1, 1), (1, -1), (0, 1), (0, -1), (1, 0), (-1, 0)):
            counts = cut.cpu + cpu, cut.cut + more
            there = (counts[0] >= 0) & (counts[1] > 0) & (sum(counts) <= self._blocks)
            moved = dataclasses.replace(cut, cpu=counts[0], cut=counts[1])
            made.append(moved.at(there))
        return self._chosen(_unique(_joined(made)))

    # --- scores ----------------------------------------------------------------------------------

    def _totals(self, of: Layouts) -> tuple[I64, I64]:
        cpu, own = self._memory.items(of)
        return np.asarray(sum(cpu.values())), np.asarray(sum(own.values()))

    def _lacks(self, of: Layouts) -> F64:
        cpu, own = self._memory.items(of)
        host = np.maximum(0, sum(cpu.values()) - self._available[0])
        there = np.maximum(0, sum(own.values()) - self._available[1])
        limits = self._limits
        bounds = ((own["weights"], limits.accelerator_weights_bytes),
                  (own["kv"], limits.accelerator_kv_bytes))  # fmt: skip
        for size, most in bounds:
            if most is not None:
                there = np.maximum(there, size - most)
        return np.asarray(host + there, np.float64)

    def _scores(self, of: Layouts, *, quick: bool) -> tuple[F64, F64, F64]:
        """What is lacking, seconds of a decode step and until the first token, [layouts]."""
        decode = self._steps.seconds(self._decode, self._memory, of)
        ttft = np.zeros(len(of))
        if self._rest is not None:
            ttft = ttft + self._steps.seconds(self._rest, self._memory, of)
        if self._visits.any():
            ttft = ttft + self._steps.visiting_s(
                self._way.prefill, self._memory, of, self._visits, quick=quick
            )
        return self._lacks(of), decode, ttft

    def _ranks(self, decode: F64 | float, ttft: F64 | float, batch: int) -> tuple:  # type: ignore[type-arg]
        """What is to be least, and what breaks ties."""
        work = self._workload
        if work.objective == "decode":
            return decode, ttft
        if work.objective == "ttft":
            return ttft, decode
        waves = -(-work.batch // batch)
        return waves * (ttft + (work.output - 1) * decode), decode

    def _order(self, of: Layouts, scores: tuple[F64, F64, F64]) -> I64:
        lacks, decode, ttft = scores
        first, second = self._ranks(decode, ttft, self._steps.setting.batch)
        return np.asarray(np.lexsort((second, first, lacks)))


def _joined(parts: Iterable[Layouts]) -> Layouts:
    return Layouts(
        *(
            np.concatenate(each).astype(np.int64)
            for each in zip(*(p.arrays for p in parts), strict=True)
        )
    )


def _unique(of: Layouts) -> Layouts:
    columns = np.unique(np.stack(of.arrays), axis=1)
    return Layouts(*columns)
