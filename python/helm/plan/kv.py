"""A plan's KV cache: the record, and its checks, its attention ops' too. Knows no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helm.base.formats import KV_SCALE_BYTES, KvDType, kv_position_bytes
from helm.base.jsonio import Reader
from helm.model.graph import Attention, KvLayer
from helm.plan.units import PlacedUnit

_MOST_LAYERS = 2**20  # the runtime's bound


@dataclass(frozen=True)
class KvSpec:
    """The KV cache: `pages` slots, each K and V of one entry of `layers` and page_tokens positions.
    kv_heads: of a whole layer."""

    dtype: KvDType
    page_tokens: int
    layers: tuple[KvLayer, ...]
    kv_heads: int
    head_dim: int
    pages: int

    @property
    def blocks(self) -> int:
        """How many pages each entry has."""
        return self.pages // len(self.layers)

    @property
    def unit_bytes(self) -> int:
        """K and V of one head in a page: the positions', and what aligns the scales."""
        pad = -self.page_tokens * self.head_dim % 4 if self.dtype in KV_SCALE_BYTES else 0
        return self.page_tokens * kv_position_bytes(self.dtype, 1, self.head_dim) + 2 * pad

    @property
    def page_bytes(self) -> int:
        """A page with all heads of a layer."""
        return self.kv_heads * self.unit_bytes

    @property
    def block_bytes(self) -> int:
        """A page of every entry."""
        return sum(layer.kv_heads for layer in self.layers) * self.unit_bytes


def check_kv(kv: KvSpec, node: Reader) -> None:
    """Sizes are within bounds, every entry has as many pages."""
    for name, most in (("page_tokens", 2**20), ("pages", 2**31)):
        node[name].integer(1, most)
    for name in ("kv_heads", "head_dim"):
        node[name].integer(1, 4096)
    _check_entries(kv.kv_heads, kv.layers, node["layers"])
    if kv.pages % len(kv.layers):
        node["pages"].reject(
            f"is {kv.pages}, no multiple of the {len(kv.layers)} entries of kv.layers"
        )


def _check_entries(kv_heads: int, layers: Sequence[KvLayer], node: Reader) -> None:
    """Those of each layer tile its heads in order."""
    if not 1 <= len(layers) <= _MOST_LAYERS:
        node.reject(f"expected 1 to {_MOST_LAYERS} entries")
    items = node.items()
    last, head = -1, kv_heads
    for i, (entry, item) in enumerate(zip(layers, items, strict=True)):
        item["layer"].integer(0, _MOST_LAYERS)
        item["kv_heads"].integer(1, kv_heads)
        if entry.layer < last:
            item["layer"].reject(f"layer {entry.layer} comes after layer {last}; layers ascend")
        if entry.layer != last:
            if head != kv_heads:
                items[i - 1]["kv_heads"].reject(_untiled(last, head, kv_heads))
            last, head = entry.layer, 0
        if entry.kv_head != head:
            item["kv_head"].reject(
                f"expected {head}, found {entry.kv_head}; the entries of a layer follow one another"
            )
        head += entry.kv_heads
        if head > kv_heads:
            item["kv_heads"].reject(_untiled(last, head, kv_heads))
    if head != kv_heads:
        items[-1]["kv_heads"].reject(_untiled(last, head, kv_heads))


def _untiled(layer: int, head: int, kv_heads: int) -> str:
    return f"the entries of layer {layer} have {head} heads, the model {kv_heads}"


def check_attentions(units: Sequence[PlacedUnit], layers: Sequence[KvLayer], root: Reader) -> None:
    """Every entry of the KV cache has one attention op, in its layer and with its heads."""
    seen: set[int] = set()
    for unit, item in zip(units, root["units"].items(), strict=True):
        for op, node in zip(unit.ops, item["ops"].items(), strict=True):
            if not isinstance(op, Attention):
                continue
            entry = layers[node["layer"].integer(0, len(layers) - 1)]
            if op.layer in seen:
                node["layer"].reject(f"entry {op.layer} of kv.layers has another attention op")
            seen.add(op.layer)
            if op.kv_heads != entry.kv_heads:
                node["kv_heads"].reject(
                    f"is {op.kv_heads}, entry {op.layer} of kv.layers has {entry.kv_heads}"
                )
            if entry.layer != unit.layer:
                node["layer"].reject(
                    f"entry {op.layer} of kv.layers is of layer {entry.layer}, the unit of layer "
                    f"{unit.layer}"
                )
    for i, child in enumerate(root["kv"]["layers"].items()):
        if i not in seen:
            child.reject("no attention op has this entry")
