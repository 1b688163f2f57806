"""bench/compare.py: its scenarios and figures, from made-up measurements."""

from __future__ import annotations

import pytest

from bench_config import CONFIG
from bench_runs import BEHIND, BLOCKS, HEAD, figures_of, model_of, process_of, run_of
from compare_report import bar_sheet
from figures import (
    AS_STORED,
    FLOPS,
    OF_PEAK,
    OF_READ,
    OTHER_OPS,
    PRODUCTS,
    RATE,
    TIMES,
    attention_flops,
    matrix_elements,
    product_flops,
    run_figures,
    step_bytes,
)
from scenarios import DEFAULTS, chosen, prompt_of, scenario


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
