"""What Gemma 2 and 3 share: norms before and after, scaled embedding, windows of some layers."""

from __future__ import annotations

import dataclasses

from helm.errors import UnsupportedModelError
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import Style, with_windows

DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
NAMES = {"hidden_act": "hidden_activation"}
STYLE = Style(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def read_gemma(keys: Keys, config: ModelConfig, pattern: int) -> ModelConfig:
    """pattern: where layer_types is absent, every so many layers one has no window. Raises
    ConfigError or UnsupportedModelError."""
    node = keys.node
    both = keys.get("use_bidirectional_attention")
    if not both.null and both.boolean():
        raise UnsupportedModelError(
            f"[{node.subject}] use_bidirectional_attention: true is not supported; HELM generates "
            "text, which attends backwards alone"
        )
    slides = [(layer + 1) % pattern != 0 for layer in range(config.num_hidden_layers)]
    config = with_windows(config, node, keys.get("sliding_window"), slides)
    if not any(config.windows) and any(slides) and node.get("layer_types").null:
        keys.get("sliding_window").reject("expected the window of most layers, found none")
    return dataclasses.replace(
        config,
        norm_plus=node.get("norm_plus", 1.0).number(0.0, 1.0),  # GGUF files store 1 + w
        score_scale=keys["query_pre_attn_scalar"].number(1e-6, 1e6) ** -0.5,
        logits_cap=_cap(keys, "final_logit_softcapping"),
        embedding_scale=config.hidden_size**0.5,
    )


def score_cap(keys: Keys) -> float:
    return _cap(keys, "attn_logit_softcapping")


def _cap(keys: Keys, name: str) -> float:
    node = keys.get(name)
    return 0.0 if node.null else node.number(1e-3, 1e6)
