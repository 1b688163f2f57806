"""ModelConfig: a Hugging Face config.json, checked. Knows nothing of graphs, weights or machines.

Keys keep their Hugging Face names. Defaults of absent keys are those of transformers' class for
the family; everything read is treated as hostile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helm.errors import CheckpointError, ConfigError, UnsupportedModelError
from helm.files import present
from helm.jsonio import Reader, read_json
from helm.rope import RopeConfig, parse_rope, rotary_size

_MAX_WIDTH = 2**24  # no layer or vocabulary is wider; also the runtime's bound
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
class Family:
    """How one architecture's config.json differs from the others.

    defaults: values of absent keys, as in transformers. keys: this family's name of a key.
    """

    model_type: str
    defaults: dict[str, Any]
    keys: dict[str, str]
    windows: str = "none"  # "none", "all" (Mistral) or "layer_types" (Qwen)


_ROTARY = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama", {**_ROTARY, **_NO_BIAS, "bos_token_id": 1, "eos_token_id": 2}, {}
    ),
    "MistralForCausalLM": Family(
        "mistral",
        {
            **_ROTARY,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {},
        windows="all",
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {**_ROTARY, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        {},
        windows="layer_types",
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {
            **_ROTARY,
            "attention_bias": False,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        {},
        windows="layer_types",
    ),
    "OPTForCausalLM": Family(
        "opt",
        {
            "activation_function": "relu",
            "tie_word_embeddings": True,
            "enable_bias": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
        {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    ),
}


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
    word_embed_proj_dim: int  # OPT; hidden_size elsewhere
    do_layer_norm_before: bool  # OPT; True elsewhere
    final_norm: bool  # a norm before the head

    @classmethod
    def from_dict(cls, config: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """Reads a parsed config.json. Raises ConfigError naming `source` and the key, or
        UnsupportedModelError."""
        return _read_config(Reader(config, source, ConfigError))

    @property
    def max_context(self) -> int:
        """Most positions a sequence may have. YaRN and linear scaling reach factor * original;
        dynamic scaling reaches no farther than unscaled, see `helm.rope`."""
        if self.rope is not None and self.rope.rope_type in ("yarn", "linear"):
            reach = int(self.rope.factor * self.rope.original_context)
            return min(max(self.max_position_embeddings, reach), _MAX_CONTEXT)
        return self.max_position_embeddings

    @property
    def context_reason(self) -> str:
        """For messages: why no more than `max_context`, if it is not that the model ends there."""
        if self.rope is None or self.rope.rope_type != "dynamic":
            return ""
        return (
            " (beyond that its dynamic rope turns every new key by the length of the whole prompt, "
            "which keys computed in steps or kept for later cannot follow)"
        )


def load_config(directory: str | Path) -> ModelConfig:
    """Reads `directory`/config.json. Raises CheckpointError, ConfigError or
    UnsupportedModelError."""
    return read_config(Path(directory) / "config.json")


def read_config(path: Path) -> ModelConfig:
    """The same for the file itself, whatever its name."""
    if not present(path):
        raise CheckpointError(f"[load] {path} does not exist; expected a model directory")
    return _read_config(read_json(path, ConfigError))


def _read_config(node: Reader) -> ModelConfig:
    architecture = _architecture(node)
    family = FAMILIES[architecture]
    _refuse_unsupported(node)

    def key(name: str) -> Reader:
        name = family.keys.get(name, name)
        return node.get(name, family.defaults[name]) if name in family.defaults else node[name]

    def size(name: str, most: int = _MAX_WIDTH) -> int:
        return key(name).integer(1, most)

    def flag(name: str, otherwise: bool) -> bool:
        return node.get(name, family.defaults.get(name, otherwise)).boolean()

    opt = family.model_type == "opt"
    hidden, heads = size("hidden_size"), size("num_attention_heads", 2**20)
    positions = size("max_position_embeddings", _MAX_CONTEXT)
    layers = size("num_hidden_layers", _MAX_LAYERS)
    head_dim = _head_dim(node, family, hidden, heads)
    rope = None if opt else parse_rope(node, positions)
    if rope is not None and (rotary_size(rope, head_dim) < 2 or rotary_size(rope, head_dim) % 2):
        node.get("head_dim", head_dim).reject(
            f"expected an even number of rotated elements per head, found "
            f"{rotary_size(rope, head_dim)} of head_dim {head_dim}"
        )
    bias = flag("enable_bias", False) if opt else flag("attention_bias", False)
    proj = node.get("word_embed_proj_dim")
    before = flag("do_layer_norm_before", True) if opt else True
    width = hidden if not opt or proj.null else proj.integer(1, _MAX_WIDTH)
    return ModelConfig(
        architecture=architecture,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(node, family, heads),
        head_dim=head_dim,
        max_position_embeddings=positions,
        hidden_act=_ACTIVATIONS[key("hidden_act").choice(_ACTIVATIONS)],
        norm_eps=1e-5 if opt else key("rms_norm_eps").number(0.0, 1.0),
        tie_word_embeddings=key("tie_word_embeddings").boolean(),
        attention_bias=bias,
        mlp_bias=bias if opt else flag("mlp_bias", False),
        rope=rope,
        windows=_windows(node, family, layers),
        dtype=_dtype(node),
        bos_token_id=read_token_id(node.get("bos_token_id", family.defaults.get("bos_token_id"))),
        eos_token_ids=read_token_ids(node.get("eos_token_id", family.defaults.get("eos_token_id"))),
        pad_token_id=read_token_id(node.get("pad_token_id", family.defaults.get("pad_token_id"))),
        word_embed_proj_dim=width,
        do_layer_norm_before=before,
        final_norm=before and not (opt and flag("_remove_final_layer_norm", False)),
    )


def _architecture(node: Reader) -> str:
    """The family that `architectures` names, in any case of its letters and at any place, or else
    `model_type`, which alone counts for transformers."""
    listed, kind = node.get("architectures"), node.get("model_type")
    names = [] if listed.null else [item.string() for item in listed.items()]
    # A base model ("LlamaModel") has the same tensors without the head.
    spellings = {
        spelling.casefold(): name
        for name in FAMILIES
        for spelling in (name, name.replace("ForCausalLM", "Model"))
    }
    known = [spellings[name.casefold()] for name in names if name.casefold() in spellings]
    model_type = "" if kind.null else kind.string().casefold()
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    fitting = [name for name in known if FAMILIES[name].model_type == model_type]
    name = (fitting or known or [by_type.get(model_type, "")])[0]
    if not name:
        said = ", ".join(names) if names else f"type {kind.value!r}"
        raise UnsupportedModelError(
            f"[{node.subject}] architectures: {said} is not supported; supported are "
            + ", ".join(sorted(FAMILIES))
        )
    if model_type and model_type != FAMILIES[name].model_type:
        kind.reject(
            f"{kind.value!r} contradicts architecture {name}, "
            f"expected {FAMILIES[name].model_type!r}"
        )
    return name


def _refuse_unsupported(node: Reader) -> None:
    if not node.get("quantization_config").null:
        raise UnsupportedModelError(
            f"[{node.subject}] quantization_config: quantised checkpoints are not supported; "
            "use the f32, f16 or bf16 checkpoint of this model"
        )
    if not node.get("layer_norm_elementwise_affine", True).boolean():
        raise UnsupportedModelError(
            f"[{node.subject}] layer_norm_elementwise_affine: false is not supported"
        )


def _head_dim(node: Reader, family: Family, hidden: int, heads: int) -> int:
    explicit = node.get("head_dim", family.defaults.get("head_dim"))
    if not explicit.null and family.model_type != "opt":
        return explicit.integer(1, 4096)
    if hidden % heads:
        node["num_attention_heads"].reject(
            f"expected a divisor of hidden_size {hidden}, found {heads}"
        )
    if hidden // heads > 4096:
        node["hidden_size"].reject(f"{hidden} over {heads} heads gives more than 4096 per head")
    return hidden // heads


def _kv_heads(node: Reader, family: Family, heads: int) -> int:
    if family.model_type == "opt":
        return heads
    listed = node.get("num_key_value_heads", family.defaults.get("num_key_value_heads"))
    kv_heads = heads if listed.null else listed.integer(1, 4096)
    if heads % kv_heads:
        listed.reject(f"expected a divisor of num_attention_heads {heads}, found {kv_heads}")
    return kv_heads


def _windows(node: Reader, family: Family, layers: int) -> tuple[int, ...]:
    if family.windows == "none":
        return (0,) * layers
    listed = node.get("sliding_window", family.defaults["sliding_window"])
    if family.windows == "layer_types" and not node.get("use_sliding_window", False).boolean():
        listed = Reader(None, node.subject, node.error, "sliding_window")
    window = 0 if listed.null else listed.integer(1, 2**31)
    if family.windows == "all":
        return (window,) * layers
    types = node.get("layer_types")
    if types.null:
        first = node.get("max_window_layers", family.defaults["max_window_layers"])
        full_layers = first.integer(0, 2**31)
        return tuple(window if layer >= full_layers else 0 for layer in range(layers))
    kinds = [item.choice(("full_attention", "sliding_attention")) for item in types.items()]
    if len(kinds) != layers:
        types.reject(f"expected {layers} entries, one per layer, found {len(kinds)}")
    if window == 0 and "sliding_attention" in kinds:
        types.reject("names sliding_attention, but sliding_window is off")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


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
