"""Published configurations of models that run as another family, or with longrope."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helm.model.families import build_graph, parse_config
from helm.model.graph import Attention
from helm.model.rope import rope_table

FALCON3_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 11, "eos_token_id": 11, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 8192, "mlp_bias": False,
    "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 4,
    "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000042,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 131072,
}  # fmt: skip
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999,
    "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
    "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
    "num_hidden_layers": 32, "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096, "pad_token_id": 199999,
    "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [
            1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817,
            2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687,
            4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894,
            8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
            16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884,
            32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97,
            33.28, 33.49, 33.5, 44.16, 47.77,
        ],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 200064,
}  # fmt: skip


def test_falcon_3_is_a_llama_with_wide_heads() -> None:
    config = parse_config(FALCON3_1B)
    assert (config.head_dim, config.num_key_value_heads, config.rope.theta) == (256, 4, 1000042.0)
    assert config.windows == (0,) * 18
    assert not config.tie_word_embeddings
    graph = build_graph(config)
    assert graph.tensors["model.layers.17.self_attn.q_proj.weight"] == (2048, 2048)
    assert graph.tensors["model.layers.17.self_attn.k_proj.weight"] == (1024, 2048)
    assert not any(name.endswith("bias") for name in graph.tensors)
    assert {op.scale for op in graph.ops() if isinstance(op, Attention)} == {1 / 16}


@pytest.mark.parametrize("far", [False, True])
def test_phi_4_mini_has_transformers_tables(far: bool) -> None:
    """Three quarters of every head of 128 are rotated."""
    config = parse_config(PHI4_MINI)
    length = 8192 if far else 4096
    theirs = transformers.Phi3Config(**PHI4_MINI)
    want, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=length)
    table = rope_table(config.rope, config.head_dim, far=far)
    got = np.array(table.inv_freq, np.float32)
    assert got.shape == (48,)
    off = np.abs(got.view(np.int32) - want.numpy().view(np.int32))
    assert off.max() <= 2
    assert table.attention_factor == pytest.approx(factor, rel=1e-12)
    assert table.attention_factor == pytest.approx(1.19024, abs=1e-5)


@pytest.mark.parametrize(("window", "context"), [(262144, 131072), (4096, 32768), (32768, 32768)])
def test_a_window_above_the_context_is_taken_as_published(window: int, context: int) -> None:
    """Phi-3's long models and Phi-4-mini have one, which bounds nothing; Mistral's lies within."""
    config = parse_config(
        {**PHI4_MINI, "sliding_window": window, "max_position_embeddings": context}
    )
    assert config.windows == (window,) * 32
