"""Ministral: Mistral with a window of some layers. Knows nothing of machines or placement."""

from __future__ import annotations

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, build_decoder, read_decoder, with_windows
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "MinistralForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(node: Reader) -> ModelConfig:
    """The window is that of all layers, unless layer_types names those that have it."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE)
    slides = [True] * config.num_hidden_layers
    return with_windows(config, node, keys.get("sliding_window"), slides)


def build(config: ModelConfig) -> Graph:
    """The shared decoder without biases."""
    return build_decoder(config)


FAMILY = Family(_ARCHITECTURE, "ministral", _DEFAULTS, read, build)
