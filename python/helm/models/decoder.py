"""The decoder that Llama, Mistral and Qwen share: RMS norm, rotary attention, gated MLP.

Knows nothing of config.json; a family's differences arrive as arguments.
"""

from __future__ import annotations

from helm.config import ModelConfig
from helm.graph import (
    Activation,
    ActivationKind,
    Attention,
    Embedding,
    Graph,
    GraphBuilder,
    KvGeometry,
    Rope,
)
from helm.rope import rope_table, rotary_size


def build_decoder(
    config: ModelConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Graph:
    """Embedding, one unit per block, head. qk_norm: an RMS norm on every q and k head."""
    b = GraphBuilder("model.")
    x = b.value("x", config.hidden_size)
    b.add(Embedding(b.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size), x))
    b.unit("embedding")
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        h = normed(b, config, f"{at}.input_layernorm", x)
        attn = attention(b, config, f"{at}.self_attn", layer, h, qkv_bias, qk_norm)
        if layer == config.num_hidden_layers - 1:
            x, attn = b.select(x), b.select(attn)
        project(b, f"{at}.self_attn.o_proj", attn, x, out_bias)
        h = normed(b, config, f"{at}.post_attention_layernorm", x)
        gated_mlp(b, config, f"{at}.mlp", h, x, mlp_bias)
        b.unit(f"block.{layer}")
    b.norm("rms", "norm", x, x, config.norm_eps)
    b.head(x, config.vocab_size, config.tie_word_embeddings)
    b.unit("head")
    return b.graph(config.architecture, kv_geometry(config))


def kv_geometry(config: ModelConfig) -> KvGeometry:
    return KvGeometry(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)


def normed(b: GraphBuilder, config: ModelConfig, module: str, x: str) -> str:
    """A value of its own with the RMS norm of x."""
    h = b.value_like(x, "h", config.hidden_size)
    b.norm("rms", module, x, h, config.norm_eps)
    return h


def attention(
    b: GraphBuilder,
    config: ModelConfig,
    at: str,
    layer: int,
    input: str,
    bias: bool,
    qk_norm: bool = False,
) -> str:
    """The value that attention(rope(norm(Q input)), rope(norm(K input)), V input) is written to."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, kv = heads * dim, kv_heads * dim
    qkv, attn = b.value("qkv", q + 2 * kv), b.value("attn", q)
    parts = [(f"{at}.q_proj", q), (f"{at}.k_proj", kv), (f"{at}.v_proj", kv)]
    b.linear(input, qkv, parts, bias=bias)
    if qk_norm:
        eps = config.norm_eps
        b.norm("rms", f"{at}.q_norm", qkv, qkv, eps, groups=heads, size=dim)
        b.norm("rms", f"{at}.k_norm", qkv, qkv, eps, offset=q, groups=kv_heads, size=dim)
    if config.rope is not None:
        table = b.rope_table(rope_table(config.rope, dim))
        rotary = rotary_size(config.rope, dim)
        b.add(Rope(qkv, 0, heads + kv_heads, dim, rotary, table))  # q and k lie side by side
    window = config.windows[layer]
    b.add(Attention(qkv, 0, q, q + kv, attn, layer, heads, kv_heads, dim, dim**-0.5, window))
    return attn


def project(b: GraphBuilder, module: str, input: str, residual: str, bias: bool) -> None:
    """residual += module input"""
    b.linear(input, residual, [(module, b.width(residual))], bias=bias, accumulate=True)


def gated_mlp(
    b: GraphBuilder, config: ModelConfig, at: str, input: str, residual: str, bias: bool
) -> None:
    """residual += down(act(gate input) * (up input))"""
    size = config.intermediate_size
    gate_up, act = b.value_like(input, "gate_up", 2 * size), b.value_like(input, "act", size)
    b.linear(input, gate_up, [(f"{at}.gate_proj", size), (f"{at}.up_proj", size)], bias=bias)
    b.add(Activation(activation_kind(config), True, gate_up, act, size))
    project(b, f"{at}.down_proj", act, residual, bias)


def activation_kind(config: ModelConfig) -> ActivationKind:
    kinds: dict[str, ActivationKind] = {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
    }
    return kinds[config.hidden_act]
