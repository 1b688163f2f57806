"""SmolLM3. Knows nothing of machines or placement."""

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
from helm.model.graph import Graph

_ARCHITECTURE = "SmolLM3ForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
}


def read(node: Reader) -> ModelConfig:
    """Some layers have no rope: those where no_rope_layers says 0, or one of every so many."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE, theta=2000000.0)
    layers, listed = config.num_hidden_layers, node.get("no_rope_layers")
    if listed.null:
        interval = keys["no_rope_layer_interval"].integer(1, 2**31)
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    else:
        rotated = listed.integers(0, 1, 2**20)
        if len(rotated) < layers:
            listed.reject(f"expected {layers} entries, one per layer, found {len(rotated)}")
    window = keys.get("sliding_window")
    if not keys.flag("use_sliding_window"):
        window = Reader(None, node.subject, node.error, "sliding_window")
    config = with_windows(config, node, window, [not turns for turns in rotated[:layers]])
    unrotated = tuple(layer for layer in range(layers) if not rotated[layer])
    return dataclasses.replace(config, unrotated=unrotated)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; attention_bias covers q, k, v and o alike."""
    bias = config.attention_bias
    return build_decoder(config, Style(bias, bias, config.mlp_bias))


FAMILY = Family(_ARCHITECTURE, "smollm3", _DEFAULTS, read, build)
