"""The text part of multimodal models: nested configurations, prefixes, tensors of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import helm
import small_models
from helm.errors import ConfigError, UnsupportedModelError
from helm.model.families import load_config, parse_config
from helm.model.weight_names import read_weights

_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PIXTRAL = {**_SIGLIP, "head_dim": 8}
_TEXT = {key: value for key, value in small_models._ROTARY.items() if value is not None}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (transformers.Gemma3Config, _SIGLIP, {"num_hidden_layers": 7, "sliding_window": 5}),
    "Mistral3": (transformers.Mistral3Config, _PIXTRAL, {"model_type": "mistral"}),
}


def saved(name: str, folder: Path) -> torch.Tensor:
    """Writes a small model; its logits of text."""
    config_class, vision, own = CASES[name]
    config = config_class(text_config={**_TEXT, **own}, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    small_models._randomise(model, 0)
    model = model.eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([small_models.PROMPT])).logits[0]


def check(folder: Path, want: torch.Tensor) -> None:
    with helm.LLM(folder, threads=1, context=64, device="cpu", kv_dtype="f32") as llm:
        got = np.array(llm.logits(small_models.PROMPT))
        assert any("images or sound" in notice for notice in llm.plan.notices)
    assert not np.any(~(np.abs(got - want.numpy()) <= 2e-5 * np.abs(want.numpy()).max()))


@pytest.mark.parametrize("name", CASES)
def test_the_text_part_runs_and_the_rest_is_left_out(name: str, tmp_path: Path) -> None:
    want = saved(name, tmp_path)
    check(tmp_path, want)
    named = read_weights(tmp_path, load_config(tmp_path))
    assert any(
        "left out" in notice and "which HELM does not take: " in notice for notice in named.notices
    )


def test_prefixes_of_newer_checkpoints(tmp_path: Path) -> None:
    want = saved("Gemma3", tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in tensors)
    newer = {
        f"model.{name}".replace("language_model.model.", "language_model."): data
        for name, data in tensors.items()
    }
    assert any(name.startswith("model.language_model.layers.") for name in newer)
    safetensors.torch.save_file(newer, tmp_path / "model.safetensors")
    check(tmp_path, want)


def test_keys_of_the_text_part_are_named(tmp_path: Path) -> None:
    saved("Gemma3", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"]["hidden_size"] = "48"
    with pytest.raises(ConfigError, match=r"text_config\.hidden_size: expected an integer"):
        parse_config(values)
    values["text_config"] = {"model_type": "qwen9_text"}
    with pytest.raises(UnsupportedModelError, match=r"qwen9_text.* is not supported"):
        parse_config(values)
    values["text_config"] = [1]
    with pytest.raises(ConfigError, match=r"text_config: expected an object"):
        parse_config(values)
