"""Layouts with cut layers: what they take, byte for byte and task by task, and the best of all."""

from __future__ import annotations

import dataclasses
import random

import cut_cases
import numpy as np
import pytest

import helm
from helm.compiler.budget import memory_bytes
from helm.compiler.candidate import Candidate
from helm.compiler.search import Search
from helm.compiler.solve import plan_of
from helm.compiler.steps import PlannedSteps
from helm.compiler.timeline import played
from helm.plan.schema import Plan
from whole import WHOLE

FEW, MANY, SAMPLED = (24, 70, 20) if WHOLE else (2, 3, 8)


def _plan(problem, every, of, least) -> tuple[Candidate, Plan]:
    best = every.candidate(of, least)
    return best, plan_of(problem, every.search.model, problem.limits, best)


def _sampled(every, seed, count):
    table = every.layouts()
    chosen = random.Random(seed).sample(range(len(table)), min(count, len(table)))
    return [table.at(np.array([i])) for i in chosen]


def _model(seed, kind):
    return cut_cases.config(seed) if kind == "dense" else cut_cases.mixture(seed)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("seed", range(FEW))
@pytest.mark.parametrize("mode", ["compute", "visit"])
def test_what_a_layout_takes_is_what_its_plan_counts(seed, mode, kind):
    dtype = ("auto", "bf16", "f32")[seed % 3]
    problem = cut_cases.problem(seed, dtype=dtype, model=_model(seed, kind))
    every = cut_cases.Every(problem.search("copied"), mode)
    if not every.leasts:
        return
    least = every.leasts[-1]
    for of in _sampled(every, seed, SAMPLED):
        best, plan = _plan(problem, every, of, least)
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


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("seed", range(FEW))
@pytest.mark.parametrize("mode", ["compute", "visit"])
def test_a_layout_takes_as_long_as_its_program_played(seed, mode, kind):
    problem = cut_cases.problem(seed, model=_model(seed, kind))
    search = problem.search("copied")
    every = cut_cases.Every(search, mode)
    if not every.leasts:
        return
    least = every.leasts[-1]
    for of in _sampled(every, seed, SAMPLED):
        best, plan = _plan(problem, every, of, least)
        steps = PlannedSteps(search, best, plan)
        decode = played(steps.decode(search.workload.expected_context), 1)[1]
        assert best.predicted.decode_s == pytest.approx(float(decode), rel=1e-9), best.cut
        prompts = sum(float(played([flight], 1)[1]) for flight in steps.prompts())
        assert best.predicted.ttft_s == pytest.approx(prompts, rel=1e-9), best.cut


def _values(every, least, work):
    """[layouts] the objective and the bytes on both devices, of those where something is cut."""
    table, cuts = every.layouts(), every.cuts
    places = zip(cuts.units, (table.heads, table.elements, table.rows), strict=True)
    inside = [ways.inside(at) for ways, at in places]
    if not cuts.whole:
        table = table.at((table.cut > 0) & (inside[0] | inside[1]) | inside[2])
    decode, ttft, items = every.decode(table), every.ttft(table, least), every.memory.items(table)
    values = {"decode": decode, "ttft": ttft}
    total = ttft + (work.output - 1) * decode
    sizes = (sum(each.values()) for each in (items.cpu, items.accelerator))
    return values.get(work.objective, total), *sizes


def _every_value(search):
    """Of all layouts, ways to run prompts and lengths of steps."""
    work, limits, found = search.workload, search.limits, []
    longest = 1 << (work.prompt * work.batch - 1).bit_length()
    longer = [n for n in search.space.visit_steps if limits.step_tokens < n <= longest]
    for step_tokens in (limits.step_tokens, *longer):
        sized = dataclasses.replace(limits, step_tokens=step_tokens)
        one = Search(search.model, search.profile, work, sized, search.space)
        if step_tokens == limits.step_tokens:
            found.append(_values(cut_cases.Every(one, "compute"), None, work))
        every = cut_cases.Every(one, "visit")
        for least in every.leasts:
            found.append(_values(every, least, work))
    return tuple(np.concatenate(each) for each in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("objective", ["decode", "ttft", "total"])
@pytest.mark.parametrize("seed", range(MANY))
def test_no_layout_is_better_by_a_hundredth(seed, objective, kind):
    problem = cut_cases.problem(seed, objective, model=_model(seed, kind))
    search = problem.search("copied")
    value, cpu, own = _every_value(search)
    rng = random.Random(seed + 99)
    limits, fits = cut_cases.limits_at_random(search, rng, cpu, own)
    want = value[fits].min(initial=np.inf)
    for policy in ("cut", "auto", "layer-partition"):
        space = dataclasses.replace(search.space, policy=policy)
        best = Search(search.model, search.profile, search.workload, limits, space).result.best
        if policy == "cut":
            assert (best is None) == (want == np.inf)
            assert best is None or best.objective_s <= want * 1.01
            cut = np.inf if best is None else best.objective_s
        elif policy == "auto":
            least = np.inf if best is None else best.objective_s
        else:
            assert least <= min(cut, np.inf if best is None else best.objective_s)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("mode", ["compute", "visit"])
@pytest.mark.parametrize("seed", range(MANY))
def test_no_layout_takes_less_than_its_bound(seed, mode, kind):
    objective = ("decode", "ttft", "total")[seed % 3]
    search = cut_cases.problem(seed, objective, model=_model(seed, kind)).search("copied")
    every, work = cut_cases.Every(search, mode), search.workload
    for least in every.leasts:
        way, (value, _, own) = every.way(least), _values(every, least, work)
        rooms = np.quantile(own, [0, 0.01, 0.1, 0.5, 1]).astype(int).tolist()
        for room in rooms:
            assert way.least_s(work, room) <= value[own <= room].min(initial=np.inf)


@pytest.mark.parametrize("objective", ["decode", "throughput"])
def test_a_bound_is_close(objective):
    """So that no layout is tried of ways to run prompts that are worse."""
    search = helm.study(
        "tests/data/configs/qwen3-8b.json", profile="thesis-4060", memory_bytes=64 << 30,
        objective=objective, batch=16, prompt_tokens=512, output_tokens=128, context=1024,
        policy="cut",
    ).search  # fmt: skip
    best, cuts = search.result.best, search._cut_search(search.result)
    _, room = memory_bytes(search.profile, search.limits)
    ways = [way for way in cuts._ways if way.batch == best.sequences]
    bounds = [way.least_s(search.workload, room) for way in ways]
    assert 0.9 * best.objective_s < min(bounds) <= best.objective_s


@pytest.mark.parametrize("seed", range(FEW))
def test_more_of_a_resource_is_never_worse(seed):
    problem = cut_cases.problem(seed, ("decode", "ttft", "total")[seed % 3])
    search = problem.search("copied")
    _, cpu, own = _every_value(search)
    rng = random.Random(seed)
    shares = sorted(rng.uniform(0, 1) for _ in range(6))
    for name, sizes in (("cpu_bytes", cpu), ("accelerator_bytes", own)):
        last = np.inf
        for share in shares:
            room = int(sizes.min() + share * (sizes.max() - sizes.min()))
            best = search.within(**{name: room}).best
            now = np.inf if best is None else best.objective_s
            assert now <= last * (1 + 1e-9)
            last = now
