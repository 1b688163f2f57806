"""Mistral. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, build_decoder, read_decoder, read_window
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "MistralForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(node: Reader) -> ModelConfig:
    """One window for all layers."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE)
    window = read_window(keys.get("sliding_window"))
    return dataclasses.replace(config, windows=(window,) * config.num_hidden_layers)


def build(config: ModelConfig) -> Graph:
    """The shared decoder without biases; the sliding window arrives in config.windows."""
    return build_decoder(config)


FAMILY = Family(_ARCHITECTURE, "mistral", _DEFAULTS, read, build, ("mistral3",))
