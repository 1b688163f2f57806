"""What a user may say about where KV pages lie, and what is said back. Plans nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from helm.base.arguments import count, is_integer, is_one_of, shown
from helm.base.sizes import size_text
from helm.compiler.overflow import least_slots
from helm.compiler.problem import ResourceLimits, Space, check_watermark
from helm.errors import InvalidError
from helm.model.graph import Attention
from helm.plan.records import WATERMARK
from helm.plan.schema import Plan
from helm.plan.units import CPU

SITES = ("auto", "stream", "cpu")
PAGE_TOKENS = 512
PAGE_CHOICES = (128, 256, 512)  # the kernels read 128 keys at a time
_LEAST_PAGE_TOKENS = 16
_MOST_PAGE_TOKENS = 2**20


@dataclass(frozen=True)
class KvOptions:
    """overflow: how decode reaches pages that the accelerator has no room for: "stream" them there,
    attend to them on the "cpu", "auto" whichever is predicted faster. vram_bytes: memory of the
    accelerator that KV pages may take at most; None: what is best. watermark: the share of the
    slots there that stays in use once pages leave; None: WATERMARK."""

    overflow: str = "auto"
    vram_bytes: int | None = None
    watermark: float | None = None

    def __post_init__(self) -> None:
        if not is_one_of(self.overflow, SITES):
            raise InvalidError(
                f"[plan] kv_overflow is {shown(self.overflow)}; expected {', '.join(SITES)}"
            )
        if self.vram_bytes is not None:
            size = count(self.vram_bytes, "[plan] kv_vram_bytes")
            object.__setattr__(self, "vram_bytes", size)
        if self.watermark is not None:
            check_watermark(self.watermark, "[plan] watermark")

    def limits(self, limits: ResourceLimits) -> ResourceLimits:
        """`limits` with those of KV pages."""
        watermark = WATERMARK if self.watermark is None else float(self.watermark)
        return dataclasses.replace(
            limits, accelerator_kv_bytes=self.vram_bytes, watermark=watermark
        )

    def space(self, space: Space) -> Space:
        """`space` with the site that was asked for. Who says how pages may overflow wants plans in
        which they can, so none that are cut unless those are asked for."""
        said = self.overflow != "auto" or self.vram_bytes is not None or self.watermark is not None
        if said and space.policy == "auto":
            space = dataclasses.replace(space, policy="layer-partition")
        if self.overflow == "stream":
            return dataclasses.replace(space, overflow=("stream",))
        if self.overflow == "cpu":
            return dataclasses.replace(space, overflow=("cpu",))
        return space

    def notices(self, plan: Plan, step_tokens: int) -> list[str]:
        """What of it the plan has no use for. step_tokens: those that a step must be able to
        have; the plan's may be more."""
        given = [
            name
            for name, said in (
                ("kv_overflow=", self.overflow != "auto"),
                ("watermark=", self.watermark is not None),
            )
            if said
        ]
        layers = accelerator_layers(plan)
        if layers == 0:
            notices = [self._no_room(plan, step_tokens)] if self.vram_bytes is not None else []
            reason = "KV lies with its layers, all of them on the CPU"
        else:
            if plan.overflows:
                return []
            notices, reason = [], "the accelerator has room for all KV of its layers"
        return notices + _without_effect(given, reason)

    def _no_room(self, plan: Plan, step_tokens: int) -> str:
        assert self.vram_bytes is not None
        kv = plan.kv
        least = least_slots(step_tokens, plan.limits.sequences, kv.page_tokens)
        each = min(least, kv.blocks) * kv.page_bytes
        return (
            f"no layer lies on the accelerator: KV pages may take {size_text(self.vram_bytes)} "
            f"there (kv_vram_bytes=), those of one layer take {size_text(each)} at least"
        )


def _without_effect(given: Sequence[str], reason: str) -> list[str]:
    return [f"{' and '.join(given)} without effect: {reason}"] if given else []


def accelerator_layers(plan: Plan) -> int:
    """Layers with attention on an accelerator."""
    return sum(
        isinstance(op, Attention) for unit in plan.units if unit.device != CPU for op in unit.ops
    )


def check_page_tokens(value: object) -> int | None:
    """`value`; InvalidError unless it is None or a page may hold so many positions."""
    if value is None:
        return None
    if not is_integer(value) or not _LEAST_PAGE_TOKENS <= int(value) <= _MOST_PAGE_TOKENS:
        raise InvalidError(
            f"[plan] page_tokens is {shown(value)}; expected {_LEAST_PAGE_TOKENS} to "
            f"{_MOST_PAGE_TOKENS}"
        )
    return int(value)
