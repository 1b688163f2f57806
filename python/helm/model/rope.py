"""Rotary position embeddings: their configuration and frequency tables. Knows no model family.

Rotary embedding: Su et al., "RoFormer" (arXiv:2104.09864). A table holds the inverse frequency of
each rotated pair in f32, computed in f32 in the same order of operations as transformers does.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from helm.base.jsonio import Reader

F32 = npt.NDArray[np.float32]
LayerKind = Literal["full_attention", "sliding_attention"]
_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
_MOST_FACTORS = 4096


@dataclass(frozen=True)
class RopeConfig:
    """What config.json says of the rotary embedding. Unused fields hold their neutral value."""

    rope_type: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_context: int = 0  # original_max_position_embeddings, positions
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, rotations
    beta_slow: float = 1.0  # yarn, rotations
    attention_factor: float | None = None  # yarn, longrope; None: derived from factor
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn
    factors: tuple[float, ...] = ()  # factors, and longrope of short contexts: one per rotated pair
    long_factors: tuple[float, ...] = ()  # longrope of contexts beyond original_context


@dataclass(frozen=True)
class RopeTable:
    """inv_freq: rotary/2 f32 values in radians per position; cos and sin are scaled by
    attention_factor."""

    inv_freq: tuple[float, ...]
    attention_factor: float


def parse_rope(
    config: Reader,
    max_positions: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    layers: LayerKind | None = None,
    theta_key: str = "rope_theta",
) -> RopeConfig:
    """Reads `rope_scaling` (old) or `rope_parameters` (new), `rope_theta` and their kin.

    A value inside the dict goes before one at the top level, as in transformers. theta, partial: of
    absent keys. layers: the kind of layers that is asked for; where the dict does not tell kinds
    apart, it is of full_attention. Raises the reader's error naming the key.
    """
    key = "rope_scaling" if config.get("rope_scaling").value else "rope_parameters"
    node = config.get(key)
    nothing = Reader({}, config.subject, config.error, key)
    if not node.value:
        node = nothing
    kinds = [name for name in get_args(LayerKind) if name in node.names()]
    if kinds and layers is None:
        node.reject("parameters per layer type are not supported; expected one set for all")
    if layers is not None and (kinds or layers == "sliding_attention"):
        node = node.get(layers) if node.get(layers).value else nothing
    kind = node.get("rope_type", node.get("type", "default").value)
    # Phi-3's first files say "su" for what became longrope.
    rope_type = "longrope" if kind.value == "su" else kind.choice(_TYPES)

    def either(name: str, outer: str, default: float) -> Reader:
        inner = node.get(name)
        return config.get(outer, default) if inner.null else inner

    base = either("rope_theta", theta_key, theta).number(1.0, 1e30)
    share = either("partial_rotary_factor", "partial_rotary_factor", partial)
    rope = RopeConfig(rope_type, base, partial if share.null else share.number(0.0, 1.0))
    if rope_type == "default":
        return rope
    return _parse_scaling(config, node, rope, max_positions)


def _parse_scaling(
    config: Reader, node: Reader, base: RopeConfig, max_positions: int
) -> RopeConfig:
    outer = config.get("original_max_position_embeddings")
    original = outer if not outer.null else node.get("original_max_position_embeddings")
    original_context = max_positions if original.null else original.integer(1, 2**31)
    common = {
        "rope_type": base.rope_type,
        "theta": base.theta,
        "partial_rotary_factor": base.partial_rotary_factor,
    }
    if base.rope_type == "factors":
        return RopeConfig(
            **common,  # type: ignore[arg-type]
            factors=_factors(node["factors"]),
        )
    if base.rope_type == "longrope":
        return _parse_longrope(node, base, max_positions, original_context)
    factor = node["factor"]
    if base.rope_type == "yarn" and factor.null:
        scale = max_positions / original_context
    else:
        scale = factor.number(1e-6, 1e6)

    def optional(name: str, default: float) -> float:
        child = node.get(name)
        return default if child.null else child.number(0.0, 1e6) or default

    if base.rope_type == "llama3":
        low = node["low_freq_factor"].number(1e-6, 1e6)
        high = node["high_freq_factor"].number(1e-6, 1e6)
        if high <= low:
            node["high_freq_factor"].reject(f"expected more than low_freq_factor {low:g}")
        return RopeConfig(
            **common,  # type: ignore[arg-type]
            factor=scale,
            original_context=original_context,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if base.rope_type == "yarn":
        attention = node.get("attention_factor")
        truncate = node.get("truncate", True)
        if base.theta <= 1.0:
            node.reject("yarn needs rope_theta above 1")
        return RopeConfig(
            **common,  # type: ignore[arg-type]
            factor=scale,
            original_context=original_context,
            beta_fast=optional("beta_fast", 32.0),
            beta_slow=optional("beta_slow", 1.0),
            attention_factor=None if attention.null else attention.number(0.0, 1e6),
            mscale=optional("mscale", 0.0),
            mscale_all_dim=optional("mscale_all_dim", 0.0),
            truncate=truncate.boolean(),
        )
    return RopeConfig(**common, factor=scale, original_context=original_context)  # type: ignore[arg-type]


def _factors(node: Reader) -> tuple[float, ...]:
    return tuple(factor.number(1e-6, 1e6) for factor in node.items(_MOST_FACTORS))


def _parse_longrope(
    node: Reader, base: RopeConfig, max_positions: int, original_context: int
) -> RopeConfig:
    factor, attention = node.get("factor"), node.get("attention_factor")
    if original_context < 2:
        node.reject(f"expected original_max_position_embeddings above 1, found {original_context}")
    return dataclasses.replace(
        base,
        factor=max_positions / original_context if factor.null else factor.number(1e-6, 1e6),
        original_context=original_context,
        attention_factor=None if attention.null else attention.number(0.0, 1e6),
        factors=_factors(node["short_factor"]),
        long_factors=_factors(node["long_factor"]),
    )


def check_rope(rope: RopeConfig, head_dim: int, node: Reader) -> None:
    """The reader's error, naming the key, unless heads of `head_dim` can be rotated so."""
    rotary = rotary_size(rope, head_dim)
    if rotary < 2 or rotary % 2:
        node.get("head_dim", head_dim).reject(
            f"expected an even number of rotated elements per head, found {rotary} of head_dim "
            f"{head_dim}"
        )
    key = "rope_scaling" if node.get("rope_scaling").value else "rope_parameters"
    longrope = rope.rope_type == "longrope"
    for name, factors in (
        ("short_factor" if longrope else "factors", rope.factors),
        ("long_factor", rope.long_factors),
    ):
        if len(factors) not in ((rotary // 2,) if longrope else (0, rotary // 2)):
            node.get(key).get(name).reject(
                f"expected {rotary // 2} factors, one per rotated pair, found {len(factors)}"
            )


def rotary_size(rope: RopeConfig, head_dim: int) -> int:
    """How many leading elements of each head are rotated."""
    return int(head_dim * rope.partial_rotary_factor)


def rope_table(rope: RopeConfig, head_dim: int, *, far: bool = False) -> RopeTable:
    """The frequency table of heads of `head_dim` elements; `rotary_size` must be even and >= 2.
    far: of contexts beyond `original_context`, which longrope has another table for.

    default: RoFormer. linear: positions interpolated by `factor` (Chen et al.,
    arXiv:2306.15595). dynamic: equal to default up to max_position_embeddings, beyond which no
    plan reaches: there transformers takes a step's frequencies from the longest position so far,
    while keys keep those of the step that they came in. llama3: Llama 3.1 (arXiv:2407.21783)
    rescales long wavelengths only. yarn: Peng et al. (arXiv:2309.00071). factors: of GGUF files,
    which state llama3's as a factor of every pair's wavelength. longrope: Ding et al.
    (arXiv:2402.13753), a factor of every pair's wavelength, other ones for long contexts.
    """
    dim = rotary_size(rope, head_dim)
    pos_freqs = _pos_freqs(rope.theta, dim)
    inv_freq = np.float32(1.0) / pos_freqs
    attention_factor = 1.0
    if rope.rope_type == "linear":
        inv_freq = inv_freq / np.float32(rope.factor)
    elif rope.rope_type == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.rope_type == "factors":
        wavelengths: F32 = np.array(rope.factors, np.float32)
        inv_freq = inv_freq / wavelengths
    elif rope.rope_type == "longrope":
        longer: F32 = np.array(rope.long_factors if far else rope.factors, np.float32)
        inv_freq = np.float32(1.0) / (longer * pos_freqs)
        attention_factor = _longrope_attention_factor(rope)
    elif rope.rope_type == "yarn":
        inv_freq, attention_factor = _yarn(pos_freqs, dim, rope), _yarn_attention_factor(rope)
    return RopeTable(tuple(float(f) for f in inv_freq), attention_factor)


def _pos_freqs(theta: float, dim: int) -> F32:
    """theta^(2i/dim) for i < dim/2, correctly rounded to f32."""
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    powers = np.float64(np.float32(theta)) ** exponents.astype(np.float64)
    result: F32 = powers.astype(np.float32)
    return result


def _llama3(inv_freq: F32, rope: RopeConfig) -> F32:
    low_wavelen = rope.original_context / rope.low_freq_factor
    high_wavelen = rope.original_context / rope.high_freq_factor
    wavelen = np.float32(2 * math.pi) / inv_freq
    factor = np.float32(rope.factor)
    scaled = np.where(wavelen > low_wavelen, inv_freq / factor, inv_freq)
    smooth = (np.float32(rope.original_context) / wavelen - np.float32(rope.low_freq_factor)) / (
        np.float32(rope.high_freq_factor - rope.low_freq_factor)
    )
    smoothed = (np.float32(1.0) - smooth) * scaled / factor + smooth * scaled
    medium = (wavelen >= high_wavelen) & (wavelen <= low_wavelen)
    result: F32 = np.where(medium, smoothed, scaled).astype(np.float32)
    return result


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _yarn(pos_freqs: F32, dim: int, rope: RopeConfig) -> F32:
    def correction_dim(rotations: float) -> float:
        ratio = rope.original_context / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    extrapolated = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    interpolation = np.float32(1.0) / (np.float32(rope.factor) * pos_freqs)
    extrapolation = np.float32(1.0) / pos_freqs
    result: F32 = interpolation * (np.float32(1.0) - extrapolated) + extrapolation * extrapolated
    return result
