"""What a user says about loading a model, checked; plans nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from helm.base.arguments import check_call, count, is_one_of, shown
from helm.base.progress import Progress
from helm.base.sizes import check_size
from helm.compiler.kv_options import PAGE_TOKENS, KvOptions, check_page_tokens
from helm.compiler.load_cost import WEIGHTS
from helm.errors import InvalidError
from helm.machine.profile import Profile, as_profile
from helm.plan.records import OBJECTIVES

Measuring = Callable[[str, float], None]  # (what is measured now, share done from 0 to 1)

_COUNTS = ("max_sequences", "batch")
_TOKENS = ("prompt_tokens", "output_tokens", "expected_tokens")
_LIMITS = ("context", "threads", "memory_bytes", "vram_bytes", *_TOKENS)


class TorchKeywords(TypedDict, total=False):
    """What `LLM.from_torch` takes by name: those of LLM(...) that are not about files."""

    context: int | None
    max_sequences: int
    dtype: str
    kv_dtype: str
    threads: int | None
    page_tokens: int
    kv_overflow: str
    kv_vram_bytes: int | None
    watermark: float | None
    prefix_cache: bool
    progress: Progress | bool | None
    memory_bytes: int | None
    device: str | None
    vram_bytes: int | None
    profile: Profile | str | os.PathLike[str] | None
    prompt_tokens: int | None
    output_tokens: int | None
    batch: int
    objective: str
    measuring: Measuring | None


@dataclass(frozen=True)
class LoadOptions:
    """What the user says about placing a model; see helm.LLM."""

    context: int | None = None
    max_sequences: int = 8
    dtype: str = "auto"
    kv_dtype: str = "auto"
    threads: int | None = None
    page_tokens: int = PAGE_TOKENS
    kv: KvOptions = field(default_factory=KvOptions)
    weights: str = "auto"
    progress: Progress | None = None
    memory_bytes: int | None = None
    device: str | None = None
    vram_bytes: int | None = None
    profile: Profile | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    expected_tokens: int | None = None
    batch: int = 1
    objective: str = "total"
    measuring: Measuring | None = None

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *_LIMITS):
            value = getattr(self, name)
            if value is None and name in _LIMITS:
                continue
            object.__setattr__(self, name, count(value, f"[load] {name}"))
        sizes = {"memory_bytes": self.memory_bytes, "vram_bytes": self.vram_bytes}
        for name, size in {**sizes, "kv_vram_bytes": self.kv.vram_bytes}.items():
            if size is not None:
                check_size(size, f"[load] {name} is {size}", f"{size} << 30")
        object.__setattr__(self, "page_tokens", check_page_tokens(self.page_tokens))
        for name, options in (("weights", WEIGHTS), ("objective", OBJECTIVES)):
            if not is_one_of(getattr(self, name), options):
                found = shown(getattr(self, name))
                raise InvalidError(f"[load] {name} must be {', '.join(options)}, got {found}")
        check_call(self.progress, "[load] progress", "progress(done, total)")
        check_call(self.measuring, "[load] measuring", "measuring(what, share)")


def load_options(keywords: Mapping[str, Any], progress: Progress | None) -> LoadOptions:
    """From what LLM(...) or `LLM.from_torch` was given by name; progress: what is to be called."""
    rest = dict(keywords)
    kv = KvOptions(
        rest.pop("kv_overflow", "auto"),
        rest.pop("kv_vram_bytes", None),
        rest.pop("watermark", None),
    )
    profile = as_profile(rest.pop("profile", None))
    return LoadOptions(**{**rest, "kv": kv, "profile": profile, "progress": progress})
