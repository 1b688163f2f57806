"""The decoder that Llama, Mistral and Qwen share: RMS norm, rotary attention, gated MLP.

A family's differences arrive as arguments.
"""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.builder import GraphBuilder
from helm.model.config import MAX_HEAD_DIM, Keys, ModelConfig, divided_head_dim, read_common
from helm.model.graph import (
    Activation,
    ActivationKind,
    Attention,
    Embedding,
    Graph,
    KvGeometry,
    Rope,
    whole_layers,
)
from helm.model.rope import parse_rope, rope_table, rotary_size

# Of absent keys, in every family that shares it.
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}


def read_decoder(keys: Keys, architecture: str) -> ModelConfig:
    """The configuration of one without windows. Raises ConfigError."""
    stated = keys.get("head_dim")
    head_dim = divided_head_dim(keys) if stated.null else stated.integer(1, MAX_HEAD_DIM)
    common = read_common(keys, architecture, head_dim, keys["rms_norm_eps"].number(0.0, 1.0))
    rope = parse_rope(keys.node, common.max_position_embeddings)
    rotary = rotary_size(rope, head_dim)
    if rotary < 2 or rotary % 2:
        keys.node.get("head_dim", head_dim).reject(
            f"expected an even number of rotated elements per head, found {rotary} of head_dim "
            f"{head_dim}"
        )
    if len(rope.factors) not in (0, rotary // 2):
        keys.node.get("rope_scaling").reject(
            f"expected {rotary // 2} factors, one per rotated pair, found {len(rope.factors)}"
        )
    return dataclasses.replace(
        common,
        num_key_value_heads=_kv_heads(keys, common.num_attention_heads),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        rope=rope,
    )


def _kv_heads(keys: Keys, heads: int) -> int:
    listed = keys.get("num_key_value_heads")
    kv_heads = heads if listed.null else listed.integer(1, MAX_HEAD_DIM)
    if heads % kv_heads:
        listed.reject(f"expected a divisor of num_attention_heads {heads}, found {kv_heads}")
    return kv_heads


def with_layer_windows(config: ModelConfig, keys: Keys) -> ModelConfig:
    """Some layers have the window, if it is used at all: those that layer_types names, or all from
    max_window_layers on."""
    node, layers = keys.node, config.num_hidden_layers
    listed = keys.get("sliding_window")
    if not keys.flag("use_sliding_window"):
        listed = Reader(None, node.subject, node.error, "sliding_window")
    window = read_window(listed)
    types = node.get("layer_types")
    if types.null:
        full_layers = keys.get("max_window_layers").integer(0, 2**31)
        slides = [layer >= full_layers for layer in range(layers)]
    else:
        kinds = [item.choice(("full_attention", "sliding_attention")) for item in types.items()]
        if len(kinds) != layers:
            types.reject(f"expected {layers} entries, one per layer, found {len(kinds)}")
        slides = [kind == "sliding_attention" for kind in kinds]
        if window == 0 and any(slides):
            types.reject("names sliding_attention, but sliding_window is off")
    return dataclasses.replace(config, windows=tuple(window if s else 0 for s in slides))


def read_window(node: Reader) -> int:
    """Positions that a token sees; 0: all."""
    return 0 if node.null else node.integer(1, 2**31)


def build_decoder(
    config: ModelConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Graph:
    """Embedding, attention and mlp of every layer, head. qk_norm: an RMS norm on every q and k
    head."""
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
        b.unit("attention", layer)
        h = normed(b, config, f"{at}.post_attention_layernorm", x)
        gated_mlp(b, config, f"{at}.mlp", h, x, mlp_bias)
        b.unit("mlp", layer)
    b.norm("rms", "norm", x, x, config.norm_eps)
    b.head(x, config.vocab_size, config.tie_word_embeddings)
    b.unit("head")
    return b.graph(config.architecture, kv_geometry(config))


def kv_geometry(config: ModelConfig) -> KvGeometry:
    layers = whole_layers(config.num_hidden_layers, config.num_key_value_heads)
    return KvGeometry(layers, config.num_key_value_heads, config.head_dim)


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
