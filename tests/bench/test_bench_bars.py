"""bench/compare.py: its ratios, bars and tables, from made-up measurements."""

from __future__ import annotations

import pytest

from bench_config import CONFIG
from bench_runs import BLOCKS, HEAD, bar, model_of, process_of, run_of
from compare_report import bar_sheet, speed_sheet, start_sheet
from figures import (
    RATE,
    attention_flops,
    bar_limits,
    bar_values,
    bars,
    product_flops,
    rounds_of,
    step_bytes,
)
from scenarios import scenario


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
