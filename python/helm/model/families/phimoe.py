"""Phi-3.5-MoE. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.errors import UnsupportedModelError
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import Style, build_decoder, read_decoder, read_window
from helm.model.families.family import Family
from helm.model.families.mixtral import DEFAULTS_OF_MIXTRAL, MIXTURE
from helm.model.families.mixture import read_mixture
from helm.model.graph import Graph
from helm.model.rope import RopeConfig

_ARCHITECTURE = "PhimoeForCausalLM"
_DEFAULTS = {
    **DEFAULTS_OF_MIXTRAL,
    "num_local_experts": 16,
    "attention_bias": False,
    "lm_head_bias": False,
    "router_jitter_noise": 0.01,
}


def read(node: Reader) -> ModelConfig:
    """Two experts, each weighed by a softmax over those whose logits are near its own."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE, theta=1e6)
    mixture = read_mixture(
        keys,
        count="num_local_experts",
        size="intermediate_size",
        score="sparsemixer",
        normalise=False,
    )
    if mixture.chosen != 2:
        keys["num_experts_per_tok"].reject(f"expected 2, found {mixture.chosen}")
    window = read_window(keys.get("sliding_window"))
    return dataclasses.replace(
        config,
        rope=_rope(node, config),
        windows=(window,) * config.num_hidden_layers,
        mixture=dataclasses.replace(mixture, near=2 * keys["router_jitter_noise"].number(0.0, 1.0)),
        head_bias=keys.flag("lm_head_bias"),
    )


def _rope(node: Reader, config: ModelConfig) -> RopeConfig | None:
    """With the family's own factor of cosines and sines, the same for short and long contexts."""
    rope, scaling = config.rope, node.get("rope_scaling")
    if scaling.null:
        scaling = node.get("rope_parameters", {})
    short, long = scaling.get("short_mscale"), scaling.get("long_mscale")
    if rope is None or rope.rope_type != "longrope" or short.null:
        return rope
    factor = short.number(1e-6, 1e6)
    if long.number(1e-6, 1e6) != factor:
        raise UnsupportedModelError(
            f"[{node.subject}] {long.path}: {long.value} differs from short_mscale {factor}, which "
            "HELM does not run"
        )
    return dataclasses.replace(rope, attention_factor=factor)


def build(config: ModelConfig) -> Graph:
    """The shared decoder with layer norms; attention_bias covers q, k, v and o alike."""
    bias = config.attention_bias
    style = Style(bias, bias, norm="layer", head_bias=config.head_bias, mixture=MIXTURE)
    return build_decoder(config, style)


FAMILY = Family(_ARCHITECTURE, "phimoe", _DEFAULTS, read, build)
