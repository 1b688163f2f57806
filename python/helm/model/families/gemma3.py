"""Gemma 3, and the text part of its multimodal models. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.families.gemma import DEFAULTS, NAMES, STYLE, read_gemma
from helm.model.graph import Graph
from helm.model.rope import check_rope, parse_rope

_ARCHITECTURE = "Gemma3ForCausalLM"
_DEFAULTS = {**DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072}


def read(node: Reader) -> ModelConfig:
    """Layers with a window have a rope of their own, which nothing scales."""
    keys = Keys(node, _DEFAULTS, NAMES)
    config = read_decoder(keys, _ARCHITECTURE, theta=1e6, layers="full_attention")
    config = read_gemma(keys, config, node.get("sliding_window_pattern", 6).integer(1, 2**31))
    most = config.max_position_embeddings
    local = parse_rope(node, most, layers="sliding_attention", theta_key="rope_local_base_freq")
    check_rope(local, config.head_dim, node)
    rope = config.rope
    assert rope is not None
    # max_position_embeddings counts what scaling has reached.
    rope = dataclasses.replace(rope, original_context=int(most / rope.factor))
    return dataclasses.replace(config, rope=rope, local_rope=local)


def build(config: ModelConfig) -> Graph:
    """The shared decoder with an RMS norm on every q and k head, and behind attention and mlp."""
    bias = config.attention_bias
    style = dataclasses.replace(STYLE, qkv_bias=bias, out_bias=bias, qk_norm="head")
    return build_decoder(config, style)


FAMILY = Family(_ARCHITECTURE, "gemma3_text", _DEFAULTS, read, build, ("gemma3",))
