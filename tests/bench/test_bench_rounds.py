"""bench/compare.py: which tiers it measures, its rounds, and what it takes of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import compare
from bench_runs import figures_of, model_of, run_of
from figures import RATE
from peers import engines_here
from peers.engine_process import EngineProcess, TooSlow
from peers.engines import Timed
from scenarios import Scenario, scenario
from worker import deviation, typical, typical_parts


def arguments(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"threads": 1, "repeats": 2, "rounds": 1, "warm": False, **changed})


@pytest.mark.parametrize(
    ("default", "dtype", "tiers"),
    [
        ("avx512bf16", "bf16", ["helm:avx2", "helm:avx512"]),
        ("avx512", "bf16", ["helm:avx2", "helm:avx512bf16"]),
        ("avx512", "f16", ["helm:avx2"]),
        ("avx2", "f16", []),
    ],
)
def test_tiers_that_compute_otherwise_are_measured_beside_the_default(
    monkeypatch: pytest.MonkeyPatch, default: str, dtype: str, tiers: list[str]
) -> None:
    names = ["scalar", "avx2", "avx512", "avx512bf16"]
    native = SimpleNamespace(
        isa_tiers=lambda: [{"name": name, "available": True} for name in names],
        isa_choice=lambda: (default, "because"),
    )
    monkeypatch.setattr(engines_here, "_helm", native)
    found = engines_here.default_engines(dtype)
    assert [engine for engine in found if engine.startswith("helm")] == ["helm", *tiers]


def test_quick_gives_way_to_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["compare.py", "--quick", "--tokens", "3"])
    found = compare.arguments()
    assert (found.rounds, found.repeats, found.tokens) == (1, 0, 3)
    assert "prefill-4096" not in found.scenarios


class FakeProcess:
    """Runs of two parts of given seconds, one after the other."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.prepared = list(seconds), 0

    def prepare(self, _: Any) -> None:
        self.prepared += 1

    def run(self, what: Any) -> Iterator[dict[str, Any]]:
        seconds = self.seconds.pop(0)
        for _ in what.part_steps:
            yield run_of(what.name, seconds, {"linear": seconds / 2}, alone=1.0)


@pytest.mark.parametrize(
    ("probes", "kept", "runs"),
    [
        ([1.0, 1.01, 1.0], 1.0, 1),
        ([1.0, 2.0, 2.0, 1.0, 1.15, 1.15], 2.0, 2),  # of two parts one may differ a little
        ([1.0, 2.0, 2.0, 2.0, 1.5, 1.5, 1.0, 3.0, 1.0], 2.0, 3),  # the closest of those that differ
    ],
)
def test_a_run_between_probes_that_differ_is_repeated(
    monkeypatch: pytest.MonkeyPatch, probes: list[float], kept: float, runs: int
) -> None:
    left = list(probes)
    monkeypatch.setattr(
        compare, "ceilings", lambda _: {"read_bytes_per_s": left.pop(0), "fma_flops": 1.0}
    )
    process = FakeProcess(1.0, 2.0, 3.0)
    found = compare.measure_scenario(process, scenario("decode", 8, 8), arguments())
    assert (found["seconds"], found["typical_seconds"]) == (2.5 * kept, 2 * kept)
    assert found["ops"] == {"linear": kept}
    assert (found["alone_seconds"], len(found["ceilings"])) == (2.0, 3)
    assert process.prepared == runs
    assert not left


def test_all_parts_of_a_scenario_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limits = [0.0], []
    process = object.__new__(EngineProcess)
    process._limit_s = 10.0

    def ask(command: dict[str, Any], _what: str, limit_s: float) -> dict[str, Any]:
        limits.append((command["part"], limit_s))
        clock[0] += 3.0
        return {}

    monkeypatch.setattr(process, "_ask", ask)
    monkeypatch.setattr("peers.engine_process.time.monotonic", lambda: clock[0])
    for _ in process.run(scenario("decode", 8, 12)):
        clock[0] += 100.0  # probes
    assert limits == [(0, 10.0), (1, 7.0), (2, 4.0)]


def test_a_scenario_beyond_the_limit_is_left_out_and_the_rest_measured_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [scenario(name, 8, 2) for name in ("decode", "decode@4096", "prefill-512")]
    started: list[list[str]] = []
    saves: list[int] = []

    class Slow:
        def __init__(self, _engine: str, _folder: Any, todo: Any, _args: Any) -> None:
            started.append([s.name for s in todo])

        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ready(self) -> dict[str, Any]:
            return {"load_s": 1.0, "first_token_s": 1.0}

    def measured(_process: Any, what: Any, _args: Any) -> dict[str, Any]:
        if what.context == 4096:
            raise TooSlow("decode@4096 took more than 1 s (--limit)")
        return run_of(what.name, 1.0)

    monkeypatch.setattr(compare, "EngineProcess", Slow)
    monkeypatch.setattr(compare, "measure_scenario", measured)
    comparison = object.__new__(compare.Comparison)
    comparison._args, comparison._console = arguments(), compare.Console(quiet=True)
    comparison._folder, comparison._reference, comparison.failed = Path(), None, False
    comparison._todo, comparison._kept = {"helm": list(wanted)}, {}
    comparison.document = {**model_of(), "shape": "made-up", "left_out": [], "rounds": []}
    comparison.round(0, lambda: saves.append(len(started)))
    comparison.round(1, lambda: saves.append(len(started)))
    assert started == [
        ["decode", "decode@4096", "prefill-512"], ["prefill-512"], ["decode", "prefill-512"],
    ]  # fmt: skip
    assert saves == [1, 2, 3]
    assert len(comparison.document["left_out"]) == 1
    ran = [[r["scenario"] for r in p["runs"]] for p in comparison.document["rounds"][0]]
    assert ran == [["decode"], ["prefill-512"]]


def test_steps_typically_take_as_long_as_the_median_one() -> None:
    assert typical([2.0, 9.0, 1.0]) == 6.0
    assert typical([]) == 0.0


class FakeEngine:
    def __init__(self, parts_s: list[float]) -> None:
        self.left, self.prepared = list(parts_s), 0

    def prepare(self, _: Scenario) -> None:
        self.prepared += 1

    def run(self, what: Scenario) -> Iterator[Timed]:
        for _ in what.part_steps:
            part_s = self.left.pop(0)
            yield Timed([part_s], {"linear": part_s})


@pytest.mark.parametrize(
    ("prompts_s", "runs", "kept"),
    [([0.3, 0.9, 0.2, 0.5, 0.09, 7.0], 5, 0.3), ([0.8, 1.1, 1.2], 3, 1.1), ([16.0, 15.0], 1, 16.0)],
)
def test_of_short_prompts_the_median_one_counts(
    prompts_s: list[float], runs: int, kept: float
) -> None:
    engine = FakeEngine(prompts_s)
    (found,) = typical_parts(engine, scenario("prefill-512", 8, 8))
    assert (found.step_s, found.ops) == ([kept], {"linear": kept})
    assert len(engine.left) == len(prompts_s) - runs
    assert engine.prepared == runs - 1  # for the first one its caller did


def test_every_part_of_a_decode_counts() -> None:
    engine = FakeEngine([0.1, 0.2, 0.3])
    what = scenario("decode", 8, 8)
    found = list(typical_parts(engine, what))
    assert [part.step_s for part in found] == [[0.1], [0.2]]
    assert len(what.part_steps) == 2
    assert engine.prepared == 0


def test_results_of_before_typical_steps_are_those_of_all_steps() -> None:
    run = run_of("decode", 2.0)
    del run["typical_seconds"]
    assert figures_of(run)[RATE] == pytest.approx(64 / 2.5)


def test_the_deviation_is_that_of_the_worst_row_and_nan_passes_for_nothing() -> None:
    expected = np.random.default_rng(1).standard_normal((5, 400)).astype(np.float32)
    assert deviation(expected, expected) == 0
    wrong = expected.copy()
    wrong[3] = -wrong[3]
    assert deviation(wrong, expected) == pytest.approx(2, rel=0.1)
    wrong[3, 7] = math.nan
    assert not deviation(wrong, expected) <= 1e9
