"""Phi-3, Phi-3.5 and Phi-4. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import (
    DEFAULTS,
    Style,
    build_decoder,
    read_decoder,
    read_window,
)
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "Phi3ForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
}


def read(node: Reader) -> ModelConfig:
    """One window for all layers, if any; long contexts by longrope."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE)
    window = read_window(keys.get("sliding_window"))
    return dataclasses.replace(config, windows=(window,) * config.num_hidden_layers)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; q, k and v are one matrix, gate and up are one."""
    return build_decoder(config, Style(fused_qkv=True, fused_gate_up=True))


FAMILY = Family(_ARCHITECTURE, "phi3", _DEFAULTS, read, build)
