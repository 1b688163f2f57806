"""Granite 3, dense. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, Style, build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "GraniteForCausalLM"
DEFAULTS_OF_GRANITE = {
    **DEFAULTS,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(node: Reader) -> ModelConfig:
    """The shared keys, and four multipliers."""
    return read_granite(Keys(node, DEFAULTS_OF_GRANITE), _ARCHITECTURE)


def read_granite(keys: Keys, architecture: str) -> ModelConfig:
    """The same for another architecture with these keys."""
    return dataclasses.replace(
        read_decoder(keys, architecture),
        embedding_scale=keys["embedding_multiplier"].number(-1e6, 1e6),
        score_scale=keys["attention_multiplier"].number(-1e6, 1e6),
        residual_scale=keys["residual_multiplier"].number(-1e6, 1e6),
        logits_scale=1.0 / keys["logits_scaling"].number(1e-6, 1e6),
    )


def build(config: ModelConfig) -> Graph:
    """The shared decoder; attention_bias covers q, k, v and o alike."""
    bias = config.attention_bias
    return build_decoder(config, Style(bias, bias, config.mlp_bias))


FAMILY = Family(_ARCHITECTURE, "granite", DEFAULTS_OF_GRANITE, read, build)
