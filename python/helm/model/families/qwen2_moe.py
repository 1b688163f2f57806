"""Qwen2's mixtures of experts, with an expert for all. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import (
    DEFAULTS,
    Style,
    build_decoder,
    read_decoder,
    with_layer_windows,
)
from helm.model.families.family import Family
from helm.model.families.mixture import MixtureStyle, dense_layers, read_mixture
from helm.model.graph import Graph

_ARCHITECTURE = "Qwen2MoeForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 16,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
}
_MIXTURE = MixtureStyle(shared="shared_expert", shared_gate="shared_expert_gate")


def read(node: Reader) -> ModelConfig:
    """Some layers may be dense, some may have a window."""
    keys = Keys(node, _DEFAULTS)
    config = with_layer_windows(read_decoder(keys, _ARCHITECTURE), keys)
    mixture = dataclasses.replace(
        read_mixture(keys, dense=dense_layers(keys, config.num_hidden_layers)),
        shared_size=keys.size("shared_expert_intermediate_size"),
    )
    bias = keys.flag("qkv_bias")
    return dataclasses.replace(config, mixture=mixture, attention_bias=bias)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; a gate scales what the shared expert adds."""
    return build_decoder(config, Style(qkv_bias=config.attention_bias, mixture=_MIXTURE))


FAMILY = Family(_ARCHITECTURE, "qwen2_moe", _DEFAULTS, read, build)
