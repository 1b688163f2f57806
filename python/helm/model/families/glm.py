"""GLM-4 of 2024. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, Style, build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "GlmForCausalLM"
DEFAULTS_OF_GLM = {
    **DEFAULTS,
    "rms_norm_eps": 0.00000015625,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
}
STYLE = Style(fused_gate_up=True, pairs="neighbours")


def read_glm(node: Reader, architecture: str) -> ModelConfig:
    """Half of every head is rotated unless the keys say otherwise."""
    return read_decoder(Keys(node, DEFAULTS_OF_GLM), architecture, partial=0.5)


def read(node: Reader) -> ModelConfig:
    """The shared keys alone."""
    return read_glm(node, _ARCHITECTURE)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; neighbours are rotated, q, k and v may have a bias, o has none."""
    return build_decoder(config, dataclasses.replace(STYLE, qkv_bias=config.attention_bias))


FAMILY = Family(_ARCHITECTURE, "glm", DEFAULTS_OF_GLM, read, build)
