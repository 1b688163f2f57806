"""Plans that leave weights on disk: what is chosen, what it takes, how long it takes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest
from disk_problems import RATE, model_folder, problem, shared_problem, solved

from helm import _helm
from helm.compiler.disk import ring_bytes, spread
from helm.compiler.disk_steps import StepTimes, ends_s
from helm.compiler.problem import DiskWeights
from helm.compiler.program import lower
from helm.compiler.solve import Study, solve
from helm.compiler.steps import PlannedSteps
from helm.compiler.timeline import Clock, Flight, collect, submit
from helm.errors import InvalidError, OutOfMemoryError, PlanError
from helm.plan.disk import ALIGNMENT, around, disk_units
from helm.plan.schema import Plan
from helm.plan.weights import slice_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("disk"))


def whole(folder: Path) -> int:
    """Bytes that the plan in memory takes, with its reserve."""
    use = solve(problem(folder, 1 << 34)).plan.memory["cpu"]
    return use.total_bytes + use.reserve_bytes


@pytest.fixture(scope="module")
def study(folder: Path) -> Study:
    return solved(problem(folder, whole(folder) - (16 << 20)))


def test_weights_stay_in_memory_where_they_fit(folder: Path) -> None:
    found = solved(problem(folder, 1 << 34))
    assert found.best.disk is None
    assert found.plan.schedule.disk_ring_bytes == 0


def test_what_does_not_fit_is_read_and_counted_to_the_byte(folder: Path, study: Study) -> None:
    plan, use, disk = study.plan, study.plan.memory["cpu"], study.best.disk
    assert disk is not None
    units = disk_units(plan)
    assert sum(unit.read_bytes for unit in units) == disk.step_bytes
    assert disk.held_bytes <= disk.step_bytes <= disk.held_bytes + len(disk.tensors) * 2 * ALIGNMENT
    kept = solve(problem(folder, 1 << 34)).plan.memory["cpu"]
    assert use.weights_bytes == kept.weights_bytes - disk.held_bytes
    assert use.staging_bytes == plan.schedule.disk_ring_bytes == disk.ring_bytes
    assert use.total_bytes + use.reserve_bytes <= whole(folder) - (16 << 20)
    # One unit more would not be held.
    least = min(unit.read_bytes for unit in units)
    assert use.total_bytes + use.reserve_bytes + least > whole(folder) - (16 << 20)
    assert any("read from disk in every step" in notice for notice in plan.notices)
    assert study.best.bottleneck == "weights read from disk"


def test_both_readers_take_the_plan_and_lower_it_alike(study: Study) -> None:
    text = study.plan.to_json()
    assert Plan.from_json(text) == dataclasses.replace(study.plan)
    assert [program.text() for program in lower(study.plan)] == _helm.program(text)
    assert " disk read layer." in _helm.program(text)[0]


def test_terms_add_up_and_follow_the_disk(folder: Path, study: Study) -> None:
    predicted = study.best.predicted
    assert sum(predicted.decode_terms.values()) == pytest.approx(predicted.decode_s)
    assert sum(predicted.prefill_terms.values()) == pytest.approx(predicted.ttft_s)
    disk = study.best.disk
    assert disk is not None
    assert predicted.decode_s >= disk.step_bytes / RATE * (1 - 1e-9)
    faster = solved(problem(folder, whole(folder) - (16 << 20)), 4 * RATE).best
    assert faster.predicted.decode_s < predicted.decode_s


def test_the_period_is_that_of_the_timeline(study: Study) -> None:
    """Of steps one after the other, task by task."""
    rng = random.Random(4)
    (program, *_) = lower(study.plan)
    units = [DiskWeights(u.number, (), 0, u.read_bytes) for u in disk_units(study.plan)]
    times = StepTimes(0.001, [rng.uniform(0, 0.02) for _ in study.plan.units])
    expected = ends_s([times] * 12, units, study.plan.schedule.disk_ring_bytes, RATE)
    reads = {u.number: u.read_bytes / RATE for u in units}
    seconds = [
        reads[task.units[0]]
        if task.verb == "read"
        else sum(times.units_s[task.units[0] : task.units[1] + 1])
        for task in program.tasks
        if task.units is not None
    ]
    clock, ends = Clock(), list[float]()
    for _ in range(12):
        flight = Flight(program, seconds, begin_s=times.begin_s)
        collect(clock, flight, submit(clock, flight))
        ends.append(float(clock.at("cpu")))  # type: ignore[arg-type]
    assert ends[11] - ends[7] == pytest.approx(expected[11] - expected[7], rel=1e-9)


# --- beside an accelerator -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def beside(folder: Path) -> Study:
    return solved(shared_problem(folder, 48 << 20))


def test_an_accelerator_holds_layers_beside_a_disk(beside: Study) -> None:
    """As many as fit; both memories to the byte; the rest is read."""
    best, plan = beside.best, beside.placed
    assert best.disk is not None
    assert 0 < best.accelerator_blocks < best.blocks
    for name in ("cpu", "accelerator"):
        use = plan.memory[name]
        assert use.total_bytes + use.reserve_bytes <= beside.limit_bytes(name)
    one = beside.search.model.weight_bytes([beside.search.model.graph.layers[0]], 256)
    own = plan.memory["accelerator"]
    assert own.total_bytes + own.reserve_bytes + one > beside.limit_bytes("accelerator")
    held = slice_bytes(plan.tensors, [s for s in plan.slices if s.access != "disk"], "cpu")
    assert sum(held.values()) == plan.memory["cpu"].weights_bytes
    there = slice_bytes(plan.tensors, plan.slices, "accelerator").values()
    assert sum(-(-size // 256) * 256 for size in there) == own.weights_bytes
    assert sum(unit.read_bytes for unit in disk_units(plan)) == best.disk.step_bytes
    assert any("read from disk in every step" in notice for notice in beside.plan.notices)
    assert best.bottleneck == "weights read from disk"


def test_its_steps_are_those_of_the_timeline(beside: Study) -> None:
    predicted, planned = (
        beside.best.predicted, PlannedSteps(beside.search, beside.best, beside.placed),
    )  # fmt: skip
    for context, seconds in (
        (beside.workload.expected_context, predicted.decode_s),
        (beside.workload.context, predicted.full_context_decode_s),
    ):
        clock, ends = Clock(), list[float]()
        (flight,) = planned.decode(context)
        for _ in range(16):
            collect(clock, flight, submit(clock, flight))
            ends.append(float(clock.at("cpu")))  # type: ignore[arg-type]
        assert (ends[15] - ends[7]) / 8 == pytest.approx(seconds, rel=1e-9)
    assert sum(predicted.decode_terms.values()) == pytest.approx(predicted.decode_s)
    assert sum(predicted.prefill_terms.values()) == pytest.approx(predicted.ttft_s)


def test_more_memory_of_an_accelerator_reads_less(folder: Path) -> None:
    studies = [solved(shared_problem(folder, n << 20)) for n in (36, 40, 46, 52, 80)]
    read = [0 if s.best.disk is None else s.best.disk.step_bytes for s in studies]
    assert read == sorted(read, reverse=True)
    assert read[0] > read[2] > read[-1] == 0
    times = [study.best.predicted.decode_s for study in studies]
    assert times == sorted(times, reverse=True)


def test_other_ways_name_this_one_beside_an_accelerator(folder: Path) -> None:
    asked = shared_problem(folder, 40 << 20)
    cut = dataclasses.replace(asked, space=dataclasses.replace(asked.space, policy="cut"))
    with pytest.raises(OutOfMemoryError, match=r"policy='auto' fits: .* read from disk .* tokens"):
        solved(cut)
    loading = dataclasses.replace(asked.loading, weights="copied")
    with pytest.raises(OutOfMemoryError, match=r"weights='auto' fits: .* read from disk .* tokens"):
        solved(dataclasses.replace(asked, loading=loading))


def test_a_read_waits_for_the_memory_that_it_takes() -> None:
    """Against bytes marked one by one."""
    rng = random.Random(1)
    for _ in range(200):
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 12))]
        ring = max(sizes) + rng.randint(0, 20)
        units = around(list(enumerate(sizes)), ring)
        places, end = [], 0
        for size in sizes:
            begin = 0 if end + size > ring else end
            end = begin + size
            places.append(set(range(begin, end)))
        for at, unit in enumerate(units):
            for back in range(1, unit.frees):
                assert not places[at] & places[(at - back) % len(sizes)]
            assert places[at] & places[(at - unit.frees) % len(sizes)]


def test_units_on_disk_are_enough_few_and_spread() -> None:
    rng = random.Random(2)
    for _ in range(200):
        weights = [
            DiskWeights(i, (), rng.choice((3, 3, 10)), 10) for i in range(rng.randint(1, 30))
        ]
        total = sum(unit.held_bytes for unit in weights)
        needed = rng.randint(1, total + 2)
        chosen = spread(weights, needed)
        if needed > total:
            assert chosen is None
            continue
        assert chosen is not None
        taken = sum(unit.held_bytes for unit in chosen)
        assert taken >= needed
        assert all(taken - unit.held_bytes < needed for unit in chosen)
        assert list(chosen) == sorted(chosen, key=lambda unit: unit.number)
    half = spread([DiskWeights(i, (), 10, 10) for i in range(40)], 200)
    assert half is not None
    gaps = [b.number - a.number for a, b in itertools.pairwise(half)]
    assert max(gaps) <= 3


def test_a_ring_is_what_memory_is_had_in() -> None:
    assert ring_bytes(5000) == 8192
    assert ring_bytes((2 << 20) + 1) == 4 << 20


def test_what_fits_nowhere_is_refused_and_other_ways_name_this_one(folder: Path) -> None:
    memory = whole(folder) - (16 << 20)
    with pytest.raises(OutOfMemoryError) as refused:
        solved(problem(folder, 66 << 20))
    assert "disk" not in str(refused.value)
    with pytest.raises(OutOfMemoryError):
        solve(problem(folder, memory))
    asked = problem(folder, memory)
    asked = dataclasses.replace(asked, loading=dataclasses.replace(asked.loading, weights="copied"))
    with pytest.raises(OutOfMemoryError, match=r"weights='auto' fits: .* read from disk .* tokens"):
        solved(asked)


def changed(plan: Plan, change: str) -> str:
    root = json.loads(plan.to_json())
    held = [each for each in root["slices"] if each["access"] == "disk"]
    if change == "ring":
        root["schedule"]["disk_ring_bytes"] = ALIGNMENT
    elif change == "none":
        for each in held:
            each["access"] = "resident"
    elif change == "head":
        name = root["units"][-1]["ops"][-1]["parts"][0]["weight"]
        next(each for each in root["slices"] if each["tensor"] == name)["access"] = "disk"
    elif change == "unaligned":
        root["schedule"]["disk_ring_bytes"] += 8
    elif change == "bound":
        name = held[0]["tensor"]
        next(each for each in root["tensors"] if each["name"] == name)["source"] = None
    else:
        held[0]["format"] = "f16"
    return json.dumps(root)


@pytest.mark.parametrize("change", ["ring", "none", "head", "unaligned", "bound", "format"])
def test_both_readers_refuse_what_cannot_be_read_from_disk(study: Study, change: str) -> None:
    text = changed(study.plan, change)
    with pytest.raises(PlanError, match=r"schedule\.disk_ring_bytes|slices"):
        Plan.from_json(text)
    with pytest.raises(InvalidError, match=r"schedule\.disk_ring_bytes|slices"):
        _helm.program(text)
