"""The decoder that Llama, Mistral and Qwen share: RMS norm, rotary attention, gated MLP.

A family's differences arrive as arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from helm.base.jsonio import Reader
from helm.model.builder import GraphBuilder
from helm.model.config import MAX_HEAD_DIM, Keys, ModelConfig, divided_head_dim, read_common
from helm.model.families.mixture import MixtureStyle, add_mixture
from helm.model.graph import (
    Activation,
    Attention,
    Embedding,
    Graph,
    KvGeometry,
    NormKind,
    Rope,
    RopePairs,
    whole_layers,
)
from helm.model.mixture_ops import ActivationKind
from helm.model.rope import LayerKind, check_rope, parse_rope, rotary_size

# Of absent keys, in every family that shares it.
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}


def read_decoder(
    keys: Keys,
    architecture: str,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    layers: LayerKind | None = None,
) -> ModelConfig:
    """The configuration of one without windows. theta, partial: rope's, of absent keys; layers: the
    kind that `rope` is of, where kinds have ropes of their own. Raises ConfigError."""
    stated = keys.get("head_dim")
    head_dim = divided_head_dim(keys) if stated.null else stated.integer(1, MAX_HEAD_DIM)
    common = read_common(keys, architecture, head_dim, keys["rms_norm_eps"].number(0.0, 1.0))
    most = common.max_position_embeddings
    rope = parse_rope(keys.node, most, theta=theta, partial=partial, layers=layers)
    check_rope(rope, head_dim, keys.node)
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
    full_layers = keys.get("max_window_layers").integer(0, 2**31)
    slides = [layer >= full_layers for layer in range(layers)]
    return with_windows(config, node, listed, slides)


def with_windows(
    config: ModelConfig, node: Reader, listed: Reader, slides: Sequence[bool]
) -> ModelConfig:
    """Layers of layer_types' kind sliding_attention have the window that `listed` says. slides:
    which they are where the key is absent. Raises ConfigError."""
    window, types = read_window(listed), node.get("layer_types")
    if not types.null:
        kinds = [item.choice(("full_attention", "sliding_attention")) for item in types.items()]
        if len(kinds) != config.num_hidden_layers:
            types.reject(
                f"expected {config.num_hidden_layers} entries, one per layer, found {len(kinds)}"
            )
        slides = [kind == "sliding_attention" for kind in kinds]
        if window == 0 and any(slides):
            types.reject("names sliding_attention, but sliding_window is off")
    return dataclasses.replace(config, windows=tuple(window if s else 0 for s in slides))


def read_window(node: Reader) -> int:
    """Positions that a token sees; 0: all."""
    return 0 if node.null else node.integer(1, 2**31)


@dataclass(frozen=True)
class Style:
    """What a family's layers have. Names are those of modules; None: no such norm.

    norm: the kind of the norms; a layer norm may have no bias. qk_norm: an RMS norm of q and k over
    every head, or over all heads together; each: a layer norm of its own for every head. parallel:
    attention and mlp read the same normed value, which then goes from one to the other, too.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm: NormKind = "rms"
    norm_bias: bool = True  # of layer norms
    qk_norm: Literal["head", "width", "each"] | None = None
    parallel: bool = False
    fused_qkv: bool = False  # one matrix
    qkv_name: str = "qkv_proj"
    mlp_names: tuple[str, str, str] = ("mlp", "gate_up_proj", "down_proj")
    fused_gate_up: bool = False  # one matrix
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    pairs: RopePairs = "halves"
    sinks: bool = False  # of attention's softmax, one per head
    head_bias: bool = False
    mixture: MixtureStyle | None = None  # None: names of most families


_PLAIN = Style()


def build_decoder(config: ModelConfig, style: Style = _PLAIN) -> Graph:
    """Embedding, attention and mlp of every layer, head."""
    b = GraphBuilder("model.")
    x = b.value("x", config.hidden_size)
    table = b.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size)
    b.add(Embedding(table, x, config.embedding_scale))
    b.unit("embedding")
    for layer in range(config.num_hidden_layers):

        def named(norm: str | None, layer: int = layer) -> str | None:
            return None if norm is None else f"layers.{layer}.{norm}"

        at = f"layers.{layer}.self_attn"
        h = normed(b, config, named(style.before_attention), x, style)
        attn = attention(b, config, at, layer, h, style)
        if layer == config.num_hidden_layers - 1:
            x, attn, h = b.select(x), b.select(attn), b.select(h) if style.parallel else h
        after = named(style.after_attention)
        add_product(b, config, f"{at}.o_proj", attn, x, style.out_bias, after, style)
        b.unit("attention", layer)
        at = f"layers.{layer}.{style.mlp_names[0]}"
        if not style.parallel:
            h = normed(b, config, named(style.before_mlp), x, style)
        if config.mixture is not None and layer not in config.mixture.dense_layers:
            add_mixture(b, config, f"layers.{layer}", h, x, style.mixture or MixtureStyle())
        else:
            act = gated(b, config, at, h, style)
            after = named(style.after_mlp)
            down = f"{at}.{style.mlp_names[2]}"
            add_product(b, config, down, act, x, style.mlp_bias, after, style)
        b.unit("mlp", layer)
    norm(b, config, "norm", x, x, style)
    head(b, config, x, style.head_bias)
    return b.graph(config.architecture, kv_geometry(config))


def kv_geometry(config: ModelConfig) -> KvGeometry:
    layers = whole_layers(config.num_hidden_layers, config.num_key_value_heads)
    return KvGeometry(layers, config.num_key_value_heads, config.head_dim)


def norm(
    b: GraphBuilder,
    config: ModelConfig,
    module: str,
    input: str,
    out: str,
    style: Style,
    *,
    offset: int = 0,
    groups: int = 1,
    size: int | None = None,
    accumulate: bool = False,
) -> None:
    """The family's norm, with the epsilon and what weights lack of its configuration."""
    b.norm(
        style.norm,
        module,
        input,
        out,
        config.norm_eps,
        offset=offset,
        groups=groups,
        size=size,
        plus=config.norm_plus,
        accumulate=accumulate,
        biased=style.norm_bias,
    )


def normed(b: GraphBuilder, config: ModelConfig, module: str | None, x: str, style: Style) -> str:
    """A value of its own with the norm of x, or x where there is none."""
    if module is None:
        return x
    h = b.value_like(x, "h", config.hidden_size)
    norm(b, config, module, x, h, style)
    return h


def attention(
    b: GraphBuilder, config: ModelConfig, at: str, layer: int, input: str, style: Style
) -> str:
    """The value that attention(rope(norm(Q input)), rope(norm(K input)), V input) is written to."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, kv = heads * dim, kv_heads * dim
    qkv, attn = b.value("qkv", q + 2 * kv), b.value("attn", q)
    parts = [(f"{at}.q_proj", q), (f"{at}.k_proj", kv), (f"{at}.v_proj", kv)]
    if style.fused_qkv:
        parts = [(f"{at}.{style.qkv_name}", q + 2 * kv)]
    b.linear(input, qkv, parts, bias=style.qkv_bias)
    norm_q_and_k(b, config, at, qkv, style)
    window = config.windows[layer]
    rope = config.local_rope if window and config.local_rope else config.rope
    if rope is not None and layer not in config.unrotated:
        rotary, table = rotary_size(rope, dim), b.rope_table(rope, dim)
        # q and k lie side by side
        b.add(Rope(qkv, 0, heads + kv_heads, dim, rotary, table, style.pairs))
    scale = dim**-0.5 if config.score_scale is None else config.score_scale
    places = (qkv, 0, q, q + kv, attn)
    shape = (layer, heads, kv_heads, dim)
    sinks = b.tensor(f"{at}.sinks", heads) if style.sinks else None
    b.add(Attention(*places, *shape, scale, window, config.score_cap, sinks))
    return attn


def norm_q_and_k(b: GraphBuilder, config: ModelConfig, at: str, qkv: str, style: Style) -> None:
    heads, dim = config.num_attention_heads, config.head_dim
    for part, offset, count in (("q", 0, heads), ("k", heads * dim, config.num_key_value_heads)):
        if style.qk_norm == "each":
            head_style = dataclasses.replace(style, norm="layer", norm_bias=False)
            for head in range(count):
                module, begin = f"{at}.{part}_layernorm.norms.{head}", offset + head * dim
                norm(b, config, module, qkv, qkv, head_style, offset=begin, size=dim)
        elif style.qk_norm is not None:
            groups, size = (count, dim) if style.qk_norm == "head" else (1, count * dim)
            module = f"{at}.{part}_norm"
            norm(b, config, module, qkv, qkv, style, offset=offset, groups=groups, size=size)


def project(b: GraphBuilder, module: str, input: str, residual: str, bias: bool) -> None:
    """residual += module input"""
    b.linear(input, residual, [(module, b.width(residual))], bias=bias, accumulate=True)


def add_product(
    b: GraphBuilder,
    config: ModelConfig,
    module: str,
    input: str,
    residual: str,
    bias: bool,
    behind: str | None,
    style: Style,
) -> None:
    """residual += residual_scale * (module input), or behind(module input) where there is such a
    norm."""
    scale, width = config.residual_scale, b.width(residual)
    if behind is None and scale == 1.0:
        return project(b, module, input, residual, bias)
    h = b.value_like(residual, "h", width)
    b.linear(input, h, [(module, width)], bias=bias)
    if behind is not None:
        assert scale == 1.0
        return norm(b, config, behind, h, residual, style, accumulate=True)
    return b.add(Activation("scale", False, h, residual, width, scale, accumulate=True))


def gated(b: GraphBuilder, config: ModelConfig, at: str, input: str, style: Style) -> str:
    """The value that act(gate input) * (up input) is written to."""
    size = config.intermediate_size
    gate_up, act = b.value_like(input, "gate_up", 2 * size), b.value_like(input, "act", size)
    parts = [(f"{at}.gate_proj", size), (f"{at}.up_proj", size)]
    if style.fused_gate_up:
        parts = [(f"{at}.{style.mlp_names[1]}", 2 * size)]
    b.linear(input, gate_up, parts, bias=style.mlp_bias)
    b.add(Activation(activation_kind(config), True, gate_up, act, size))
    return act


def plain_mlp(
    b: GraphBuilder, config: ModelConfig, input: str, residual: str, up: str, down: str
) -> None:
    """residual += down act(up input); up and down name modules."""
    size = config.intermediate_size
    act = b.value_like(input, "act", size)
    b.linear(input, act, [(up, size)], bias=config.mlp_bias)
    b.add(Activation(activation_kind(config), False, act, act, size))
    project(b, down, act, residual, config.mlp_bias)


def head(b: GraphBuilder, config: ModelConfig, x: str, bias: bool = False) -> None:
    """The unit of logits, once x is normed."""
    b.head(x, config.vocab_size, config.tie_word_embeddings, bias)
    if config.logits_scale != 1.0:
        scale = config.logits_scale
        b.add(Activation("scale", False, "logits", "logits", config.vocab_size, scale))
    if config.logits_cap > 0:
        cap = config.logits_cap
        b.add(Activation("softcap", False, "logits", "logits", config.vocab_size, cap))
    b.unit("head")


def activation_kind(config: ModelConfig) -> ActivationKind:
    kinds: dict[str, ActivationKind] = {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
    }
    return kinds[config.hidden_act]
