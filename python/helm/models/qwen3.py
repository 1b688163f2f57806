"""Qwen3, dense. Knows nothing of machines or placement."""

from __future__ import annotations

from helm.config import ModelConfig
from helm.graph import Graph
from helm.models.decoder import build_decoder


def build(config: ModelConfig) -> Graph:
    """The shared decoder with an RMS norm on every q and k head before the rotation."""
    bias = config.attention_bias
    return build_decoder(config, qkv_bias=bias, out_bias=bias, qk_norm=True)
