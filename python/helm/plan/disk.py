"""What a plan leaves on disk: what a step reads of it unit by unit, and where that comes to lie in
the ring. The same rules as the runtime's. Knows nothing of the rest of a plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from helm.base.formats import tensor_bytes
from helm.base.jsonio import Reader
from helm.plan.units import CPU, PlacedUnit
from helm.plan.weights import Slice, TensorSpec, lies_as_held

ALIGNMENT = 4096  # of reads, in files and in memory
_MOST_BYTES = 2**46  # the runtime's bound


class Placing(Protocol):
    """What is needed of a plan."""

    @property
    def tensors(self) -> Sequence[TensorSpec]: ...
    @property
    def slices(self) -> Sequence[Slice]: ...
    @property
    def units(self) -> Sequence[PlacedUnit]: ...
    @property
    def schedule(self) -> Any: ...  # with disk_ring_bytes


@dataclass(frozen=True)
class DiskUnit:
    """A unit of which weights are on disk. number: its place in the plan. read_bytes: of a step,
    with what aligns them. frees: its read may begin once that of so many reads before was used,
    counted around from step to step."""

    number: int
    read_bytes: int
    frees: int = 1


def read_bytes(held: Iterable[tuple[TensorSpec, str]]) -> int:
    """What a step reads of these tensors of one unit, each with its format: whole multiples of
    ALIGNMENT, those that touch together."""
    stretches = sorted(
        (extent.file, extent.offset, extent.offset + tensor_bytes(format, tensor.shape))
        for tensor, format in held
        if tensor.source is not None
        for extent in tensor.source.extents
    )
    total, last, end = 0, "", -1
    for file, begin, until in stretches:
        down, up = begin // ALIGNMENT * ALIGNMENT, -(-until // ALIGNMENT) * ALIGNMENT
        if file == last and down <= end:
            total += max(0, up - end)
            end = max(end, up)
        else:
            total, last, end = total + up - down, file, up
    return total


def around(units: Sequence[tuple[int, int]], ring_bytes: int) -> tuple[DiskUnit, ...]:
    """units: (number, read_bytes) in the order of a step, each at most the ring."""
    places, end = list[tuple[int, int]](), 0
    for _, size in units:
        begin = 0 if end + size > ring_bytes else end
        end = begin + size
        places.append((begin, end))
    found, count = list[DiskUnit](), len(units)
    for at, (number, size) in enumerate(units):
        begin, until = places[at]
        frees = 1
        while frees < count:
            other = places[(at - frees) % count]
            if other[0] < until and begin < other[1]:
                break
            frees += 1
        found.append(DiskUnit(number, size, frees))
    return tuple(found)


def disk_units(plan: Placing) -> tuple[DiskUnit, ...]:
    """Units of which every step reads weights from disk, into the ring."""
    if plan.schedule.disk_ring_bytes == 0:
        return ()
    specs = {tensor.name: tensor for tensor in plan.tensors}
    formats = {s.tensor: s.format for s in plan.slices if s.device == CPU and s.access == "disk"}
    sizes = list[tuple[int, int]]()
    for number, unit in enumerate(plan.units):
        names = {name for op in unit.ops for name in op.weight_names()} & formats.keys()
        if names:
            sizes.append((number, read_bytes((specs[n], formats[n]) for n in names)))
    return around(sizes, plan.schedule.disk_ring_bytes)


def check_disk(plan: Placing, root: Reader) -> None:
    """Raises the error of `root`, `plan` as JSON, naming the field, unless the runtime can read
    what is on disk."""
    tensors, slices, units = plan.tensors, plan.slices, plan.units
    ring_bytes = plan.schedule.disk_ring_bytes
    ring = root["schedule"].get("disk_ring_bytes", 0)
    ring.integer(0, _MOST_BYTES)
    specs = {tensor.name: tensor for tensor in tensors}
    on_disk = set[str]()
    for held, node in zip(slices, root["slices"].items(), strict=True):
        if held.access == "disk":
            _check_slice(held, specs[held.tensor], node["access"])
            on_disk.add(held.tensor)
    if not on_disk:
        if ring_bytes:
            ring.reject("expected 0, as no slice is on disk")
        return
    if ring_bytes == 0 or ring_bytes % ALIGNMENT:
        ring.reject(f"expected a multiple of {ALIGNMENT}, as slices are on disk")
    # Steps run all units in order, one step after the other.
    where = "where weights are read from disk"
    for name, wanted in (("decode_groups", 1), ("prefill_overlap", False)):
        node = root["schedule"].get(name, wanted)
        if node.value != wanted:
            node.reject(f"expected {json.dumps(wanted)} {where}")
    readers: Mapping[str, list[PlacedUnit]] = {name: [] for name in on_disk}
    for unit in units:
        for name in {n for op in unit.ops for n in op.weight_names()} & on_disk:
            readers[name].append(unit)
    for name, found in readers.items():
        if any(unit.device != CPU for unit in found):
            root["slices"].reject(f"{name!r} is on disk; only units of the CPU read from there")
        if any(unit.layer is None for unit in found):
            root["slices"].reject(f"{name!r} is on disk; only weights of layers may be")
        if len(found) > 1:
            root["slices"].reject(f"{name!r} is on disk and read by several units")
    for one in disk_units(plan):
        if one.read_bytes > ring_bytes:
            ring.reject(
                f"holds {ring_bytes} bytes, {units[one.number].name!r} has {one.read_bytes} on disk"
            )


def _check_slice(held: Slice, tensor: TensorSpec, node: Reader) -> None:
    if held.device != CPU:
        node.reject("only the CPU reads what is mapped or on disk")
    if len(tensor.shape) != 2:
        node.reject("only matrices are read from disk")
    if tensor.source is None:
        node.reject(f"{tensor.name!r} is bound from memory, not on disk")
    if tensor.part is not None:
        node.reject(f"{tensor.name!r} is a part of a tensor; those are not on disk")
    if not lies_as_held(tensor, held.format):
        node.reject(
            f"cannot be read from disk: expected one run of rows side by side, stored as "
            f"{held.format} and aligned"
        )


def on_disk(slices: Iterable[Slice], names: Iterable[str]) -> tuple[Slice, ...]:
    """The slices, with these tensors of the CPU on disk."""
    wanted = set(names)
    return tuple(
        dataclasses.replace(held, access="disk")
        if held.device == CPU and held.tensor in wanted
        else held
        for held in slices
    )
