"""The timeline against an event loop, and programs against texts."""

from __future__ import annotations

import random
from typing import Any

import naive_timeline
import numpy as np
import pytest

from helm.compiler.program import layer_tasks, lowered
from helm.compiler.task import Program, Task
from helm.compiler.timeline import (
    Flight,
    Spread,
    backward,
    body,
    onward,
    period_s,
    played,
)
from helm.model.graph import Attention, Embedding, Select
from helm.plan.units import PlacedUnit

KINDS = [(visits, far) for visits in (False, True) for far in ("none", "visit", "cpu")]


def program_of(cpu: int, own: int, kind: tuple[bool, Any], ends: tuple[str, str]) -> Program:
    sites = [*["cpu"] * cpu, *["accelerator"] * own]
    layers = [
        PlacedUnit(
            f"layer.{i}", "attention", i, site, (Attention("x", 0, 0, 0, "x", i, 1, 1, 1, 1.0, 0),)
        )
        for i, site in enumerate(sites)
    ]
    units = [
        PlacedUnit("embedding", "embedding", None, ends[0], (Embedding("", "x"),)),
        *layers,
        PlacedUnit("head", "head", None, ends[1], (Select("x", "y"),)),
    ]
    return lowered(units, {"x": 1, "y": 1}, "y", *kind)


def random_step(rng: random.Random, program: Program, **options: Any) -> dict[str, Any]:
    """Arguments of a flight. Integers, so that no sum is rounded."""
    seconds = [float(rng.choice((1, 2, 3, 5, 8, 40))) for _ in program.tasks]
    counts = {}
    for number, task in enumerate(program.tasks):
        if task.verb == "page":
            counts[number] = rng.randint(0, 5)
        if task.verb == "cached" and rng.random() < 0.5:
            seconds[number] = 0.0
    return {
        "program": program, "seconds": seconds, "counts": counts,
        "begin_s": float(rng.randint(0, 3)), **options,
    }  # fmt: skip


def some_program(rng: random.Random) -> Program:
    visits, far = rng.choice(KINDS)
    cpu, own = rng.randint(0, 4), rng.randint(0, 4)
    if cpu + own == 0:
        own = 1
    if own == 0 or (visits and cpu == 0):
        cpu, own = max(1, cpu), max(1, own)
    sites = ("cpu", "accelerator") if cpu == 0 else ("cpu",)
    return program_of(
        cpu, own, (visits, far), (rng.choice(sites), rng.choice(("cpu", "accelerator")))
    )


@pytest.mark.parametrize("seed", range(300))
def test_steps_take_what_the_event_loop_says(seed: int) -> None:
    rng = random.Random(seed)
    at_once = rng.choice((1, 2))
    programs = [some_program(rng)]
    steps = [
        random_step(
            rng, programs[0], leaving_s=float(rng.choice((0, 0, 7, 60))), waits=rng.random() < 0.3
        )
        for _ in range(rng.randint(1, 5))
    ]
    spans, end = played([Flight(**step) for step in steps], at_once)
    naive = [naive_timeline.Step(**step) for step in steps]
    assert end == naive_timeline.run(naive, at_once)
    for step, found in zip(naive, spans, strict=True):
        for number, job in step.done.items():
            assert found[number][1] == job.end, (number, step.program.text())


def seconds_of(program: Program, number: int, kinds: list[dict[str, float]]) -> float:
    """Of a task of a layer of the kind that its place says."""
    task = program.tasks[number]
    assert task.units is not None
    return kinds[task.units[0] - 1][_key(task)]


def _key(task: Task) -> str:
    return task.lane if task.verb == "copy" else task.verb


@pytest.mark.parametrize("seed", range(60))
def test_layers_as_matrices_take_what_their_tasks_take(seed: int) -> None:
    """Layers that visit, then layers whose pages are spread, of two kinds in any order, or alike;
    many candidates at once."""
    rng = random.Random(seed)
    cpu, own = rng.choice((1, 2, 7, 40)), rng.choice((1, 2, 7, 40))
    program = program_of(cpu, own, (True, "visit"), ("cpu", "cpu"))
    candidates, alike = 3, rng.random() < 0.5
    names = {
        _key(t) for tasks in (layer_tasks(True, "none"), layer_tasks(False, "visit")) for t in tasks
    }

    def durations() -> dict[str, Any]:
        found: dict[str, Any] = {
            name: np.array([float(rng.randint(1, 30)) for _ in range(candidates)]) for name in names
        }
        return {**found, "cached": found["cached"] * rng.choice((0, 1))}

    classes = [durations(), durations()]
    pages = [np.array([rng.choice((0, 1, 2, 3, 9)) for _ in range(candidates)]) for _ in classes]
    member = [0 if alike else rng.randint(0, 1) for _ in range(cpu + own)]

    def bodies(visits: bool) -> list[Any]:
        tasks = layer_tasks(visits, "none" if visits else "visit")
        counts = [0, 0] if visits else pages
        return [
            body(tasks, [seconds[_key(t)] for t in tasks], count)
            for seconds, count in zip(classes, counts, strict=True)
        ]

    *_, visited = onward(bodies(True), member[:cpu])
    *_, left = backward(bodies(False), member[cpu:])
    spread = Spread(visited[0] + left[0], left[1], visited[1])
    leaving = float(rng.choice((0, 5, 500)))
    front, up, down, tail = (float(rng.randint(0, 9)) for _ in range(4))
    chain = program_of(1, 1, (False, "none"), ("cpu", "cpu"))
    flight = Flight(chain, (front, up, spread, down, tail), leaving_s=leaving)
    _, end = played([flight], 1)
    for candidate in range(candidates):
        seconds, counts = [], {}
        for number, task in enumerate(program.tasks):
            layer = (
                member[task.units[0] - 1] if task.units and 0 < task.units[0] <= cpu + own else 0
            )
            if task.verb == "page":
                counts[number] = int(pages[layer][candidate])
            if number < 2 or task.units is None or task.lane == "cpu":
                ends = {"embedding": front, "head": tail, "up": up, "down": down}
                name = task.lane if task.verb == "copy" else program.subject(task)
                seconds.append(ends[name])
            else:
                seconds.append(classes[layer][_key(task)][candidate])
        step = naive_timeline.Step(program, seconds, counts, leaving_s=leaving)
        assert np.broadcast_to(end, (candidates,))[candidate] == naive_timeline.run([step], 1)


@pytest.mark.parametrize("seed", range(100))
def test_two_steps_in_turn_take_their_eigenvalue(seed: int) -> None:
    rng = random.Random(seed)
    program = program_of(
        *rng.choice(((1, 1), (0, 1), (1, 0))),
        (False, "none"),
        ("cpu", rng.choice(("cpu", "accelerator"))),
    )
    steps = [random_step(rng, program) for _ in range(2)]
    period = period_s([Flight(**step) for step in steps])
    naive = naive_timeline.period([naive_timeline.Step(**step) for step in steps])
    assert period == pytest.approx(naive, rel=1e-12)
