"""Makes plans: places a model on CPU and accelerator within their memories. Reads no file.

What does not fit is made smaller where the user left room, or refused with the numbers. The
format itself is in `helm.plan.schema`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from helm.base.arguments import is_one_of, shown
from helm.base.formats import (
    KV_ELEMENT_BYTES,
    POLICIES,
    KvDType,
    dtype_name,
    uncompressed,
)
from helm.compiler.abilities import able_to_hold, slow_bf16
from helm.compiler.advice import largest_context, require
from helm.compiler.candidate import Candidate
from helm.compiler.choose_access import loaded_space, stored_dtype, with_loading
from helm.compiler.counts import CostedGraph
from helm.compiler.kv_budget import KvBudget, fewer_at_once, fit_kv
from helm.compiler.kv_options import KvOptions
from helm.compiler.load_cost import LoadingRequest
from helm.compiler.memory import activation_bytes, workspace_bytes
from helm.compiler.placement import memory_use, placed_units, prediction, schedule, unused
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import PLENTY, unlimited
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
from helm.errors import InvalidError, PlanError
from helm.machine.profile import Profile
from helm.machine.rates import capped_reserve
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.families import build_graph
from helm.model.graph import Graph
from helm.plan.records import Loading, Workload
from helm.plan.schema import KvSpec, Limits, MemoryUse, ModelIdentity, PlacedUnit, Plan, Schedule
from helm.plan.weights import TensorSpec

__all__ = [
    "MemoryUse",
    "Plan",
    "check_checkpoint",
    "check_model",
    "costed_graph",
    "make_plan",
]


@dataclass(frozen=True)
class _Problem:
    """What is to be placed. kv: with no pages yet; shrink: the context may be lowered."""

    config: ModelConfig
    infos: Mapping[str, TensorInfo] | None
    tensors: tuple[TensorSpec, ...]
    model: CostedGraph
    limits: Limits
    kv: KvSpec
    reserve_bytes: int | None
    shrink: bool
    kv_options: KvOptions

    @property
    def graph(self) -> Graph:
        return self.model.graph

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.model.formats, self.infos)

    @property
    def dominant_format(self) -> str:
        return dominant_format(self.graph, self.model.formats)


def make_plan(
    config: ModelConfig,
    checkpoint_tensors: Mapping[str, TensorInfo] | None,
    *,
    context: int | None = None,
    max_sequences: int = 8,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    page_tokens: int = 512,
    step_tokens: int = 512,
    threads: int | None = None,
    memory_bytes: int | None = None,
    reserve_bytes: int | None = None,
    profile: Profile | None = None,
    workload: Workload | None = None,
    accelerator_bytes: int | None = None,
    space: Space | None = None,
    kv_options: KvOptions | None = None,
    loading: LoadingRequest | None = None,
) -> Plan:
    """Places every unit: by search on the machine of `profile`, without one on the CPU.

    checkpoint_tensors: from `read_weights`, or `TensorInfo.in_memory` for bound tensors; None
    plans from the configuration alone, with weights of `config.dtype` (f32 when it names none).
    context: positions per sequence; None takes the workload's or else the model's, the latter less
    if memory is short. dtype: how matrices are held, one of POLICIES: "auto" as stored, "q8" in 8
    bits, "q4" in 4, but for embeddings, the head and small matrices; vectors are always f32.
    kv_dtype "auto": that of most matrix bytes, or what goes with packed ones; "i8": integers, with
    a scale per position and KV head. memory_bytes: what the machine has free, of which
    `reserve_bytes` stay untouched; None: see ResourceLimits. threads and memory_bytes are needed
    without a profile and override it with one, as accelerator_bytes does. workload: what the search
    prices; None asks for 128 tokens after 512. space: decisions to fix; None allows all that the
    runtime executes. kv_options: how KV may use an accelerator's memory; None as is best. loading:
    whether weights are copied, compressed or stay mapped; None as is best for many answers.

    Raises InvalidError for arguments out of range, ProfileError for a profile that lacks a rate,
    CheckpointError when the checkpoint does not fit the model, OutOfMemoryError with every item's
    size when weights and the smallest KV cache do not fit.
    """
    dtype, kv_dtype = dtype_name(dtype), dtype_name(kv_dtype)
    shrink = context is None and workload is None
    if context is None:
        context = config.max_context if workload is None else workload.context
    limits = Limits(context, step_tokens, max_sequences, max_sequences)
    if profile is None and (threads is None or memory_bytes is None):
        raise InvalidError("[plan] threads and memory_bytes must be given without a profile")
    _check_arguments(
        config, limits, page_tokens, 1 if threads is None else threads, (dtype, kv_dtype)
    )
    graph = build_graph(config)
    if checkpoint_tensors is not None:
        check_checkpoint(graph, checkpoint_tensors)
    tensors = tensors_of(graph, checkpoint_tensors)
    formats = choose_formats(graph, config, checkpoint_tensors, dtype)
    if kv_dtype == "auto":
        kv_dtype = dominant_dtype(graph, formats, config, checkpoint_tensors)
    kv = KvSpec(
        dtype=cast(KvDType, kv_dtype),
        page_tokens=min(page_tokens, context),
        layers=graph.kv.layers,
        kv_heads=graph.kv.kv_heads,
        head_dim=graph.kv.head_dim,
        pages=0,
    )
    options = kv_options or KvOptions()
    model = CostedGraph(graph, formats, kv.dtype)
    problem = _Problem(
        config, checkpoint_tensors, tensors, model, limits, kv, reserve_bytes, shrink, options
    )
    profile, without = able_to_hold(profile, formats)
    options.check_accelerator(profile)
    space = options.space(space or Space())
    if threads is not None:
        space = dataclasses.replace(space, threads=(threads,))
    own = 0 if profile is None else profile.cpu.memory_bytes
    room = own if memory_bytes is None else memory_bytes

    stored, most = stored_dtype(config, checkpoint_tensors), room + problem.resident_bytes

    def place(profile: Profile | None, loading: Loading, *, plenty: bool = False) -> Plan:
        loaded = problem
        if loading == "compressed":
            smaller = compressed_formats(tensors, formats, stored)
            own = dataclasses.replace(model, cpu_formats=smaller)
            loaded = dataclasses.replace(problem, model=own)
        host = PLENTY if plenty else room
        if profile is None:
            return _cpu_plan(loaded, threads or 1, host)
        allowed = loaded_space(space, loading)
        return _searched_plan(loaded, profile, workload, host, accelerator_bytes, allowed)

    plan = with_loading(place, profile, loading or LoadingRequest(), stored, most)
    notices = (
        *without,
        *plan.notices,
        *options.notices(plan, step_tokens),
        *slow_bf16(plan, profile, problem.dominant_format),
    )
    return dataclasses.replace(plan, notices=notices)


def _cpu_plan(problem: _Problem, threads: int, memory_bytes: int) -> Plan:
    limits, kv = problem.limits, problem.kv
    fixed = _memory_use(problem, limits, kv, threads)
    smaller = " or a 16-bit dtype=" if problem.dominant_format == "f32" else ""
    budget = KvBudget(memory_bytes, problem.reserve_bytes, problem.resident_bytes, fixed, smaller)
    limits, kv, notices = fit_kv(budget, limits, kv, shrink=problem.shrink)
    use = _memory_use(problem, limits, kv, threads)
    plan = _plan(problem, limits, kv, threads, notices)
    use = dataclasses.replace(use, reserve_bytes=budget.reserve(use.kv_bytes))
    return dataclasses.replace(
        plan, memory={"cpu": use}, schedule=Schedule(pages={"cpu": kv.pages})
    )


def _plan(problem: _Problem, limits: Limits, kv: KvSpec, threads: int, notices: list[str]) -> Plan:
    """The parts that do not depend on the placement, with all units on the CPU."""
    graph = problem.graph
    units = tuple(PlacedUnit(unit.name, "cpu", unit.ops) for unit in graph.units)
    return Plan(
        model=_identity(problem.config, problem.infos),
        limits=limits,
        threads=threads,
        kv=kv,
        rope=graph.rope,
        tensors=problem.tensors,
        slices=slices_of(problem.tensors, units, problem.model.format),
        values=graph.values,
        units=units,
        logits=graph.logits,
        memory={},
        notices=tuple(notices),
    )


def _searched_plan(
    problem: _Problem,
    profile: Profile,
    workload: Workload | None,
    memory_bytes: int,
    accelerator_bytes: int | None,
    space: Space,
) -> Plan:
    limits, model = problem.limits, problem.model
    resources = ResourceLimits(
        cpu_bytes=memory_bytes + problem.resident_bytes,
        accelerator_bytes=accelerator_bytes,
        accelerator_reserve_bytes=capped_reserve(accelerator_bytes),
        cpu_reserve_bytes=problem.reserve_bytes,
        step_tokens=limits.step_tokens,
        page_tokens=problem.kv.page_tokens,
        sequences=limits.sequences,
    )
    resources = problem.kv_options.limits(resources)
    workload = _workload(workload, limits.context)
    notices: list[str] = []
    if problem.shrink:
        fits = largest_context(model, profile, workload, resources, space)
        if 2 <= fits < limits.context:
            notices.append(
                f"memory holds a context of {fits} tokens, the model allows {limits.context}"
            )
            workload = _workload(None, fits)
    result = require(model, profile, workload, resources, space)
    best = result.best
    assert best is not None
    limits = dataclasses.replace(limits, context=workload.context)
    problem = dataclasses.replace(problem, limits=limits, shrink=False)
    if best.uses_accelerator:
        plan = _partitioned_plan(problem, best, notices)
    else:
        plan = _cpu_plan(problem, best.threads, memory_bytes)
        if profile.accelerator is not None:
            notices.append(unused(result, profile.accelerator.name))
        plan = dataclasses.replace(plan, notices=(*notices, *plan.notices))
    listed = (*result.by_layout, *result.labelled.values())
    ideal = result
    if not all(candidate.fits for candidate in listed):
        ideal = unlimited(model, profile, workload, resources, space)
    return dataclasses.replace(plan, prediction=prediction(result, ideal, profile, workload))


def _workload(given: Workload | None, context: int) -> Workload:
    """The default asks for as much of it as the context holds."""
    if given is not None:
        return dataclasses.replace(given, context=max(context, given.prompt + given.output))
    prompt = max(1, min(512, context // 2))
    return Workload(prompt, max(1, min(128, context - prompt)), context=max(2, context))


def _partitioned_plan(problem: _Problem, best: Candidate, notices: list[str]) -> Plan:
    limits = dataclasses.replace(problem.limits, step_tokens=best.step_tokens)
    layers = problem.kv.layers
    kv = dataclasses.replace(problem.kv, pages=layers * best.kv_blocks * best.sequences)
    if best.sequences < limits.sequences:
        notices.append(fewer_at_once(best.sequences * limits.context, limits))
    units = placed_units(problem.graph, best)
    return dataclasses.replace(
        _plan(problem, limits, kv, best.threads, notices),
        slices=slices_of(problem.tensors, units, problem.model.format),
        units=units,
        memory=memory_use(best),
        schedule=schedule(best, kv),
    )


def costed_graph(plan: Plan, graph: Graph) -> CostedGraph:
    """The graph with the formats of `plan`, which was made for it."""
    formats = {held.tensor: uncompressed(held.format) for held in plan.slices}
    cpu = {held.tensor: held.format for _, held in plan.held("cpu")}
    return CostedGraph(graph, formats, plan.kv.dtype, cpu)


def check_model(
    plan: Plan, config: ModelConfig, checkpoint_tensors: Mapping[str, TensorInfo] | None
) -> None:
    """PlanError unless `plan` was made for this configuration and checkpoint."""
    found = _identity(config, checkpoint_tensors)
    if plan.model == found:
        return
    fields = dataclasses.asdict(found)
    differs = [name for name, value in fields.items() if getattr(plan.model, name) != value]
    shown = ", ".join(
        f"{name} {getattr(plan.model, name)!r} in the plan, {fields[name]!r} here"
        for name in differs
    )
    raise PlanError(
        f"[plan] the plan was made for another model: {shown}; make the plan anew for this one"
    )


def _check_arguments(
    config: ModelConfig, limits: Limits, page_tokens: int, threads: int, dtypes: tuple[str, str]
) -> None:
    if not 1 <= limits.context <= config.max_context:
        raise InvalidError(
            f"[plan] a context of {limits.context} was asked for, the model allows 1 to "
            f"{config.max_context}{config.context_reason}; choose one in that range"
        )
    for name, value, most in (
        ("max_sequences", limits.sequences, 4096),
        ("step_tokens", limits.step_tokens, 2**20),
        ("page_tokens", page_tokens, 2**20),
        ("threads", threads, 4096),
    ):
        if not 1 <= value <= most:
            raise InvalidError(f"[plan] {name} is {value}; expected 1 to {most}")
    if limits.step_tokens < limits.sequences:
        raise InvalidError(
            f"[plan] step_tokens is {limits.step_tokens}, max_sequences {limits.sequences}; a step "
            "must hold a token of every sequence: raise step_tokens or lower max_sequences"
        )
    known = (POLICIES, ("auto", *KV_ELEMENT_BYTES))
    for name, dtype, choices in zip(("dtype", "kv_dtype"), dtypes, known, strict=True):
        if not is_one_of(dtype, choices):
            raise InvalidError(f"[plan] {name} is {shown(dtype)}; expected {', '.join(choices)}")


def _memory_use(problem: _Problem, limits: Limits, kv: KvSpec, threads: int) -> MemoryUse:
    graph = problem.graph
    return MemoryUse(
        weights_bytes=problem.model.host_bytes(graph.units),
        kv_bytes=kv.pages * kv.page_bytes,
        activations_bytes=activation_bytes(graph, graph.units, limits),
        workspace_bytes=workspace_bytes(graph, graph.units, limits, kv, threads),
    )


def _identity(config: ModelConfig, infos: Mapping[str, TensorInfo] | None) -> ModelIdentity:
    table = [infos[name].identity for name in sorted(infos)] if infos else []
    identity = json.dumps([_stated(dataclasses.asdict(config)), table], sort_keys=True)
    return ModelIdentity(
        config.architecture,
        hashlib.sha256(identity.encode()).hexdigest(),
        config.vocab_size,
        config.hidden_size,
        config.max_context,
    )


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """Without what configurations had no field for before, where it says nothing: what was saved
    for a model stays of use."""
    rope = config.get("rope")
    if rope is None or rope["factors"]:
        return config
    return {**config, "rope": {name: value for name, value in rope.items() if name != "factors"}}
