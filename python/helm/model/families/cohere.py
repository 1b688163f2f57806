"""Command-R. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.errors import UnsupportedModelError
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import Style, build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "CohereForCausalLM"
DEFAULTS_OF_COHERE = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "pad_token_id": 0,
}
NAMES = {"rms_norm_eps": "layer_norm_eps"}
_STYLE = Style(norm="layer", norm_bias=False, parallel=True, before_mlp=None, pairs="neighbours")


def read_cohere(keys: Keys, architecture: str, theta: float) -> ModelConfig:
    """The shared keys, and the scale of logits. UnsupportedModelError for norms of q and k."""
    if keys.flag("use_qk_norm"):
        raise UnsupportedModelError(
            f"[{keys.node.subject}] use_qk_norm: true is not supported; expected a model without "
            "norms of q and k, as Command-R"
        )
    config = read_decoder(keys, architecture, theta=theta)
    scale = keys["logit_scale"].number(-1e6, 1e6)
    return dataclasses.replace(config, logits_scale=scale)


def read(node: Reader) -> ModelConfig:
    """No windows; all layers have rope."""
    return read_cohere(Keys(node, DEFAULTS_OF_COHERE, NAMES), _ARCHITECTURE, 500000.0)


def build(config: ModelConfig) -> Graph:
    """The shared decoder with layer norms; attention and mlp read the same normed value."""
    bias = config.attention_bias
    return build_decoder(config, dataclasses.replace(_STYLE, qkv_bias=bias, out_bias=bias))


FAMILY = Family(_ARCHITECTURE, "cohere", DEFAULTS_OF_COHERE, read, build)
