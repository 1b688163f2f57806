"""What steps take in each mode: against the timeline, an oracle, and the rates that a service must
reach. tests/data/steady_rates.json, which the runtime's tests read, is made by

    python tests/compiler/test_step_modes.py
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from naive_modes import Rows, step_s
from plans import study

from helm import _helm
from helm.compiler.choices import choices
from helm.compiler.explain import serving_lines, serving_of
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import Search
from helm.compiler.setting import make_setting
from helm.compiler.solve import Study
from helm.compiler.step_prices import StepPrices, executed_modes, rates_by_mode, step_prices
from helm.compiler.steps import PlannedSteps
from helm.compiler.timeline import played
from helm.machine.profile import Profile, load_profile
from helm.model.families import build_graph, parse_config
from helm.plan.records import Workload
from search_cases import config_of, costed, model_of

DATA = next(
    folder / "tests" / "data" / "steady_rates.json"
    for folder in Path(__file__).resolve().parents
    if (folder / "pyproject.toml").exists()
)
SHAPES = DATA.parents[2] / "bench" / "shapes.json"
GIB = 1 << 30
MODES = ("near", "joint", "split")


@functools.cache
def served(preset: str, model: str, **options: Any) -> Study:
    given = {"objective": "serve", "batch": 8, "prompt": 512, "output": 128, "context": 4096}
    return study(model, config_of(model), None, load_profile(preset), **{**given, **options})


def prices_of(preset: str = "rtx-4060-8gb-ddr5", model: str = "qwen3-8b") -> StepPrices:
    profile, work = load_profile(preset), Workload(512, 128, 8, 4096, "serve")
    setting = make_setting(
        model_of(model), profile, work, ResourceLimits(sequences=8), profile.cpu.threads, 8
    )
    return step_prices(setting, "accelerator")


def windowed(prices: StepPrices) -> StepPrices:
    """With half of the layers seeing 100 positions, and devices that disturb one another."""
    (kind,) = prices.attention
    fields = ("cpu_s", "near_s", "far_s", "near_beside_s", "far_beside_s", "cpu_pair_s", "pair_s")
    half = dataclasses.replace(kind, **{name: getattr(kind, name) / 2 for name in fields})
    half = dataclasses.replace(half, near_beside_s=half.near_s / 0.8, far_beside_s=half.far_s / 0.7)
    few = dataclasses.replace(half, window=100, layers=kind.layers // 2)
    half = dataclasses.replace(half, layers=kind.layers - few.layers)
    slow = prices.accelerator_s / 0.9
    return dataclasses.replace(prices, attention=(half, few), accelerator_beside_s=slow)


def naive_rate(
    tables: Any, mode: str, near: int, far: int, prompt: int, output: int, chunk: float
) -> float:
    """Steps with a chunk, and steps without, as many that prompts begin as requests end."""
    far = 0 if mode == "near" else far
    length, each = prompt + output / 2, prompt / output
    chunk = max(chunk, (near + far) * each)
    tokens = min(chunk, prompt)
    prompts = [((prompt - tokens) / 2, tokens, chunk / tokens)]
    rows = Rows([length] * near, [length] * far, prompts, near + far + chunk / prompt)
    with_s, best = step_s(tables, mode, rows), 0.0
    for others in {far, 0}:
        if near + others == 0:
            continue
        without_s = step_s(
            tables, mode, Rows([length] * near, [length] * others, (), near + others)
        )
        # Of a hundred steps, how many have a chunk: each token asks for `each` rows.
        low, high = 0.0, 1.0
        for _ in range(100):
            share = (low + high) / 2
            wanted = each * (share * (near + far) + (1 - share) * (near + others))
            low, high = (share, high) if wanted > share * chunk else (low, share)
        if others < far and share * 5 < 1:
            continue  # far rows wait for five steps
        made = share * (near + far) + (1 - share) * (near + others)
        best = max(best, made / (share * with_s + (1 - share) * without_s))
    return best


def paced(tables: Any, near: int, prompt: int, output: int, rows: tuple[int, ...]) -> float:
    """Rows of prompts that a step of near requests has."""
    length, near = prompt + output / 2, max(near, 1)
    alone = step_s(tables, "near", Rows([length] * near, (), (), near))
    fits = [min(4, max((n for n in rows if n <= prompt), default=1))]
    for n in rows:
        if n <= prompt:
            chunk = Rows([length] * near, (), [((prompt - n) / 2, n, 1.0)], near + n / prompt)
            if step_s(tables, "near", chunk) <= max(2.25 * alone, 0.05):
                fits.append(n)
    return max(fits)


# --- one step ------------------------------------------------------------------------------------


def timed(found: Study, context: int) -> tuple[float, Any, int]:
    """The timeline's decode step, the tables, and positions that the CPU attends to."""
    steps = PlannedSteps(found.search, found.best, found.placed)
    seconds = float(played(steps.decode(context), found.best.decode_groups)[1])
    row = int(np.argmax(
        (steps.setting.rows.boundary == found.best.cpu_blocks)
        & (steps.setting.rows.embedded == (found.best.embedding == "accelerator"))
    ))  # fmt: skip
    head: Any = found.best.head
    blocks = int(steps.setting.pool.far_blocks(context)[0])
    return seconds, step_prices(steps.setting, head).record(row), blocks


@pytest.mark.parametrize("preset", ["rtx-4090-24gb-ddr5", "rtx-4060-8gb-ddr5"])
def test_a_near_step_is_the_timelines(preset: str) -> None:
    """On the second machine layers lie on both devices."""
    found = served(preset, "qwen3-8b", objective="total", policy="layer-partition", batch=4)
    assert (found.best.cpu_blocks > 0) == (preset == "rtx-4060-8gb-ddr5")
    steps = PlannedSteps(found.search, found.best, found.placed)
    if found.best.decode_groups > 1:  # priced for requests that take turns
        steps = PlannedSteps(
            found.search, dataclasses.replace(found.best, decode_groups=1), found.placed
        )
    _, tables, _ = timed(found, 600)
    seconds = float(played(steps.decode(600), 1)[1])
    assert step_s(tables, "near", Rows([600] * 4, outputs=4)) == pytest.approx(seconds, rel=1e-9)
    (prompt, *_) = steps.prompts()
    tokens = int(steps.prefill.tokens[0])
    predicted = step_s(tables, "near", Rows((), (), [(0, tokens, 1)], 1))
    if found.best.visit_tokens == 0:
        # The last layer goes on with fewer rows, which the tables leave out.
        assert predicted == pytest.approx(float(played([prompt], 1)[1]), rel=0.1)


def test_a_joint_step_is_the_timelines() -> None:
    """Where the CPU takes longer, so that near attention does not show."""
    found = served(
        "rtx-3090-24gb-ddr4", "qwen3-8b", objective="decode", batch=8, context=16384,
        kv_vram_bytes=2 * GIB, kv_overflow="cpu",
    )  # fmt: skip
    assert found.best.kv is not None
    assert found.best.cpu_blocks == 0
    seconds, tables, blocks = timed(found, 16384)
    far = blocks * found.placed.kv.page_tokens / 8
    joint = step_s(tables, "joint", Rows((), [far] * 8, outputs=8))
    assert joint == pytest.approx(seconds, rel=1e-6)
    assert found.plan.predictor == tables


def test_steady_rates_are_the_oracles() -> None:
    rng = random.Random(3)
    for prices in (prices_of(), windowed(prices_of()), prices_of(model="llama-3.2-1b")):
        layouts = len(prices.step_s)
        for _ in range(40):
            layout, mode = rng.randrange(layouts - 1), rng.choice(MODES)
            near, far = rng.randint(0, 20), rng.choice((0, 1, 7, 40))
            prompt, output = rng.choice((1, 30, 1000)), rng.choice((1, 64, 500))
            if near + (far if mode != "near" else 0) == 0:
                continue
            counts: Any = (np.array([float(near)]), np.array([float(far)]), prompt, output)
            chunk, tables = rng.choice((1.0, 40.0, 300.0)), prices.record(layout)
            rate = prices.steady_rate(mode, *counts, chunk)[layout, 0]  # type: ignore[arg-type]
            expected = naive_rate(tables, mode, near, far, prompt, output, chunk)
            pace = prices.paced_chunk(np.maximum(counts[0], 1), prompt, output)[layout, 0]
            assert pace == paced(tables, near, prompt, output, prices.rows)
            assert rate == pytest.approx(expected, rel=1e-9)


# --- what a service reaches ----------------------------------------------------------------------


def test_plans_promise_the_modes_that_the_runtime_executes() -> None:
    assert executed_modes() == _helm.EXECUTED_MODES == MODES


def simulated() -> Profile:
    """A thread for each of the CPU and `sim`, 11 GB/s each, of the same memory."""
    device = {
        "memory_bytes": 8 * GIB,
        "matvec_bytes_per_s": dict.fromkeys(("f32", "f16", "bf16"), 11e9),
        "matmul_flops": {name: {"1": 1.1e11, "512": 1.1e11} for name in ("f32", "f16", "bf16")},
        "attention_bytes_per_s": dict.fromkeys(("f32", "f16", "bf16", "i8"), 9e9),
        "attention_flops": dict.fromkeys(("f32", "f16", "bf16", "i8"), 5e10),
        "op_s": 2e-6,
        "step_s": 2e-5,
        "activation_bytes_per_s": 11e9,
    }
    link = dict.fromkeys(
        [f"{kind}to_{end}_bytes_per_s" for kind in ("", "pageable_")
         for end in ("accelerator", "host")], 10e9,
    )  # fmt: skip
    return Profile.from_json(json.dumps({
        "format": "helm-profile", "version": 2, "name": "sim", "estimated": True,
        "identity": {"source": "11 GB/s a thread, which lose a fifth beside one another"},
        "cpu": {**device, "threads": 1, "thread_sweep": {"1": 11e9}},
        "accelerator": {**device, "name": "sim", "reserve_bytes": 0, "stage_s": 2e-5},
        "link": {**link, "latency_s": 2e-5, "cpu_rate_while_copying": 0.9,
                 "rate_while_both_compute": 0.8},
    }))  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "output", "gain"),
    [(128, 128, 1.8), (32, 128, 2.5), (256, 128, 1.25), (1000, 128, 0.97)],
)
def test_eight_requests_where_two_are_near(prompt: int, output: int, gain: float) -> None:
    """The 0.6B shape in f16 on the simulated accelerator."""
    shape = json.loads(SHAPES.read_text())["qwen3-0.6b"]
    graph = build_graph(dataclasses.replace(parse_config(shape, "qwen3-0.6b"), dtype="f16"))
    work = Workload(prompt, output, 8, 2048, "serve")
    setting = make_setting(
        costed(graph, "f16"), simulated(), work, ResourceLimits(sequences=8), 1, 8
    )
    prices = step_prices(setting, "accelerator")
    rates = rates_by_mode(prices, np.array([2]), np.array([6]), prompt, output)
    alone, joint = rates["near"][0, 0], rates["joint"][0, 0]
    assert max(joint, alone) / alone >= gain
    if gain > 1:
        assert joint / alone >= gain


def test_the_planner_takes_the_best_of_all_layouts_and_rooms() -> None:
    profile, work = load_profile("rtx-4060-8gb-ddr5"), Workload(256, 256, 8, 2048, "serve")
    limits = ResourceLimits(sequences=8, page_tokens=256)
    space = Space(threads=(profile.cpu.threads,))
    model = model_of("llama-3.2-1b")
    found = Search(model, profile, work, limits, space)
    best = found.result.best
    assert best is not None
    rng, least = random.Random(1), np.inf
    for choice in choices(model, profile, work, limits, space):
        setting, prices = choice.setting, step_prices(choice.setting, choice.head)
        least = min(least, _least_that_fits(found, choice))
        for _ in range(4):
            row, page = rng.randrange(len(setting.rows.boundary)), rng.randrange(len(setting.pages))
            # A block has 256 positions, a request two and a whole context eight.
            blocks, slots = 8 * setting.batch, setting.batch * int(setting.pages[page])
            slots = slots if setting.rows.has_blocks[row] else blocks
            near = min(8, slots // 2)
            far, tables = min(8 - near, (blocks - slots) // 2), prices.record(row)
            shape = (near, far, 256, 256, paced(tables, near, 256, 256, prices.rows))
            rate = max(naive_rate(tables, mode, *shape) for mode in executed_modes()
                       if near or (far and mode != "near"))  # fmt: skip
            steady = work.batch * work.output / rate
            assert choice.serve_s[row, page] <= steady * (1 + 1e-9)
            if slots < blocks:  # nothing else is known of what overflows
                assert choice.serve_s[row, page] == pytest.approx(steady, rel=1e-9)
    assert best.objective_s == pytest.approx(least, rel=1e-9)


def _least_that_fits(found: Search, choice: Any) -> float:
    from helm.compiler.budget import memory_bytes, missing

    lacks = sum(missing(choice.budget, memory_bytes(found.profile, found.limits), found.limits))
    fits = (np.asarray(lacks) == 0) & choice.possible
    if choice.mode == "visit":
        fits &= choice.prefills[0].allowed[:, None]
    return float(np.where(fits, choice.serve_s, np.inf).min())


def test_a_small_card_asks_the_cpu_from_some_load_on() -> None:
    found = served(
        "rtx-4060-8gb-ddr5", "llama-3.2-1b", batch=32, kv_vram_bytes=GIB, page_tokens=256
    )
    serves = serving_of(found)
    assert serves is not None
    rates = [rate.tokens_per_s for rate in serves.rates]
    assert [rate.requests for rate in serves.rates] == [1, 2, 4, 8, 16, 32]
    assert rates == sorted(rates)
    assert serves.rates[0].mode == "near"
    last = serves.rates[-1]
    if serves.cpu_from is None:
        assert last.far == 0
        assert "never" in serving_lines(serves)[0]
    else:
        assert last.mode == "joint"
        assert last.near + last.far <= 32
        assert found.plan.predictor is not None
        assert str(serves.cpu_from) in serving_lines(serves)[0]


def test_the_cpu_alone_has_no_modes() -> None:
    found = served("cpu-desktop-64gb-ddr5", "qwen3-8b")
    serves = serving_of(found)
    assert serves is not None
    assert {rate.mode for rate in serves.rates} == {"cpu"}
    assert serves.cpu_from is None
    assert found.plan.predictor is None
    rates = [rate.tokens_per_s for rate in serves.rates]
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]  # one read of the weights for all
    assert serving_of(served("cpu-desktop-64gb-ddr5", "qwen3-8b", objective="total")) is None


# --- the runtime's copy --------------------------------------------------------------------------


def steady_rates() -> list[dict[str, Any]]:
    found = []
    for prices, layout in ((prices_of(), 0), (windowed(prices_of()), 9)):
        tables = prices.record(layout)
        rates = []
        for mode in MODES:
            for near, far in ((3, 0), (2, 6), (0, 5), (20, 90)):
                if near or mode != "near":
                    for prompt, output, chunk in ((512, 128, 100), (20, 300, 20)):
                        rate = naive_rate(tables, mode, near, far, prompt, output, chunk)
                        rates.append({"mode": mode, "near": near, "far": far, "prompt": prompt,
                                      "output": output, "chunk": chunk, "rate": rate})  # fmt: skip
        found.append({"predictor": dataclasses.asdict(tables), "page_tokens": 512, "rates": rates})
    return found


def test_the_runtimes_cases_are_those_of_the_planner() -> None:
    kept, now = json.loads(DATA.read_text()), json.loads(json.dumps(steady_rates()))
    assert len(kept) == len(now)
    for before, after in zip(kept, now, strict=True):
        assert before["predictor"].keys() == after["predictor"].keys()
        for old, new in zip(before["rates"], after["rates"], strict=True):
            assert old == pytest.approx(new, rel=1e-6) if isinstance(old, float) else True
            assert {**old, "rate": 0} == {**new, "rate": 0}
            assert old["rate"] == pytest.approx(new["rate"], rel=1e-6)


if __name__ == "__main__":
    DATA.write_text(json.dumps(steady_rates()) + "\n", encoding="utf-8")
