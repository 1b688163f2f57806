"""What the ways of loading weights mean for a plan on the CPU's side: bytes to copy or compress,
rates once they are mapped. Decides and searches nothing."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from helm.base.formats import tensor_bytes
from helm.compiler.load_cost import (
    ASSUMED_MATVEC_BYTES_PER_S,
    LoadingRequest,
    Situation,
    Waiting,
)
from helm.compiler.problem import Space
from helm.compiler.tensors import compressible, mappable
from helm.compiler.times import is_memory_bound
from helm.machine.profile import Profile
from helm.machine.rates import rate_class
from helm.plan.records import Loading, Predicted, Workload
from helm.plan.schema import Plan
from helm.plan.weights import TensorSpec

Weight = tuple[tuple[int, ...], str]  # shape and format


def loaded_profile(profile: Profile, access: Loading, mapped_share: float) -> Profile:
    """The rates with which weights loaded so are read. mapped_share: see that function."""
    cpu = profile.cpu
    if access == "compressed":
        cpu = cpu.complete
    if access == "mapped":
        cpu = cpu.with_mapped_weights(mapped_share)
    return dataclasses.replace(profile, cpu=cpu)


def loaded_space(space: Space, access: Loading) -> Space:
    """What the runtime can do with weights that are loaded so."""
    if access != "compressed":
        return dataclasses.replace(space, mapped_weights=access == "mapped")
    return dataclasses.replace(space, prefill=tuple(m for m in space.prefill if m != "stream"))


def mapped_share(
    tensors: Iterable[TensorSpec], formats: Mapping[str, str], stored: str | None
) -> float:
    """Of the bytes of matrices, on any device, those that could stay mapped. stored: see
    `mappable`."""
    matrices = [t for t in tensors if len(t.shape) == 2]
    mapped = [t for t in matrices if mappable(t, formats[t.name], stored)]
    size, every = (_bytes((t.shape, formats[t.name]) for t in some) for some in (mapped, matrices))
    return size / max(1, every)


def with_mapped(plan: Plan, stored: str | None) -> Plan:
    """`plan` with what the CPU holds left in its files, where it can be read there."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    slices = tuple(
        dataclasses.replace(held, access="mapped")
        if held.device == "cpu" and mappable(tensors[held.tensor], held.format, stored)
        else held
        for held in plan.slices
    )
    return dataclasses.replace(plan, slices=slices)


def situation(
    plan: Plan,
    priced: tuple[Workload, Predicted] | None,
    request: LoadingRequest,
    share: float,
    stored: str | None,
    memory_bytes: int,
) -> Situation:
    """Of a plan with copied weights. priced: its work and times, where a profile gave them. share:
    see `mapped_share`. memory_bytes: of the host, what the plan may take with its reserve."""
    held = [(tensor, own.format) for tensor, own in plan.held("cpu")]
    copies = [(t.shape, format) for t, format in held if mappable(t, format, stored)]
    packs = [(t.shape, format) for t, format in held if compressible(t, format, stored)]
    matrices = [(t.shape, format) for t, format in held if len(t.shape) == 2]
    use = plan.memory["cpu"]
    return Situation(
        copy_bytes=_bytes(copies),
        share=share,
        spare_bytes=memory_bytes - use.total_bytes - use.reserve_bytes,
        visits=plan.schedule.prefill == "stream",
        waiting=_waiting(plan, *priced) if priced else _unpriced(matrices, plan, request),
        compress_bytes=_bytes(packs),
        compressed_bytes=sum(tensor_bytes("bf16c", shape) for shape, _ in packs),
        compress_share=_bytes(packs) / max(1, _bytes(matrices)),
    )


def _waiting(plan: Plan, work: Workload, predicted: Predicted) -> Waiting:
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


def _unpriced(matrices: Sequence[Weight], plan: Plan, request: LoadingRequest) -> Waiting:
    """A decode step reads the matrices and does nothing else."""
    waits_s, products_s = _decode_products_s(matrices, plan.threads, request)
    return Waiting(
        decode_s=waits_s,
        decode_products_s=products_s,
        step_s=products_s,
        prompt_tokens=plan.limits.step_tokens,
        decode_tokens=request.batch,
        batch=request.batch,
        output=Workload().output,
        objective=request.objective,
    )


def _decode_products_s(
    matrices: Sequence[Weight], threads: int, request: LoadingRequest
) -> tuple[float, float]:
    """Of a step's products, the time that they wait for weights, and all."""
    sizes: Counter[str] = Counter()
    for shape, format in matrices:
        sizes[rate_class(format)] += tensor_bytes(format, shape)
    size, kind = sizes.total(), max(sizes, key=lambda kind: sizes[kind], default="")
    cpu = None if request.cpu is None else request.cpu.complete
    if cpu is None or kind not in cpu.matvec_bytes_per_s or kind not in cpu.matmul_flops:
        memory_s = size / ASSUMED_MATVEC_BYTES_PER_S
        return memory_s, memory_s
    if threads in cpu.thread_sweep:
        cpu = cpu.with_threads(threads)
    memory_s = size / cpu.matvec_bytes_per_s[kind]
    flops = 2.0 * request.batch * sum(math.prod(shape) for shape, _ in matrices)
    compute_s = flops / float(cpu.matmul_rate(kind, request.batch))
    products_s = max(memory_s, compute_s)
    return (memory_s if is_memory_bound(compute_s, memory_s) else 0.0), products_s


def _bytes(weights: Iterable[Weight]) -> int:
    return sum(tensor_bytes(format, shape) for shape, format in weights)
