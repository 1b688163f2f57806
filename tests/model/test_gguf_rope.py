"""Rope in GGUF files: factors of wavelengths give the frequencies of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gguf_models
import small_models
from helm.model.config import ModelConfig
from helm.model.families import load_config, parse_config
from helm.model.gguf.config import VECTORS, config_of
from helm.model.gguf.file import read_gguf
from helm.model.rope import RopeConfig, rope_table

_TOKENS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def opened(path: Path) -> ModelConfig:
    return parse_config(config_of(read_gguf(path, VECTORS)), str(path))


def test_longrope_is_the_checkpoints(tmp_path: Path) -> None:
    folder = small_models.model_dir("phi3_longrope")
    config = opened(gguf_models.write(folder, tmp_path / "x.gguf", keys=_TOKENS))
    expected = load_config(folder)
    assert config.rope is not None
    assert expected.rope is not None
    for far in (False, True):
        ours = rope_table(config.rope, config.head_dim, far=far)
        theirs = rope_table(expected.rope, expected.head_dim, far=far)
        np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq, rtol=2**-22)
        assert ours.attention_factor == pytest.approx(theirs.attention_factor, rel=1e-6)
    assert replace(config, rope=None) == replace(expected, rope=None, dtype=None)


def test_factors_of_llama3_give_its_frequencies(tmp_path: Path) -> None:
    folder = small_models.model_dir("llama3")
    config = opened(gguf_models.write(folder, tmp_path / "x.gguf"))
    expected = load_config(folder)
    assert config.rope is not None
    assert expected.rope is not None
    same_frequencies(config.rope, expected.rope, config.head_dim)


def test_factors_of_llama_3_1_give_its_frequencies() -> None:
    """In the numbers of the published model, with pairs of all three kinds."""
    parts = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    published = {**parts, "original_max_position_embeddings": 8192}
    factors = gguf_models.llama3_factors(published, 500000.0, 128).tolist()
    assert (min(factors), max(factors)) == (1.0, 8.0)
    assert len(set(factors)) == 8
    same_frequencies(
        RopeConfig("factors", 500000.0, factors=tuple(factors)),
        RopeConfig("llama3", 500000.0, original_context=8192, **parts),
        128,
    )


def same_frequencies(ours: RopeConfig, theirs: RopeConfig, head_dim: int) -> None:
    found, expected = rope_table(ours, head_dim), rope_table(theirs, head_dim)
    assert found.attention_factor == expected.attention_factor == 1.0
    np.testing.assert_allclose(found.inv_freq, expected.inv_freq, rtol=4 * 2**-23)
