"""What the ways of loading weights mean for a plan on the CPU's side: bytes to copy or compress,
rates once they are mapped. Decides and searches nothing."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from helm.base.formats import tensor_bytes
from helm.compiler.load_cost import ASSUMED_MATVEC_BYTES_PER_S, LoadingRequest, Waiting
from helm.compiler.tensors import mappable
from helm.compiler.times import is_memory_bound
from helm.machine.profile import Profile
from helm.machine.rates import rate_class
from helm.plan.records import Loading, Predicted, Workload
from helm.plan.schema import Plan
from helm.plan.weights import TensorSpec


def loaded_profile(profile: Profile, access: Loading, mapped_share: float) -> Profile:
    """The rates with which weights loaded so are read. mapped_share: see that function."""
    cpu = profile.cpu
    if access == "compressed":
        cpu = cpu.complete
    if access == "mapped":
        cpu = cpu.with_mapped_weights(mapped_share)
    return dataclasses.replace(profile, cpu=cpu)


def mapped_share(
    tensors: Iterable[TensorSpec], formats: Mapping[str, str], stored: str | None
) -> float:
    """Of the bytes of matrices, on any device, those that could stay mapped. stored: see
    `mappable`."""
    matrices = [(t, formats[t.whole]) for t in tensors if len(t.shape) == 2]
    mapped = bytes_of(held for held in matrices if mappable(*held, stored))
    return mapped / max(1, bytes_of(matrices))


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


def priced_waiting(plan: Plan, work: Workload, predicted: Predicted) -> Waiting:
    """For the weights of a plan with copied ones."""
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


def unpriced_waiting(plan: Plan, request: LoadingRequest) -> Waiting:
    """Where no profile gives times: a decode step reads the matrices and does nothing else."""
    matrices = [(t, own.format) for t, own in plan.held("cpu") if len(t.shape) == 2]
    sizes: Counter[str] = Counter()
    for matrix in matrices:
        sizes[rate_class(matrix[1])] += bytes_of([matrix])
    kind = max(sizes, key=lambda kind: sizes[kind], default="")
    cpu = None if request.cpu is None else request.cpu.complete
    waits_s = products_s = sizes.total() / ASSUMED_MATVEC_BYTES_PER_S
    if cpu is not None and kind in cpu.matvec_bytes_per_s and kind in cpu.matmul_flops:
        if plan.threads in cpu.thread_sweep:
            cpu = cpu.with_threads(plan.threads)
        memory_s = sizes.total() / cpu.matvec_bytes_per_s[kind]
        flops = 2.0 * request.batch * sum(math.prod(t.shape) for t, _ in matrices)
        compute_s = flops / float(cpu.matmul_rate(kind, request.batch))
        waits_s = memory_s if is_memory_bound(compute_s, memory_s) else 0.0
        products_s = max(memory_s, compute_s)
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


def bytes_of(weights: Iterable[tuple[TensorSpec, str]]) -> int:
    """weights: with their formats."""
    return sum(tensor_bytes(format, tensor.shape) for tensor, format in weights)
