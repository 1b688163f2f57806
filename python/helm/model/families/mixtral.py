"""Mixtral. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, Style, build_decoder, read_decoder, read_window
from helm.model.families.family import Family
from helm.model.families.mixture import MixtureStyle, read_mixture
from helm.model.graph import Graph

_ARCHITECTURE = "MixtralForCausalLM"
DEFAULTS_OF_MIXTRAL = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = MixtureStyle(
    "block_sparse_moe",
    gate="experts.*.w1.weight",
    up="experts.*.w3.weight",
    down="experts.*.w2.weight",
)


def read(node: Reader) -> ModelConfig:
    """Weights of the experts chosen add up to one; one window for all layers, if any."""
    keys = Keys(node, DEFAULTS_OF_MIXTRAL)
    config = read_decoder(keys, _ARCHITECTURE, theta=1e6)
    window = read_window(keys.get("sliding_window"))
    return dataclasses.replace(
        config,
        windows=(window,) * config.num_hidden_layers,
        mixture=read_mixture(
            keys, count="num_local_experts", size="intermediate_size", normalise=True
        ),
    )


def build(config: ModelConfig) -> Graph:
    """The shared decoder without biases."""
    return build_decoder(config, Style(mixture=MIXTURE))


FAMILY = Family(_ARCHITECTURE, "mixtral", DEFAULTS_OF_MIXTRAL, read, build)
