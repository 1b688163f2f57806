"""The configuration in a GGUF header, as transformers' config.json would say it.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from typing import Any

from helm.base.arguments import shown
from helm.errors import CheckpointError, UnsupportedModelError
from helm.model.families.unknown import KNOWN, nearest, needed
from helm.model.gguf.architectures import ARCHITECTURES, Architecture
from helm.model.gguf.file import Gguf
from helm.model.gguf.keys import MOST, Keys
from helm.model.gguf.token_ids import token_ids

ROPE_FREQS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
VECTORS = (ROPE_FREQS, SHORT, LONG)  # tensors that belong to the configuration


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
            f"[{node.subject}] general.architecture: {shown(name)} is not supported"
            f"{_nearest(name)}; supported in GGUF are {', '.join(sorted(ARCHITECTURES))}; take a "
            "model of these"
        )
    return ARCHITECTURES[name]


def _nearest(name: str) -> str:
    close, needs = nearest(name, ARCHITECTURES), needed(name)
    known = "" if needs is None else f"{KNOWN}: HELM lacks {needs}"
    return known + ("" if close is None else f"; the nearest that is: {close}")


def config_of(gguf: Gguf) -> dict[str, Any]:
    """A config.json for `parse_config`. Raises CheckpointError and UnsupportedModelError
    that name file and key."""
    found = architecture(gguf)
    node = gguf.node()
    keys = Keys(gguf, node["general.architecture"].string())
    _refuse(keys, found)
    heads = keys.uniform("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = _head_dim(keys, hidden, heads)
    return {
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
        **_epsilon(keys, found),
        "rope_theta": keys.decimal("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **_biases(gguf, found),
        **_rope(gguf, keys, head_dim),
        **found.more(keys),
        **token_ids(gguf),
    }


def _refuse(keys: Keys, found: Architecture) -> None:
    """UnsupportedModelError for a key that the family does not follow."""
    for name, neutral in _NOT_RUN.items():
        if name in found.follows:
            continue
        node = keys.get(name)
        if not node.null and node.value not in neutral:
            raise UnsupportedModelError(
                f"[{node.subject}] {node.path}: {shown(node.value)} needs what HELM does not run; "
                "expected a dense model without it; take another model"
            )


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
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


def _vocabulary(gguf: Gguf, keys: Keys) -> int:
    """Rows of the embedding, which the file's own keys must fit."""
    table = gguf.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(
            f"[load] {gguf.source}: tensor 'token_embd.weight' is missing or no matrix; expected "
            "the embedding; download the whole model"
        )
    rows = table.shape[0]
    stated = keys.get("vocab_size", rows)
    if stated.integer(1, MOST) != rows:
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


def _epsilon(keys: Keys, found: Architecture) -> dict[str, float]:
    if found.layer_norm:
        return {"layer_norm_eps": keys.decimal("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon")}


def _biases(gguf: Gguf, found: Architecture) -> dict[str, Any]:
    if found.bias:
        return {}
    return {
        found.bias_key: "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in gguf.tensors,
    }


def _rope(gguf: Gguf, keys: Keys, head_dim: int) -> dict[str, Any]:
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
    if kind == "longrope" or SHORT in gguf.vectors or LONG in gguf.vectors:
        config["rope_scaling"] = _longrope(gguf, keys, size)
        return config
    if factors is not None and kind != "none":
        keys.get("rope.scaling.type").reject(
            f"{kind} and tensor '{ROPE_FREQS}' both scale rope; expected one of both; convert the "
            "original checkpoint again"
        )
    if factors is not None:
        config["rope_scaling"] = {
            "rope_type": "factors",
            "factors": _factors(gguf, ROPE_FREQS, size),
        }
    elif kind == "yarn":
        config["rope_scaling"] = _yarn(keys)
    elif kind == "linear" or not linear.null:
        factor = "rope.scaling.factor" if kind == "linear" else "rope.scale_linear"
        config["rope_scaling"] = {"rope_type": "linear", "factor": keys.decimal(factor)}
    return config


def _factors(gguf: Gguf, name: str, rotary: int) -> list[float]:
    """What the wavelength of each rotated pair is multiplied by."""
    if name not in gguf.vectors:
        raise CheckpointError(
            f"[load] {gguf.source}: tensor '{name}' is missing; expected {rotary // 2} factors of "
            "rope; download the file again"
        )
    factors = list(gguf.vectors[name])
    if len(factors) != rotary // 2 or not all(1e-6 <= factor <= 1e6 for factor in factors):
        raise CheckpointError(
            f"[load] {gguf.source}: tensor '{name}' has {len(factors)} values, expected "
            f"{rotary // 2} from 1e-6 to 1e6, one of each rotated pair; download the file again"
        )
    return factors


def _longrope(gguf: Gguf, keys: Keys, rotary: int) -> dict[str, Any]:
    original = keys.needed("rope.scaling.original_context_length").integer(1, MOST)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _factors(gguf, SHORT, rotary),
        "long_factor": _factors(gguf, LONG, rotary),
        "original_max_position_embeddings": original,
    }
    if not keys.get("rope.scaling.attn_factor").null:
        scaling["attention_factor"] = keys.decimal("rope.scaling.attn_factor")
    return scaling


def _yarn(keys: Keys) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": keys.decimal("rope.scaling.factor")}
    original = keys.get("rope.scaling.original_context_length")
    if not original.null:
        scaling["original_max_position_embeddings"] = original.integer(1, MOST)
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
