"""Faults in keys that single families have, each named."""

from __future__ import annotations

import pytest

from helm.errors import ConfigError, UnsupportedModelError
from helm.model.families import parse_config

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def read(base, **changes):
    return parse_config({**base, **changes})


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sliding_window": 0}, ConfigError, "sliding_window: expected an integer from 1"),
        ({"sliding_window": None}, ConfigError, "sliding_window: expected the window of most"),
        (
            {"layer_types": ["full_attention"]},
            ConfigError,
            "layer_types: expected 7 entries, one per layer, found 1",
        ),
        (
            {"layer_types": ["chunked_attention"] * 7},
            ConfigError,
            r"layer_types\[0\]: expected one of full_attention",
        ),
        ({"query_pre_attn_scalar": 0}, ConfigError, "query_pre_attn_scalar: expected a number"),
        ({"final_logit_softcapping": -1.0}, ConfigError, "final_logit_softcapping: expected a num"),
        ({"sliding_window_pattern": 0}, ConfigError, "sliding_window_pattern: expected an integer"),
        ({"rope_local_base_freq": "x"}, ConfigError, "rope_local_base_freq: expected a finite"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attent"),
    ],
)
def test_faults_of_gemma_are_named(changes, error, message):
    assert read(GEMMA).windows == (4096,) * 5 + (0, 4096)
    with pytest.raises(error, match=message):
        read(GEMMA, **changes)


def test_faults_of_other_families_are_named():
    smollm3 = {**SIZES, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    with pytest.raises(ConfigError, match="no_rope_layers: expected 2 entries, one per layer"):
        read(smollm3, no_rope_layers=[1])
    granite = {**SIZES, "architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    with pytest.raises(ConfigError, match="logits_scaling: expected a number from"):
        read(granite, logits_scaling=0)
    cohere = {**SIZES, "architectures": ["CohereForCausalLM"], "model_type": "cohere"}
    with pytest.raises(UnsupportedModelError, match="use_qk_norm: true is not supported"):
        read(cohere, use_qk_norm=True)
