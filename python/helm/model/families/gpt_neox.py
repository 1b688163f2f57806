"""GPT-NeoX and Pythia. Knows nothing of machines or placement.

Black et al., "GPT-NeoX-20B" (arXiv:2204.06745). Attention and the plain MLP stand side by side,
each behind a layer norm of its own. A checkpoint has the rows of q, k and v head by head.
"""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.builder import GraphBuilder
from helm.model.config import Keys, ModelConfig, divided_head_dim, read_common
from helm.model.families.decoder import Style, attention, kv_geometry, plain_mlp, project
from helm.model.families.family import Family
from helm.model.graph import Embedding, Graph
from helm.model.rope import check_rope, parse_rope

_ARCHITECTURE = "GPTNeoXForCausalLM"
_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_STYLE = Style(fused_qkv=True, qkv_name="query_key_value")


def read(node: Reader) -> ModelConfig:
    """A quarter of every head is rotated unless `rotary_pct` says otherwise."""
    keys = Keys(node, _DEFAULTS)
    head_dim = divided_head_dim(keys)
    config = read_common(keys, _ARCHITECTURE, head_dim, keys["layer_norm_eps"].number(0.0, 1.0))
    share = node.get("rotary_pct", 0.25).number(0.0, 1.0)
    most = config.max_position_embeddings
    rope = parse_rope(node, most, partial=share, theta_key="rotary_emb_base")
    check_rope(rope, head_dim, node)
    return dataclasses.replace(
        config,
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=True,
        parallel=keys.flag("use_parallel_residual"),
        rope=rope,
    )


def build(config: ModelConfig) -> Graph:
    """Embedding, attention and mlp of every layer, head."""
    b = GraphBuilder("gpt_neox.")
    x = b.value("x", config.hidden_size)
    table = b.tensor("embed_in.weight", config.vocab_size, config.hidden_size)
    b.add(Embedding(table, x))
    b.unit("embedding")
    for layer in range(config.num_hidden_layers):
        x = _layer(b, config, layer, x)
    b.norm("layer", "final_layer_norm", x, x, config.norm_eps)
    b.head(x, config.vocab_size, config.tie_word_embeddings, table="embed_in.weight")
    b.unit("head")
    return b.graph(config.architecture, kv_geometry(config))


def _layer(b: GraphBuilder, config: ModelConfig, layer: int, x: str) -> str:
    """Side by side both norms read x as it comes, so attention's unit norms for the mlp, too."""
    at, last = f"layers.{layer}", config.num_hidden_layers - 1

    def normed(module: str) -> str:
        out = b.value_like(x, "h", config.hidden_size)
        b.norm("layer", f"{at}.{module}", x, out, config.norm_eps)
        return out

    h = normed("input_layernorm")
    style = dataclasses.replace(_STYLE, qkv_bias=config.attention_bias)
    attn = attention(b, config, f"{at}.attention", layer, h, style)
    if layer == last:
        x, attn = b.select(x), b.select(attn)
    if config.parallel:
        h = normed("post_attention_layernorm")
    project(b, f"{at}.attention.dense", attn, x, config.attention_bias)
    b.unit("attention", layer)
    if not config.parallel:
        h = normed("post_attention_layernorm")
    plain_mlp(b, config, h, x, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h")
    b.unit("mlp", layer)
    return x


FAMILY = Family(
    _ARCHITECTURE,
    "gpt_neox",
    _DEFAULTS,
    read,
    build,
    by_head=("attention.query_key_value",),
    aliases={"embed_out.weight": "lm_head.weight"},
)
