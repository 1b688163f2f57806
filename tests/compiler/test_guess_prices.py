"""From which acceptance on guesses pay, against sums by hand and other prices of the same steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import helm
from command import helm as command
from helm.compiler import explain
from helm.compiler.solve import Study
from helm.compiler.speculation import (
    GuessPrice,
    GuessPrices,
    break_even,
    expected,
    guess_prices,
    step_s,
)
from helm.machine.profile import load_profile

QWEN = str(Path(__file__).resolve().parents[1] / "data" / "configs" / "qwen3-8b.json")


def study(preset: Any = "cpu-desktop-64gb-ddr5", **options: Any) -> Study:
    return helm.study(QWEN, profile=preset, **options)


@pytest.mark.parametrize("ratio", [1.0, 1.05, 1.4, 2.0, 2.7, 5.0])
def test_the_break_even_brings_as_much_as_it_costs(ratio: float) -> None:
    for guesses in range(1, 9):
        rate = break_even(guesses, ratio)
        if ratio > expected(0.99, guesses):
            assert rate is None
        else:
            assert rate is not None
            tokens = 1.0
            for right in range(1, guesses + 1):
                tokens += rate**right
            assert tokens == pytest.approx(ratio, abs=1e-4)
    assert expected(1.0, 4) == 5
    assert expected(0.0, 4) == 1
    assert expected(0.5, 2) == 1.75


def test_the_best_number_is_the_one_that_brings_most() -> None:
    steps = {1: 1.3, 2: 1.35, 4: 1.5, 8: 6.0}
    prices = GuessPrices(1.0, tuple(GuessPrice(k, s, break_even(k, s)) for k, s in steps.items()))
    least = prices.least
    assert least is not None
    assert (least.guesses, least.pays_from) == (2, pytest.approx(0.2746, abs=1e-3))
    assert prices.best(0.1) == (0, 1.0)
    for rate in (0.4, 0.7, 0.95):
        gains = {k: sum(rate**i for i in range(k + 1)) / s for k, s in steps.items()}
        found, gain = prices.best(rate)
        assert gain == pytest.approx(max(gains.values()))
        assert gains[found] == pytest.approx(gain)
    assert GuessPrices(1.0, ()).best(0.9) == (0, 1.0)
    assert GuessPrices(1.0, ()).least is None


def test_longer_steps_are_priced_as_the_plan_prices_more_sequences() -> None:
    """At a context so short that attention is nothing, rows are rows."""
    one = study(prompt_tokens=8, output_tokens=8, context=16)
    assert step_s(one, 0) == pytest.approx(one.best.predicted.decode_s, rel=1e-6)
    for guesses in (1, 4, 7):
        together = study(prompt_tokens=8, output_tokens=8, context=16, batch=1 + guesses)
        assert step_s(one, guesses) == pytest.approx(together.best.predicted.decode_s, rel=0.02)


@pytest.mark.parametrize("preset", ["thesis-4060", "cpu-desktop-64gb-ddr5"])
def test_longer_steps_take_longer_and_never_pay_where_products_bound_them(preset: str) -> None:
    found = guess_prices(study(preset))
    steps = [found.alone_s, *(price.step_s for price in found.prices)]
    assert steps == sorted(steps)
    assert [price.guesses for price in found.prices] == list(range(1, len(steps)))
    profile = load_profile(preset)
    slow = {kind: {rows: rate * 1e-3 for rows, rate in rates.items()}
            for kind, rates in profile.cpu.matmul_flops.items()}  # fmt: skip
    own = dataclasses.replace(profile.cpu, matmul_flops=slow)
    bound = study(dataclasses.replace(profile, cpu=own, accelerator=None, link=None))
    assert guess_prices(bound).least is None
    assert "never pay" in explain.guesses_text(bound)
    free = study("thesis-4060")
    least = guess_prices(free).least
    assert least is not None
    assert (least.pays_from or 0) < 0.005
    assert "pay whenever one is right" in explain.guesses_text(free)


def test_where_nothing_is_guessed_the_reason_is_said() -> None:
    crowded = guess_prices(study(batch=8))
    assert (crowded.prices, crowded.least) == ((), None)
    assert "no rows of logits" in explain.guesses_text(study(batch=8))
    assert crowded.to_dict()["pays_from"] is None


def test_plan_tells_it() -> None:
    given = ("plan", QWEN, "--profile", "thesis-4060", "-c", "4096")
    assert "guesses of tokens pay " in " ".join(command(*given).stdout.split())
    told = json.loads(command(*given, "--json").stdout)["speculation"]
    assert told["reason"] == ""
    assert told["step_s"]["0"] <= told["step_s"]["1"] <= told["step_s"]["7"]
    assert told["pays_from"] == pytest.approx(
        told["step_s"][str(told["guesses"])] / told["step_s"]["0"] - 1, abs=1e-3
    )
