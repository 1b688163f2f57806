"""Qwen3, dense. Knows nothing of machines or placement."""

from __future__ import annotations

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
from helm.model.graph import Graph

_ARCHITECTURE = "Qwen3ForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "attention_bias": False,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read(node: Reader) -> ModelConfig:
    """A window of some layers, if any."""
    keys = Keys(node, _DEFAULTS)
    return with_layer_windows(read_decoder(keys, _ARCHITECTURE), keys)


def build(config: ModelConfig) -> Graph:
    """The shared decoder with an RMS norm on every q and k head before the rotation."""
    bias = config.attention_bias
    return build_decoder(config, Style(bias, bias, qk_norm="head"))


FAMILY = Family(_ARCHITECTURE, "qwen3", _DEFAULTS, read, build)
