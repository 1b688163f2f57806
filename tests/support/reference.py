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
        dtype, runs = source["stored"], source["extents"]
        if dtype == "columns":
            dtype, runs = source["aux"][0]["dtype"], [{**source["aux"][0], "rows": shape[0]}]
        raw = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
        found = []
        for run in runs:
            assert run.get("row_stride", 0) == 0
            count = run["rows"] * math.prod(shape[1:])
            path = Path(directory) / run["file"]
            found.append(np.fromfile(path, dtype=raw, count=count, offset=run["offset"]))
        stored = np.concatenate(found)
        by_column = source["stored"] == "columns"
        stored = stored.reshape(shape[::-1]).T if by_column else stored.reshape(shape)
        wide = bf16_to_f64(stored) if dtype == "bf16" else stored.astype(np.float64)
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
            sink = weights[op["sinks"]][head] if op.get("sinks") else -np.inf
            total = p.sum() + np.exp(sink - scores.max())
            out[i, head * dim : (head + 1) * dim] = (p / total) @ v[first : i + 1]


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


def _route(op, values, weights, plan, tokens, kv_dtype) -> None:
    bias = weights[op["bias"]] if op.get("bias") else 0
    for t, logits in enumerate(values[op["in"]]):
        values[op["out"]][t] = _routed(op, logits, bias)


def _routed(op, logits, bias) -> F64:
    count, k = len(logits), op["chosen"]
    if op["score"] == "sparsemixer":
        return _sparse_mixed(logits, op["near"])
    scores = {
        "softmax": lambda: np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum(),
        "sigmoid": lambda: 1 / (1 + np.exp(-logits)),
        "softmax_selected": lambda: logits,
    }[op["score"]]()
    choice = scores + bias
    groups = choice.reshape(op.get("groups", 1), -1)
    best = np.sort(groups, axis=1)[:, ::-1][:, : op.get("group_best", 1)].sum(axis=1)
    kept = np.argsort(-best, kind="stable")[: op.get("groups_kept", 1)]
    of = np.repeat(np.arange(len(groups)), count // len(groups))
    order = [e for e in np.argsort(-choice, kind="stable") if of[e] in kept]
    ids = np.sort(order[:k])
    chosen = scores[ids]
    if op["score"] == "softmax_selected":
        chosen = np.exp(chosen - chosen.max()) / np.exp(chosen - chosen.max()).sum()
    if op.get("normalise"):
        chosen = chosen / chosen.sum()
    return np.concatenate([ids, chosen * op.get("scale", 1)])


def _sparse_mixed(logits, near) -> F64:
    found, left = {}, logits.copy()
    for _ in range(2):
        most = left.max()
        apart = (most - logits) / np.maximum(np.abs(logits), most) > near
        shown = np.where(apart, -np.inf, left)
        found[int(left.argmax())] = 1 / np.exp(shown - most).sum()
        left[left.argmax()] = -np.inf
    return np.array([*sorted(found), *(found[e] for e in sorted(found))])


def _experts(op, values, weights, plan, tokens, kv_dtype) -> None:
    k, size, x = op["chosen"], op["size"], values[op["in"]]
    gate, down = weights[op["gate"]], weights[op["down"]]
    width = values[op["out"]].shape[1]
    bias = weights[op["gate_bias"]] if op.get("gate_bias") else np.zeros(len(gate))
    last = weights[op["down_bias"]] if op.get("down_bias") else np.zeros(len(down))
    for t, route in enumerate(values[op["routes"]]):
        for e, weight in zip(route[:k].astype(int), route[k:], strict=True):
            if op["layout"] == "apart":
                rows = slice(e * size, (e + 1) * size)
                g, u = gate[rows] @ x[t] + bias[rows], weights[op["up"]][rows] @ x[t]
            else:
                rows = slice(e * 2 * size, (e + 1) * 2 * size)
                both = gate[rows] @ x[t] + bias[rows]
                halves = op["layout"] == "halves"
                g, u = (both[:size], both[size:]) if halves else (both[::2], both[1::2])
            rows = slice(e * width, (e + 1) * width)
            act = _gated(op["activation"], g, u, op.get("factor", 1))
            values[op["out"]][t] += weight * (down[rows] @ act + last[rows])


def _gated(kind, gate, up, factor) -> F64:
    if kind == "swiglu_limit":
        gate, up = np.minimum(gate, factor), np.clip(up, -factor, factor) + 1
        return gate / (1 + np.exp(-1.702 * gate)) * up
    assert kind == "silu"
    return gate / (1 + np.exp(-gate)) * up


_OPS = {
    "embedding": _embedding,
    "position_embedding": _position_embedding,
    "norm": _norm,
    "linear": _linear,
    "rope": _rope,
    "attention": _attention,
    "activation": _activation,
    "select": _select,
    "route": _route,
    "experts": _experts,
}
