"""OLMo 2: norms stand behind attention and mlp. Knows nothing of machines or placement."""

from __future__ import annotations

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, Style, build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.graph import Graph

_ARCHITECTURE = "Olmo2ForCausalLM"
DEFAULTS_OF_OLMO = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}


def read(node: Reader) -> ModelConfig:
    """The shared keys alone."""
    return read_decoder(Keys(node, DEFAULTS_OF_OLMO), _ARCHITECTURE)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; one RMS norm spans all heads of q, and one those of k."""
    bias = config.attention_bias
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="width",
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    )
    return build_decoder(config, style)


FAMILY = Family(_ARCHITECTURE, "olmo2", DEFAULTS_OF_OLMO, read, build)
