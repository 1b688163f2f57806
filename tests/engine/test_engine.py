"""The native engine against transformers: every family, dtype, tier and way to cut the work."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from model_tensors import tensors_of
from near_logits import (
    BEST_EXACT_TIER,
    LENGTHS,
    ROUNDING_TIERS,
    ULP,
    assert_close,
    engine_of,
    reference_logits,
    reference_model,
)
from plans import make_plan

import small_models
from engine_helpers import greedy, logits_of, prompt_of
from helm import _helm
from helm.compiler.load_cost import LoadingRequest
from helm.machine.profile import load_profile
from helm.model.families import load_config

WHY = {tier["name"]: tier["reason"] for tier in _helm.isa_tiers()}
TIERS = [tier["name"] for tier in _helm.isa_tiers() if tier["available"]]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", small_models.CASES)
def test_logits_equal_transformers(name: str, length: int) -> None:
    got = logits_of(engine_of(name), prompt_of(length))
    assert_close(got, reference_logits(name, "f32", length), 400, f"{name} {length}")


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "qwen3", "opt", "opt_350m"])
def test_sixteen_bit_weights(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELM_CPU_ISA", BEST_EXACT_TIER)
    got = logits_of(engine_of(name, dtype), prompt_of(513))
    assert_close(got, reference_logits(name, dtype, 513), 400, f"{name} {dtype}")


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
def test_sixteen_bit_cache(kv_dtype: str) -> None:
    got = logits_of(engine_of("qwen3", kv_dtype=kv_dtype), prompt_of(513))
    ulps = 8 * ULP[kv_dtype] / ULP["f32"]  # each key and value is rounded once per layer
    assert_close(got, reference_logits("qwen3", "f32", 513), ulps, kv_dtype)


def test_comparison_catches_nan_sign_and_row() -> None:
    want = reference_logits("llama", "f32", 7)
    for change in (
        lambda a: a.__setitem__((3, 5), np.nan),
        lambda a: a.__setitem__((3, np.abs(a[3]).argmax()), -np.abs(a[3]).max() * 1.1),
        lambda a: a.__setitem__(3, a[4]),
    ):
        wrong = want.copy()
        change(wrong)
        with pytest.raises(pytest.fail.Exception):
            assert_close(wrong, want, 400, "changed")


@pytest.mark.parametrize("name", small_models.CASES)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    prompt = prompt_of(37)
    with torch.no_grad():
        out = reference_model(name, "f32").generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            attention_mask=torch.ones(1, len(prompt)),
            repetition_penalty=1.0,
        )
    assert greedy(engine_of(name), [prompt], 40)[0] == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3_window", "opt"])
def test_batch_equals_single(name: str) -> None:
    engine = engine_of(name)
    prompts = [prompt_of(length) for length in (1, 90, 7, 300, 33, 2, 64, 65, 17, 5)]
    together = greedy(engine, prompts, 25)
    assert together == [greedy(engine, [prompt], 25)[0] for prompt in prompts]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_chunks_equal_whole(dtype: str) -> None:
    tokens = np.array(prompt_of(300), np.int32)
    engine = engine_of("qwen3", dtype)
    whole = logits_of(engine, tokens.tolist())
    for chunk in (1, 13, 128):
        sequence = engine.open(300)
        parts = [
            engine.forward(sequence, tokens[i : i + chunk], True) for i in range(0, 300, chunk)
        ]
        engine.close(sequence)
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_page_size_and_step_size_do_not_change_tokens() -> None:
    prompts = [prompt_of(200), prompt_of(3)]
    expected = greedy(engine_of("mistral_window"), prompts, 30)
    for page_tokens, step_tokens in ((16, 512), (37, 64), (512, 8)):
        engine = engine_of("mistral_window", page_tokens=page_tokens, step_tokens=step_tokens)
        assert greedy(engine, prompts, 30) == expected


def run_tier(
    tier: str,
    name: str,
    dtype: str,
    folder: Path,
    *more: Path,
    placed: dict[str, str] | None = None,
) -> str:
    """Runs engine_helpers.py in a process of that tier; `folder` takes the plan. placed: endings
    of tensors' names -> their format in the engine."""
    model = small_models.model_dir(name, dtype)
    options = {"threads": 2, "memory_bytes": 4 << 30, "kv_dtype": "f32"}
    plan = make_plan(load_config(model), tensors_of(model), **options)
    for ending, wanted in (placed or {}).items():
        slices = tuple(
            replace(held, format=wanted) if held.tensor.endswith(ending) else held
            for held in plan.slices
        )
        assert slices != plan.slices
        plan = replace(plan, slices=slices)
    (folder / "plan.json").write_text(plan.to_json())
    script = Path(__file__).parents[1] / "support" / "engine_helpers.py"
    run = subprocess.run(
        [sys.executable, script, folder / "plan.json", model, *more],
        env={**os.environ, "HELM_CPU_ISA": tier},
        text=True,
        capture_output=True,
    )
    assert run.returncode == 0, run.stderr
    used, tokens = run.stdout.split(" ", 1)
    assert used == tier
    return tokens


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_tier_gives_the_same_tokens(dtype: str, tmp_path: Path) -> None:
    exact = [tier for tier in TIERS if dtype != "bf16" or tier not in ROUNDING_TIERS]
    outputs = {tier: run_tier(tier, "qwen3", dtype, tmp_path) for tier in exact}
    assert len(set(outputs.values())) == 1, outputs


@pytest.mark.parametrize("tier", ROUNDING_TIERS)
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "qwen3", "opt", "opt_350m"])
def test_rounded_activations_err_less_than_torch_in_bf16(
    name: str, tier: str, tmp_path: Path
) -> None:
    if tier not in TIERS:
        pytest.skip(f"no tier {tier}: {WHY[tier]}")
    run_tier(tier, name, "bf16", tmp_path, tmp_path / "logits.npz")
    logits = np.load(tmp_path / "logits.npz")
    for chunk in ("by_1", "by_7", "by_13", "by_128"):
        np.testing.assert_array_equal(logits[chunk], logits["whole"])
    tokens = torch.tensor([prompt_of(300)])

    def through_torch(dtype: torch.dtype) -> np.ndarray:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            small_models.model_dir(name, "bf16"), dtype=dtype, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            return model(tokens).logits[0].double().numpy()

    exact = through_torch(torch.float64)
    own, of_torch = (
        np.sqrt(np.mean((got - exact) ** 2))
        for got in (logits["whole"], through_torch(torch.bfloat16))
    )
    assert own > 1e-4 * np.sqrt(np.mean(exact**2))  # else nothing was rounded
    assert own <= of_torch


@pytest.mark.parametrize("tier", TIERS)
def test_parts_of_a_product_in_several_dtypes(tier: str, tmp_path: Path) -> None:
    """Parts of one dtype after another, which in some tiers take inputs packed in another way."""
    logits = {}
    for name, placed in (("one", None), ("several", {"k_proj.weight": "f32"})):
        file = tmp_path / f"{name}.npz"
        run_tier(tier, "qwen3", "bf16", tmp_path, file, placed=placed)
        logits[name] = np.load(file)
    for chunk in ("by_1", "by_7", "by_13", "by_128"):
        np.testing.assert_array_equal(logits["several"][chunk], logits["several"]["whole"])
    same = np.array_equal(logits["several"]["whole"], logits["one"]["whole"])
    assert same == (tier not in ROUNDING_TIERS)  # keys are no longer of rounded inputs


@pytest.mark.parametrize("name", ["llama_tied_sharded", "opt_350m"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_mapped_weights_give_the_same_logits(name: str, dtype: str) -> None:
    folder = small_models.model_dir(name, dtype)
    for placed in ("auto", "f16"):  # f16: converted, so copied after all
        options = {"threads": 2, "memory_bytes": 4 << 30, "dtype": placed}
        config, tensors = load_config(folder), tensors_of(folder)
        copied, mapped = (
            _helm.Engine(
                make_plan(config, tensors, loading=LoadingRequest(weights), **options).to_json(),
                str(folder),
            )
            for weights in ("copied", "mapped")
        )
        sizes = [engine.stats["copied_bytes"] for engine in (mapped, copied)]
        assert (sizes[0] < sizes[1]) if placed == "auto" else (0 < sizes[0] <= sizes[1])
        assert mapped.stats["weights_bytes"] == copied.stats["weights_bytes"]
        prompt = prompt_of(40)
        np.testing.assert_array_equal(logits_of(mapped, prompt), logits_of(copied, prompt))


def test_tensors_from_memory_are_used_in_place_or_converted() -> None:
    model = small_models.make_model("llama")
    folder = small_models.model_dir("llama")
    plan = make_plan(load_config(folder), tensors_of(folder), threads=1, memory_bytes=4 << 30)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    shared = _helm.Engine(plan.to_json(), tensors=tensors)
    loaded = _helm.Engine(plan.to_json(), str(folder))
    prompt = prompt_of(20)
    before = logits_of(loaded, prompt)
    np.testing.assert_array_equal(logits_of(shared, prompt), before)
    with torch.no_grad():
        model.lm_head.weight *= 2  # in place: the engine sees it
    np.testing.assert_array_equal(logits_of(shared, prompt), 2 * before)
    halves = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    converted = logits_of(_helm.Engine(plan.to_json(), tensors=halves), prompt)
    assert not np.array_equal(converted, before)


def test_a_searched_plan_for_the_cpu_runs_and_gives_the_same_logits() -> None:
    folder = small_models.model_dir("qwen3")
    config, tensors = load_config(folder), tensors_of(folder)
    options = {"context": 600, "kv_dtype": "f32", "memory_bytes": 4 << 30}
    plain = make_plan(config, tensors, threads=8, **options)
    searched = make_plan(config, tensors, profile=load_profile("cpu-laptop-16gb"), **options)
    assert searched.prediction is not None
    got, want = (
        logits_of(_helm.Engine(plan.to_json(), str(folder)), prompt_of(7))
        for plan in (searched, plain)
    )
    assert np.array_equal(got, want)
