"""GLM-4 of 2025, dense: norms also behind attention and mlp. Knows nothing of placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import ModelConfig
from helm.model.families.decoder import build_decoder
from helm.model.families.family import Family
from helm.model.families.glm import DEFAULTS_OF_GLM, STYLE, read_glm
from helm.model.graph import Graph

_ARCHITECTURE = "Glm4ForCausalLM"


def read(node: Reader) -> ModelConfig:
    """The keys of its forerunner."""
    return read_glm(node, _ARCHITECTURE)


def build(config: ModelConfig) -> Graph:
    """The shared decoder with four norms a layer."""
    style = dataclasses.replace(
        STYLE,
        qkv_bias=config.attention_bias,
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
    )
    return build_decoder(config, style)


FAMILY = Family(_ARCHITECTURE, "glm4", DEFAULTS_OF_GLM, read, build)
