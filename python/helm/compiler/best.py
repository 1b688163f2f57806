"""Keeps the best candidate of every layout of whole layers, of choices that are offered one after
the other. Knows no plan format and no terminal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from helm.compiler.budget import memory_bytes, missing
from helm.compiler.candidate import Candidate, Missing, OverflowUse, SitePrice, goals, predicted
from helm.compiler.choices import SITES, Choice, fastest, may_visit
from helm.compiler.counts import CostedGraph
from helm.compiler.order import least, less
from helm.compiler.overflow import Bools
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.setting import Site
from helm.compiler.times import F64, I64
from helm.machine.profile import Profile
from helm.plan.records import Workload

Lacks = tuple[I64, I64]  # see `missing`
_ROUNDED = 1 - 1e-9


@dataclass(frozen=True)
class SearchResult:
    """best: the fastest candidate that fits, None if none does. ranked: the best of each layout
    that fits, fastest first, cut ones too. by_layout: the best of every layout of whole layers,
    those that do not fit as well, in the order all on the accelerator, then by boundary; what a
    plot over k shows. labelled: "all-accelerator", "fill-accelerator" and "all-cpu", as far as the
    machine has them, and where the best is of another kind "layer-partition", the best of whole
    layers. asked: the best of a policy that was asked for, which may not fit. uncut: why nothing
    can be cut, "" if something can."""

    best: Candidate | None
    ranked: tuple[Candidate, ...]
    by_layout: tuple[Candidate, ...]
    labelled: dict[str, Candidate]
    asked: Candidate | None = None
    uncut: str = ""


def _scores(choice: Choice, workload: Workload) -> tuple[F64, F64]:
    """[rows, pages] the objective and what breaks ties, both to be small."""
    if workload.objective == "serve":
        return choice.serve_s, choice.decode_s.min(axis=0)
    ttft, step = choice.prefill_s.min(axis=0), choice.decode_s.min(axis=0)
    return goals(workload, choice.setting.batch, ttft, step)


def _least_s(choice: Choice, workload: Workload, *, prompts: bool = True) -> F64:
    """[rows] no layout has a lower objective. prompts: whether these are counted."""
    step_s = choice.least_decode_s()
    if workload.objective == "serve":
        return np.zeros_like(step_s)
    ttft_s = choice.least_prefill_s() if prompts else np.zeros_like(step_s)
    return np.asarray(_ROUNDED * goals(workload, choice.setting.batch, ttft_s, step_s)[0])


class Best:
    """Keeps the best candidate of every layout: the least that lacks memory first, then the best
    by score. with_scratch_s: the least objective of those that lack no more host memory than their
    scratch takes, which is less with fewer threads."""

    def __init__(
        self, model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits,
        space: Space,
    ) -> None:  # fmt: skip
        self._blocks, self._space = len(model.graph.layers), space
        self._workload = workload
        self._limits, self._available = limits, memory_bytes(profile, limits)
        self.with_scratch_s = np.inf
        rows = 1 if profile.accelerator is None else self._blocks + 2
        self._score = {head: np.full((3, rows), np.inf) for head in SITES}
        self._found: dict[Site, list[tuple[Choice, Lacks, int] | None]] = {
            head: [None] * rows for head in SITES
        }
        self._labels: dict[str, tuple[tuple[bool, int], Choice, Lacks, int]] = {}

    def offer(self, choice: Choice) -> None:
        each = cpu, own = missing(choice.budget, self._available, self._limits)
        lacks = cpu + own
        scratch = choice.budget.cpu["workspace"] + choice.budget.cpu["reserve"]
        allowed = self._allowed(choice)
        nearly = (cpu > 0) & (cpu <= scratch) & (own == 0) & choice.possible & allowed[:, None]
        fits = nearly | (lacks == 0) & allowed[:, None]
        if self._hopeless(choice, fits, prompts=False):
            return
        if choice.mode == "compute":
            self._offer_labels(choice, each)
        if self._hopeless(choice, fits, prompts=True):  # memory alone ranks what does not fit
            first = np.broadcast_to(_least_s(choice, self._workload)[:, None], lacks.shape)
            second = np.full(lacks.shape, np.inf)
        else:
            first, second = _scores(choice, self._workload)
        lacks = np.where(choice.possible, lacks, np.inf)
        self.with_scratch_s = min(self.with_scratch_s, first[nearly].min(initial=np.inf))
        scores = np.stack([lacks, first, second])  # [3, rows, pages]
        page = least(scores)
        score = np.take_along_axis(scores, page[None, :, None], axis=2)[:, :, 0]
        best = self._score[choice.head]
        for row in np.flatnonzero(allowed & less(score, best)):
            best[:, row] = score[:, row]
            self._found[choice.head][row] = (choice, each, int(page[row]))

    def _hopeless(self, choice: Choice, fits: Bools, *, prompts: bool) -> bool:
        """Whether no layout of it may be better than what was found, where anything fits. fits:
        [rows, pages], perhaps with less scratch. prompts: whether these are counted. More requests
        at once are offered first, and fewer take more steps."""
        work, batch, best = self._workload, choice.setting.batch, self._score[choice.head]
        some = any((score[0] == 0).any() for score in self._score.values())
        if work.objective != "throughput" or batch == work.batch or not some:
            return False
        beaten = (best[0] == 0) & (best[1] <= _least_s(choice, work, prompts=prompts))
        return bool((beaten | ~fits.any(axis=1)).all())

    def _allowed(self, choice: Choice) -> npt.NDArray[np.bool_]:
        rows = choice.setting.rows
        allowed = np.ones(len(rows.boundary), bool)
        if self._space.one_boundary and choice.head == "cpu":
            allowed &= rows.boundary == self._blocks
        if choice.mode == "visit":
            allowed &= may_visit(choice.setting, choice.head)
        return allowed

    def _offer_labels(self, choice: Choice, each: Lacks) -> None:
        """The plans that need no model of time: everything on one side, and as many blocks as
        fit beside their whole KV cache, run in the plainest way."""
        lacks = each[0] + each[1]
        full, last = 0, lacks.shape[0] - 1
        offers = [("all-cpu", last, 0)] if choice.head == "cpu" else [("all-accelerator", 0, 0)]
        if choice.head == "accelerator":
            offers += [
                ("fill-accelerator", int(r), int(r))
                for r in np.flatnonzero(lacks[:, full] == 0)[:1]
            ]
        for label, row, rank in offers:
            first, known = (bool(lacks[row, full] > 0), rank), self._labels.get(label)
            if known is not None and first > known[0]:
                continue
            if known is None or first < known[0] or self._sooner(choice, known[1], row):
                self._labels[label] = first, choice.plainest, each, row

    def _sooner(self, choice: Choice, known: Choice, row: int) -> bool:
        """Whether its plainest ways are faster than those of `known`."""
        known_s = _scores(known, self._workload)[0][row, 0]
        if _least_s(choice, self._workload)[row] >= known_s:
            return False
        return bool(_scores(choice.plainest, self._workload)[0][row, 0] < known_s)

    def result(self) -> SearchResult:
        layouts = [
            self._candidate(*found, row)
            for row in range(len(self._found["cpu"]))
            for head in SITES
            if (found := self._found[head][row]) is not None
        ]
        fitting = [candidate for candidate in layouts if candidate.fits]
        ranked = sorted(fitting, key=lambda c: (c.objective_s, self._tie(c)))
        labelled = {
            label: self._candidate(choice, each, 0, row)
            for label, (_, choice, each, row) in self._labels.items()
        }
        return SearchResult(ranked[0] if ranked else None, tuple(ranked), tuple(layouts), labelled)

    def _tie(self, candidate: Candidate) -> float:
        predicted = candidate.predicted
        return predicted.ttft_s if self._workload.objective == "decode" else predicted.decode_s

    def _candidate(self, choice: Choice, lacks: Lacks, page: int, row: int) -> Candidate:
        setting, rows = choice.setting, choice.setting.rows
        held = int(setting.pages[page]) if rows.has_blocks[row] else 0
        decode = fastest(choice.decodes, row, page)
        prefill = choice.prefills[int(np.argmin(choice.prefill_s[:, row, page]))]
        visits_from = prefill.visit_least
        ways = prefill.priced, decode.expected, decode.full_context
        ttft_s, decode_s, full_s = (float(each.total[row, page]) for each in ways)
        seconds = ttft_s, decode_s, full_s
        terms = decode.expected.terms(row, page), prefill.priced.terms(row, page)
        return Candidate(
            blocks=self._blocks,
            cpu_blocks=int(rows.boundary[row]),
            embedding="accelerator" if rows.embedded[row] else "cpu",
            head=choice.head,
            kv_blocks=setting.pages_of(self._workload.context),
            accelerator_kv_blocks=held,
            overflow=decode.overflow,
            kv=_overflow_use(choice, row, page),
            decode_groups=decode.groups,
            prefill_mode=choice.mode,
            prefill_overlap=prefill.overlap,
            step_tokens=setting.limits.step_tokens,
            visit_tokens=0 if visits_from is None else choice.steps.visit_tokens(row, visits_from),
            visit_pages=0 if visits_from is None else setting.visit_pages,
            threads=setting.cpu.threads,
            sequences=setting.batch,
            predicted=predicted(self._workload, setting.batch, seconds, terms),
            memory=choice.budget.at(row, page),
            missing=Missing(*(int(device[row, page]) for device in lacks)),
            objective_s=float(choice.serve_s[row, page])
            if self._workload.objective == "serve"
            else goals(self._workload, setting.batch, ttft_s, decode_s)[0],
        )


def _overflow_use(choice: Choice, row: int, page: int) -> OverflowUse | None:
    """What overflows of a candidate's KV; None where nothing can."""
    setting = choice.setting
    if not (setting.rows.has_blocks[row] and setting.pool.overflows[page]):
        return None
    pool, context = setting.pool, setting.workload.context
    near = min(context, int(pool.kept[page]) // pool.sequences * pool.page_tokens)
    far = int(pool.far_blocks(context)[page])
    sites = []
    for site in dict.fromkeys(way.overflow for way in choice.decodes):
        way = fastest([way for way in choice.decodes if way.overflow == site], row, page)
        sites.append(SitePrice(site, *way.key(row, page)))
    return OverflowUse(pool.watermark, near, far, tuple(sites))
