"""OPT: learned positions, layer norm with bias, plain MLP. Knows nothing of machines or placement.

Zhang et al., "OPT" (arXiv:2205.01068). opt-350m normalises after each residual addition and
embeds into fewer elements than hidden_size.
"""

from __future__ import annotations

from collections.abc import Collection

from helm.config import ModelConfig
from helm.graph import Activation, Embedding, Graph, GraphBuilder, PositionEmbedding, Select
from helm.models.decoder import activation_kind, attention, kv_geometry

_POSITION_OFFSET = 2  # the first two rows of the position table belong to padding


def build(config: ModelConfig, names: Collection[str] | None) -> Graph:
    """Embedding with positions, one unit per block, head."""
    b = GraphBuilder(("model.decoder.", "decoder."), names)
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
        _block(b, config, layer, x)
    _head(b, config, x)
    return b.graph(config.architecture, kv_geometry(config))


def _block(b: GraphBuilder, config: ModelConfig, layer: int, x: str) -> None:
    at, bias, before = f"layers.{layer}", config.attention_bias, config.do_layer_norm_before
    eps, size = config.norm_eps, config.intermediate_size
    h = b.value("h", config.hidden_size) if before else x
    act = b.value("act", size)
    if before:
        b.norm("layer", f"{at}.self_attn_layer_norm", x, h, eps)
    attention(b, config, f"{at}.self_attn", layer, h, x, bias, bias, out_name="out_proj")
    if before:
        b.norm("layer", f"{at}.final_layer_norm", x, h, eps)
    else:
        b.norm("layer", f"{at}.self_attn_layer_norm", x, x, eps)
    b.linear(h, act, [(f"{at}.fc1", size)], bias=config.mlp_bias)
    b.add(Activation(activation_kind(config), False, act, act, size))
    b.linear(act, x, [(f"{at}.fc2", config.hidden_size)], bias=config.mlp_bias, accumulate=True)
    if not before:
        b.norm("layer", f"{at}.final_layer_norm", x, x, eps)
    b.unit(f"block.{layer}")


def _head(b: GraphBuilder, config: ModelConfig, x: str) -> None:
    out = b.value("x_out", config.hidden_size, "outputs")
    b.add(Select(x, out))
    if config.final_norm:
        b.norm("layer", "final_layer_norm", out, out, config.norm_eps)
    if config.word_embed_proj_dim != config.hidden_size:
        narrow = b.value("embed_out", config.word_embed_proj_dim, "outputs")
        b.linear(out, narrow, [("project_out", config.word_embed_proj_dim)])
        out = narrow
    b.head(out, config.vocab_size, config.tie_word_embeddings)
    b.unit("head")
