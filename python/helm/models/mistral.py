"""Mistral. Knows nothing of machines or placement."""

from __future__ import annotations

from helm.config import ModelConfig
from helm.graph import Graph
from helm.models.decoder import build_decoder


def build(config: ModelConfig) -> Graph:
    """The shared decoder without biases; the sliding window arrives in config.windows."""
    return build_decoder(config)
