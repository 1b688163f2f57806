"""gpt-oss: experts in MXFP4, attention with sinks. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import (
    DEFAULTS,
    Style,
    build_decoder,
    read_decoder,
    with_windows,
)
from helm.model.families.family import Family
from helm.model.families.mixture import MixtureStyle, read_mixture
from helm.model.graph import Graph

_ARCHITECTURE = "GptOssForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}
# Rows of gate and up lie in turn, in one matrix of all experts; in GGUF files they lie apart.
_TOGETHER = MixtureStyle(
    router="router",
    router_bias=True,
    gate="experts.gate_up_proj.weight",
    up=None,
    down="experts.down_proj.weight",
    biases=("experts.gate_up_proj_bias", "experts.down_proj_bias"),
    layout="neighbours",
)
_APART = dataclasses.replace(
    _TOGETHER,
    gate="experts.gate_proj.weight",
    up="experts.up_proj.weight",
    biases=("experts.gate_proj_bias", "experts.down_proj_bias"),
    up_bias="experts.up_proj_bias",
    layout="apart",
)


def read(node: Reader) -> ModelConfig:
    """Every second layer has a window; the weights of the experts chosen are their softmax."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE, theta=150000.0)
    slides = [(layer + 1) % 2 == 1 for layer in range(config.num_hidden_layers)]
    config = with_windows(config, node, keys.get("sliding_window"), slides)
    alpha = keys["swiglu_alpha"]
    if abs(alpha.number(0.0, 1e6) - 1.702) > 1e-6:
        alpha.reject(f"expected 1.702, found {alpha.value}")
    mixture = dataclasses.replace(
        read_mixture(
            keys,
            count="num_local_experts",
            size="intermediate_size",
            score="softmax_selected",
            normalise=False,
        ),
        limit=keys["swiglu_limit"].number(1e-6, 1e6),
        apart=keys.flag("experts_apart"),
    )
    return dataclasses.replace(config, mixture=mixture)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; q, k, v and o have a bias, every head a sink."""
    bias = config.attention_bias
    assert config.mixture is not None
    names = _APART if config.mixture.apart else _TOGETHER
    return build_decoder(config, Style(bias, bias, sinks=True, mixture=names))


FAMILY = Family(_ARCHITECTURE, "gpt_oss", _DEFAULTS, read, build)
