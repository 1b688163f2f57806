"""What requests reach that come and go: the rate of each number of them, and the mode that brings
it. Searches nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helm.compiler.setting import Setting, Site
from helm.compiler.step_prices import (
    StepMode,
    StepPrices,
    blocks_of_request,
    executed_modes,
    rates_by_mode,
    step_prices,
)
from helm.compiler.steps import PlannedSteps
from helm.compiler.timeline import played

if TYPE_CHECKING:
    from helm.compiler.candidate import Candidate
    from helm.compiler.search import Search
    from helm.plan.predictor import Predictor
    from helm.plan.schema import Plan


@dataclass(frozen=True)
class ServingRate:
    """Of so many requests at once: tokens/s in all, in which mode, and how many are near and far;
    others wait. mode: "cpu" where the plan is for the CPU alone."""

    requests: int
    tokens_per_s: float
    mode: str
    near: int
    far: int


@dataclass(frozen=True)
class Serving:
    """Mean tokens of `concurrency` requests that come and go. rates: of 1, 2, 4, ... requests.
    cpu_from: from how many on some are far, so that the CPU attends for them; None: never. modes:
    that the runtime executes."""

    concurrency: int
    prompt: int
    output: int
    modes: tuple[StepMode, ...]
    cpu_from: int | None
    rates: tuple[ServingRate, ...]


def serving(search: Search, best: Candidate, plan: Plan) -> Serving:
    """Of the plan of a search's candidate."""
    work = search.workload
    every = _cut_rates(search, best, plan) if best.cut is not None else _rates(search, best, plan)
    listed = [rate for rate in every if rate.requests & (rate.requests - 1) == 0]
    if every[-1] is not listed[-1]:
        listed.append(every[-1])
    cpu_from = next((rate.requests for rate in every if rate.far), None)
    return Serving(work.batch, work.prompt, work.output, executed_modes(), cpu_from, tuple(listed))


def _rates(search: Search, best: Candidate, plan: Plan) -> list[ServingRate]:
    """Of every number of requests, by the tables of the plan's predictor."""
    work, setting = search.workload, PlannedSteps(search, best, plan).setting
    spreads = best.accelerator_blocks > 0 and best.kv is not None
    counts = np.arange(1, work.batch + 1)
    each, blocks = blocks_of_request(setting), best.kv_blocks * best.sequences
    slots = best.accelerator_kv_blocks * best.sequences if spreads else blocks
    near = np.minimum(counts, slots // each)
    far = np.minimum(counts - near, (blocks - slots) // each)
    prices, row = _prices(setting, best), _row(setting, best)
    found = {
        mode: rate[row]
        for mode, rate in rates_by_mode(prices, near, far, work.prompt, work.output).items()
        if mode == "near" or spreads
    }
    rates: list[ServingRate] = []
    kept = ServingRate(0, 0.0, "near", 0, 0)
    for i in range(work.batch):
        for mode, rate in found.items():
            there = 0 if mode == "near" else int(far[i])
            # More requests than pay wait, so that no rate falls.
            if (mode == "near" or there) and rate[i] > kept.tokens_per_s:
                shown = mode if best.uses_accelerator else "cpu"
                kept = ServingRate(0, float(rate[i]), shown, int(near[i]), there)
        rates.append(dataclasses.replace(kept, requests=i + 1))
    return rates


def _cut_rates(search: Search, best: Candidate, plan: Plan) -> list[ServingRate]:
    """Where layers are cut all KV is near, and steps are what the timeline plays."""
    work, rates = search.workload, []
    prompt_s = best.predicted.ttft_s / best.sequences
    for count in sorted({*(2**i for i in range(best.sequences.bit_length())), best.sequences}):
        if count <= best.sequences:
            wider = dataclasses.replace(best, sequences=count)
            flights = PlannedSteps(search, wider, plan).decode(work.expected_context)
            seconds = work.output * float(played(flights, 1)[1]) + count * prompt_s
            rates.append(ServingRate(count, count * work.output / seconds, "near", count, 0))
    return rates


def predictor(search: Search, best: Candidate, plan: Plan) -> Predictor | None:
    """What the runtime chooses modes by: where KV of the accelerator's layers may lie in host
    memory, and no layer is cut or visits."""
    if not plan.overflows or best.cut is not None or best.visit is not None:
        return None
    setting = PlannedSteps(search, best, plan).setting
    return _prices(setting, best).record(_row(setting, best))


def _prices(setting: Setting, best: Candidate) -> StepPrices:
    head: Site = "cpu" if best.head == "cpu" else "accelerator"
    return step_prices(setting, head)


def _row(setting: Setting, best: Candidate) -> int:
    """The candidate's layout among the setting's."""
    embedded = best.embedding == "accelerator"
    same = (setting.rows.boundary == best.cpu_blocks) & (setting.rows.embedded == embedded)
    return int(np.argmax(same))
