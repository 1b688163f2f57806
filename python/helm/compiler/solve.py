"""The planner: places a model on CPU and accelerator within their memories. Reads no file.

`solve` makes a study of a problem, one search for each access to the weights that is tried. The
plan is the study's projection. What does not fit is made smaller where the user left room, or
refused with the numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from helm.base.arguments import is_one_of, shown
from helm.base.formats import KV_ELEMENT_BYTES, POLICIES, KvDType, dtype_name
from helm.compiler.abilities import able_to_hold, check_vram, slow_bf16
from helm.compiler.access import (
    loaded_profile,
    loaded_space,
    mapped_share,
    situation,
    with_mapped,
)
from helm.compiler.advice import Gain, largest_context, require, sensitivity
from helm.compiler.budget import memory_bytes
from helm.compiler.candidate import Candidate
from helm.compiler.counts import CostedGraph
from helm.compiler.identity import identity
from helm.compiler.kv_options import KvOptions
from helm.compiler.load_cost import NOTHING_TO_MAP, LoadingRequest, Situation, choose
from helm.compiler.on_cpu import HostRoom, fewer_at_once, placed_on_cpu
from helm.compiler.placement import memory_use, placed_units, prediction, schedule, unused
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import PLENTY, Search
from helm.compiler.tensors import (
    check_checkpoint,
    choose_formats,
    compressed_formats,
    dominant_dtype,
    dominant_format,
    resident_bytes,
    slices_of,
    tensors_of,
)
from helm.errors import InvalidError, OutOfMemoryError
from helm.machine.profile import Profile
from helm.machine.rates import CpuProfile, capped_reserve
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.families import build_graph
from helm.model.graph import Graph
from helm.plan.records import Loading, LoadingChoice, Workload
from helm.plan.schema import KvSpec, Limits, PlacedUnit, Plan, Schedule
from helm.plan.weights import TensorSpec


@dataclass(frozen=True)
class Problem:
    """What is to be planned, for the machine of `profile`; without one, for a CPU.

    checkpoint_tensors: from `read_weights`, or `TensorInfo.in_memory` for bound tensors; None
    plans from the configuration alone, with weights of `config.dtype` (f32 when it names none).
    context: positions per sequence; None takes the workload's or else the model's, the latter less
    if memory is short. dtype: how matrices are held, one of POLICIES: "auto" as stored, "q8" in 8
    bits, "q4" in 4, but for embeddings, the head and small matrices; vectors are always f32.
    kv_dtype "auto": that of most matrix bytes, or what goes with packed ones; "i8": integers, with
    a scale per position and KV head. memory_bytes: what the machine has free, of which
    `reserve_bytes` stay untouched; None: see ResourceLimits. threads and memory_bytes are needed
    without a profile and override it with one, as accelerator_bytes does. workload: what the search
    prices; None asks for 128 tokens after 512. space: decisions to fix. kv_options: how KV may use
    an accelerator's memory. loading: whether weights are copied, compressed or stay mapped. name:
    of the model, for people. notices: what the plan says first. Raises InvalidError for arguments
    out of range.
    """

    config: ModelConfig
    checkpoint_tensors: Mapping[str, TensorInfo] | None
    context: int | None = None
    max_sequences: int = 8
    dtype: str = "auto"
    kv_dtype: str = "auto"
    page_tokens: int = 512
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

    def __post_init__(self) -> None:
        for name, known in (("dtype", POLICIES), ("kv_dtype", ("auto", *KV_ELEMENT_BYTES))):
            dtype = dtype_name(getattr(self, name))
            object.__setattr__(self, name, dtype)
            if not is_one_of(dtype, known):
                raise InvalidError(f"[plan] {name} is {shown(dtype)}; expected {', '.join(known)}")
        if self.profile is None and (self.threads is None or self.memory_bytes is None):
            raise InvalidError("[plan] threads and memory_bytes must be given without a profile")
        config, context = self.config, self.limits.context
        if not 1 <= context <= config.max_context:
            raise InvalidError(
                f"[plan] a context of {context} was asked for, the model allows 1 to "
                f"{config.max_context}{config.context_reason}; choose one in that range"
            )
        for name, most in (
            ("max_sequences", 4096),
            ("step_tokens", 2**20),
            ("page_tokens", 2**20),
            ("threads", 4096),
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InvalidError(f"[plan] {name} is {value}; expected 1 to {most}")
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
        if self.checkpoint_tensors is not None:
            check_checkpoint(self.graph, self.checkpoint_tensors)
        return tensors_of(self.graph, self.checkpoint_tensors)

    @functools.cached_property
    def formats(self) -> dict[str, str]:
        """Tensor -> format, on any device, before any is compressed."""
        return choose_formats(self.graph, self.config, self.checkpoint_tensors, self.dtype)

    @property
    def limits(self) -> Limits:
        """With the context that is asked for."""
        context = self.context
        if context is None:
            context = self.config.max_context if self.workload is None else self.workload.context
        return Limits(context, self.step_tokens, self.max_sequences, self.max_sequences)

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
        page_tokens = min(self.page_tokens, self.limits.context)
        return KvSpec(cast(KvDType, dtype), page_tokens, kv.layers, kv.kv_heads, kv.head_dim, 0)

    @functools.cached_property
    def machine(self) -> tuple[Profile | None, tuple[str, ...]]:
        """The profile, without an accelerator that cannot hold the formats, and what to say."""
        return able_to_hold(self.profile, self.formats)

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
        smaller: dict[str, str] = {}
        if access == "compressed":
            smaller = compressed_formats(self.tensors, self.formats, self.stored)
        return CostedGraph(self.graph, self.formats, self.kv.dtype, smaller)

    def rates(self, access: Loading) -> Profile | None:
        """Of the machine, for weights that are loaded so."""
        own, _ = self.machine
        return None if own is None else loaded_profile(own, access, self.mapped_share)

    def decisions(self, access: Loading) -> Space:
        """Those that are left with weights that are loaded so."""
        space = self.kv_options.space(self.space)
        if self.threads is not None:
            space = dataclasses.replace(space, threads=(self.threads,))
        return loaded_space(space, access)

    def resources(self) -> ResourceLimits:
        """What a plan may take of the machine."""
        resources = ResourceLimits(
            cpu_bytes=self.room_bytes + self.resident_bytes,
            accelerator_bytes=self.accelerator_bytes,
            accelerator_reserve_bytes=capped_reserve(self.accelerator_bytes),
            cpu_reserve_bytes=self.reserve_bytes,
            step_tokens=self.step_tokens,
            page_tokens=self.kv.page_tokens,
            sequences=self.max_sequences,
        )
        return self.kv_options.limits(resources)


@dataclass(frozen=True)
class Study:
    """A plan with the search that it came from; without a profile there is none. What a plan does
    not need is found when it is first asked for.

    model: with the formats of the access. placed: where everything lies. choice: why the weights
    are loaded as `access` says."""

    problem: Problem = field(repr=False)
    access: Loading
    model: CostedGraph = field(repr=False)
    placed: Plan
    found: Search | None = field(repr=False)
    choice: LoadingChoice | None = None

    @property
    def search(self) -> Search:
        assert self.found is not None  # with a profile
        return self.found

    @property
    def best(self) -> Candidate:
        assert self.search.result.best is not None
        return self.search.result.best

    @property
    def workload(self) -> Workload:
        return self.search.workload

    @property
    def profile(self) -> Profile:
        profile, _ = self.problem.machine
        assert profile is not None
        return profile

    @functools.cached_property
    def gains(self) -> tuple[Gain, ...]:
        """What a better machine would bring."""
        return sensitivity(self.search)

    def limit_bytes(self, device: str) -> int:
        """What the plan may take of `device`'s memory."""
        return memory_bytes(self.profile, self.search.limits)[device == "accelerator"]

    @property
    def situation(self) -> Situation:
        """What the choice of another access depends on."""
        problem = self.problem
        priced = None if self.found is None else (self.workload, self.best.predicted)
        room, share = problem.room_bytes + problem.resident_bytes, problem.mapped_share
        return situation(self.placed, priced, problem.loading, share, problem.stored, room)

    @functools.cached_property
    def plan(self) -> Plan:
        """What of the study a runtime needs, and what people want to know beside it."""
        problem, plan, choice = self.problem, self.placed, self.choice
        profile, without = problem.machine
        if self.access == "mapped":
            # Vectors alone save nothing.
            if problem.loading.weights != "auto" or problem.mapped_share > 0:
                plan = with_mapped(plan, problem.stored)
            if plan.loading != "mapped" and choice is not None:
                choice = dataclasses.replace(choice, reason=NOTHING_TO_MAP)
        notices = (
            *problem.notices,
            *without,
            *plan.notices,
            *problem.kv_options.notices(plan, problem.step_tokens),
            *slow_bf16(plan, profile, dominant_format(problem.graph, problem.formats)),
        )
        predicted = None if self.found is None else prediction(self.found, self.profile)
        return dataclasses.replace(
            plan, notices=notices, loading_choice=choice, prediction=predicted
        )


def solve(problem: Problem) -> Study:
    """Places every unit: by search on the machine of the profile, without one on the CPU.

    The search prices copied weights. If mapped or compressed ones turn out better, or only
    compressed ones fit, another prices those with their rates or formats, so that placement and
    predictions are what will run.

    Raises ProfileError for a profile that lacks a rate, CheckpointError when the checkpoint does
    not fit the model, OutOfMemoryError with every item's size when weights and the smallest KV
    cache do not fit.
    """
    assert problem.tensors  # of the checkpoint, whose faults come first
    profile, _ = problem.machine
    check_vram(problem.profile, problem.accelerator_bytes, problem.kv_options.vram_bytes)
    request, cpu = problem.loading, problem.loading.cpu if profile is None else profile.cpu
    try:
        copied = _placed(problem, "copied")
    except OutOfMemoryError as refused:
        return _compressed_for_room(problem, cpu, refused)
    at = copied.situation
    if request.weights == "compressed" and at.compress_bytes == 0:
        raise InvalidError(
            "[plan] compressed weights were asked for, but no bf16 matrix that would become "
            "smaller lies on the CPU, or they are a module's in memory; choose copied or mapped "
            "weights"
        )
    access, choice = choose(request, at, cpu)
    alone = profile is None or profile.accelerator is None
    if access == "copied" or (access == "mapped" and alone and problem.rates(access) == profile):
        return dataclasses.replace(copied, access=access, choice=choice)
    study = _placed(problem, access)
    visits = study.placed.schedule.prefill == "stream"
    if access == "mapped" and request.weights == "auto" and visits:
        study = copied
        _, choice = choose(request, dataclasses.replace(at, visits=True), cpu)
    return dataclasses.replace(study, choice=choice)


def _compressed_for_room(
    problem: Problem, cpu: CpuProfile | None, refused: OutOfMemoryError
) -> Study:
    """Where copied weights were refused."""
    if problem.loading.weights not in ("auto", "compressed"):
        raise refused
    try:
        study = _placed(problem, "compressed")
    except OutOfMemoryError:
        raise refused from None
    plenty = _placed(dataclasses.replace(problem, memory_bytes=PLENTY), "copied")
    asked = dataclasses.replace(problem.loading, weights="compressed")
    _, choice = choose(asked, plenty.situation, cpu)
    choice = dataclasses.replace(choice, reason="weights that are copied do not fit")
    return dataclasses.replace(study, choice=choice)


def _placed(problem: Problem, access: Loading) -> Study:
    """Where everything lies with weights that are loaded so, at the rates that they have then."""
    model, limits, rates = problem.model(access), problem.limits, problem.rates(access)
    shrinks = problem.context is None and problem.workload is None
    if rates is None:
        plan = _cpu_plan(problem, model, limits, problem.threads or 1, shrinks)
        return Study(problem, access, model, plan, None)
    space, resources = problem.decisions(access), problem.resources()
    workload, notices = problem.work, []
    if shrinks:
        fits = largest_context(model, rates, workload, resources, space)
        if 2 <= fits < limits.context:
            notices.append(
                f"memory holds a context of {fits} tokens, the model allows {limits.context}"
            )
            workload = Workload.within(fits)
    search = Search(model, rates, workload, resources, space)
    result = require(search)
    best = result.best
    assert best is not None
    limits = dataclasses.replace(limits, context=workload.context)
    if best.uses_accelerator:
        plan = _partitioned_plan(problem, model, limits, best)
    else:
        if rates.accelerator is not None:
            notices.append(unused(result, rates.accelerator.name))
        plan = _cpu_plan(problem, model, limits, best.threads, shrinks=False)
    plan = dataclasses.replace(plan, notices=(*notices, *plan.notices))
    return Study(problem, access, model, plan, search)


def _cpu_plan(
    problem: Problem, model: CostedGraph, limits: Limits, threads: int, shrinks: bool
) -> Plan:
    most = dominant_format(problem.graph, problem.formats)
    room = HostRoom(
        problem.room_bytes,
        problem.reserve_bytes,
        problem.resident_bytes,
        smaller=" or a 16-bit dtype=" if most == "f32" else "",
    )
    limits, kv, use, notices = placed_on_cpu(model, limits, problem.kv, threads, room, shrinks)
    return _plan(
        problem,
        model,
        tuple(PlacedUnit(unit.name, "cpu", unit.ops) for unit in problem.graph.units),
        limits=limits,
        threads=threads,
        kv=kv,
        memory={"cpu": use},
        schedule=Schedule(pages={"cpu": kv.pages}),
        notices=tuple(notices),
    )


def _partitioned_plan(
    problem: Problem, model: CostedGraph, limits: Limits, best: Candidate
) -> Plan:
    kv, notices = problem.kv, []
    kv = dataclasses.replace(kv, pages=kv.layers * best.kv_blocks * best.sequences)
    if best.sequences < limits.sequences:
        notices.append(fewer_at_once(best.sequences * limits.context, limits))
    return _plan(
        problem,
        model,
        placed_units(problem.graph, best),
        limits=dataclasses.replace(limits, step_tokens=best.step_tokens),
        threads=best.threads,
        kv=kv,
        memory=memory_use(best),
        schedule=schedule(best, kv),
        notices=tuple(notices),
    )


def _plan(
    problem: Problem, model: CostedGraph, units: tuple[PlacedUnit, ...], **decided: Any
) -> Plan:
    graph = problem.graph
    return Plan(
        model=identity(problem.config, problem.checkpoint_tensors),
        rope=graph.rope,
        tensors=problem.tensors,
        slices=slices_of(problem.tensors, units, model.format),
        values=graph.values,
        units=units,
        logits=graph.logits,
        **decided,
    )
