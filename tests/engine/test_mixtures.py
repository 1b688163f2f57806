"""Mixtures of experts: no bit depends on what else is computed, and what is wrong has a name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plans import make_plan
from safetensors.torch import load_file, save_file

import small_models
from engine_helpers import Logits, greedy, logits_of, prompt_of
from helm import _helm
from helm.errors import CheckpointError, ConfigError, UnsupportedModelError
from helm.model.families import load_config
from helm.model.weight_names import read_weights
from helm.serve.metrics import Metrics
from helm.session.service import Service
from whole import one_in

EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


def engine_of(folder: Path, dtype: str, threads: int = 2, **options: Any) -> _helm.Engine:
    weights = read_weights(folder, load_config(folder))
    memory = {"memory_bytes": 4 << 30, "kv_dtype": "f32"}
    plan = make_plan(
        weights.config, weights.tensors, threads=threads, dtype=dtype, **memory, **options
    )
    return _helm.Engine(plan.to_json(), str(folder))


def in_chunks(engine: _helm.Engine, tokens: list[int], chunk: int) -> Logits:
    sequence = engine.open(len(tokens))
    own = np.array(tokens, np.int32)
    parts = [
        engine.forward(sequence, own[i : i + chunk], True) for i in range(0, len(tokens), chunk)
    ]
    engine.close(sequence)
    return np.concatenate(parts)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_batch_chunks_and_threads_change_no_bit(name: str, dtype: str) -> None:
    folder, tokens = small_models.model_dir(name), prompt_of(200)
    engine = engine_of(folder, dtype)
    whole = logits_of(engine, tokens)
    assert np.isfinite(whole).all()
    for chunk in one_in(2, (1, 2, 5, 8, 9, 40, 67), name + dtype):
        np.testing.assert_array_equal(in_chunks(engine, tokens, chunk), whole)
    for threads in (1, 3, 7):
        np.testing.assert_array_equal(logits_of(engine_of(folder, dtype, threads), tokens), whole)
    prompts = [prompt_of(length) for length in (1, 40, 7, 33, 2, 17)]
    together = greedy(engine, prompts, 12)
    assert together == [greedy(engine, [prompt], 12)[0] for prompt in prompts]


def test_experts_read_are_counted_beside_those_expected() -> None:
    """By the engine, by what serves it, and in /metrics."""
    engine = engine_of(small_models.model_dir("qwen3_moe"), "f32")
    service = Service(engine, prefix_cache=False)
    assert not any(name.startswith("experts") for name in service.stats())
    outbox = _helm.Outbox()
    service.submit([_helm.Request(prompt=prompt_of(7), max_tokens=2)], outbox)
    assert outbox.wait(10.0, ended=True)
    found = engine.stats["experts"]
    expected = 6 * (1 - 0.5**7) + 3 * 6 * 0.5  # 7 rows in the first layer, else one
    assert (found["runs"], found["rows"]) == (4, 7 + 3)
    assert found["expected"] == pytest.approx(expected)
    assert 3 * 4 <= found["distinct"] <= 3 * 3 + 6
    stats = service.stats()
    assert (stats["experts_read"], stats["experts_expected"]) == (
        found["distinct"],
        found["expected"],
    )
    text = Metrics().text(stats, 0, {}, True, {})
    assert f"helm_engine_experts_read_total {found['distinct']}\n" in text
    assert f"helm_engine_experts_expected_total {expected:.6g}\n" in text
    service.stop(1.0)


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """The small model of that name with other tensors."""
    folder = tmp_path / "model"
    shutil.copytree(small_models.model_dir(name), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_experts_that_all_tokens_have_and_that_none_has(tmp_path: Path) -> None:
    """Three experts of eight for all tokens. The others' weights do not matter."""

    def choose(tensors: dict[str, Any]) -> None:
        for name, value in tensors.items():
            if name.endswith("correction_bias"):
                value[:] = torch.tensor([0, 0, 0, 0, 9, 8, 7, 0.0])

    folder = changed(tmp_path, "glm4_moe", choose)
    tokens = prompt_of(70)
    for dtype in ("f32", "q4"):
        engine = engine_of(folder, dtype)
        found = logits_of(engine, tokens)
        np.testing.assert_array_equal(in_chunks(engine, tokens, 1), found)

    def spoil(tensors: dict[str, Any]) -> None:
        choose(tensors)
        for name, value in tensors.items():
            if ".experts.0." in name or ".experts.3." in name:
                value[:] = 7.0

    other = changed(tmp_path / "other", "glm4_moe", spoil)
    np.testing.assert_array_equal(logits_of(engine_of(other, "q4"), tokens), found)


def test_of_equal_logits_the_lower_ids_are_chosen(tmp_path: Path) -> None:
    """All experts' logits are equal: 0, 1 and 2 are chosen, whatever the others are."""

    def tie(tensors: dict[str, Any]) -> None:
        for name, value in tensors.items():
            if name.endswith("mlp.gate.weight"):
                value[:] = value[0]

    def spoil(tensors: dict[str, Any]) -> None:
        tie(tensors)
        for name, value in tensors.items():
            if ".experts.3." in name or ".experts.5." in name:
                value[:] = 3.0

    tokens = prompt_of(20)
    tied = changed(tmp_path, "qwen3_moe", tie)
    other = changed(tmp_path / "other", "qwen3_moe", spoil)
    found = logits_of(engine_of(tied, "f32"), tokens)
    np.testing.assert_array_equal(logits_of(engine_of(other, "f32"), tokens), found)


def test_router_logits_that_are_not_finite_make_nan(tmp_path: Path) -> None:
    """Of every token whose router overflows, so that its request ends with an error."""
    folder = changed(tmp_path, "qwen3_moe", lambda t: t[ROUTER].fill_(3e38))
    found = logits_of(engine_of(folder, "f32"), prompt_of(20))
    assert np.isnan(found).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(EXPERT), f"lacks 1 of 6 experts, among them '{EXPERT}'"),
        (lambda t: t.update({EXPERT: torch.zeros(16, 48)}), f"the expert '{EXPERT}' is f32"),
        (lambda t: t.update({EXPERT: t[EXPERT].to(torch.float16)}), f"'{EXPERT}' is f16"),
        (lambda t: t.update({ROUTER: torch.zeros(5, 48)}), "gate.weight is \\[5, 48\\]"),
        (lambda t: t.update({ROUTER: torch.zeros(6, 48, dtype=torch.int8)}), "the router"),
        (
            lambda t: t.update({EXPERT.replace(".2.", ".6."): torch.zeros(32, 48)}),
            "experts.6.up_proj.weight",
        ),
    ],
)
def test_damaged_experts_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    folder = changed(tmp_path, "qwen3_moe", change)
    with pytest.raises(CheckpointError, match=said):
        engine_of(folder, "f32")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most the 6"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("mixtral", {"num_local_experts": -1}, "num_local_experts"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok: expected 2"),
        ("glm4_moe", {"scoring_func": "tanh"}, "scoring_func"),
        ("glm4_moe", {"n_group": 3}, "n_group: expected a divisor of the 8 experts"),
        ("glm4_moe", {"topk_group": 1}, "topk_group: 1 groups have 2 experts, 3 are chosen"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_bad_keys_are_refused(tmp_path: Path, name: str, change: dict[str, Any], said: str) -> None:
    stated = json.loads((small_models.model_dir(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, **change}))
    with pytest.raises((ConfigError, UnsupportedModelError), match=said):
        load_config(tmp_path)
