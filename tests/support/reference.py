"""The oracle: a naive float64 interpreter of a plan's ops for one sequence, in numpy.

Independent of helm: it takes the plan as parsed JSON and reads the weights' bytes itself. It keeps
no cache; every call computes all positions from the start.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def bf16_to_f64(bits: npt.NDArray[np.uint16]) -> F64:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def round_to(values: F64, dtype: str) -> F64:
    """`values` rounded to nearest even in `dtype`, back as float64."""
    if dtype == "f32":
        return values.astype(np.float32).astype(np.float64)
    if dtype == "f16":
        return values.astype(np.float32).astype(np.float16).astype(np.float64)
    bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bf16_to_f64(rounded.astype(np.uint16))


def load_weights(plan: dict[str, Any], directory: str | Path) -> dict[str, F64]:
    """Every tensor of the plan as float64, rounded to the format of its slice on the CPU."""
    weights: dict[str, F64] = {}
    formats = {s["tensor"]: s["format"] for s in plan["slices"] if s["device"] == "cpu"}
    for tensor in plan["tensors"]:
        source, shape = tensor["source"], tensor["shape"]
        assert not any(extent["row_stride"] for extent in source["extents"])
        raw = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[source["stored"]]
        runs = [
            np.fromfile(
                Path(directory) / extent["file"],
                dtype=raw,
                count=extent["rows"] * math.prod(shape[1:]),
                offset=extent["offset"],
            )
            for extent in source["extents"]
        ]
        stored = np.concatenate(runs).reshape(shape)
        wide = bf16_to_f64(stored) if source["stored"] == "bf16" else stored.astype(np.float64)
        weights[tensor["name"]] = round_to(wide, formats[tensor["name"]])
    return weights


def run(
    plan: dict[str, Any], weights: dict[str, F64], tokens: list[int], *, round_kv: bool = False
) -> F64:
    """Logits [tokens, vocab] of one sequence. round_kv: K and V as the cache would hold them."""
    count = len(tokens)
    values = {v["name"]: np.full((count, v["width"]), np.nan) for v in plan["values"]}
    kv_dtype = plan["kv"]["dtype"] if round_kv else None
    for unit in plan["units"]:
        for op in unit["ops"]:
            _OPS[op["op"]](op, values, weights, plan, tokens, kv_dtype)
    return values[plan["logits"]]


def _embedding(op, values, weights, plan, tokens, kv_dtype) -> None:
    for t, token in enumerate(tokens):
        values[op["out"]][t] = weights[op["table"]][token] * op.get("scale", 1)


def _position_embedding(op, values, weights, plan, tokens, kv_dtype) -> None:
    for t in range(len(tokens)):
        values[op["out"]][t] += weights[op["table"]][t + op["offset"]]


def _norm(op, values, weights, plan, tokens, kv_dtype) -> None:
    size = op["size"]
    for group in range(op["groups"]):
        begin = op["in_offset"] + group * size
        x = values[op["in"]][:, begin : begin + size].copy()
        if op["kind"] == "layer":
            x -= x.mean(axis=1, keepdims=True)
        x /= np.sqrt((x * x).mean(axis=1, keepdims=True) + op["eps"])
        x *= weights[op["weight"]] + op.get("weight_plus", 0)
        if op["bias"] is not None:
            x += weights[op["bias"]]
        begin = op["out_offset"] + group * size
        held = values[op["out"]][:, begin : begin + size]
        held[:] = held + x if op.get("accumulate") else x


def _linear(op, values, weights, plan, tokens, kv_dtype) -> None:
    x, parts = values[op["in"]], []
    for part in op["parts"]:
        y = x @ weights[part["weight"]].T
        parts.append(y if part["bias"] is None else y + weights[part["bias"]])
    stacked = np.concatenate(parts, axis=1)
    values[op["out"]][:] = values[op["out"]] + stacked if op["accumulate"] else stacked


def _rope(op, values, weights, plan, tokens, kv_dtype) -> None:
    table = plan["rope"][op["table"]]
    positions = np.arange(len(tokens), dtype=np.float32)
    angle = np.outer(positions, np.array(table["inv_freq"], np.float32)).astype(np.float32)
    cos = np.cos(angle.astype(np.float64)) * table["attention_factor"]
    sin = np.sin(angle.astype(np.float64)) * table["attention_factor"]
    half = op["rotary"] // 2
    for head in range(op["heads"]):
        begin = op["offset"] + head * op["head_dim"]
        x = values[op["value"]][:, begin : begin + op["rotary"]]
        if op.get("pairs") == "neighbours":
            first, second = slice(0, None, 2), slice(1, None, 2)
        else:
            first, second = slice(0, half), slice(half, None)
        a, b = x[:, first].copy(), x[:, second].copy()
        x[:, first], x[:, second] = a * cos - b * sin, b * cos + a * sin


def _attention(op, values, weights, plan, tokens, kv_dtype) -> None:
    dim, qkv, out = op["head_dim"], values[op["in"]], values[op["out"]]
    group = op["heads"] // op["kv_heads"]
    for head in range(op["heads"]):
        kv = head // group * dim
        q = qkv[:, op["q_offset"] + head * dim :][:, :dim]
        k = qkv[:, op["k_offset"] + kv :][:, :dim]
        v = qkv[:, op["v_offset"] + kv :][:, :dim]
        if kv_dtype is not None:
            k, v = round_to(k, kv_dtype), round_to(v, kv_dtype)
        for i in range(len(tokens)):
            first = max(0, i - op["window"] + 1) if op["window"] else 0
            scores = k[first : i + 1] @ q[i] * op["scale"]
            if "softcap" in op:
                scores = op["softcap"] * np.tanh(scores / op["softcap"])
            p = np.exp(scores - scores.max())
            out[i, head * dim : (head + 1) * dim] = (p / p.sum()) @ v[first : i + 1]


def _activation(op, values, weights, plan, tokens, kv_dtype) -> None:
    x, size = values[op["in"]], op["size"]
    gate = x[:, :size]
    if op["kind"] == "silu":
        y = gate / (1 + np.exp(-gate))
    elif op["kind"] == "relu":
        y = np.maximum(gate, 0)
    elif op["kind"] == "scale":
        y = op.get("factor", 1) * gate
    elif op["kind"] == "softcap":
        y = op["factor"] * np.tanh(gate / op["factor"])
    elif op["kind"] == "gelu":
        y = 0.5 * gate * (1 + _erf(gate / math.sqrt(2)))
    else:
        y = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    y = y * x[:, size:] if op["gated"] else y
    values[op["out"]][:] = values[op["out"]] + y if op.get("accumulate") else y


def _select(op, values, weights, plan, tokens, kv_dtype) -> None:
    values[op["out"]][:] = values[op["in"]]


_OPS = {
    "embedding": _embedding,
    "position_embedding": _position_embedding,
    "norm": _norm,
    "linear": _linear,
    "rope": _rope,
    "attention": _attention,
    "activation": _activation,
    "select": _select,
}
