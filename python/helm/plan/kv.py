"""A plan's KV cache: the record, and its checks, its attention ops' too. Knows no weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from helm.base.formats import KV_SCALE_BYTES, KvDType, kv_position_bytes
from helm.base.jsonio import Reader
from helm.model.graph import Attention, KvLayer
from helm.plan.units import PlacedUnit

_MOST_LAYERS = 2**20  # the runtime's bound


@dataclass(frozen=True)
class KvSpec:
    """The KV cache. Every entry of `layers` has `blocks` pages, each K and V of page_tokens
    positions. window_blocks: pages of an entry with a window, where those that lie before the
    window are given up; 0: all are kept. kv_heads: of a whole layer."""

    dtype: KvDType
    page_tokens: int
    layers: tuple[KvLayer, ...]
    kv_heads: int
    head_dim: int
    blocks: int
    window_blocks: int = field(default=0, metadata={"optional": True})

    def entry_pages(self, entry: KvLayer) -> int:
        """How many pages it has."""
        return self.window_blocks if self.window_blocks and entry.window else self.blocks

    @property
    def pages(self) -> int:
        """Of all entries."""
        return sum(map(self.entry_pages, self.layers))

    @property
    def total_bytes(self) -> int:
        """Of all pages."""
        return sum(self.entry_pages(e) * e.kv_heads for e in self.layers) * self.unit_bytes

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

    def most_window_blocks(self, step_tokens: int, sequences: int) -> int:
        """Pages of an entry with a window that sequences fill at most: of each the window of its
        next position, and what one step writes. 0 without windows."""
        return window_blocks(self.layers, self.page_tokens, step_tokens, sequences)


def window_blocks(
    layers: Iterable[KvLayer], page_tokens: int, step_tokens: int, sequences: int
) -> int:
    """See `KvSpec.most_window_blocks`."""
    window = max((entry.window for entry in layers), default=0)
    if window == 0:
        return 0
    return sequences * ((window + step_tokens + page_tokens - 3) // page_tokens + 1)


def check_kv(kv: KvSpec, step_tokens: int, sequences: int, node: Reader) -> None:
    """Sizes are within bounds, and windows have the pages that they need."""
    node["page_tokens"].integer(1, 2**20)
    for name in ("kv_heads", "head_dim"):
        node[name].integer(1, 4096)
    _check_entries(kv.kv_heads, kv.layers, node["layers"])
    node["blocks"].integer(1, 2**31 // len(kv.layers))
    if not kv.window_blocks:
        return
    least, found = kv.most_window_blocks(step_tokens, sequences), node["window_blocks"]
    if not least:
        found.reject(f"is {found.value}, but no entry of kv.layers has a window")
    if not least <= kv.window_blocks < kv.blocks:
        found.reject(
            f"expected {least} to less than kv.blocks, {kv.blocks}, found {found.value}; or 0, to "
            "keep all positions"
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
        item.get("window", 0).integer(0, 2**31)
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
            if op.window != entry.window:
                node["window"].reject(
                    f"is {op.window}, entry {op.layer} of kv.layers has {entry.window}"
                )
            if entry.layer != unit.layer:
                node["layer"].reject(
                    f"entry {op.layer} of kv.layers is of layer {entry.layer}, the unit of layer "
                    f"{unit.layer}"
                )
    for i, child in enumerate(root["kv"]["layers"].items()):
        if i not in seen:
            child.reject("no attention op has this entry")
