"""The one layout of the CPU alone: the KV cache that memory leaves, or why that is too little.

Knows no times and no accelerator.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from helm.base.sizes import size_text
from helm.compiler.counts import CostedGraph
from helm.compiler.memory import activation_bytes, workspace_bytes
from helm.compiler.problem import beside_reserve, host_reserve
from helm.errors import OutOfMemoryError
from helm.plan.schema import KvSpec, Limits, MemoryUse


@dataclass(frozen=True)
class HostRoom:
    """memory_bytes: what is free. reserve_bytes None: what `host_reserve` says. resident_bytes:
    weights used where they already lie in memory. smaller: what would make the weights so."""

    memory_bytes: int
    reserve_bytes: int | None
    resident_bytes: int
    smaller: str

    def reserve(self, use: MemoryUse) -> int:
        """What stays free beside a plan that takes so much."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return int(host_reserve(use.total_bytes - self.resident_bytes))

    def lacking(self, use: MemoryUse) -> int:
        """Bytes that such a plan wants beyond the memory there is, negative what it leaves."""
        taken = use.total_bytes - self.resident_bytes
        return taken + self.reserve(use) - self.memory_bytes

    def left_bytes(self, use: MemoryUse) -> int:
        """The most that a plan may add to such a use."""
        most = beside_reserve(self.memory_bytes)
        if self.reserve_bytes is not None:
            most = self.memory_bytes - self.reserve_bytes
        return most - (use.total_bytes - self.resident_bytes)


def placed_on_cpu(
    model: CostedGraph,
    limits: Limits,
    kv: KvSpec,
    threads: int,
    room: HostRoom,
    shrink: bool,
) -> tuple[Limits, KvSpec, MemoryUse, list[str]]:
    """With the largest cache up to full contexts for all sequences; at least one full context,
    which is lowered if `shrink`. kv: no pages yet. Returns what fits and what to say of it; raises
    OutOfMemoryError with every item's size."""

    def use(limits: Limits, kv: KvSpec) -> MemoryUse:
        graph = model.graph
        return MemoryUse(
            weights_bytes=model.host_bytes(graph.units),
            kv_bytes=kv.pages * kv.page_bytes,
            activations_bytes=activation_bytes(graph, graph.units, limits),
            workspace_bytes=workspace_bytes(graph, graph.units, limits, kv, threads),
        )

    fixed = use(limits, kv)
    most = max(0, room.left_bytes(fixed) // (kv.page_bytes * kv.layers))  # blocks
    one = -(-limits.context // kv.page_tokens)
    notices: list[str] = []
    if most < one and not (shrink and most > 0):
        raise OutOfMemoryError(_refusal(room, fixed, limits, kv, most))
    if most < one:
        context = most * kv.page_tokens
        notices.append(
            f"memory holds a context of {context:,} tokens, the model allows {limits.context:,}"
        )
        limits, one = dataclasses.replace(limits, context=context), most
    blocks = min(most, one * limits.sequences)
    if blocks < one * limits.sequences:
        notices.append(fewer_at_once(blocks * kv.page_tokens, limits))
    kv = dataclasses.replace(kv, pages=blocks * kv.layers)
    taken = use(limits, kv)
    beside = room.reserve(dataclasses.replace(fixed, kv_bytes=taken.kv_bytes))
    return limits, kv, dataclasses.replace(taken, reserve_bytes=beside), notices


def fewer_at_once(tokens: int, limits: Limits) -> str:
    """What a user of a cache of so many tokens is told."""
    return (
        f"the KV cache holds {tokens:,} tokens in all, not {limits.context:,} for each of "
        f"{limits.sequences} requests; requests wait while it is full"
    )


def _refusal(room: HostRoom, fixed: MemoryUse, limits: Limits, kv: KvSpec, most: int) -> str:
    block_bytes = kv.page_bytes * kv.layers
    whole = dataclasses.replace(fixed, kv_bytes=-(-limits.context // kv.page_tokens) * block_bytes)
    fits = f"a context of {most * kv.page_tokens} would fit"
    if most == 0:
        short = size_text(room.lacking(dataclasses.replace(fixed, kv_bytes=block_bytes)))
        fits = (
            f"even a context of {kv.page_tokens} lacks {short}; free memory, or allow more with "
            f"memory_bytes= if that was limited, or choose a smaller model{room.smaller}"
        )
    return (
        f"[plan] needs weights {size_text(fixed.weights_bytes - room.resident_bytes)} + KV cache "
        f"{size_text(whole.kv_bytes)} for a context of {limits.context} + activations "
        f"{size_text(fixed.activations_bytes)} + workspace {size_text(fixed.workspace_bytes)} + "
        f"reserve {size_text(room.reserve(whole))}; {size_text(room.memory_bytes)} are "
        f"available; {fits}"
    )
