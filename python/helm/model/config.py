"""ModelConfig: a Hugging Face config.json, checked. Knows no family, graph, weights or machine.

Keys keep their Hugging Face names. A family gives the defaults of absent keys; everything read is
treated as hostile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helm.base.jsonio import Reader
from helm.model.mixture_ops import RouteScore
from helm.model.rope import RopeConfig

MAX_WIDTH = 2**24  # no layer or vocabulary is wider; also the runtime's bound
MAX_HEADS = 2**20
MAX_HEAD_DIM = 4096
_MAX_LAYERS = 1000
_MAX_CONTEXT = 2**30
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = {
    **dict.fromkeys(("float32", "float", "fp32", "f32"), "f32"),
    **dict.fromkeys(("float16", "half", "fp16", "f16"), "f16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
}


@dataclass(frozen=True)
class Mixture:
    """Of a mixture's layers: `experts` of `expert_size` elements, `chosen` for each token. What the
    fields from `score` to `near` mean, `helm.model.mixture_ops.Route` says. shared_size: elements
    of an MLP for all tokens; limit: of activation swiglu_limit; dense_layers: without experts."""

    experts: int
    chosen: int
    expert_size: int
    score: RouteScore
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1
    near: float = 0.0
    shared_size: int = 0
    limit: float = 0.0
    dense_layers: tuple[int, ...] = ()
    apart: bool = False  # gate and up are two tensors where the family's checkpoints have one
    joined: bool = False  # they are one where the family's checkpoints have two


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. Sizes are in elements, positions in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str  # "silu", "gelu", "gelu_tanh" or "relu"
    norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig | None  # None: learned positions
    windows: tuple[int, ...]  # per layer, positions each token sees; 0: all
    dtype: str | None  # "f32", "f16" or "bf16" as the config says
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    word_embed_proj_dim: int  # of an embedded token, before a projection to hidden_size
    do_layer_norm_before: bool  # norms stand before attention and MLP, not after them
    final_norm: bool  # a norm before the head
    quantization: str | None = None  # how weights are stored, see `helm.model.quantization`
    local_rope: RopeConfig | None = None  # of layers with a window; None: that of the others
    unrotated: tuple[int, ...] = ()  # layers without rope
    heads_normed: bool = False  # every head of q and k has a norm of its own
    parallel: bool = False  # attention and mlp read the same value
    norm_plus: float = 0.0  # what is added to every norm's weight
    score_scale: float | None = None  # of attention's scores; None: head_dim ** -0.5
    score_cap: float = 0.0  # c bounds scores by c tanh(score / c); 0: nothing does
    logits_cap: float = 0.0  # likewise
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    head_bias: bool = False
    residual_scale: float = 1.0  # of what attention and mlp add
    mixture: Mixture | None = None  # None: dense
    drafting_layers: int = 0  # behind the last, which guess tokens and are left out

    @property
    def max_context(self) -> int:
        """Most positions a sequence may have. YaRN and linear scaling reach factor * original;
        dynamic scaling reaches no farther than unscaled, see `helm.model.rope`."""
        if self.rope is not None and self.rope.rope_type in ("yarn", "linear"):
            reach = int(self.rope.factor * self.rope.original_context)
            return min(max(self.max_position_embeddings, reach), _MAX_CONTEXT)
        return self.max_position_embeddings

    def is_far(self, context: int) -> bool:
        """Whether sequences of `context` positions have longrope's tables of long contexts."""
        rope = self.rope
        return rope is not None and rope.rope_type == "longrope" and context > rope.original_context

    @property
    def context_reason(self) -> str:
        """For messages: why no more than `max_context`, if it is not that the model ends there."""
        if self.rope is None or self.rope.rope_type != "dynamic":
            return ""
        return (
            " (beyond that its dynamic rope turns every new key by the length of the whole prompt, "
            "which keys computed in steps or kept for later cannot follow)"
        )


@dataclass(frozen=True)
class Keys:
    """A config.json with what its family knows. defaults: values of absent keys, as in
    transformers; names: the family's own name of a key."""

    node: Reader
    defaults: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Reader:
        """One that must be there where the family has no default of it."""
        name = self.names.get(name, name)
        if name in self.defaults:
            return self.node.get(name, self.defaults[name])
        return self.node[name]

    def get(self, name: str, otherwise: Any = None) -> Reader:
        """One that may be absent without a default of the family."""
        return self.node.get(name, self.defaults.get(name, otherwise))

    def size(self, name: str, most: int = MAX_WIDTH) -> int:
        return self[name].integer(1, most)

    def flag(self, name: str, otherwise: bool = False) -> bool:
        return self.get(name, otherwise).boolean()


def read_common(keys: Keys, architecture: str, head_dim: int, norm_eps: float) -> ModelConfig:
    """What every family reads alike. Each head has its own K and V, positions are learned, no
    layer has a window or a bias: a family replaces what it has otherwise. Raises ConfigError."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads", MAX_HEADS)
    layers = keys.size("num_hidden_layers", _MAX_LAYERS)
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=keys.size("max_position_embeddings", _MAX_CONTEXT),
        hidden_act=_ACTIVATIONS[keys["hidden_act"].choice(_ACTIVATIONS)],
        norm_eps=norm_eps,
        tie_word_embeddings=keys["tie_word_embeddings"].boolean(),
        attention_bias=False,
        mlp_bias=False,
        rope=None,
        windows=(0,) * layers,
        dtype=_dtype(keys.node),
        bos_token_id=read_token_id(keys.get("bos_token_id")),
        eos_token_ids=read_token_ids(keys.get("eos_token_id")),
        pad_token_id=read_token_id(keys.get("pad_token_id")),
        word_embed_proj_dim=hidden,
        do_layer_norm_before=True,
        final_norm=True,
    )


def divided_head_dim(keys: Keys) -> int:
    """The elements of a head where the heads share hidden_size."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads", MAX_HEADS)
    if hidden % heads:
        keys["num_attention_heads"].reject(
            f"expected a divisor of hidden_size {hidden}, found {heads}"
        )
    if hidden // heads > MAX_HEAD_DIM:
        keys["hidden_size"].reject(
            f"{hidden} over {heads} heads gives more than {MAX_HEAD_DIM} per head"
        )
    return hidden // heads


def _dtype(node: Reader) -> str | None:
    """None where the config does not say, or says what no weight is held in ("auto"): the files
    know."""
    name = node.get("dtype") if not node.get("dtype").null else node.get("torch_dtype")
    return None if name.null else _DTYPES.get(name.string().casefold().removeprefix("torch."))


def read_token_id(node: Reader) -> int | None:
    token = None if node.null else node.integer(-1, 2**31 - 1)
    return None if token == -1 else token  # -1: written by old converters for "none"


def read_token_ids(node: Reader) -> tuple[int, ...]:
    items = node.items() if isinstance(node.value, list) else [node]
    return tuple(token for token in map(read_token_id, items) if token is not None)
