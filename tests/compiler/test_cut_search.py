"""Layouts with cut layers: what they take, byte for byte and task by task, and the best of all."""

from __future__ import annotations

import random

import cut_cases
import numpy as np
import pytest

from helm.compiler.candidate import Candidate
from helm.compiler.cut_candidate import candidate_of
from helm.compiler.solve import plan_of
from helm.compiler.steps import PlannedSteps
from helm.compiler.timeline import played
from helm.plan.schema import Plan


def _plan(problem, found) -> tuple[Candidate, Plan]:
    search = problem.search("copied")
    best = candidate_of(found, search.profile, search.limits, search.workload)
    return best, plan_of(problem, search.model, problem.limits, best)


def _sampled(every, seed, count):
    table = every.layouts()
    chosen = random.Random(seed).sample(range(len(table)), min(count, len(table)))
    return [table.at(np.array([i])) for i in chosen]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("mode", ["compute", "stream"])
def test_what_a_layout_takes_is_what_its_plan_counts(seed, mode):
    problem = cut_cases.problem(seed, dtype=("auto", "bf16", "f32")[seed % 3])
    every = cut_cases.Every(problem.search("copied"), mode)
    least = (every.prefill.visit_choices() or [None])[-1] if mode == "stream" else None
    if mode == "stream" and least is None:
        return
    for of in _sampled(every, seed, 20):
        best, plan = _plan(problem, every.found(of, least))
        assert Plan.from_json(plan.to_json()) == plan
        want = cut_cases.counted(plan, every.search.model.format, plan.limits)
        for device, sizes in want.items():
            for purpose, size in sizes.items():
                assert best.memory[device][purpose] == size, (device, purpose, best.cut)
        assert sum(best.predicted.decode_terms.values()) == pytest.approx(
            best.predicted.decode_s, rel=1e-9
        )
        assert sum(best.predicted.prefill_terms.values()) == pytest.approx(
            best.predicted.ttft_s, rel=1e-9
        )


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("mode", ["compute", "stream"])
def test_a_layout_takes_as_long_as_its_program_played(seed, mode):
    problem = cut_cases.problem(seed)
    search = problem.search("copied")
    every = cut_cases.Every(search, mode)
    least = (every.prefill.visit_choices() or [None])[-1] if mode == "stream" else None
    if mode == "stream" and least is None:
        return
    for of in _sampled(every, seed, 20):
        best, plan = _plan(problem, every.found(of, least))
        steps = PlannedSteps(search, best, plan)
        decode = played(steps.decode(search.workload.expected_context), 1)[1]
        assert best.predicted.decode_s == pytest.approx(float(decode), rel=1e-9), best.cut
        prompts = sum(float(played([flight], 1)[1]) for flight in steps.prompts())
        assert best.predicted.ttft_s == pytest.approx(prompts, rel=1e-9), best.cut
