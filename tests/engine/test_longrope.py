"""Longrope: the plan's context chooses between its two tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import helm
import small_models
from helm.errors import ConfigError
from helm.model.families import build_graph, load_config, parse_config

ORIGINAL = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.AutoConfig.from_pretrained(small_models.model_dir("phi3_longrope"))
    config.original_max_position_embeddings = ORIGINAL
    config.rope_parameters["original_max_position_embeddings"] = ORIGINAL
    config._attn_implementation = "eager"
    model = transformers.Phi3ForCausalLM(config)
    small_models._randomise(model, 0)
    model.save_pretrained(tmp_path)
    return tmp_path


def theirs(folder: Path, tokens: list[int]) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize(("context", "length"), [(ORIGINAL, ORIGINAL), (200, 100)])
def test_logits_equal_transformers_on_both_sides(folder: Path, context: int, length: int) -> None:
    tokens = [(7 * i * i + 3 * i + 11) % 131 for i in range(length)]
    want = theirs(folder, tokens)
    with helm.LLM(folder, threads=1, context=context, device="cpu", kv_dtype="f32") as llm:
        got = np.array(llm.logits(tokens))
    assert not np.any(~(np.abs(got - want) <= 2e-5 * np.abs(want).max()))


def test_a_prompt_is_turned_alike_wherever_it_ends(folder: Path) -> None:
    """The context decides, not the length so far, which keys computed before could not follow."""
    tokens = small_models.PROMPT
    with helm.LLM(folder, threads=1, context=ORIGINAL, device="cpu") as near:
        short = np.array(near.logits(tokens))
    with helm.LLM(folder, threads=1, context=ORIGINAL + 1, device="cpu") as far:
        long = np.array(far.logits(tokens))
        padded = np.array(far.logits([*tokens, *tokens[:12]]))
    assert np.abs(short - long).max() > 1e-3
    np.testing.assert_array_equal(padded[: len(tokens)], long)


def test_plans_of_both_sides_are_of_different_models(folder: Path) -> None:
    """Saved KV belongs to the model of its plan."""
    with helm.LLM(folder, threads=1, context=ORIGINAL, device="cpu") as llm:
        identity = llm.plan.model
    with helm.LLM(folder, threads=1, context=ORIGINAL + 1, device="cpu") as llm:
        assert llm.plan.model != identity


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
@pytest.mark.parametrize("count", [0, 5, 7])
def test_lists_of_another_length_are_named(folder: Path, name: str, count: int) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"][name] = [1.0] * count
    with pytest.raises(ConfigError, match=rf"{name}: expected 6 factors.* found {count}"):
        parse_config(values)


def test_graphs_hold_both_tables(folder: Path) -> None:
    graph = build_graph(load_config(folder))
    (far,) = graph.far_rope
    assert graph.rope_of(ORIGINAL) == graph.rope
    assert graph.rope_of(ORIGINAL + 1) == (far.instead,)
    assert far.instead != graph.rope[0]
    assert far.beyond == ORIGINAL
