"""Llama 2 and 3.x. Knows nothing of machines or placement."""

from __future__ import annotations

from helm.config import ModelConfig
from helm.graph import Graph
from helm.models.decoder import build_decoder


def build(config: ModelConfig) -> Graph:
    """The shared decoder; attention_bias covers q, k, v and o alike."""
    return build_decoder(
        config,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
