"""The dtypes of weights and of the KV cache: names and sizes."""

from __future__ import annotations

from typing import Literal, get_args

DType = Literal["f32", "f16", "bf16"]
DTYPES: tuple[str, ...] = get_args(DType)
DTYPE_BYTES: dict[str, int] = {"f32": 4, "f16": 2, "bf16": 2}
# i8: integers with an f32 scale per row of K or V, that is per position and KV head.
KvDType = Literal["f32", "f16", "bf16", "i8"]
KV_DTYPES: tuple[str, ...] = get_args(KvDType)
KV_ELEMENT_BYTES: dict[str, int] = {**DTYPE_BYTES, "i8": 1}
KV_SCALE_BYTES: dict[str, int] = {"i8": 4}
_SYNONYMS = {
    **dict.fromkeys(("float32", "fp32", "float"), "f32"),
    **dict.fromkeys(("float16", "fp16", "half"), "f16"),
    "bfloat16": "bf16",
    "int8": "i8",
}


def dtype_name(value: str) -> str:
    """HELM's name of a dtype that others call otherwise; anything else as it is."""
    return _SYNONYMS.get(value, value) if isinstance(value, str) else value


def kv_position_bytes(dtype: str, kv_heads: int, head_dim: int) -> int:
    """K and V of one position of one layer."""
    return 2 * kv_heads * (head_dim * KV_ELEMENT_BYTES[dtype] + KV_SCALE_BYTES.get(dtype, 0))
