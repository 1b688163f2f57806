"""ModelConfig: a Hugging Face config.json, checked. Knows nothing of graphs, weights or machines.

Keys keep their Hugging Face names. Defaults of absent keys are those of transformers' class for
the family; everything read is treated as hostile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helm.errors import CheckpointError, ConfigError, UnsupportedModelError
from helm.jsonio import Reader, parse
from helm.rope import RopeConfig, parse_rope, rotary_size

_MAX_WIDTH = 2**24  # no layer or vocabulary is wider; also the runtime's bound
_MAX_LAYERS = 10_000
_MAX_CONTEXT = 2**30
_MAX_FILE_BYTES = 64 << 20
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
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


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
        """Most positions a sequence may have. YaRN states its reach as factor * original."""
        if self.rope is not None and self.rope.rope_type == "yarn":
            reach = int(self.rope.factor * self.rope.original_context)
            return min(max(self.max_position_embeddings, reach), _MAX_CONTEXT)
        return self.max_position_embeddings


def load_config(directory: str | Path) -> ModelConfig:
    """Reads `directory`/config.json. Raises CheckpointError, ConfigError or
    UnsupportedModelError."""
    return read_config(Path(directory) / "config.json")


def read_config(path: Path) -> ModelConfig:
    """The same for the file itself, whatever its name."""
    return _read_config(parse(read_json_file(path), str(path), ConfigError))


def read_json_file(path: Path) -> bytes:
    """The bytes of a regular file of at most 64 MiB; CheckpointError otherwise."""
    try:
        if not path.is_file():
            raise CheckpointError(f"[load] {path} does not exist; expected a model directory")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise CheckpointError(f"[load] {path} is over 64 MiB; it is not a configuration file")
        return path.read_bytes()
    except (OSError, ValueError) as reason:
        if isinstance(reason, CheckpointError):
            raise
        raise CheckpointError(f"[load] cannot read {path}: {reason}") from None


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
        bos_token_id=_token_id(node.get("bos_token_id", family.defaults.get("bos_token_id"))),
        eos_token_ids=_token_ids(node.get("eos_token_id", family.defaults.get("eos_token_id"))),
        pad_token_id=_token_id(node.get("pad_token_id", family.defaults.get("pad_token_id"))),
        word_embed_proj_dim=width,
        do_layer_norm_before=before,
        final_norm=before and not (opt and flag("_remove_final_layer_norm", False)),
    )


def _architecture(node: Reader) -> str:
    listed = node.get("architectures")
    names = [] if listed.null else [item.string() for item in listed.items()]
    model_type = node.get("model_type")
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    # A base model ("LlamaModel") has the same tensors without the head.
    name = names[0] if names else by_type.get(str(model_type.value), f"type {model_type.value!r}")
    if name.endswith("Model") and name[: -len("Model")] + "ForCausalLM" in FAMILIES:
        name = name[: -len("Model")] + "ForCausalLM"
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"[{node.subject}] architectures: {name} is not supported; supported are "
            + ", ".join(sorted(FAMILIES))
        )
    if not model_type.null and model_type.string() != FAMILIES[name].model_type:
        model_type.reject(
            f"{model_type.value!r} contradicts architecture {name}, "
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
    name = node.get("dtype") if not node.get("dtype").null else node.get("torch_dtype")
    return None if name.null else _DTYPES[name.choice(_DTYPES)]


def _token_id(node: Reader) -> int | None:
    token = None if node.null else node.integer(-1, 2**31 - 1)
    return None if token == -1 else token  # -1: written by old converters for "none"


def _token_ids(node: Reader) -> tuple[int, ...]:
    items = node.items() if isinstance(node.value, list) else [node]
    return tuple(token for token in map(_token_id, items) if token is not None)


@dataclass(frozen=True)
class GenerationDefaults:
    """generation_config.json. None: the file does not say."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def load_generation_defaults(directory: str | Path, config: ModelConfig) -> GenerationDefaults:
    """Reads `directory`/generation_config.json; ids it lacks, or its absence, fall back to
    `config`. Raises ConfigError naming the file and key."""
    path = Path(directory) / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(config.eos_token_ids, config.bos_token_id, config.pad_token_id)
    return read_generation_defaults(parse(read_json_file(path), str(path), ConfigError), config)


def read_generation_defaults(node: Reader, config: ModelConfig) -> GenerationDefaults:
    """The defaults in a parsed generation_config.json."""

    def number(name: str, low: float, high: float) -> float | None:
        child = node.get(name)
        return None if child.null else child.number(low, high)

    eos, top_k = node.get("eos_token_id"), node.get("top_k")
    bos, pad = _token_id(node.get("bos_token_id")), _token_id(node.get("pad_token_id"))
    sample = node.get("do_sample")
    return GenerationDefaults(
        eos_token_ids=config.eos_token_ids if eos.null else _token_ids(eos),
        bos_token_id=config.bos_token_id if bos is None else bos,
        pad_token_id=config.pad_token_id if pad is None else pad,
        do_sample=False if sample.null else sample.boolean(),
        temperature=number("temperature", 0.0, 1e6),
        top_k=None if top_k.null else top_k.integer(0, 2**31 - 1),
        top_p=number("top_p", 0.0, 1.0),
        min_p=number("min_p", 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1e-6, 1e6),
    )
