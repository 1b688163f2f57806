"""Qwen2 and Qwen2.5. Knows nothing of machines or placement."""

from __future__ import annotations

from helm.config import ModelConfig
from helm.graph import Graph
from helm.models.decoder import build_decoder


def build(config: ModelConfig) -> Graph:
    """The shared decoder; q, k and v always have a bias, o never."""
    return build_decoder(config, qkv_bias=True)
