"""OPT: learned positions, layer norm with bias, plain MLP. Knows nothing of machines or placement.

Zhang et al., "OPT" (arXiv:2205.01068). opt-350m normalises after each residual addition and
embeds into fewer elements than hidden_size.
"""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.errors import UnsupportedModelError
from helm.model.builder import GraphBuilder
from helm.model.config import MAX_WIDTH, Keys, ModelConfig, divided_head_dim, read_common
from helm.model.families.decoder import Style, attention, kv_geometry, plain_mlp, project
from helm.model.families.family import Family
from helm.model.graph import Embedding, Graph, PositionEmbedding

_ARCHITECTURE = "OPTForCausalLM"
_DEFAULTS = {
    "activation_function": "relu",
    "tie_word_embeddings": True,
    "enable_bias": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_NAMES = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
_NORM_EPS = 1e-5
_POSITION_OFFSET = 2  # the first two rows of the position table belong to padding


def read(node: Reader) -> ModelConfig:
    """Heads share hidden_size; one flag says whether every linear map has a bias."""
    if not node.get("layer_norm_elementwise_affine", True).boolean():
        raise UnsupportedModelError(
            f"[{node.subject}] layer_norm_elementwise_affine: false is not supported"
        )
    keys = Keys(node, _DEFAULTS, _NAMES)
    config = read_common(keys, _ARCHITECTURE, divided_head_dim(keys), _NORM_EPS)
    narrow = node.get("word_embed_proj_dim", config.hidden_size)
    bias = keys.flag("enable_bias")
    before = keys.flag("do_layer_norm_before", True)
    return dataclasses.replace(
        config,
        attention_bias=bias,
        mlp_bias=bias,
        word_embed_proj_dim=config.hidden_size if narrow.null else narrow.integer(1, MAX_WIDTH),
        do_layer_norm_before=before,
        final_norm=before and not keys.flag("_remove_final_layer_norm"),
    )


def build(config: ModelConfig) -> Graph:
    """Embedding with positions, attention and mlp of every layer, head."""
    b = GraphBuilder("model.decoder.")
    hidden, narrow = config.hidden_size, config.word_embed_proj_dim
    x = b.value("x", hidden)
    embed = x if narrow == hidden else b.value("embed", narrow)
    b.add(Embedding(b.tensor("embed_tokens.weight", config.vocab_size, narrow), embed))
    if embed != x:
        b.linear(embed, x, [("project_in", hidden)])
    rows = config.max_position_embeddings + _POSITION_OFFSET
    table = b.tensor("embed_positions.weight", rows, hidden)
    b.add(PositionEmbedding(table, _POSITION_OFFSET, x))
    b.unit("embedding")
    for layer in range(config.num_hidden_layers):
        x = _layer(b, config, layer, x)
    _head(b, config, x)
    return b.graph(config.architecture, kv_geometry(config))


def _layer(b: GraphBuilder, config: ModelConfig, layer: int, x: str) -> str:
    """Of the last layer, and of that alone, another value than x goes on. A norm behind a residual
    addition belongs to the unit that adds."""
    at, bias, before = f"layers.{layer}", config.attention_bias, config.do_layer_norm_before
    eps = config.norm_eps

    def normed(module: str) -> str:
        h = b.value_like(x, "h", config.hidden_size) if before else x
        b.norm("layer", f"{at}.{module}", x, h, eps)
        return h

    h = normed("self_attn_layer_norm") if before else x
    attn = attention(b, config, f"{at}.self_attn", layer, h, Style(qkv_bias=bias))
    if layer == config.num_hidden_layers - 1:
        x, attn = b.select(x), b.select(attn)
    project(b, f"{at}.self_attn.out_proj", attn, x, bias)
    h = x if before else normed("self_attn_layer_norm")
    b.unit("attention", layer)
    h = normed("final_layer_norm") if before else h
    plain_mlp(b, config, h, x, f"{at}.fc1", f"{at}.fc2")
    if not before:
        normed("final_layer_norm")
    b.unit("mlp", layer)
    return x


def _head(b: GraphBuilder, config: ModelConfig, out: str) -> None:
    if config.final_norm:
        b.norm("layer", "final_layer_norm", out, out, config.norm_eps)
    if config.word_embed_proj_dim != config.hidden_size:
        narrow = b.value("embed_out", config.word_embed_proj_dim, "outputs")
        b.linear(out, narrow, [("project_out", config.word_embed_proj_dim)])
        out = narrow
    b.head(out, config.vocab_size, config.tie_word_embeddings)
    b.unit("head")


FAMILY = Family(_ARCHITECTURE, "opt", _DEFAULTS, read, build)
