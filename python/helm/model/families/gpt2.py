"""GPT-2: learned positions, layer norm with bias, plain MLP. Knows nothing of machines.

Radford et al., "Language Models are Unsupervised Multitask Learners" (OpenAI, 2019). A checkpoint
has the weights of linear maps as [columns, rows].
"""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.errors import UnsupportedModelError
from helm.model.builder import GraphBuilder
from helm.model.config import Keys, ModelConfig, divided_head_dim, read_common
from helm.model.families.decoder import Style, attention, kv_geometry, plain_mlp, project
from helm.model.families.family import Family
from helm.model.graph import Embedding, Graph, PositionEmbedding

_ARCHITECTURE = "GPT2LMHeadModel"
_DEFAULTS = {
    "activation_function": "gelu_new",
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
_STYLE = Style(fused_qkv=True, qkv_name="c_attn", qkv_bias=True)


def read(node: Reader) -> ModelConfig:
    """Heads share n_embd; the MLP is four times as wide where n_inner does not say."""
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if node.get(name, False).boolean():
            raise UnsupportedModelError(f"[{node.subject}] {name}: true is not supported")
    if node.get("n_inner").null:
        wide = 4 * node["n_embd"].integer(1, 2**22)
        node = Reader({**node.value, "n_inner": wide}, node.subject, node.error, node.path)
    keys = Keys(node, _DEFAULTS, _NAMES)
    eps = keys["layer_norm_epsilon"].number(0.0, 1.0)
    config = read_common(keys, _ARCHITECTURE, divided_head_dim(keys), eps)
    scaled = keys.flag("scale_attn_weights", True)
    return dataclasses.replace(
        config, attention_bias=True, mlp_bias=True, score_scale=None if scaled else 1.0
    )


def build(config: ModelConfig) -> Graph:
    """Embedding with positions, attention and mlp of every layer, head."""
    b = GraphBuilder("transformer.")
    x = b.value("x", config.hidden_size)
    b.add(Embedding(b.tensor("wte.weight", config.vocab_size, config.hidden_size), x))
    table = b.tensor("wpe.weight", config.max_position_embeddings, config.hidden_size)
    b.add(PositionEmbedding(table, 0, x))
    b.unit("embedding")
    for layer in range(config.num_hidden_layers):
        x = _layer(b, config, layer, x)
    b.norm("layer", "ln_f", x, x, config.norm_eps)
    b.head(x, config.vocab_size, config.tie_word_embeddings, table="wte.weight")
    b.unit("head")
    return b.graph(config.architecture, kv_geometry(config))


def _layer(b: GraphBuilder, config: ModelConfig, layer: int, x: str) -> str:
    """Of the last layer, and of that alone, another value than x goes on."""
    at = f"h.{layer}"
    h = b.value_like(x, "h", config.hidden_size)
    b.norm("layer", f"{at}.ln_1", x, h, config.norm_eps)
    attn = attention(b, config, f"{at}.attn", layer, h, _STYLE)
    if layer == config.num_hidden_layers - 1:
        x, attn = b.select(x), b.select(attn)
    project(b, f"{at}.attn.c_proj", attn, x, True)
    b.unit("attention", layer)
    h = b.value_like(x, "h", config.hidden_size)
    b.norm("layer", f"{at}.ln_2", x, h, config.norm_eps)
    plain_mlp(b, config, h, x, f"{at}.mlp.c_fc", f"{at}.mlp.c_proj")
    b.unit("mlp", layer)
    return x


FAMILY = Family(
    _ARCHITECTURE,
    "gpt2",
    _DEFAULTS,
    read,
    build,
    by_column=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
