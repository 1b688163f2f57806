"""The KV cache of a plan on the CPU alone: what memory leaves it, or why that is too little."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from helm.base.sizes import size_text
from helm.compiler.problem import beside_reserve, host_reserve
from helm.errors import OutOfMemoryError
from helm.plan.schema import KvSpec, Limits, MemoryUse


@dataclass(frozen=True)
class KvBudget:
    """What the KV cache may take. fixed: everything else, its KV field zero. reserve_bytes None:
    what `host_reserve` says."""

    memory_bytes: int
    reserve_bytes: int | None
    resident_bytes: int  # weights used where they already lie in memory
    fixed: MemoryUse
    smaller: str  # remedy: what would make the weights so

    @property
    def kv_bytes(self) -> int:
        room = beside_reserve(self.memory_bytes)
        if self.reserve_bytes is not None:
            room = self.memory_bytes - self.reserve_bytes
        return room - self._taken(0)

    def reserve(self, kv_bytes: int) -> int:
        """What stays free beside a cache of so many bytes."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return int(host_reserve(self._taken(kv_bytes)))

    def lacking(self, kv_bytes: int) -> int:
        """Bytes that a cache of so many wants beyond the memory there is."""
        return self._taken(kv_bytes) + self.reserve(kv_bytes) - self.memory_bytes

    def _taken(self, kv_bytes: int) -> int:
        return self.fixed.total_bytes - self.resident_bytes + kv_bytes


def fit_kv(
    budget: KvBudget, limits: Limits, kv: KvSpec, shrink: bool
) -> tuple[Limits, KvSpec, list[str]]:
    """The largest cache up to full contexts for all sequences; at least one full context, which
    is lowered if `shrink`. Raises OutOfMemoryError."""
    block_bytes = kv.page_bytes * kv.layers  # one page of every layer
    room = max(0, budget.kv_bytes // block_bytes)
    one = -(-limits.context // kv.page_tokens)
    notices: list[str] = []
    if room < one and not (shrink and room > 0):
        raise OutOfMemoryError(_refusal(budget, limits, kv, room))
    if room < one:
        context = room * kv.page_tokens
        notices.append(
            f"memory holds a context of {context:,} tokens, the model allows {limits.context:,}"
        )
        limits, one = dataclasses.replace(limits, context=context), room
    blocks = min(room, one * limits.sequences)
    if blocks < one * limits.sequences:
        notices.append(fewer_at_once(blocks * kv.page_tokens, limits))
    return limits, dataclasses.replace(kv, pages=blocks * kv.layers), notices


def fewer_at_once(tokens: int, limits: Limits) -> str:
    """What a user of a cache of so many tokens is told."""
    return (
        f"the KV cache holds {tokens:,} tokens in all, not {limits.context:,} for each of "
        f"{limits.sequences} requests; requests wait while it is full"
    )


def _refusal(budget: KvBudget, limits: Limits, kv: KvSpec, room: int) -> str:
    fixed = budget.fixed
    blocks = -(-limits.context // kv.page_tokens)
    kv_bytes = blocks * kv.page_bytes * kv.layers
    fits = f"a context of {room * kv.page_tokens} would fit"
    if room == 0:
        short = size_text(budget.lacking(kv.page_bytes * kv.layers))
        fits = (
            f"even a context of {kv.page_tokens} lacks {short}; free memory, or allow "
            f"more with memory_bytes= if that was limited, or choose a smaller model"
            f"{budget.smaller}"
        )
    return (
        f"[plan] needs weights {size_text(fixed.weights_bytes - budget.resident_bytes)} + KV cache "
        f"{size_text(kv_bytes)} for a context of {limits.context} + activations "
        f"{size_text(fixed.activations_bytes)} + workspace {size_text(fixed.workspace_bytes)} + "
        f"reserve {size_text(budget.reserve(kv_bytes))}; {size_text(budget.memory_bytes)} are "
        f"available; {fits}"
    )
