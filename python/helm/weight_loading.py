"""Gives a plan its way of loading weights, once everything else of it is decided.

The search prices copied weights. If mapped or compressed ones turn out better, or only compressed
ones fit, it is asked again with the rates and bytes of those, so that placement and predictions are
what will run. Reads no file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from helm.checkpoint import TensorInfo
from helm.compiler.cost import is_memory_bound
from helm.compiler.loading import (
    ASSUMED_MATVEC_BYTES_PER_S,
    Loading,
    LoadingRequest,
    Situation,
    Waiting,
    choose,
)
from helm.compiler.workload import Space, Workload
from helm.config import ModelConfig
from helm.errors import InvalidError, OutOfMemoryError
from helm.profile import Profile
from helm.weights import compressed_bytes, compressible, dominant_dtype, mappable

if TYPE_CHECKING:
    from helm.plan_format import PlacedTensor, Plan


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
        plan = _identified(found, plan)
        return dataclasses.replace(plan, loading="compressed", loading_choice=choice)
    at = _situation(plan, request, stored, memory_bytes)
    if request.weights == "compressed" and at.compress_bytes == 0:
        raise InvalidError(
            "[plan] compressed weights were asked for, but no bf16 matrix that would become "
            "smaller lies on the CPU, or they are a module's in memory; choose copied or mapped "
            "weights"
        )
    loading, choice = choose(request, at, cpu)
    if loading == "compressed":
        plan = _identified(_compressed(place, profile), plan)
    if loading == "mapped" and profile is not None:
        rates = mapped_profile(profile, plan.tensors, stored)
        same = rates == profile and profile.accelerator is None
        other = plan if same else _identified(place(rates, loading), plan)
        if request.weights == "auto" and other.schedule.prefill == "stream":
            loading, choice = choose(request, dataclasses.replace(at, visits=True), cpu)
        else:
            plan = other
    return dataclasses.replace(plan, loading=loading, loading_choice=choice)


def _compressed(place: Place, profile: Profile | None) -> Plan:
    return place(None if profile is None else compressed_profile(profile), "compressed")


def _compressed_for_room(place: Place, profile: Profile | None) -> Plan | None:
    try:
        return _compressed(place, profile)
    except OutOfMemoryError:
        return None


def loaded_profile(profile: Profile, plan: Plan, stored: str | None) -> Profile:
    """The rates with which `plan`, its loading decided, runs on the machine of `profile`."""
    if plan.loading == "mapped":
        return mapped_profile(profile, plan.tensors, stored)
    if plan.loading == "compressed":
        return compressed_profile(profile)
    return profile


def mapped_profile(
    profile: Profile, tensors: tuple[PlacedTensor, ...], stored: str | None
) -> Profile:
    """`profile` with weights that stay mapped where they can."""
    cpu = profile.cpu.with_mapped_weights(_share(tensors, stored))
    return dataclasses.replace(profile, cpu=cpu)


def compressed_profile(profile: Profile) -> Profile:
    """`profile` with compressed weights where they can be."""
    return dataclasses.replace(profile, cpu=profile.cpu.with_compressed_weights())


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
    use, packs = plan.memory["cpu"], [t for t in on_cpu(plan) if compressible(t, stored)]
    return Situation(
        copy_bytes=sum(t.nbytes for t in on_cpu(plan) if mappable(t, stored)),
        share=_share(plan.tensors, stored),
        spare_bytes=memory_bytes - use.total_bytes - use.reserve_bytes,
        visits=plan.schedule.prefill == "stream",
        waiting=_waiting(plan, request),
        compress_bytes=sum(t.nbytes for t in packs),
        compressed_bytes=sum(compressed_bytes(t) for t in packs),
        compress_share=_compress_share(plan, stored),
    )


def _compress_share(plan: Plan, stored: str | None) -> float:
    """Of the bytes of matrices on the CPU, those that can be compressed."""
    matrices = list(_matrices(on_cpu(plan)))
    packs = sum(t.nbytes for t in matrices if compressible(t, stored))
    return packs / max(1, sum(t.nbytes for t in matrices))


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
    matrices = list(_matrices(on_cpu(plan)))
    size, dtype = sum(t.nbytes for t in matrices), dominant_dtype(plan.tensors)
    cpu = request.cpu
    if cpu is None or dtype not in cpu.matvec_bytes_per_s or dtype not in cpu.matmul_flops:
        memory_s = size / ASSUMED_MATVEC_BYTES_PER_S
        return memory_s, memory_s
    if plan.threads in cpu.thread_sweep:
        cpu = cpu.with_threads(plan.threads)
    memory_s = size / cpu.matvec_bytes_per_s[dtype]
    flops = 2.0 * request.batch * sum(math.prod(t.shape) for t in matrices)
    compute_s = flops / float(cpu.matmul_rate(dtype, request.batch))
    products_s = max(memory_s, compute_s)
    return (memory_s if is_memory_bound(compute_s, memory_s) else 0.0), products_s


def _share(tensors: tuple[PlacedTensor, ...], stored: str | None) -> float:
    """Of the bytes of matrices, those that can stay mapped."""
    matrices = list(_matrices(tensors))
    mapped = sum(t.nbytes for t in matrices if mappable(t, stored))
    return mapped / max(1, sum(t.nbytes for t in matrices))


def _matrices(tensors: tuple[PlacedTensor, ...] | Iterator[PlacedTensor]) -> Iterator[PlacedTensor]:
    return (tensor for tensor in tensors if len(tensor.shape) == 2)


def on_cpu(plan: Plan) -> Iterator[PlacedTensor]:
    """Those that units on the CPU read."""
    units = (unit for unit in plan.units if unit.device == "cpu")
    names = {name for unit in units for op in unit.ops for name in op.weight_names()}
    return (tensor for tensor in plan.tensors if tensor.name in names)
