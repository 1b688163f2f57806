"""From a configuration to a plan with everything the search knew of it. Prints nothing.

`make_plan` keeps of its search what a plan needs; an explanation also wants the other layouts,
the price of those that lack memory, and what a better machine would bring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from helm.base.formats import dtype_name
from helm.compiler.abilities import able_to_hold
from helm.compiler.advice import Gain, sensitivity
from helm.compiler.budget import memory_bytes
from helm.compiler.candidate import Candidate
from helm.compiler.choose_access import loaded_profile, loaded_space, stored_dtype
from helm.compiler.counts import CostedGraph
from helm.compiler.kv_options import PAGE_TOKENS, KvOptions, check_page_tokens
from helm.compiler.load_cost import LoadingRequest
from helm.compiler.make import costed_graph, make_plan
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import SearchResult, search, unlimited
from helm.compiler.tensors import choose_formats, compressed_formats
from helm.errors import InvalidError
from helm.machine.profile import Profile
from helm.machine.rates import capped_reserve
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.families import build_graph
from helm.plan.records import OBJECTIVES, Workload
from helm.plan.schema import Plan

DEFAULT_CONTEXT = 4096
_STEP_TOKENS = 512


@dataclass(frozen=True)
class Request:
    """What is to be planned. prompt and output None: 512 and 128, less if the context is shorter.
    context None: DEFAULT_CONTEXT, less if the model allows less, more if prompt and output need
    more. cpu_bytes, accelerator_bytes None: what the profile states. weights: see LoadingRequest.
    """

    prompt: int | None = None
    output: int | None = None
    batch: int = 1
    context: int | None = None
    objective: str = "total"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    cpu_bytes: int | None = None
    accelerator_bytes: int | None = None
    kv: KvOptions = field(default_factory=KvOptions)
    page_tokens: int = PAGE_TOKENS
    weights: str = "auto"

    def __post_init__(self) -> None:
        check_page_tokens(self.page_tokens)


@dataclass(frozen=True)
class Study:
    """A plan with the search it came from. unlimited: the best of each layout if memory were no
    object, in the order of result.by_layout: what the layouts that do not fit would reach.
    others: what the other objectives would choose; "throughput" alone may run fewer sequences at
    once, so where it does for want of memory, there are none."""

    name: str
    plan: Plan
    model: CostedGraph
    profile: Profile
    workload: Workload
    limits: ResourceLimits
    result: SearchResult
    unlimited: SearchResult
    others: dict[str, Candidate]
    gains: tuple[Gain, ...]

    @property
    def best(self) -> Candidate:
        assert self.result.best is not None
        return self.result.best

    def limit_bytes(self, device: str) -> int:
        """What the plan may take of `device`'s memory."""
        return memory_bytes(self.profile, self.limits)[device == "accelerator"]


def study(
    name: str,
    config: ModelConfig,
    checkpoint_tensors: Mapping[str, TensorInfo] | None,
    profile: Profile,
    request: Request,
) -> Study:
    """Plans and keeps the search. Raises what `make_plan` raises."""
    workload = workload_of(config, request)
    if request.accelerator_bytes and profile.accelerator is None:
        raise InvalidError(
            f"[plan] vram_bytes= was given, but {profile.name} has no accelerator; choose another "
            "profile=, or leave vram_bytes= out"
        )
    step_tokens = max(_STEP_TOKENS, workload.batch)
    plan = make_plan(
        config,
        checkpoint_tensors,
        max_sequences=workload.batch,
        dtype=request.dtype,
        kv_dtype=request.kv_dtype,
        step_tokens=step_tokens,
        memory_bytes=request.cpu_bytes,
        profile=profile,
        workload=workload,
        accelerator_bytes=request.accelerator_bytes,
        page_tokens=request.page_tokens,
        kv_options=request.kv,
        loading=LoadingRequest(request.weights),
    )
    stored = stored_dtype(config, checkpoint_tensors)
    graph = build_graph(config)
    formats = choose_formats(graph, config, checkpoint_tensors, dtype_name(request.dtype))
    profile = able_to_hold(profile, formats)[0] or profile  # the plan says what it leaves out
    own_bytes = request.accelerator_bytes if profile.accelerator else None
    smaller: dict[str, str] = {}
    if plan.loading == "compressed":
        smaller = compressed_formats(plan.tensors, formats, stored)
    model = CostedGraph(graph, formats, plan.kv.dtype, smaller)
    limits = ResourceLimits(
        cpu_bytes=request.cpu_bytes,
        accelerator_bytes=own_bytes,
        accelerator_reserve_bytes=capped_reserve(own_bytes),
        step_tokens=step_tokens,
        page_tokens=plan.kv.page_tokens,
        sequences=workload.batch,
    )
    limits = request.kv.limits(limits)
    space = loaded_space(request.kv.space(Space()), plan.loading)
    rates = loaded_profile(profile, plan, stored)
    return Study(
        name=name,
        plan=plan,
        model=model,
        profile=profile,
        workload=workload,
        limits=limits,
        result=search(model, rates, workload, limits, space),
        unlimited=unlimited(model, rates, workload, limits, space),
        others=_others(model, rates, workload, limits, space),
        gains=sensitivity(model, rates, workload, limits, space),
    )


def _others(
    model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits, space: Space
) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    for objective in OBJECTIVES:
        if objective != workload.objective:
            changed = dataclasses.replace(workload, objective=objective)
            best = search(model, profile, changed, limits, space).best
            if best is not None:
                found[objective] = best
    return found


def workload_of(config: ModelConfig, request: Request) -> Workload:
    """What is asked for, with the defaults of `Request`. Raises InvalidError."""
    most = config.max_context if request.context is None else request.context
    prompt, output = request.prompt, request.output
    if prompt is None:
        prompt = max(1, min(512, most // 2 if output is None else most - output))
    if output is None:
        output = max(1, min(128, most - prompt))
    if prompt + output > config.max_context:
        raise InvalidError(
            f"[plan] prompt and output take {prompt + output} positions, the model allows "
            f"{config.max_context}{config.context_reason}; shorten them with prompt_tokens= and "
            "output_tokens="
        )
    context = request.context
    if context is None:
        context = min(max(DEFAULT_CONTEXT, prompt + output), config.max_context)
    return Workload(
        prompt,
        output,
        request.batch,
        context,
        request.objective,  # type: ignore[arg-type]  # checked by Workload
    )


def cpu_decode_rate(config: ModelConfig, plan: Plan, profile: Profile) -> float:
    """Decode tokens/s of one sequence of a plan that lies on the CPU, on the machine of
    `profile`. Raises ProfileError if the profile lacks a rate or the plan's thread count."""
    model = costed_graph(plan, build_graph(config))
    context = plan.limits.context
    prompt = max(1, min(512, context // 2))
    workload = Workload(prompt, max(1, min(128, context - prompt)), context=max(2, context))
    host = dataclasses.replace(profile, accelerator=None, link=None)
    host = loaded_profile(host, plan, None)
    best = unlimited(model, host, workload, space=Space(threads=(plan.threads,))).best
    assert best is not None  # memory was no object
    return best.predicted.decode_tokens_per_s
