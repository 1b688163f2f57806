"""The plan: everything the runtime needs, as JSON. Knows the format, not how plans are made.

`helm.plan` makes plans; the runtime and `Plan.from_json` read them, as hostile input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from helm.errors import PlanError
from helm.graph import (
    OPS,
    Linear,
    Op,
    Rope,
    Value,
)
from helm.jsonio import Reader, decode, encode, parse
from helm.rope import RopeTable

FORMAT = "helm-plan"
VERSION = 1
DType = Literal["f32", "f16", "bf16"]
DTYPE_BYTES: dict[str, int] = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class ModelIdentity:
    """fingerprint: SHA-256 in hex of the configuration and the tensor table."""

    architecture: str
    fingerprint: str
    vocab_size: int
    hidden_size: int
    max_context: int  # positions the model itself allows


@dataclass(frozen=True)
class Limits:
    """What one step and one engine may hold. step_outputs: rows of logits in one step."""

    context: int
    step_tokens: int
    step_outputs: int
    sequences: int


@dataclass(frozen=True)
class KvSpec:
    """The KV cache: `pages` slots, each K and V of one layer and page_tokens positions."""

    dtype: DType
    page_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    pages: int

    @property
    def page_bytes(self) -> int:
        elements = 2 * self.page_tokens * self.kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Source:
    """Where a tensor is stored: `offset` bytes into `file` of the model directory."""

    file: str
    offset: int
    dtype: DType


@dataclass(frozen=True)
class PlacedTensor:
    """A weight as the runtime holds it. source None: bound from memory."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    source: Source | None

    @property
    def nbytes(self) -> int:
        elements = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            elements *= extent
        return elements


@dataclass(frozen=True)
class PlacedUnit:
    """A partition unit on its device."""

    name: str
    device: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device's memory by purpose."""

    weights_bytes: int
    kv_bytes: int
    activations_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.activations_bytes + self.workspace_bytes


@dataclass(frozen=True)
class Plan:
    """A placement of one model on one machine. notices: what the planner wants the user to know."""

    model: ModelIdentity
    limits: Limits
    threads: int
    kv: KvSpec
    rope: tuple[RopeTable, ...]
    tensors: tuple[PlacedTensor, ...]
    values: tuple[Value, ...]
    units: tuple[PlacedUnit, ...]
    logits: str
    memory: dict[str, MemoryUse]
    notices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {"format": FORMAT, "version": VERSION, **encode(self)}

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` is its inverse."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads and checks a plan. Raises PlanError naming the field, as in units[3].ops[1].out."""
        root = parse(text, "plan", PlanError)
        if root["format"].string() != FORMAT:
            root["format"].reject(f"expected {FORMAT!r}, found {root['format'].value!r}")
        version = root["version"].integer(0, 2**31)
        if version != VERSION:
            root["version"].reject(f"expected {VERSION}, found {version}; make the plan anew")
        names = ("model", "limits", "threads", "kv", "rope", "tensors", "values", "units")
        root.only(["format", "version", *names, "logits", "memory", "notices"])
        plan = cls(
            model=decode(ModelIdentity, root["model"]),
            limits=decode(Limits, root["limits"]),
            threads=root["threads"].integer(1, 4096),
            kv=decode(KvSpec, root["kv"]),
            rope=tuple(decode(RopeTable, node) for node in root["rope"].items()),
            tensors=tuple(decode(PlacedTensor, node) for node in root["tensors"].items()),
            values=tuple(decode(Value, node) for node in root["values"].items()),
            units=tuple(_decode_unit(node) for node in root["units"].items()),
            logits=root["logits"].string(),
            memory={k: decode(MemoryUse, root["memory"][k]) for k in root["memory"].names()},
            notices=tuple(node.string() for node in root.get("notices", []).items()),
        )
        _check(plan, root)
        return plan


def _decode_unit(node: Reader) -> PlacedUnit:
    node.only(("name", "device", "ops"))
    ops: list[Op] = []
    for item in node["ops"].items():
        kind = item["op"].string()
        if kind not in OPS:
            item["op"].reject(f"unknown op {kind!r}; known are " + ", ".join(sorted(OPS)))
        ops.append(decode(OPS[kind], item, extra=("op",)))
    return PlacedUnit(node["name"].string(), node["device"].string(), tuple(ops))


def _check(plan: Plan, root: Reader) -> None:
    """References resolve, names are unique and limits are consistent."""
    _check_limits(plan, root)
    tensors = _unique([tensor.name for tensor in plan.tensors], root["tensors"])
    values = _unique([value.name for value in plan.values], root["values"])
    for tensor, node in zip(plan.tensors, root["tensors"].items(), strict=True):
        _check_tensor(tensor, node)
    if plan.logits not in values:
        root["logits"].reject(f"unknown value {plan.logits!r}")
    for unit in root["units"].items():
        for node in unit["ops"].items():
            _check_op(node, tensors, values, len(plan.rope))


def _check_limits(plan: Plan, root: Reader) -> None:
    limits, kv = root["limits"], root["kv"]
    limits["context"].integer(1, 2**31)
    limits["step_tokens"].integer(1, 2**20)
    limits["step_outputs"].integer(1, plan.limits.step_tokens)
    limits["sequences"].integer(1, plan.limits.step_outputs)
    for name, most in (("page_tokens", 2**20), ("layers", 2**20), ("pages", 2**31)):
        kv[name].integer(1, most)
    for name in ("kv_heads", "head_dim"):
        kv[name].integer(1, 4096)


def _check_tensor(tensor: PlacedTensor, node: Reader) -> None:
    if len(tensor.shape) not in (1, 2) or min(tensor.shape) < 1:
        node["shape"].reject("expected one or two positive dimensions")
    if len(tensor.shape) == 1 and tensor.dtype != "f32":
        node["dtype"].reject("vectors are placed as f32")
    file = "" if tensor.source is None else tensor.source.file
    if file.startswith("/") or ".." in file.split("/"):
        node["source"]["file"].reject(f"{file!r} leaves the model directory")


def _unique(names: list[str], node: Reader) -> set[str]:
    seen: set[str] = set()
    for name, child in zip(names, node.items(), strict=True):
        if name in seen:
            child["name"].reject(f"{name!r} is listed twice")
        seen.add(name)
    return seen


_VALUE_KEYS = ("in", "out", "value")
_TENSOR_KEYS = ("weight", "bias")


def _check_op(node: Reader, tensors: set[str], values: set[str], tables: int) -> None:
    for key in _VALUE_KEYS:
        if key in node.value and node.value[key] not in values:
            node[key].reject(f"unknown value {node.value[key]!r}")
    if node.value["op"] == Rope.op:
        node["table"].integer(0, tables - 1)
    elif "table" in node.value and node.value["table"] not in tensors:
        node["table"].reject(f"unknown tensor {node.value['table']!r}")
    holders = [node, *(node["parts"].items() if node.value["op"] == Linear.op else [])]
    for holder in holders:
        for key in _TENSOR_KEYS:
            name = holder.value.get(key)
            if name is not None and name not in tensors:
                holder[key].reject(f"unknown tensor {name!r}")
