"""Llama 2 and 3.x. Knows nothing of machines or placement."""

from __future__ import annotations

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, Style, build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "LlamaForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(node: Reader) -> ModelConfig:
    """The shared keys alone."""
    return read_decoder(Keys(node, _DEFAULTS), _ARCHITECTURE)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; attention_bias covers q, k, v and o alike."""
    bias = config.attention_bias
    return build_decoder(config, Style(bias, bias, config.mlp_bias))


FAMILY = Family(_ARCHITECTURE, "llama", _DEFAULTS, read, build)
