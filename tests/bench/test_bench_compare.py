"""bench/compare.py: its figures, bars, tables and rounds, from made-up measurements."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_config import CONFIG

import compare
import engines_here
from compare_report import bar_sheet, speed_sheet, start_sheet
from engine_process import EngineProcess, TooSlow
from engines import Timed
from figures import (
    AS_STORED,
    FLOPS,
    OF_PEAK,
    OF_READ,
    OTHER_OPS,
    PRODUCTS,
    RATE,
    TIMES,
    Bar,
    attention_flops,
    bar_limits,
    bar_values,
    bars,
    matrix_elements,
    product_flops,
    rounds_of,
    run_figures,
    step_bytes,
)
from scenarios import DEFAULTS, Scenario, chosen, prompt_of, scenario
from worker import deviation, typical, typical_parts

# Of CONFIG: 2 blocks of q 32 x 24, k and v 16 x 24 each, o 24 x 32, gate, up and down 40 x 24 each.
BLOCKS = 2 * (32 * 24 + 2 * 16 * 24 + 24 * 32 + 3 * 40 * 24)
BEHIND = 24 * 32 + 3 * 40 * 24  # the last attention
HEAD = 300 * 24


def run_of(
    name: str,
    seconds: float,
    ops: dict[str, float] | None = None,
    read: tuple[float, ...] = (1e9, 3e9),
    alone: float = 0.0,
) -> dict[str, Any]:
    """A run whose parts are between these probes."""
    return {
        "scenario": name,
        "seconds": 1.25 * seconds,  # some steps took longer than the others
        "typical_seconds": seconds,
        "ops": ops or {},
        "alone_seconds": alone,
        "peak_rss_bytes": 4 * (BLOCKS + HEAD),
        "ceilings": [{"read_bytes_per_s": rate, "fma_flops": 1e9} for rate in read],
    }


def figures_of(run: dict[str, Any]) -> dict[str, float]:
    return run_figures(run, scenario(run["scenario"], 128, 64), CONFIG, "bf16")


def process_of(engine: str, *runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": engine,
        "load_s": 1.0,
        "first_token_s": 2.0,
        "details": {"isa": "avx512"} if engine == "helm" else {},
        "deviation": 0.01,
        "runs": list(runs),
    }


def model_of(*rounds: list[dict[str, Any]]) -> dict[str, Any]:
    engines = list(dict.fromkeys(p["engine"] for processes in rounds for p in processes))
    return {
        "shape": "made-up",
        "dtype": "bf16",
        "config": CONFIG,
        "engines": engines,
        "scenarios": [dataclasses.asdict(scenario(name, 128, 64)) for name in DEFAULTS],
        "left_out": [],
        "rounds": list(rounds),
    }


def bar(text: str, engines: list[str], engine: str = "helm") -> Bar:
    (found,) = [b for b in bars(engines) if b.text == text and b.engine == engine]
    return found


@pytest.mark.parametrize(
    ("name", "kind", "context", "sequences", "steps"),
    [
        ("decode", "decode", 100, 1, 48),
        ("decode-x8", "decode", 100, 8, 48),
        ("decode@4096", "decode", 4096, 1, 24),
        ("decode@32768-x2", "decode", 32768, 2, 12),
        ("prefill-512", "prefill", 512, 1, 1),
    ],
)
def test_a_scenario_is_what_its_name_says(
    name: str, kind: str, context: int, sequences: int, steps: int
) -> None:
    found = scenario(name, 100, 48)
    assert (found.kind, found.context) == (kind, context)
    assert (found.sequences, found.steps) == (sequences, steps)
    assert found.tokens == (context if kind == "prefill" else sequences * steps)


@pytest.mark.parametrize("name", ["decode@", "prefill", "prefill-0", "decode-x0", "Decode", ""])
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(SystemExit, match="no scenario"):
        scenario(name, 128, 64)


@pytest.mark.parametrize(
    ("name", "steps"), [("decode", [6] * 8), ("decode@9000", [4] * 3), ("prefill-512", [1])]
)
def test_parts_of_a_scenario_have_as_many_steps_each_or_one_more(
    name: str, steps: list[int]
) -> None:
    assert scenario(name, 100, 48).part_steps == steps
    assert scenario("decode", 100, 3).part_steps == [3]
    assert scenario("decode", 100, 19).part_steps == [4, 5, 5, 5]


def test_only_helm_as_it_comes_measures_everything() -> None:
    wanted = [scenario(name, 128, 64) for name in (*DEFAULTS, "decode@9000")]
    assert chosen("helm", wanted) == wanted
    named = {e: [s.name for s in chosen(e, wanted)] for e in ("helm:avx2", "llama.cpp:fa")}
    assert named["helm:avx2"] == ["decode", "prefill-512", "decode@9000"]
    assert named["llama.cpp:fa"] == [n for n in (*DEFAULTS, "decode@9000") if "32768" not in n]


def test_prompts_of_sequences_begin_differently_and_longer_ones_alike() -> None:
    firsts = {tuple(prompt_of(2, 300, i)) for i in range(8)}
    assert len(firsts) == 8
    assert prompt_of(50, 300)[:20] == prompt_of(20, 300)


def test_a_decode_step_reads_matrices_once_and_every_sequences_keys_and_values() -> None:
    assert matrix_elements(CONFIG) == (BLOCKS, HEAD)
    what = scenario("decode-x4", 10, 3)  # sees 11, 12, 13 positions
    kv = sum(2 * 2 * 2 * 8 * seen for seen in (11, 12, 13)) / 3 * 4
    assert step_bytes(CONFIG, "f32", what) == 4 * (BLOCKS + HEAD + kv)
    assert step_bytes(CONFIG, "f32", what, 1000.0) == 1000 + 4 * kv


def test_prefill_counts_what_is_behind_attention_once_and_causal_pairs() -> None:
    assert product_flops(CONFIG, 7) == 2 * (7 * (BLOCKS - BEHIND) + BEHIND + HEAD)
    pairs = sum(1 for query in range(7) for key in range(7) if key <= query)
    assert attention_flops(CONFIG, 7) == 2 * 4 * (2 * 8 + 2 * 8) * pairs


def test_figures_of_a_decode_are_shares_of_the_ceilings_around_it() -> None:
    ops = {"linear": 1.5, "attention": 0.3, "norm": 0.1}
    found = figures_of(run_of("decode-x4", 2.0, ops))
    assert found[RATE] == pytest.approx(4 * 64 / 2.0)
    size = step_bytes(CONFIG, "bf16", scenario("decode-x4", 128, 64))
    assert found[OF_READ] == pytest.approx(64 * size / 2.0 / 2e9)
    run, what = run_of("decode-x4", 2.0, ops), scenario("decode-x4", 128, 64)
    smaller = run_figures(run, what, CONFIG, "bf16", 3.0 * (BLOCKS + HEAD) / 2)
    fewer = (BLOCKS + HEAD) / 2
    assert smaller[OF_READ] == pytest.approx(64 * (size - fewer) / 2.0 / 2e9)
    assert smaller[AS_STORED] == found[AS_STORED] == found[OF_READ]
    assert found[OTHER_OPS] == pytest.approx(1 - 1.8 / 2.5)  # norms, and what no op accounts for


def test_a_ceiling_is_that_of_every_part_for_as_long_as_the_part_takes_at_it() -> None:
    run = run_of("decode", 1.0, read=(1e9, 3e9, 3e9, 5e9))  # parts at 2, 3 and 4 GB/s
    size = step_bytes(CONFIG, "bf16", scenario("decode", 128, 64))
    at_ceiling_s = 64 * size / 3 * (1 / 2e9 + 1 / 3e9 + 1 / 4e9)
    assert figures_of(run)[OF_READ] == pytest.approx(at_ceiling_s / 1.0)


def test_figures_of_a_prefill_tell_products_from_the_whole() -> None:
    ops = {"linear": 1.0, "attention": 0.5}
    found = figures_of(run_of("prefill-512", 2.0, ops))
    products, attention = product_flops(CONFIG, 512), attention_flops(CONFIG, 512)
    assert found[RATE] == pytest.approx(256)
    assert found[FLOPS] == pytest.approx((products + attention) / 2 / 1e9)
    assert found[OF_PEAK] == pytest.approx((products + attention) / 2 / 1e9)
    assert found[PRODUCTS] == pytest.approx(products / 1e9)
    assert PRODUCTS not in figures_of(run_of("prefill-512", 2.0))


def test_sequences_are_set_beside_the_same_steps_of_one() -> None:
    run = run_of("decode-x8", 2.0, alone=1.5)
    assert figures_of(run)[TIMES] == pytest.approx(8 * 1.5 / 2.0)
    model = model_of([process_of("helm", run)])
    rows = {row[0]: row[1:] for row in bar_sheet(model).rows}
    row = rows["8 sequences over one"]
    assert row[:2] + row[3:] == ("helm", "6.00x [6.00x, 6.00x]", ">= 6x", "met")


@pytest.mark.parametrize(
    ("isa", "reading_s", "computing_s", "times"),
    [
        ("avx512", 1.0, 0.5, 12.0),  # 8 x 1.5 s of one alone over what bounds eight together
        ("avx512", 0.5, 1.5, 8.0),
        ("avx512bf16", 1.0, 1.5, 12.0),  # the peak of f32 does not bound products in bf16
    ],
)
def test_a_ratio_is_set_beside_that_of_the_roofline(
    isa: str, reading_s: float, computing_s: float, times: float
) -> None:
    run, what = run_of("decode-x8", 2.0, alone=1.5), scenario("decode-x8", 128, 64)
    read = 64 * step_bytes(CONFIG, "bf16", what)
    computed = 64 * 8 * 2 * (BLOCKS + HEAD)
    ceiling = {"read_bytes_per_s": read / reading_s, "fma_flops": computed / computing_s}
    process = process_of("helm", {**run, "ceilings": [ceiling, ceiling]})
    process["details"]["isa"] = isa
    found = bar_limits(bar("8 sequences over one", ["helm"]), rounds_of(model_of([process])))
    assert found == [pytest.approx(times)]
    assert bar_limits(bar("decode at 4,096 over llama.cpp as it comes", ["helm"]), [{}]) == []


def test_shares_have_no_limit_beside_them_and_ratios_of_prompts_that_of_the_peak() -> None:
    ours = process_of("helm", run_of("prefill-512", 2.0))
    theirs = process_of("llama.cpp", run_of("prefill-512", 3.0))
    rows = {row[0]: row for row in bar_sheet(model_of([ours, theirs])).rows}
    flops = product_flops(CONFIG, 512) + attention_flops(CONFIG, 512)
    limit = 3.0 / (flops / 1e9)
    assert rows["prefill of 512, products, of the f32 peak"][3] == ""
    cell = rows["prefill of 512 over llama.cpp, its better setting"][3]
    assert cell == f"{limit:.2f}x [{limit:.2f}x, {limit:.2f}x]"


def test_a_bar_is_a_median_of_ratios_within_rounds() -> None:
    seconds = [(1.0, 2.0), (4.0, 4.0), (8.0, 24.0)]  # of HELM and of llama.cpp: 2x, 1x, 3x
    model = model_of(
        *(
            [process_of("helm", run_of("decode", ours)),
             process_of("llama.cpp", run_of("decode", theirs))]
            for ours, theirs in seconds
        )
    )  # fmt: skip
    (row,) = [
        r for r in bar_sheet(model).rows if r[0] == "decode over llama.cpp, its better setting"
    ]
    assert row[1:3] + row[4:] == ("helm", "2.00x [1.00x, 3.00x]", ">= 1.3x", "met")


def test_the_better_setting_of_a_peer_counts_and_its_own_default_where_named() -> None:
    found = {
        ("helm", "decode@4096"): {RATE: 12.0},
        ("llama.cpp", "decode@4096"): {RATE: 3.0},
        ("llama.cpp:no-fa", "decode@4096"): {RATE: 10.0},
        ("llama.cpp:fa", "decode"): {RATE: 100.0},
    }
    engines = ["helm", "llama.cpp"]
    default = bar("decode at 4,096 over llama.cpp as it comes", engines)
    better = bar("decode at 4,096 over llama.cpp, its better setting", engines)
    assert bar_values(default, [found]) == [4.0]
    assert bar_values(better, [found]) == [1.2]
    assert default.met([4.0])
    assert not better.met([1.2])


def test_a_bar_without_one_of_its_parts_is_not_measured() -> None:
    model = model_of([process_of("helm", run_of("decode", 1.0))])
    verdicts = {row[0]: row[-1] for row in bar_sheet(model).rows}
    assert verdicts["decode over llama.cpp, its better setting"] == "not measured"
    assert verdicts["8 sequences over one"] == "not measured"
    assert verdicts["decode, of the read ceiling"] == "NOT MET"
    assert "all but products and attention, of a decode step" not in verdicts  # another shape


def test_what_should_be_small_is_met_below_its_goal() -> None:
    other = bar("all but products and attention, of a decode step", ["helm"])
    assert other.met([0.029, 0.01, 0.9])
    assert not other.met([0.031])


def test_a_tier_that_rounds_has_the_bars_of_prefill_and_avx2_has_not() -> None:
    engines = ["helm", "helm:avx2", "helm:avx512bf16", "llama.cpp"]
    text = "prefill of 512 over llama.cpp, its better setting"
    assert [b.engine for b in bars(engines) if b.text == text] == ["helm", "helm:avx512bf16"]


def test_helm_on_avx2_has_the_goal_of_avx2() -> None:
    process = process_of("helm", run_of("decode", 1.0))
    rows = {row[0]: row for row in bar_sheet(model_of([process])).rows}
    assert rows["decode, of the read ceiling"][4] == ">= 93%"
    assert rows["decode on AVX2 alone, of the read ceiling"][-1] == "not measured"
    process["details"]["isa"] = "avx2"
    rows = {row[0]: row for row in bar_sheet(model_of([process])).rows}
    assert "decode, of the read ceiling" not in rows
    assert rows["decode on AVX2 alone, of the read ceiling"][1] == "helm"
    assert rows["decode on AVX2 alone, of the read ceiling"][4] == ">= 88%"


def test_goals_of_reading_are_set_to_the_checkpoints_bytes_too_where_fewer_are_read() -> None:
    process = process_of("helm", run_of("decode", 0.001))
    stored = 2.0 * (BLOCKS + HEAD)
    process["weight_bytes"] = stored
    assert not any("checkpoint" in row[0] for row in bar_sheet(model_of([process])).rows)
    process["weight_bytes"] = 0.75 * stored
    rows = {row[0]: row for row in bar_sheet(model_of([process])).rows}
    read = rows["decode, of the read ceiling"]
    as_stored = rows["decode, of reading the checkpoint's bytes"]
    assert as_stored[4] == read[4] == ">= 93%"
    share = [float(row[2].split("%")[0]) for row in (read, as_stored)]
    assert share[0] < share[1] < share[0] / 0.75  # keys and values are what they are


def test_tables_have_a_row_for_each_scenario_that_an_engine_measured() -> None:
    first = [
        process_of("helm", run_of("decode", 1.0), run_of("prefill-512", 1.0)),
        process_of("llama.cpp", run_of("decode", 2.0)),
    ]
    model = model_of(first, [process_of("helm", run_of("decode", 3.0))])
    rows = speed_sheet(model).rows
    assert [row[:2] for row in rows] == [
        ("decode", "helm"), ("decode", "llama.cpp"), ("prefill-512", "helm"),
    ]  # fmt: skip
    assert rows[0][2] == "42.7 [21.3, 64]"
    assert rows[1][-1] == ""  # a peer does not tell its ops
    starts = start_sheet(model).rows
    assert starts[0] == ("helm", "1 [1, 1]", "2 [2, 2]", "200% [200%, 200%]", "0.01 [0.01, 0.01]")
    lines = speed_sheet(model).markdown().splitlines()
    assert len({line.count("|") for line in lines[2:]}) == 1


def arguments(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"threads": 1, "repeats": 2, "rounds": 1, **changed})


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
    monkeypatch.setattr("engine_process.time.monotonic", lambda: clock[0])
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
    comparison._todo = {"helm": list(wanted)}
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
