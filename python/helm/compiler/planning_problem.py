"""What is asked of the planner, checked, and what follows from it alone. Places nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from helm.base.arguments import is_one_of, shown
from helm.base.formats import DTYPE_CHOICES, FORMATS, KV_ELEMENT_BYTES, KvDType, dtype_name
from helm.compiler.access import loaded_profile, mapped_share
from helm.compiler.budget import step_limits
from helm.compiler.counts import CostedGraph
from helm.compiler.kv_options import PAGE_CHOICES, KvOptions
from helm.compiler.load_cost import LoadingRequest
from helm.compiler.problem import ResourceLimits, Slower, Space
from helm.compiler.search import Search
from helm.compiler.tensors import (
    choose_formats,
    compressed_formats,
    dominant_dtype,
    resident_bytes,
    tensors_of,
)
from helm.errors import InvalidError
from helm.machine.profile import Profile
from helm.machine.rates import capped_reserve
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.families import build_graph
from helm.model.graph import Graph
from helm.model.stacked import with_stacks
from helm.plan.kv import KvSpec
from helm.plan.records import Loading, Workload
from helm.plan.schema import Limits
from helm.plan.weights import TensorSpec, cut_cols


@dataclass(frozen=True)
class Problem:
    """What is to be planned, for the machine of `profile`; without one, for a CPU.

    checkpoint_tensors: from `read_weights`, or `TensorInfo.in_memory` for bound tensors; None
    plans from the configuration alone, with weights of `config.dtype` (f32 when it names none).
    context: positions per sequence; None takes the workload's or else the model's, the latter less
    if memory is short. dtype: how matrices are held, one of POLICIES: "auto" as stored, "q8" in 8
    bits, "q4" in 4, but for embeddings, the head and small matrices; vectors are always f32; or
    "fit", for the first of auto, q8 and q4 that fits.
    kv_dtype "auto": that of most matrix bytes, or what goes with packed ones; "i8": integers, with
    a scale per position and KV head. page_tokens: positions of a page; None: one of PAGE_CHOICES,
    the least unless others are faster. memory_bytes: what the machine has free, of which
    `reserve_bytes` stay untouched; None: see ResourceLimits. threads and memory_bytes are needed
    without a profile and override it with one, as accelerator_bytes does. workload: what the search
    prices; None asks for 128 tokens after 512. space: decisions to fix. kv_options: how KV may use
    an accelerator's memory. loading: whether weights are copied, compressed or stay mapped. name:
    of the model, for people. notices: what the plan says first. slower: where weights may lie, too.
    Raises InvalidError for arguments out of range.
    """

    config: ModelConfig
    checkpoint_tensors: Mapping[str, TensorInfo] | None
    context: int | None = None
    max_sequences: int = 8
    dtype: str = "auto"
    kv_dtype: str = "auto"
    page_tokens: int | None = 512
    step_tokens: int = 512
    threads: int | None = None
    memory_bytes: int | None = None
    reserve_bytes: int | None = None
    profile: Profile | None = None
    workload: Workload | None = None
    accelerator_bytes: int | None = None
    space: Space = field(default_factory=Space)
    kv_options: KvOptions = field(default_factory=KvOptions)
    loading: LoadingRequest = field(default_factory=LoadingRequest)
    name: str = ""
    notices: tuple[str, ...] = ()
    slower: Slower = field(default_factory=Slower)

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPE_CHOICES), ("kv_dtype", ("auto", *KV_ELEMENT_BYTES))):
            dtype = dtype_name(getattr(self, name))
            object.__setattr__(self, name, dtype)
            if not is_one_of(dtype, known):
                raise InvalidError(f"[plan] {name} is {shown(dtype)}; expected {', '.join(known)}")
        if self.profile is None and (self.threads is None or self.memory_bytes is None):
            raise InvalidError("[plan] threads and memory_bytes must be given without a profile")
        if self.checkpoint_tensors is not None and self.config.mixture is not None:
            stacked = with_stacks(self.checkpoint_tensors, self.graph)
            object.__setattr__(self, "checkpoint_tensors", stacked)
        config, context = self.config, self.limits.context
        if not 1 <= context <= config.max_context:
            raise InvalidError(
                f"[plan] a context of {context} was asked for, the model allows 1 to "
                f"{config.max_context}{config.context_reason}; choose one in that range"
            )
        most = {"max_sequences": 4096, "threads": 4096, "step_tokens": 2**20, "page_tokens": 2**20}
        for name, bound in most.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= bound:
                raise InvalidError(f"[plan] {name} is {value}; expected 1 to {bound}")
        if self.step_tokens < self.max_sequences:
            raise InvalidError(
                f"[plan] step_tokens is {self.step_tokens}, max_sequences {self.max_sequences}; a "
                "step must hold a token of every sequence: raise step_tokens or lower max_sequences"
            )

    @functools.cached_property
    def graph(self) -> Graph:
        return build_graph(self.config)

    @functools.cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Raises CheckpointError where the checkpoint does not fit the model."""
        return tensors_of(self.graph, self.checkpoint_tensors)

    @functools.cached_property
    def formats(self) -> dict[str, str]:
        """Tensor -> format, on any device, before any is compressed."""
        return choose_formats(self.graph, self.config, self.checkpoint_tensors, self.dtype)

    @property
    def shrinks(self) -> bool:
        """Whether the context may be lowered."""
        return self.context is None and self.workload is None

    @property
    def limits(self) -> Limits:
        """With the context that is asked for."""
        context = self.context
        if context is None:
            context = self.config.max_context if self.workload is None else self.workload.context
        return step_limits(context, self.step_tokens, self.max_sequences)

    @property
    def work(self) -> Workload:
        """What is priced, in a context of the limits or of all that it takes."""
        own, context = self.workload, self.limits.context
        if own is None:
            return Workload.within(context)
        return dataclasses.replace(own, context=max(context, own.prompt + own.output))

    @functools.cached_property
    def kv(self) -> KvSpec:
        """No pages yet."""
        kv, dtype = self.graph.kv, self.kv_dtype
        if dtype == "auto":
            dtype = dominant_dtype(self.graph, self.formats, self.config, self.checkpoint_tensors)
        page_tokens = min(self.page_tokens or PAGE_CHOICES[0], self.limits.context)
        return KvSpec(cast(KvDType, dtype), page_tokens, kv.layers, kv.kv_heads, kv.head_dim, 0)

    @property
    def stored(self) -> str | None:
        """See `mappable`."""
        return (self.config.dtype or "f32") if self.checkpoint_tensors is None else None

    @property
    def room_bytes(self) -> int:
        """Of the host."""
        own = 0 if self.profile is None else self.profile.cpu.memory_bytes
        return own if self.memory_bytes is None else self.memory_bytes

    @functools.cached_property
    def resident_bytes(self) -> int:
        return resident_bytes(self.formats, self.checkpoint_tensors)

    @functools.cached_property
    def mapped_share(self) -> float:
        return mapped_share(self.tensors, self.formats, self.stored)

    def model(self, access: Loading) -> CostedGraph:
        """With the formats in which the CPU holds weights that are loaded so."""
        smaller = compressed_formats(self.tensors, self.formats, self.stored)
        own = smaller if access == "compressed" else {}
        return CostedGraph(self.graph, self.formats, self.kv.dtype, own)

    def decisions(self, access: Loading) -> Space:
        """Those that the runtime is left with, with weights that are loaded so."""
        space = self.kv_options.space(self.space)
        sources = [tensor.source for tensor in self.tensors]
        packed = any(FORMATS[format].packed for format in self.formats.values())
        reordered = any(source.reorders for source in sources if source is not None)
        why = "the order of its columns is not theirs in memory (act-order)"
        return dataclasses.replace(
            space,
            # Compressed weights are of the CPU alone.
            prefill=tuple(m for m in space.prefill if m != "visit" or access != "compressed"),
            threads=space.threads if self.threads is None else (self.threads,),
            mapped_weights=access == "mapped",
            columns=256 if packed else max(map(cut_cols, sources)),
            uncut=why if reordered else space.uncut,
        )

    def search(self, access: Loading, workload: Workload | None = None) -> Search:
        """For `work`, or for another workload. With a profile only."""
        assert self.profile is not None
        rates = loaded_profile(self.profile, access, self.mapped_share)
        rates = rates.with_tiers(self.slower.shares)
        work, space = workload or self.work, self.decisions(access)
        return Search(self.model(access), rates, work, self.resources(), space)

    def resources(self) -> ResourceLimits:
        """What a plan may take of the machine."""
        own = ResourceLimits(
            cpu_bytes=self.room_bytes + self.resident_bytes,
            accelerator_bytes=self.accelerator_bytes,
            accelerator_reserve_bytes=capped_reserve(self.accelerator_bytes),
            cpu_near_bytes=self.slower.near_bytes,
            cpu_reserve_bytes=self.reserve_bytes,
            step_tokens=self.step_tokens,
            page_tokens=self.kv.page_tokens,
            sequences=self.max_sequences,
        )
        return self.kv_options.limits(own)
