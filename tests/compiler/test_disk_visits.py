"""Plans whose weights on disk visit an accelerator in long steps: what is chosen, what it takes,
how long it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_problems import model_folder, shared_problem, solved

from helm import _helm
from helm.compiler import disk
from helm.compiler.budget import memory_bytes
from helm.compiler.candidate import Candidate
from helm.compiler.disk_prices import Layout, Priced, PricedSteps
from helm.compiler.disk_steps import ends_s
from helm.compiler.memory import DEVICE_ALIGNMENT
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import DiskWeights
from helm.compiler.program import lower
from helm.compiler.solve import Study, plan_of
from helm.compiler.steps import PlannedSteps, planned_steps
from helm.compiler.timeline import Clock, collect, submit
from helm.plan.disk import disk_units
from helm.plan.records import Workload
from helm.plan.schema import Plan
from helm.plan.weights import slice_bytes

FAST, ROUNDS = 1e10, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("disk"))


def prompt_problem(folder: Path, vram: int, ram: int = 86 << 20) -> Problem:
    """Of a prompt, on a machine whose CPU multiplies slowly."""
    own = shared_problem(folder, vram)
    assert own.profile is not None
    assert own.memory_bytes is not None
    cpu = own.profile.cpu
    slow = {kind: {n: rate / 30 for n, rate in rates.items()}
            for kind, rates in cpu.matmul_flops.items()}  # fmt: skip
    return dataclasses.replace(
        own,
        workload=Workload(256, 16, context=320, objective="ttft"),
        space=dataclasses.replace(own.space, visit_steps=(64, 128, 256)),
        memory_bytes=own.memory_bytes + ram - (94 << 20),
        profile=dataclasses.replace(own.profile, cpu=dataclasses.replace(cpu, matmul_flops=slow)),
    )


@pytest.fixture(scope="module")
def study(folder: Path) -> Study:
    return solved(prompt_problem(folder, 56 << 20), FAST)


def test_weights_visit_from_disk_where_that_is_faster(folder: Path, study: Study) -> None:
    best, schedule = study.best, study.plan.schedule
    assert best.disk is not None
    assert (schedule.prefill, schedule.visit_tokens) == ("visit", best.visit_tokens)
    assert 1 < best.visit_tokens <= best.step_tokens
    own = prompt_problem(folder, 56 << 20)
    computing = dataclasses.replace(own.space, prefill=("compute",))
    other = solved(dataclasses.replace(own, space=computing), FAST).best
    assert (other.prefill_mode, other.visit_tokens) == ("compute", 0)
    assert best.predicted.ttft_s < 0.8 * other.predicted.ttft_s
    slow = solved(own, 1e8).best  # it takes room of the accelerator, so that more is read
    assert slow.prefill_mode == "compute"


def test_both_memories_hold_what_visits_to_the_byte(folder: Path, study: Study) -> None:
    plan, best = study.placed, study.best
    assert best.disk is not None
    for name in ("cpu", "accelerator"):
        use = plan.memory[name]
        assert use.total_bytes + use.reserve_bytes <= study.limit_bytes(name)
    model = study.search.model
    layer = model.weight_bytes([model.graph.layers[0]], DEVICE_ALIGNMENT)
    pages = plan.schedule.visit_pages * plan.kv.page_bytes
    assert plan.memory["accelerator"].staging_bytes == 2 * layer + pages
    held = slice_bytes(plan.tensors, [s for s in plan.slices if s.access != "disk"], "cpu")
    assert sum(held.values()) == plan.memory["cpu"].weights_bytes
    assert sum(unit.read_bytes for unit in disk_units(plan)) == best.disk.step_bytes
    stats = _helm.Engine(plan.to_json(), str(folder), device="sim").stats
    for use in stats["devices"]:
        planned = plan.memory[use["device"]]
        for purpose in ("weights_bytes", "kv_bytes", "activations_bytes", "staging_bytes"):
            assert use[purpose] == getattr(planned, purpose), (use["device"], purpose)
    assert stats["disk_step_bytes"] == best.disk.step_bytes


def test_both_readers_take_the_plan_and_lower_it_alike(study: Study) -> None:
    text = study.placed.to_json()
    assert Plan.from_json(text) == study.placed
    programs = _helm.program(text)
    assert [program.text() for program in lower(study.placed)] == programs
    assert " disk read layer." in programs[0]
    assert " up visit layer." in programs[1]


def test_the_drawn_prompt_reads_beside_copies_and_stages(study: Study) -> None:
    _, prompt = planned_steps(study.search, study.best, study.placed)
    verbs = {(span.lane, span.verb) for span in prompt.spans}
    assert {("disk", "read"), ("up", "visit"), ("accelerator", "run")} <= verbs
    for reading, visit in zip(
        [s for s in prompt.spans if s.verb == "read"],
        [s for s in prompt.spans if s.verb == "visit" and "." in s.task.removeprefix("layer.")],
        strict=True,
    ):
        assert reading.task == visit.task
        assert reading.end_s <= visit.start_s


Way = tuple[Candidate, Layout, int | None, PricedSteps, int, tuple[DiskWeights, ...]]


def ways(study: Study) -> Iterator[Way]:
    """All that the search prices with the most threads."""
    own = study.search
    assert own.space.disk is not None
    available = memory_bytes(own.profile, own.limits)
    for sized in disk._settings(own.model, own.profile, own.workload, own.limits, own.space):
        if sized.cpu.threads != own.profile.cpu.threads:
            continue
        priced = Priced(sized)
        for layout in disk._layouts(sized, available, own.limits, own.space):
            for ring, chosen in disk._choices(layout, available[0], own.limits, own.space.disk):
                for least in priced.leasts(layout):
                    of = priced, layout, least, priced.steps(layout, least), ring, chosen
                    yield disk._candidate(*of, own.space.disk), *of[1:]


@pytest.mark.parametrize(("vram", "ram", "rate"), [(56, 86, FAST), (50, 86, 1e9), (46, 92, 5e8)])
def test_prompts_take_what_the_timeline_says(
    folder: Path, vram: int, ram: int, rate: float
) -> None:
    """Again and again, as the first reads of a model at rest are no part of it."""
    study = solved(prompt_problem(folder, vram << 20, ram << 20), rate)
    search, seen = study.search, set[str]()
    limits = dataclasses.replace(study.problem.limits, context=search.workload.context)
    for candidate, layout, _, steps, ring, chosen in ways(study):
        plan = plan_of(study.problem, search.model, limits, candidate)
        flights = PlannedSteps(search, candidate, plan).prompts()
        clock, ends = Clock(), list[float]()
        for _ in range(ROUNDS):
            for flight in flights:
                collect(clock, flight, submit(clock, flight))
            ends.append(float(clock.at("cpu")))  # type: ignore[arg-type]
        every = ends_s([step for step, _ in steps.prompts] * ROUNDS, chosen, ring, rate)
        priced = every[len(flights) - 1 :: len(flights)]
        assert ends[-1] - ends[-3] == pytest.approx(priced[-1] - priced[-3], rel=1e-9)
        predicted = candidate.predicted
        assert sum(predicted.prefill_terms.values()) == pytest.approx(predicted.ttft_s)
        assert predicted.prefill_terms["disk_s"] > -1e-12
        seen.add(f"{layout.mode} {layout.head}")
    assert {"visit cpu", "visit accelerator"} <= seen
