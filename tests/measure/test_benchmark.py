"""measure.benchmark and `helm-llm bench`: what is measured, what is counted, what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess

import pytest

import command
import helm
from helm import _helm
from helm.measure.benchmark import Load, measure
from helm.model.hub import bundled_model
from small_models import model_dir


@pytest.fixture(scope="module")
def llm():
    with helm.LLM(context=200, max_sequences=3, threads=1, dtype="f32") as model:
        yield model


def test_a_report_adds_up(llm):
    rounds = []
    load = Load(prompt=60, output=8, batch=3)
    report = llm.benchmark(load, 2, lambda done, of: rounds.append((done, of)))
    assert rounds == [(0, 2), (1, 2), (2, 2)]
    for phase, tokens in ((report.prefill, 180), (report.decode, 3)):
        assert len(phase.seconds) == 2
        assert phase.tokens == tokens
        assert phase.tokens_per_s == tuple(tokens / s for s in phase.seconds)
        whole = sum(share.seconds for share in phase.ops)
        assert min(phase.seconds) * 0.9 < whole < max(phase.seconds) * 1.1
        assert {"linear", "attention", "norm", "rope"} < {share.op for share in phase.ops}
        assert phase.ops[-1].op == "rest"
    assert min(*report.read_bytes_per_s, *report.fma_flops) > 1e8


def test_experts_are_counted_beside_those_expected():
    """Half of six for each token; two tokens share some."""
    with helm.LLM(
        model_dir("qwen3_moe"), context=64, max_sequences=2, threads=2, device="cpu"
    ) as llm:
        before = llm.stats
        assert before["experts"] == {"runs": 0, "rows": 0, "distinct": 0, "expected": 0}
        tensors = {t.name: 4 * math.prod(t.shape) for t in llm.plan.tensors if len(t.shape) == 2}
        embed = tensors.pop("model.embed_tokens.weight")
        experts = sum(size for name, size in tensors.items() if ".experts." in name)
        rest = sum(tensors.values()) - experts
        assert embed > 0
        assert before["decode_bytes"] == rest + experts // 2
        report = llm.benchmark(Load(prompt=12, output=6, batch=2), 2)
        after = llm.stats["experts"]
    expected, counted = report.experts
    assert expected == 4.5
    assert 3 <= counted <= 6
    assert after["runs"] > 0
    assert 3 * after["runs"] <= after["distinct"] <= 6 * after["runs"]
    assert after["rows"] > 2 * after["runs"]  # prompts have more
    decode = {share.op: share for share in report.decode.ops}
    assert decode["experts"].bytes == pytest.approx(experts * 0.75)
    assert decode["experts"].flops == pytest.approx(2 * experts / 4)
    assert report.step_bytes > rest + experts * 0.75


def test_a_dense_model_has_no_experts(llm):
    assert llm.benchmark(Load(prompt=4, output=2, batch=1), 1).experts is None


def test_bytes_and_operations_are_those_of_the_model(llm):
    load = Load(prompt=40, output=9, batch=2)  # the middle step attends to 45 positions
    report = llm.benchmark(load, 1)
    config, tensors = llm.config, llm.plan.tensors
    matrices = sum(4 * t.shape[0] * t.shape[1] for t in tensors if len(t.shape) == 2)
    kv = 2 * 45 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    decode = {share.op: share for share in report.decode.ops}
    assert decode["linear"].bytes == matrices == llm.stats["decode_bytes"]
    assert decode["attention"].bytes == kv
    assert report.step_bytes == matrices + kv
    assert decode["linear"].flops == 2 * 2 * matrices / 4
    prefill = {share.op: share for share in report.prefill.ops}
    last = f"layers.{config.num_hidden_layers - 1}."
    asked = sum(  # of tokens whose logits are asked for: the head, and what follows attention
        t.shape[0] * t.shape[1]
        for t in tensors
        if "embed_tokens" in t.name
        or (last in t.name and ("o_proj" in t.name or "mlp" in t.name) and len(t.shape) == 2)
    )
    assert prefill["linear"].flops == 2 * 80 * (matrices / 4 - asked) + 2 * 2 * asked
    pairs = 2 * 40 * 41 / 2
    assert prefill["attention"].flops == pytest.approx(
        4 * config.num_attention_heads * config.head_dim * pairs * config.num_hidden_layers
    )


def test_compressed_weights_count_as_what_is_read_of_them():
    with helm.LLM(context=64, threads=1, weights="compressed") as llm:
        report = llm.benchmark(Load(prompt=8, output=4, batch=1), 1)
        (linear,) = [share for share in report.decode.ops if share.op == "linear"]
        matrices = sum(2 * math.prod(t.shape) for t in llm.plan.tensors if len(t.shape) == 2)
        assert linear.bytes == llm.stats["decode_bytes"]
        assert 0.7 * matrices < linear.bytes < 0.9 * matrices


def test_sequences_are_closed_afterwards(llm):
    before = llm.generate([5, 6, 7], max_tokens=5, temperature=0)
    for _ in range(3):
        llm.benchmark(Load(150, 50, 3), 1)
    assert llm.generate([5, 6, 7], max_tokens=5, temperature=0).tokens == before.tokens


def test_no_sequence_is_left_open_where_pages_are_short():
    with helm.LLM(context=512, max_sequences=4, page_tokens=64) as whole:
        plan = whole.plan
    short = dataclasses.replace(plan.kv, blocks=5)  # of 16 that they need
    plan = dataclasses.replace(
        plan, kv=short, schedule=dataclasses.replace(plan.schedule, pages={"cpu": short.pages})
    )
    engine = _helm.Engine(plan.to_json(), str(bundled_model()))
    for _ in range(3):
        with pytest.raises(helm.CapacityError):
            measure(engine, plan, Load(200, 50, 4), 1)
    engine.close(engine.open(5 * 64))


@pytest.mark.parametrize(
    ("load", "rounds", "message"),
    [
        (
            Load(200, 1, 1),
            1,
            "prompt is 200; this plan, of context 200 for 3 at once, allows 1 to 199",
        ),
        (Load(100, 101, 1), 1, "output is 101; .* allows 1 to 100"),
        (Load(10, 10, 4), 1, "batch is 4; .* allows 1 to 3"),
        (Load(10, 10, 0), 1, "batch is 0"),
        (Load(10, 10, 1), 0, "rounds is 0"),
        (Load(10.5, 10, 1), 1, "prompt is 10.5"),
        (5, 1, "expected helm.measure.benchmark.Load.*, got 5"),
    ],
)
def test_what_the_plan_cannot_run_is_refused(llm, load, rounds, message):
    with pytest.raises(helm.InvalidError, match=message):
        llm.benchmark(load, rounds)


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    return command.helm("bench", *arguments, status=status)


def test_the_command_shows_where_the_time_goes():
    run = bench("--rounds", "1", "--output-tokens", "4", "--ops")
    assert "% of the machine's read ceiling" in run.stdout
    assert re.search(r"^weights (copied|mapped|compressed): .* on huge pages$", run.stdout, re.M)
    for word in ("decode step", "prefill", "linear", "attention", "rest", "of f32 peak"):
        assert word in run.stdout


def test_the_command_as_json():
    run = bench(
        "--rounds", "2", "--prompt-tokens", "30", "--output-tokens", "4", "--batch", "2", "--json"
    )
    report = json.loads(run.stdout)
    assert report["load"] == {"prompt": 30, "output": 4, "batch": 2}
    assert len(report["decode_tokens_per_s"]) == 2
    assert report["devices"][0]["device"] == "cpu"


def test_the_command_refuses_what_does_not_fit():
    run = bench("--prompt-tokens", "100000", status=2)
    assert "error: [bench] --prompt-tokens is 100000" in run.stderr
