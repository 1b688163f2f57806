"""A plan's devices, and its units on them: the records, and the checks of both. Knows nothing of
the rest of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from helm.base.jsonio import Reader, decode
from helm.model.graph import (
    OPS,
    Add,
    Attention,
    Concat,
    Linear,
    Op,
    Rope,
    UnitKind,
    Value,
)

CPU = "cpu"  # the name of the first device
_MOST_DEVICES, _MOST_LAYERS = 16, 2**20  # the runtime's bounds


@dataclass(frozen=True)
class DeviceSpec:
    """A device that a plan may use. Whatever names a device in a plan has this name."""

    name: str
    kind: Literal["cpu", "accelerator"]


@dataclass(frozen=True)
class PlacedUnit:
    """A partition unit on its device. kind, layer: see `helm.model.graph.Unit`."""

    name: str
    kind: UnitKind
    layer: int | None
    device: str
    ops: tuple[Op, ...]


def devices_named(names: Iterable[str]) -> tuple[DeviceSpec, ...]:
    """The CPU, then accelerators: those of `names` that are not the CPU's."""
    others = (DeviceSpec(name, "accelerator") for name in names if name != CPU)
    return (DeviceSpec(CPU, "cpu"), *others)


def check_devices(devices: Sequence[DeviceSpec], node: Reader) -> None:
    """The CPU comes first and is the only one of its kind; names are unique."""
    if not 1 <= len(devices) <= _MOST_DEVICES:
        node.reject(f"expected 1 to {_MOST_DEVICES} devices, the CPU first")
    unique_names([device.name for device in devices], node)
    for i, (device, item) in enumerate(zip(devices, node.items(), strict=True)):
        expected = "accelerator" if i else "cpu"
        if device.kind != expected:
            item["kind"].reject(
                f"expected {expected!r}, found {device.kind!r}; the CPU is the first device and "
                "the only one of its kind"
            )
        if not device.name:
            item["name"].reject("expected a name")
    if devices[0].name != CPU:
        node.items()[0]["name"].reject(f"expected {CPU!r}, found {devices[0].name!r}")


def check_device(device: str, known: Iterable[DeviceSpec], node: Reader) -> None:
    """A device that a plan names is one of its devices."""
    if device not in {own.name for own in known}:
        node.reject(f"unknown device {device!r}")


def decode_unit(node: Reader) -> PlacedUnit:
    node.only(("name", "kind", "layer", "device", "ops"))
    ops: list[Op] = []
    for item in node["ops"].items():
        kind = item["op"].string()
        if kind not in OPS:
            item["op"].reject(f"unknown op {kind!r}; known are " + ", ".join(sorted(OPS)))
        ops.append(decode(OPS[kind], item, extra=("op",)))
    of: UnitKind = node["kind"].choice(get_args(UnitKind))  # type: ignore[assignment]
    layer = None if node["layer"].null else node["layer"].integer(0, _MOST_LAYERS)
    return PlacedUnit(node["name"].string(), of, layer, node["device"].string(), tuple(ops))


def check_units(units: Sequence[PlacedUnit], devices: Sequence[DeviceSpec], node: Reader) -> None:
    """The embedding comes first, heads last; layers ascend, each with its attention units before
    those of its mlp; attention ops are in attention units, at most one in each."""
    items = node.items()
    unique_names([unit.name for unit in units], node)
    heads = len(list(itertools.takewhile(lambda unit: unit.kind == "head", reversed(units))))
    if heads == 0:
        (items[-1]["kind"] if items else node).reject("the last unit is the head")
    for i, (unit, item) in enumerate(zip(units, items, strict=True)):
        check_device(unit.device, devices, item["device"])
        if (i == 0) != (unit.kind == "embedding"):
            item["kind"].reject("the first unit is the embedding, and no other is")
        if (unit.kind == "head") != (i >= len(units) - heads):
            item["kind"].reject("the last unit is the head, and no other is but its parts")
        in_layer = unit.kind in ("attention", "mlp")
        if in_layer != (unit.layer is not None):
            expected = f"the layer that this {unit.kind} is of" if in_layer else "null"
            item["layer"].reject(f"expected {expected}, found {unit.layer}")
        found = sum(isinstance(op, Attention) for op in unit.ops)
        most = int(unit.kind == "attention")
        if found > most:
            wanted = "at most one attention op" if most else "no attention op"
            item["ops"].reject(f"a unit of kind {unit.kind} has {wanted}, found {found}")
    for before, unit, item in zip(units, units[1:], items[1:], strict=False):
        if before.layer is None or unit.layer is None:
            continue
        if unit.layer < before.layer:
            item["layer"].reject(
                f"layer {unit.layer} comes after layer {before.layer}; layers ascend"
            )
        if unit.layer == before.layer and (before.kind, unit.kind) == ("mlp", "attention"):
            item["kind"].reject(
                f"the attention of layer {unit.layer} comes after its mlp; a layer has its "
                "attention, then its mlp"
            )


def unique_names(names: Sequence[str], node: Reader) -> set[str]:
    """The names of the node's items, each once."""
    seen: set[str] = set()
    for name, child in zip(names, node.items(), strict=True):
        if name in seen:
            child["name"].reject(f"{name!r} is listed twice")
        seen.add(name)
    return seen


_VALUE_KEYS = ("in", "out", "value", "routes")
_TENSOR_KEYS = (
    "weight", "bias", "sinks", "gate", "up", "down", "gate_bias", "up_bias", "down_bias"
)  # fmt: skip


def check_op(node: Reader, tensors: set[str], values: Mapping[str, Value], tables: int) -> None:
    """What an op names is there; sums and values side by side have the shape of what they make."""
    of = node.value["op"]
    for key in _VALUE_KEYS:
        if key in node.value:
            named = node[key].items() if (of, key) == (Concat.op, "in") else [node[key]]
            for name in named:
                if name.value not in values:
                    name.reject(f"unknown value {name.value!r}")
    if of == Rope.op:
        node["table"].integer(0, tables - 1)
    elif "table" in node.value and node.value["table"] not in tensors:
        node["table"].reject(f"unknown tensor {node.value['table']!r}")
    holders = [node, *(node["parts"].items() if of == Linear.op else [])]
    for holder in holders:
        for key in _TENSOR_KEYS:
            name = holder.value.get(key)
            if name is not None and name not in tensors:
                holder[key].reject(f"unknown tensor {name!r}")
    if of in (Add.op, Concat.op):
        _check_sum(node, values)


def _check_sum(node: Reader, values: Mapping[str, Value]) -> None:
    """Of `add` and `concat`."""
    listed, out = node["in"], values[node.value["out"]]
    ins = [
        values[name] for name in ([listed.value] if node.value["op"] == Add.op else listed.value)
    ]
    if not ins:
        listed.reject("expected values")
    if out in ins:
        own = node["out"] if node.value["op"] == Add.op else listed
        own.reject(f"{out.name!r} is read and written")
    if any(value.rows != out.rows for value in ins):
        node["out"].reject(f"{out.name!r} has rows {out.rows!r}, unlike what goes into it")
    width = sum(value.width for value in ins)
    if width != out.width:
        node["out"].reject(f"is {out.width} wide, what goes into it {width}")
