"""StableLM. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import Style, build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "StableLmForCausalLM"
_DEFAULTS = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_NAMES = {"rms_norm_eps": "layer_norm_eps"}


def read(node: Reader) -> ModelConfig:
    """A quarter of every head is rotated unless the keys say otherwise."""
    keys = Keys(node, _DEFAULTS, _NAMES)
    config = read_decoder(keys, _ARCHITECTURE, partial=0.25)
    return dataclasses.replace(
        config,
        attention_bias=keys.flag("use_qkv_bias"),
        heads_normed=keys.flag("qk_layernorm"),
        parallel=keys.flag("use_parallel_residual"),
    )


def build(config: ModelConfig) -> Graph:
    """The shared decoder with layer norms."""
    style = Style(
        norm="layer",
        qkv_bias=config.attention_bias,
        qk_norm="each" if config.heads_normed else None,
        parallel=config.parallel,
        before_mlp=None if config.parallel else "post_attention_layernorm",
    )
    return build_decoder(config, style)


FAMILY = Family(_ARCHITECTURE, "stablelm", _DEFAULTS, read, build)
