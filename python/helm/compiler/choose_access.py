"""Gives a plan its way of loading weights, once everything else of it is decided.

The search prices copied weights. If mapped or compressed ones turn out better, or only compressed
ones fit, it is asked again with the rates of those or in their format, so that placement and
predictions are what will run. Reads no file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from helm.base.formats import tensor_bytes
from helm.compiler.load_cost import (
    ASSUMED_MATVEC_BYTES_PER_S,
    NOTHING_TO_MAP,
    LoadingRequest,
    Situation,
    Waiting,
    choose,
)
from helm.compiler.problem import Space
from helm.compiler.tensors import compressible, mappable
from helm.compiler.times import is_memory_bound
from helm.errors import InvalidError, OutOfMemoryError
from helm.machine.profile import Profile
from helm.machine.rates import rate_class
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.plan.records import Loading, Workload

if TYPE_CHECKING:
    from helm.plan.schema import Plan
    from helm.plan.weights import Slice, TensorSpec


Weight = tuple[tuple[int, ...], str]  # shape and format


class Place(Protocol):
    """Makes a plan with weights loaded in a way, at the rates that they have then. plenty: as if
    host memory were no object."""

    def __call__(
        self, profile: Profile | None, loading: Loading, *, plenty: bool = False
    ) -> Plan: ...


def with_loading(
    place: Place,
    profile: Profile | None,
    request: LoadingRequest,
    stored: str | None,
    memory_bytes: int,
) -> Plan:
    """The plan that `place` makes, with its loading. stored: see `mappable`. memory_bytes: of the
    host, what a plan may take with its reserve."""
    cpu = request.cpu if profile is None else profile.cpu
    try:
        plan = place(profile, "copied")
    except OutOfMemoryError:
        found = None
        if request.weights in ("auto", "compressed"):
            found = _compressed_for_room(place, profile)
        if found is None:
            raise
        request = dataclasses.replace(request, weights="compressed")
        plan = place(profile, "copied", plenty=True)
        _, choice = choose(request, _situation(plan, request, stored, memory_bytes), cpu)
        choice = dataclasses.replace(choice, reason="weights that are copied do not fit")
        return dataclasses.replace(found, loading_choice=choice)
    at = _situation(plan, request, stored, memory_bytes)
    if request.weights == "compressed" and at.compress_bytes == 0:
        raise InvalidError(
            "[plan] compressed weights were asked for, but no bf16 matrix that would become "
            "smaller lies on the CPU, or they are a module's in memory; choose copied or mapped "
            "weights"
        )
    loading, choice = choose(request, at, cpu)
    if loading == "compressed":
        plan = place(profile, "compressed")
    if loading == "mapped" and profile is not None:
        rates = mapped_profile(profile, plan, stored)
        same = rates == profile and profile.accelerator is None
        other = plan if same else _identified(place(rates, loading), plan)
        if request.weights == "auto" and other.schedule.prefill == "stream":
            loading, choice = choose(request, dataclasses.replace(at, visits=True), cpu)
        else:
            plan = other
    if loading == "mapped":
        if request.weights != "auto" or _share(plan, stored) > 0:  # vectors alone save nothing
            plan = with_mapped(plan, stored)
        if plan.loading != "mapped":
            choice = dataclasses.replace(choice, reason=NOTHING_TO_MAP)
    return dataclasses.replace(plan, loading_choice=choice)


def with_mapped(plan: Plan, stored: str | None) -> Plan:
    """`plan` with what the CPU holds left in its files, where it can be read there. stored: see
    `mappable`."""

    def placed(tensor: TensorSpec, held: Slice) -> Slice:
        mapped = held.device == "cpu" and mappable(tensor, held.format, stored)
        return dataclasses.replace(held, access="mapped") if mapped else held

    tensors = {tensor.name: tensor for tensor in plan.tensors}
    slices = tuple(placed(tensors[held.tensor], held) for held in plan.slices)
    return dataclasses.replace(plan, slices=slices)


def _compressed_for_room(place: Place, profile: Profile | None) -> Plan | None:
    try:
        return place(profile, "compressed")
    except OutOfMemoryError:
        return None


def loaded_profile(profile: Profile, plan: Plan, stored: str | None) -> Profile:
    """The rates with which `plan`, its loading decided, runs on the machine of `profile`."""
    if plan.loading == "mapped":
        return mapped_profile(profile, plan, stored)
    if plan.loading == "compressed":
        return dataclasses.replace(profile, cpu=profile.cpu.complete)
    return profile


def mapped_profile(profile: Profile, plan: Plan, stored: str | None) -> Profile:
    """`profile` with the weights of `plan` mapped where they can be."""
    cpu = profile.cpu.with_mapped_weights(_share(plan, stored))
    return dataclasses.replace(profile, cpu=cpu)


def loaded_space(space: Space, loading: Loading) -> Space:
    """What the runtime can do with weights that are loaded so."""
    if loading != "compressed":
        return dataclasses.replace(space, mapped_weights=loading == "mapped")
    return dataclasses.replace(space, prefill=tuple(m for m in space.prefill if m != "stream"))


def stored_dtype(config: ModelConfig, infos: Mapping[str, TensorInfo] | None) -> str | None:
    """What `mappable` wants to know of a model whose checkpoint is not there."""
    return (config.dtype or "f32") if infos is None else None


def _identified(plan: Plan, original: Plan) -> Plan:
    """With the identity of the profile from which the other was derived."""
    if plan.prediction is None or original.prediction is None:
        return plan
    prediction = dataclasses.replace(plan.prediction, profile=original.prediction.profile)
    return dataclasses.replace(plan, prediction=prediction)


def _situation(
    plan: Plan, request: LoadingRequest, stored: str | None, memory_bytes: int
) -> Situation:
    use = plan.memory["cpu"]
    copies: list[Weight] = []
    packs: list[Weight] = []
    for tensor, held in plan.held("cpu"):
        if mappable(tensor, held.format, stored):
            copies.append((tensor.shape, held.format))
        if compressible(tensor, held.format, stored):
            packs.append((tensor.shape, held.format))
    return Situation(
        copy_bytes=_bytes(copies),
        share=_share(plan, stored),
        spare_bytes=memory_bytes - use.total_bytes - use.reserve_bytes,
        visits=plan.schedule.prefill == "stream",
        waiting=_waiting(plan, request),
        compress_bytes=_bytes(packs),
        compressed_bytes=sum(tensor_bytes("bf16c", shape) for shape, _ in packs),
        compress_share=_bytes(packs) / max(1, _bytes(_cpu_matrices(plan))),
    )


def _waiting(plan: Plan, request: LoadingRequest) -> Waiting:
    """Without a prediction: a decode step reads the matrices and does nothing else."""
    if plan.prediction is not None:
        work, predicted = plan.prediction.workload, plan.prediction.predicted
        prefill, decode = predicted.prefill_terms, predicted.decode_terms
        together = predicted.sequences
        return Waiting(
            prefill_s=prefill["cpu_memory_s"],
            decode_s=decode["cpu_memory_s"],
            prefill_products_s=prefill["cpu_memory_s"] + prefill["cpu_compute_s"],
            decode_products_s=decode["cpu_memory_s"] + decode["cpu_compute_s"],
            step_s=predicted.decode_s,
            prompt_tokens=min(plan.limits.step_tokens, work.prompt * together),
            decode_tokens=-(-together // plan.schedule.decode_groups),
            waves=-(-work.batch // together),
            batch=work.batch,
            output=work.output,
            objective=work.objective,
        )
    waits_s, products_s = _decode_products_s(plan, request)
    return Waiting(
        prefill_s=0.0,
        decode_s=waits_s,
        prefill_products_s=0.0,
        decode_products_s=products_s,
        step_s=products_s,
        prompt_tokens=plan.limits.step_tokens,
        decode_tokens=request.batch,
        waves=1,
        batch=request.batch,
        output=Workload().output,
        objective=request.objective,
    )


def _decode_products_s(plan: Plan, request: LoadingRequest) -> tuple[float, float]:
    """Of a step's products, the time that they wait for weights, and all."""
    matrices = _cpu_matrices(plan)
    size, kind = _bytes(matrices), _most(matrices)
    cpu = None if request.cpu is None else request.cpu.complete
    if cpu is None or kind not in cpu.matvec_bytes_per_s or kind not in cpu.matmul_flops:
        memory_s = size / ASSUMED_MATVEC_BYTES_PER_S
        return memory_s, memory_s
    if plan.threads in cpu.thread_sweep:
        cpu = cpu.with_threads(plan.threads)
    memory_s = size / cpu.matvec_bytes_per_s[kind]
    flops = 2.0 * request.batch * sum(math.prod(shape) for shape, _ in matrices)
    compute_s = flops / float(cpu.matmul_rate(kind, request.batch))
    products_s = max(memory_s, compute_s)
    return (memory_s if is_memory_bound(compute_s, memory_s) else 0.0), products_s


def _most(weights: Iterable[Weight]) -> str:
    """The format class of most of the bytes."""
    total: dict[str, int] = {}
    for weight in weights:
        kind = rate_class(weight[1])
        total[kind] = total.get(kind, 0) + _bytes([weight])
    return max(total, key=lambda kind: total[kind], default="")


def _share(plan: Plan, stored: str | None) -> float:
    """Of the bytes of matrices, on any device, those that could stay mapped."""
    formats = {held.tensor: held.format for held in plan.slices}
    matrices = [t for t in plan.tensors if len(t.shape) == 2]
    mapped = [t for t in matrices if mappable(t, formats[t.name], stored)]
    size, every = (_bytes((t.shape, formats[t.name]) for t in some) for some in (mapped, matrices))
    return size / max(1, every)


def _cpu_matrices(plan: Plan) -> list[Weight]:
    held = ((tensor.shape, held.format) for tensor, held in plan.held("cpu"))
    return [weight for weight in held if len(weight[0]) == 2]


def _bytes(weights: Iterable[Weight]) -> int:
    return sum(tensor_bytes(format, shape) for shape, format in weights)
