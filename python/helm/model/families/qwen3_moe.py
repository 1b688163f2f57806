"""Qwen3's mixtures of experts. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, Style, build_decoder, read_decoder, read_window
from helm.model.families.family import Family
from helm.model.families.mixture import dense_layers, read_mixture
from helm.model.graph import Graph

_ARCHITECTURE = "Qwen3MoeForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "attention_bias": False,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}


def read(node: Reader) -> ModelConfig:
    """Some layers may be dense; all have the window, if it is used."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE)
    layers, used = config.num_hidden_layers, keys.flag("use_sliding_window")
    window = read_window(keys.get("sliding_window", 4096)) if used else 0
    mixture = read_mixture(keys, dense=dense_layers(keys, layers))
    return dataclasses.replace(config, windows=(window,) * layers, mixture=mixture)


def build(config: ModelConfig) -> Graph:
    """The shared decoder with an RMS norm on every q and k head before the rotation."""
    bias = config.attention_bias
    return build_decoder(config, Style(bias, bias, qk_norm="head"))


FAMILY = Family(_ARCHITECTURE, "qwen3_moe", _DEFAULTS, read, build)
