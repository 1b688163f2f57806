"""The planner: places a model on CPU and accelerator within their memories. Reads no file.

`solve` makes a study of a problem, one search for each access to the weights that is tried. The
plan is the study's projection. What does not fit is made smaller where the user left room, or
refused with the numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from helm.base.formats import PACKED_POLICIES
from helm.base.sizes import rate_text, size_text
from helm.compiler.abilities import check_policy, check_vram, slow_bf16
from helm.compiler.access import bytes_of, priced_waiting, unpriced_waiting, with_mapped
from helm.compiler.advice import Gain, largest_context, require, sensitivity
from helm.compiler.budget import memory_bytes
from helm.compiler.candidate import Candidate
from helm.compiler.counts import CostedGraph
from helm.compiler.disk import disk_weights
from helm.compiler.kv_options import PAGE_CHOICES
from helm.compiler.load_cost import NOTHING_TO_MAP, ONLY_COPIED_VISIT, Situation, choose
from helm.compiler.on_cpu import on_cpu
from helm.compiler.placement import (
    less_context,
    parts_of,
    placed,
    prediction,
    unused,
    visits,
    with_accelerator,
)
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import PUBLISHED_POLICIES, DiskSpace, Drive
from helm.compiler.search import PLENTY, Search
from helm.compiler.serving import predictor
from helm.compiler.steps import Steps, planned_steps
from helm.compiler.tensors import compressible, dominant_format, identity, mappable, slices_of
from helm.compiler.tiers import in_tiers
from helm.errors import InvalidError, OutOfMemoryError
from helm.machine.profile import Profile
from helm.plan.disk import on_disk
from helm.plan.records import Loading, LoadingChoice, Workload
from helm.plan.schema import Limits, Plan
from helm.plan.units import devices_named

_ALIKE = 0.01  # plans that differ by no more are as fast as one another


@dataclass(frozen=True)
class Study:
    """A plan with the search that it came from; without a profile there is none. What a plan does
    not need is found when it is first asked for.

    placed: where everything lies. choice: why the weights are loaded as `access` says."""

    problem: Problem = field(repr=False)
    access: Loading
    placed: Plan
    found: Search | None = field(repr=False)
    choice: LoadingChoice | None = None

    @property
    def search(self) -> Search:
        assert self.found is not None  # with a profile
        return self.found

    @property
    def best(self) -> Candidate:
        return require(self.search)

    @property
    def workload(self) -> Workload:
        return self.search.workload

    @property
    def profile(self) -> Profile:
        """With the rates of the access."""
        return self.search.profile

    @functools.cached_property
    def gains(self) -> tuple[Gain, ...]:
        """What a better machine would bring."""
        return sensitivity(self.search)

    @functools.cached_property
    def steps(self) -> tuple[Steps, ...]:
        """A decode step and a step of prompts, task by task, as the plan's times have them; two
        steps where two are on their way at once."""
        return planned_steps(self.search, self.best, self.placed)

    def limit_bytes(self, device: str) -> int:
        """What the plan may take of `device`'s memory."""
        return memory_bytes(self.profile, self.search.limits)[device == "accelerator"]

    def chosen(self, weights: str) -> tuple[Loading, LoadingChoice]:
        """How weights, which this study copies, had better be loaded. weights: what is asked for,
        see LoadingRequest."""
        problem, plan, stored = self.problem, self.placed, self.problem.stored
        held = [(tensor, own.format) for tensor, own in plan.held("cpu")]
        packs = [weight for weight in held if compressible(*weight, stored)]
        matrices = bytes_of(weight for weight in held if len(weight[0].shape) == 2)
        waiting, cpu = unpriced_waiting(plan, problem.loading), problem.loading.cpu
        if self.found is not None:
            waiting = priced_waiting(plan, self.workload, self.best.predicted)
            cpu = self.profile.cpu
        use, room = plan.memory["cpu"], problem.room_bytes + problem.resident_bytes
        situation = Situation(
            copy_bytes=bytes_of(weight for weight in held if mappable(*weight, stored)),
            share=problem.mapped_share,
            spare_bytes=room - use.total_bytes - use.reserve_bytes,
            visits=visits(plan),
            waiting=waiting,
            compress_bytes=bytes_of(packs),
            compressed_bytes=bytes_of((tensor, "bf16c") for tensor, _ in packs),
            compress_share=bytes_of(packs) / max(1, matrices),
        )
        return choose(dataclasses.replace(problem.loading, weights=weights), situation, cpu)

    def saying(self, *notices: str) -> Study:
        """With more that the plan says."""
        said = (*self.problem.notices, *notices)
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, notices=said))

    @functools.cached_property
    def plan(self) -> Plan:
        """What of the study a runtime needs, and what people want to know beside it."""
        problem, plan, choice = self.problem, self.placed, self.choice
        profile = problem.profile
        if self.access == "mapped":
            # Vectors alone save nothing.
            if problem.loading.weights != "auto" or problem.mapped_share > 0:
                plan = with_mapped(plan, problem.stored)
            if plan.loading != "mapped" and choice is not None:
                choice = dataclasses.replace(choice, reason=NOTHING_TO_MAP)
        notices = (
            *problem.notices,
            *plan.notices,
            *problem.kv_options.notices(plan, problem.step_tokens),
            *slow_bf16(plan, profile, dominant_format(problem.graph, problem.formats)),
            *(profile.notices_of({held.format for held in plan.slices}) if profile else ()),
        )
        predicted = None if profile is None else prediction(self.search, profile)
        tables = None if profile is None else predictor(self.search, self.best, plan)
        return dataclasses.replace(
            plan, notices=notices, loading_choice=choice, predictor=tables, prediction=predicted
        )


def solve(problem: Problem) -> Study:
    """Places every unit, in memory: by search on the machine of the profile, without one on the
    CPU.

    The search prices copied weights. If mapped or compressed ones turn out better, or only
    compressed ones fit, another prices those with their rates or formats, so that placement and
    predictions are what will run. dtype "fit" asks for each dtype in turn.

    Raises ProfileError for a profile that lacks a rate, CheckpointError when the checkpoint does
    not fit the model, OutOfMemoryError with every item's size when weights and the smallest KV
    cache do not fit.
    """
    if problem.page_tokens is None:
        return _paged(problem)
    return _fitting(problem) if problem.dtype == "fit" else in_tiers(problem, _in_memory)


def _paged(problem: Problem) -> Study:
    """With the smallest pages that are as fast as any, but for a percent. Each page that visits the
    accelerator has a copy and an op of its own. Where none does, no price depends on the size, and
    the smallest waste least."""
    least, *others = PAGE_CHOICES
    studies = [solve(dataclasses.replace(problem, page_tokens=least))]
    if studies[0].found is None or not studies[0].placed.overflows:
        return studies[0]
    studies += [solve(dataclasses.replace(problem, page_tokens=tokens)) for tokens in others]
    most = min(study.best.objective_s for study in studies) * (1 + _ALIKE)
    return next(study for study in studies if study.best.objective_s <= most)


def from_disk(problem: Problem, drives: Sequence[Drive], refused: OutOfMemoryError) -> Study:
    """With weights on a disk, or on several drives, that memory, as `solve` says in `refused`, does
    not hold. As stored, since nothing is converted on the way. Where weights or a policy were
    asked for that rule this out, the refusal says what it would reach."""
    if problem.profile is None:
        raise refused
    own = dataclasses.replace(problem, dtype="auto" if problem.dtype == "fit" else problem.dtype)
    others = ["weights='auto'"] if problem.loading.weights != "auto" else []
    disk = DiskSpace(disk_weights(own.graph, own.tensors, own.formats), tuple(drives))
    space = dataclasses.replace(own.space, disk=disk)
    if space.policy in ("cut", *PUBLISHED_POLICIES):
        others.append("policy='auto'")
        space = dataclasses.replace(space, policy="auto")
    try:
        study = _placed(dataclasses.replace(own, space=space), "copied")
    except OutOfMemoryError:
        raise refused from None
    best = study.best
    if best.disk is None:
        raise refused
    rate = rate_text(best.predicted.decode_tokens_per_s)
    said = (
        f"{size_text(best.disk.held_bytes)} of weights that memory does not hold are read from disk"
        f" in every step, at {disk.rate_text}: about {rate} tokens/s"
    )
    if others:
        fits = f"{' and '.join(others)} {'fits' if len(others) == 1 else 'fit'}"
        raise OutOfMemoryError(f"{refused}; {fits}: {said}")
    return dataclasses.replace(study, problem=own).saying(said)


def _in_memory(problem: Problem) -> Study:
    """In one dtype."""
    assert problem.tensors  # of the checkpoint, whose faults come first
    check_vram(problem.profile, problem.accelerator_bytes, problem.kv_options.vram_bytes)
    check_policy(problem.space.policy, problem.profile)
    published, asked = problem.space.policy in PUBLISHED_POLICIES, problem.loading.weights
    try:
        copied = _placed(problem, "copied")
    except OutOfMemoryError as refused:
        if published or asked not in ("auto", "compressed"):
            raise
        return _compressed_for_room(problem, refused)
    access, choice = copied.chosen("copied" if published else asked)
    if asked == "compressed" and choice.compress_bytes == 0:
        raise InvalidError(
            "[plan] compressed weights were asked for, but no bf16 matrix that would become "
            "smaller lies on the CPU, or they are a module's in memory; choose copied or mapped "
            "weights"
        )
    if published:
        choice = dataclasses.replace(
            choice, reason="what visits the GPU lies in page-locked memory"
        )
    study = copied if access == "copied" else _placed(problem, access)
    if access == "mapped" and asked == "auto" and visits(study.placed):
        study, choice = copied, dataclasses.replace(choice, reason=ONLY_COPIED_VISIT)
    return dataclasses.replace(study, choice=choice)


def _fitting(problem: Problem) -> Study:
    """With weights as stored, else in the first packed format that fits."""
    for dtype in ("auto", *PACKED_POLICIES):
        loading = problem.loading
        if dtype != "auto" and loading.weights == "compressed":  # of bf16 alone
            loading = dataclasses.replace(loading, weights="auto")
        try:
            own = dataclasses.replace(problem, dtype=dtype, loading=loading)
            study = in_tiers(own, _in_memory)
        except OutOfMemoryError as error:
            refused = error
            continue
        held = f"in {dtype}: as stored they do not fit"
        if dtype == "auto":
            held = "as stored, in bf16c" if study.access == "compressed" else "as stored"
        return study.saying(f"dtype='fit' holds weights {held}")
    raise OutOfMemoryError(f"{refused}; this is in {dtype}, the last format that dtype='fit' tries")


def _compressed_for_room(problem: Problem, refused: OutOfMemoryError) -> Study:
    """Where copied weights were refused."""
    try:
        study = _placed(problem, "compressed")
    except OutOfMemoryError:
        raise refused from None
    plenty = _placed(dataclasses.replace(problem, memory_bytes=PLENTY), "copied")
    _, choice = plenty.chosen("compressed")
    choice = dataclasses.replace(choice, reason="weights that are copied do not fit")
    return dataclasses.replace(study, choice=choice)


def _placed(problem: Problem, access: Loading) -> Study:
    """Where everything lies with weights that are loaded so, at the rates that they have then."""
    model, limits, notices = problem.model(access), problem.limits, []
    if problem.profile is None:
        return Study(problem, access, plan_of(problem, model, limits), None)
    search = problem.search(access)
    if problem.shrinks:
        fits = largest_context(model, search.profile, search.workload, search.limits, search.space)
        if 2 <= fits < limits.context:
            notices.append(less_context(fits, limits))
            search = problem.search(access, Workload.within(fits))
    best = require(search)
    limits = dataclasses.replace(limits, context=search.workload.context)
    accelerator = search.profile.accelerator
    if accelerator is not None and not best.uses_accelerator:
        notices.append(unused(search.result, accelerator.name))
    return Study(problem, access, plan_of(problem, model, limits, best, notices), search)


def plan_of(
    problem: Problem,
    model: CostedGraph,
    limits: Limits,
    best: Candidate | None = None,
    notices: Sequence[str] = (),
) -> Plan:
    """best: what a search found, notices: what is said of it; None: all on the CPU, in less context
    where that is allowed."""
    graph, threads = problem.graph, (problem.threads or 1) if best is None else best.threads
    made, visiting = placed(model, best)
    if best is not None and best.uses_accelerator:
        counted = with_accelerator(problem.kv, made, best, limits)
    else:
        counted = on_cpu(problem, model, limits, threads, best)
    limits, kv, memory, order, said = counted
    tensors = parts_of(problem.tensors, made)
    slices = slices_of(tensors, made.units, model.format, visiting)
    return Plan(
        model=identity(problem.config, problem.checkpoint_tensors, limits.context),
        limits=limits,
        threads=threads,
        devices=devices_named(memory),
        kv=kv,
        rope=graph.rope_of(limits.context),
        tensors=tensors,
        slices=on_disk(slices, best.disk.tensors if best and best.disk else ()),
        values=made.values,
        units=made.units,
        logits=graph.logits,
        memory=memory,
        notices=(*notices, *said),
        schedule=order,
    )
