"""Gemma 2. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.families.gemma import DEFAULTS, NAMES, STYLE, read_gemma, score_cap
from helm.model.graph import Graph

_ARCHITECTURE = "Gemma2ForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def read(node: Reader) -> ModelConfig:
    """Every second layer has a window; scores and logits have soft caps."""
    keys = Keys(node, _DEFAULTS, NAMES)
    config = read_gemma(keys, read_decoder(keys, _ARCHITECTURE), 2)
    return dataclasses.replace(config, score_cap=score_cap(keys))


def build(config: ModelConfig) -> Graph:
    """The shared decoder with norms behind attention and mlp."""
    bias = config.attention_bias
    return build_decoder(config, dataclasses.replace(STYLE, qkv_bias=bias, out_bias=bias))


FAMILY = Family(_ARCHITECTURE, "gemma2", _DEFAULTS, read, build)
