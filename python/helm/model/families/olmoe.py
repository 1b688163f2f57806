"""OLMoE. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.errors import UnsupportedModelError
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, Style, build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.families.mixture import read_mixture
from helm.model.graph import Graph

_ARCHITECTURE = "OlmoeForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}


def read(node: Reader) -> ModelConfig:
    """Every layer is a mixture."""
    keys = Keys(node, _DEFAULTS)
    clip = keys.get("clip_qkv")
    if not clip.null:
        raise UnsupportedModelError(
            f"[{node.subject}] {clip.path}: bounds of q, k and v are not supported, expected null"
        )
    config = read_decoder(keys, _ARCHITECTURE)
    return dataclasses.replace(config, mixture=read_mixture(keys, size="intermediate_size"))


def build(config: ModelConfig) -> Graph:
    """The shared decoder; one RMS norm spans all heads of q, and one those of k."""
    bias = config.attention_bias
    return build_decoder(config, Style(bias, bias, qk_norm="width"))


FAMILY = Family(_ARCHITECTURE, "olmoe", _DEFAULTS, read, build)
