"""The configuration in a GGUF header, as transformers' config.json would say it.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. One row of
`ARCHITECTURES` per architecture that a family of HELM runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.base.arguments import shown
from helm.base.jsonio import Reader
from helm.errors import CheckpointError, UnsupportedModelError
from helm.model.gguf.cursor import Array
from helm.model.gguf.file import Gguf, needed
from helm.model.gguf.token_ids import token_ids

ROPE_FREQS = "rope_freqs.weight"
VECTORS = (ROPE_FREQS,)  # tensors that belong to the configuration
_MOST = 2**31


@dataclass(frozen=True)
class Architecture:
    """family: transformers' class. adjacent: rows of q and k lie as rotation of neighbours needs
    them. heads_norm: RMS norms of every q and k head. bias: q, k and v have one, o has none."""

    family: str
    model_type: str
    adjacent: bool = False
    heads_norm: bool = False
    bias: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", adjacent=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", heads_norm=True),
}
# Keys that change what a model computes, and no family here does, with their neutral values.
_NOT_RUN: dict[str, tuple[float, ...]] = {
    "expert_count": (0,),
    "attention.logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "use_parallel_residual": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
}


def architecture(gguf: Gguf) -> Architecture:
    """What runs the model; UnsupportedModelError for an architecture that HELM lacks."""
    node = gguf.node()["general.architecture"]
    name = node.string()
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"[{node.subject}] general.architecture: {shown(name)} is not supported; supported in "
            f"GGUF are {', '.join(sorted(ARCHITECTURES))}; take a model of these"
        )
    return ARCHITECTURES[name]


def config_of(gguf: Gguf) -> dict[str, Any]:
    """A config.json for `parse_config`. Raises CheckpointError and UnsupportedModelError
    that name file and key."""
    found = architecture(gguf)
    node = gguf.node()
    keys = _Keys(gguf, node["general.architecture"].string())
    _refuse(keys)
    heads = keys.uniform("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = _head_dim(keys, hidden, heads)
    config: dict[str, Any] = {
        "architectures": [found.family],
        "model_type": found.model_type,
        "vocab_size": _vocabulary(gguf, keys),
        "hidden_size": hidden,
        "intermediate_size": keys.uniform("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.uniform("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.decimal("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **_biases(gguf, found),
        **_rope(gguf, keys, head_dim),
        **_window(keys, found),
        **token_ids(gguf),
    }
    return config


class _Keys:
    """The keys of one architecture, which begin with its name."""

    def __init__(self, gguf: Gguf, name: str) -> None:
        self._gguf = gguf
        self._node = gguf.node()
        self._name = name

    def get(self, key: str, default: Any = None) -> Reader:
        return self._node.get(f"{self._name}.{key}", default)

    def needed(self, key: str) -> Reader:
        return needed(self._node, f"{self._name}.{key}")

    def integer(self, key: str) -> int:
        return self.needed(key).integer(1, _MOST)

    def uniform(self, key: str, default: int | None = None) -> int:
        """An integer that may be stated per layer, where all layers agree."""
        node = self.get(key, default)
        if not isinstance(node.value, Array):
            return self.integer(key) if default is None else node.integer(1, _MOST)
        values = set(node.value.numbers().tolist())
        if len(values) != 1:
            raise UnsupportedModelError(
                f"[{node.subject}] {node.path}: differs between layers ({len(values)} values), "
                "which HELM does not run; take another model"
            )
        return Reader(values.pop(), node.subject, node.error, node.path).integer(1, _MOST)

    def decimal(self, key: str, default: float | None = None) -> float:
        """The shortest number that is stored so in f32, as it stands in config.json."""
        node = self.get(key, default)
        value = self.needed(key).number() if node.null else node.number()
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        if not math.isfinite(narrow):
            node.reject(f"{value:g} is no number of 32 bits; download the file again")
        return float(str(narrow))


def _refuse(keys: _Keys) -> None:
    """UnsupportedModelError for a key that no family of HELM follows."""
    for name, neutral in _NOT_RUN.items():
        node = keys.get(name)
        if not node.null and node.value not in neutral:
            raise UnsupportedModelError(
                f"[{node.subject}] {node.path}: {shown(node.value)} needs what HELM does not run; "
                "expected a dense model without it; take another model"
            )


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    stated = keys.get("attention.key_length")
    if stated.null:
        if hidden % heads:
            keys.get("attention.head_count").reject(
                f"{heads} does not divide embedding_length {hidden}; expected a divisor, or "
                "attention.key_length; convert the original checkpoint again"
            )
        return hidden // heads
    size = stated.integer(1, 4096)
    values = keys.get("attention.value_length", size)
    if values.integer(1, 4096) != size:
        values.reject(f"{values.value} differs from key_length {size}, which HELM does not run")
    return size


def _vocabulary(gguf: Gguf, keys: _Keys) -> int:
    """Rows of the embedding, which the file's own keys must fit."""
    table = gguf.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(
            f"[load] {gguf.source}: tensor 'token_embd.weight' is missing or no matrix; expected "
            "the embedding; download the whole model"
        )
    rows = table.shape[0]
    stated = keys.get("vocab_size", rows)
    if stated.integer(1, _MOST) != rows:
        stated.reject(
            f"is {stated.value}, tensor 'token_embd.weight' has {rows} rows; expected the same; "
            "convert the original checkpoint again"
        )
    tokens = gguf.array("tokenizer.ggml.tokens")
    if tokens is not None and tokens.count > rows:
        raise CheckpointError(
            f"[load] {gguf.source}: tokenizer.ggml.tokens has {tokens.count} tokens, tensor "
            f"'token_embd.weight' has {rows} rows; expected no more tokens than rows; convert the "
            "original checkpoint again"
        )
    return rows


def _biases(gguf: Gguf, found: Architecture) -> dict[str, Any]:
    if found.bias:
        return {}
    return {
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in gguf.tensors,
    }


def _rope(gguf: Gguf, keys: _Keys, head_dim: int) -> dict[str, Any]:
    """`partial_rotary_factor` and `rope_scaling`."""
    rotary = keys.get("rope.dimension_count", head_dim)
    size = rotary.integer(1, 4096)
    if size > head_dim:
        rotary.reject(f"{size} is over the {head_dim} elements of a head; expected at most these")
    config: dict[str, Any] = {}
    if size != head_dim:
        share = size / head_dim  # such that the product, cut, is `size` again
        whole = int(head_dim * share) == size
        config["partial_rotary_factor"] = share if whole else math.nextafter(share, 1.0)
    kind = keys.get("rope.scaling.type", "none").choice(("none", "linear", "yarn", "longrope"))
    linear = keys.get("rope.scale_linear")  # of old files
    factors = gguf.vectors.get(ROPE_FREQS)
    if kind == "longrope":
        keys.get("rope.scaling.type").reject("longrope is not supported; take another model")
    if factors is not None and kind != "none":
        keys.get("rope.scaling.type").reject(
            f"{kind} and tensor '{ROPE_FREQS}' both scale rope; expected one of both; convert the "
            "original checkpoint again"
        )
    if factors is not None:
        config["rope_scaling"] = {"rope_type": "factors", "factors": _factors(gguf, size)}
    elif kind == "yarn":
        config["rope_scaling"] = _yarn(keys)
    elif kind == "linear" or not linear.null:
        factor = "rope.scaling.factor" if kind == "linear" else "rope.scale_linear"
        config["rope_scaling"] = {"rope_type": "linear", "factor": keys.decimal(factor)}
    return config


def _factors(gguf: Gguf, rotary: int) -> list[float]:
    """What the wavelength of each rotated pair is multiplied by, as Llama 3.1 has it."""
    factors = list(gguf.vectors[ROPE_FREQS])
    if len(factors) != rotary // 2 or not all(1e-6 <= factor <= 1e6 for factor in factors):
        raise CheckpointError(
            f"[load] {gguf.source}: tensor '{ROPE_FREQS}' has {len(factors)} values, expected "
            f"{rotary // 2} from 1e-6 to 1e6, one of each rotated pair; download the file again"
        )
    return factors


def _yarn(keys: _Keys) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": keys.decimal("rope.scaling.factor")}
    original = keys.get("rope.scaling.original_context_length")
    if not original.null:
        scaling["original_max_position_embeddings"] = original.integer(1, _MOST)
    for name, key in (
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ):
        if not keys.get(key).null:
            scaling[name] = keys.decimal(key)
    # ggml multiplies YaRN's own factor of attention by this one; config.json's replaces it.
    more = keys.decimal("rope.scaling.attn_factor", 1.0)
    if more != 1.0:
        own = 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0
        scaling["attention_factor"] = more * own
    return scaling


def _window(keys: _Keys, found: Architecture) -> dict[str, Any]:
    """Mistral's window of all layers; Qwen's files have none that is used."""
    window = keys.get("attention.sliding_window", 0)
    if not found.adjacent or window.integer(0, _MOST) == 0:
        return {}
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window.value,
    }
