"""Qwen2 and Qwen2.5. Knows nothing of machines or placement."""

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

_ARCHITECTURE = "Qwen2ForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read(node: Reader) -> ModelConfig:
    """A window of some layers, if any."""
    keys = Keys(node, _DEFAULTS)
    return with_layer_windows(read_decoder(keys, _ARCHITECTURE), keys)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; q, k and v always have a bias, o never."""
    return build_decoder(config, Style(qkv_bias=True))


FAMILY = Family(_ARCHITECTURE, "qwen2", _DEFAULTS, read, build)
