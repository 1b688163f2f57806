"""Granite 3's mixtures of experts. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import Style, build_decoder
from helm.model.families.family import Family
from helm.model.families.granite import DEFAULTS_OF_GRANITE, read_granite
from helm.model.families.mixture import MixtureStyle, read_mixture
from helm.model.graph import Graph

_ARCHITECTURE = "GraniteMoeForCausalLM"
_DENSE = {key: value for key, value in DEFAULTS_OF_GRANITE.items() if key != "mlp_bias"}
_DEFAULTS = {**_DENSE, "num_local_experts": 8, "num_experts_per_tok": 2}
_TOGETHER = MixtureStyle(
    "block_sparse_moe",
    "router.layer",
    gate="input_linear.weight",
    up=None,
    down="output_linear.weight",
    layout="halves",
)
_APART = dataclasses.replace(
    _TOGETHER, gate="gate_linear.weight", up="up_linear.weight", layout="apart"
)


def read(node: Reader) -> ModelConfig:
    """The keys of the dense models; weights of the experts chosen are their softmax."""
    keys = Keys(node, _DEFAULTS)
    mixture = read_mixture(
        keys,
        count="num_local_experts",
        size="intermediate_size",
        score="softmax_selected",
        normalise=False,
    )
    mixture = dataclasses.replace(mixture, apart=keys.flag("experts_apart"))
    return dataclasses.replace(read_granite(keys, _ARCHITECTURE), mixture=mixture)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; attention_bias covers q, k, v and o alike."""
    bias = config.attention_bias
    assert config.mixture is not None
    names = _APART if config.mixture.apart else _TOGETHER
    return build_decoder(config, Style(bias, bias, mixture=names))


FAMILY = Family(_ARCHITECTURE, "granitemoe", _DEFAULTS, read, build)
