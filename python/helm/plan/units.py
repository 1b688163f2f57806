"""A plan's devices, and its units on them: the records, and the checks of both. Knows nothing of
the rest of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from helm.base.jsonio import Reader, decode
from helm.model.graph import OPS, Attention, Linear, Op, Rope, UnitKind

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
    """The embedding comes first, the head last; layers ascend, each with one attention and one mlp
    at most, in this order; attention ops are in attention units."""
    items = node.items()
    for i, (unit, item) in enumerate(zip(units, items, strict=True)):
        check_device(unit.device, devices, item["device"])
        if (i == 0) != (unit.kind == "embedding"):
            item["kind"].reject("the first unit is the embedding, and no other is")
        if (i == len(units) - 1) != (unit.kind == "head"):
            item["kind"].reject("the last unit is the head, and no other is")
        in_layer = unit.kind in ("attention", "mlp")
        if in_layer != (unit.layer is not None):
            expected = f"the layer that this {unit.kind} is of" if in_layer else "null"
            item["layer"].reject(f"expected {expected}, found {unit.layer}")
        found = sum(isinstance(op, Attention) for op in unit.ops)
        if found != (unit.kind == "attention"):
            wanted = "one attention op" if unit.kind == "attention" else "no attention op"
            item["ops"].reject(f"a unit of kind {unit.kind} has {wanted}, found {found}")
    for before, unit, item in zip(units, units[1:], items[1:], strict=False):
        if before.layer is None or unit.layer is None:
            continue
        if unit.layer < before.layer:
            item["layer"].reject(
                f"layer {unit.layer} comes after layer {before.layer}; layers ascend"
            )
        if unit.layer == before.layer and (before.kind, unit.kind) != ("attention", "mlp"):
            item["kind"].reject(
                f"the {unit.kind} of layer {unit.layer} comes after its {before.kind}; a layer has "
                "one attention, then one mlp"
            )


def check_visits(units: Sequence[PlacedUnit], node: Reader) -> None:
    """Layers with weights on the CPU, which visit an accelerator, lie there as a whole."""
    for i, unit in enumerate(units):
        if unit.layer is None or unit.device != CPU:
            continue
        kinds = {other.kind for other in units[max(0, i - 1) : i + 2]
                 if (other.layer, other.device) == (unit.layer, CPU)}  # fmt: skip
        if kinds != {"attention", "mlp"}:
            node.items()[i].reject(
                f"layer {unit.layer} visits the accelerator, which needs its attention and its mlp "
                "on the CPU; set schedule.prefill to 'compute' or place both alike"
            )


def unique_names(names: Sequence[str], node: Reader) -> set[str]:
    """The names of the node's items, each once."""
    seen: set[str] = set()
    for name, child in zip(names, node.items(), strict=True):
        if name in seen:
            child["name"].reject(f"{name!r} is listed twice")
        seen.add(name)
    return seen


_VALUE_KEYS = ("in", "out", "value")
_TENSOR_KEYS = ("weight", "bias")


def check_op(node: Reader, tensors: set[str], values: set[str], tables: int) -> None:
    """What an op names is there."""
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
