"""What would have to change: why nothing fits, the largest context that does, and what more
memory or bandwidth would bring. Every answer is a search or a sum of bytes; formats no table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from helm.base.formats import uncompressed
from helm.base.sizes import counted, size_text
from helm.compiler.access import loaded_profile, mapped_share
from helm.compiler.budget import executable, itemise, memory_bytes, missing
from helm.compiler.candidate import Candidate
from helm.compiler.counts import CostedGraph
from helm.compiler.problem import PUBLISHED_POLICIES, ResourceLimits, Space
from helm.compiler.search import Search, search
from helm.compiler.setting import Site, make_setting
from helm.errors import HelmError, InvalidError, OutOfMemoryError
from helm.machine.profile import Profile
from helm.machine.rates import scaled_flops
from helm.model.config import ModelConfig
from helm.model.families import build_graph
from helm.model.graph import Graph
from helm.plan.records import Workload
from helm.plan.schema import Plan

_GIB = 2**30
_GB_PER_S = 1e9


def require(found: Search) -> Candidate:
    """The search's best, or OutOfMemoryError saying how many bytes are missing where and what
    would fit."""
    best = found.result.best
    if best is None and found.space.policy == "cut":
        raise _uncut(found)
    if best is None and found.space.policy in PUBLISHED_POLICIES:
        raise _unpublished(found)
    if best is None:
        raise OutOfMemoryError(_refusal(found))
    return best


def _uncut(found: Search) -> HelmError:
    """Why no cut placement, which was asked for, can be had."""
    result, name = found.result, found.model.graph.architecture
    if result.uncut or result.asked is None:
        why = result.uncut or "no way to run its prompts is allowed"
        return InvalidError(
            f"[plan] policy='cut' was asked for, but {name} cannot be cut: {why}; choose 'auto' or "
            "'layer-partition'"
        )
    closest = result.asked
    return OutOfMemoryError(
        f"[plan] policy='cut' was asked for, but no placement of {name} with cut layers fits on "
        f"{found.profile.name}: the nearest {closest.reason} "
        f"({_itemised(closest, memory_bytes(found.profile, found.limits))})"
    )


def _unpublished(found: Search) -> HelmError:
    """Why the plan of a published policy, which was asked for, cannot be had."""
    result, name, policy = found.result, found.model.graph.architecture, found.space.policy
    if result.asked is None:
        why = "no way to run its prompts is allowed, or its KV cache may not lie on the GPU"
        why = result.uncut or why
        return InvalidError(
            f"[plan] policy={policy!r} was asked for, but {name} cannot be placed so: {why}; "
            "choose 'auto' or 'layer-partition'"
        )
    closest = result.asked
    return OutOfMemoryError(
        f"[plan] policy={policy!r} was asked for, but with it {name} does not fit on "
        f"{found.profile.name}: it {closest.reason} "
        f"({_itemised(closest, memory_bytes(found.profile, found.limits))})"
    )


@dataclass(frozen=True)
class Shortage:
    """The least bytes to add so that some layout fits: to both memories together, to the CPU's
    alone, to the accelerator's alone (None: no layout then fits)."""

    cpu: int
    accelerator: int
    cpu_alone: int | None
    accelerator_alone: int | None

    @property
    def fits(self) -> bool:
        return self.cpu + self.accelerator == 0


def shortage(
    model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits, space: Space
) -> Shortage:
    """What the layouts lack that takes least memory; with fewer threads there is less scratch."""
    found: list[tuple[int, int]] = []
    threads = min(profile.cpu.thread_sweep if space.threads is None else space.threads)
    setting = make_setting(model, profile, workload, limits, threads, workload.batch, space=space)
    heads: tuple[Site, ...] = ("cpu",) if profile.accelerator is None else ("cpu", "accelerator")
    for head in heads:
        budget = itemise(setting, head, "compute")
        cpu, own = missing(budget, memory_bytes(profile, limits), limits)
        rows = setting.rows
        allowed = executable(setting) | (space.kv == "host")
        if space.one_boundary and head == "cpu":
            allowed &= (rows.boundary == rows.blocks)[:, None]
        found += zip(cpu[allowed].tolist(), own[allowed].tolist(), strict=True)
    both = min(found, key=lambda pair: (sum(pair), pair))
    return Shortage(
        *both,
        min((cpu for cpu, own in found if own == 0), default=None),
        min((own for cpu, own in found if cpu == 0), default=None),
    )


def largest_context(
    model: CostedGraph, profile: Profile, workload: Workload, limits: ResourceLimits, space: Space
) -> int:
    """The most positions per sequence for which some layout fits, at most the workload's and in
    whole pages if less; 0 if none does."""

    def fits(context: int) -> bool:
        smaller = Workload(1, max(1, context - 1), workload.batch, context)
        return shortage(model, profile, smaller, limits, space).fits

    if fits(max(2, workload.context)):
        return workload.context
    low, high = 0, -(-workload.context // limits.page_tokens)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(max(2, middle * limits.page_tokens)):
            low = middle
        else:
            high = middle
    return low * limits.page_tokens


def nearest(found: Search) -> Candidate:
    """To fitting. Host memory is what can be added most easily: what lacks with the accelerator
    full."""
    layouts = found.result.by_layout
    return min(layouts, key=lambda c: (c.missing.accelerator > 0, c.missing.total))


def _refusal(found: Search) -> str:
    model, profile, workload = found.model, found.profile, found.workload
    limits, space = found.limits, found.space
    closest = nearest(found)
    each = workload.objective in ("throughput", "serve")  # fewer at once were tried, down to one
    least = dataclasses.replace(workload, batch=1) if each else workload
    lacks = shortage(model, profile, least, limits, space)
    context = largest_context(model, profile, least, limits, space)
    changes = []
    if context:
        changes.append(f"a context of {context:,}")
    if lacks.cpu_alone is not None:
        changes.append(f"{size_text(lacks.cpu_alone)} more RAM")
    if lacks.accelerator_alone is not None and profile.accelerator is not None:
        changes.append(f"{size_text(lacks.accelerator_alone)} more VRAM")
    if least.batch > 1:
        changes.append("perhaps a smaller batch")
    one = ", one at a time," if workload.batch > least.batch else ""
    return (
        f"[plan] {model.graph.architecture} with a context of {workload.context:,} for "
        f"{counted(workload.batch, 'request')}{one} does not fit on {profile.name}: the nearest "
        f"placement {closest.reason} ({_itemised(closest, memory_bytes(profile, limits))}); "
        f"it would fit with {' or '.join(changes)}"
    )


def _itemised(candidate: Candidate, available: tuple[int, int]) -> str:
    parts = []
    for device, memory, most in zip(
        ("cpu", "accelerator"), ("RAM", "VRAM"), available, strict=True
    ):
        items = candidate.memory[device]
        listed = " + ".join(
            f"{'KV cache' if purpose == 'kv' else purpose} {size_text(size)}"
            for purpose, size in items.items()
            if size
        )
        if listed:
            parts.append(f"in {size_text(most)} of {memory}: {listed}")
    return "; ".join(parts)


@dataclass(frozen=True)
class Gain:
    """What one change of the machine brings. unit: "GiB" or "GB/s". decode_tokens_per_s, ttft_s
    and objective_s of the best plan after it; gain: how many times faster the objective is."""

    resource: str
    added: float
    unit: str
    decode_tokens_per_s: float
    ttft_s: float
    objective_s: float
    gain: float


def sensitivity(
    found: Search,
    *,
    vram_gib: tuple[int, ...] = (1, 2, 4),
    bandwidth_gb_per_s: tuple[int, ...] = (1, 10),
) -> tuple[Gain, ...]:
    """The best with more accelerator memory and with faster host memory.

    Faster host memory raises every rate of the CPU that is bytes per second. Raises
    OutOfMemoryError if nothing fits as it is.
    """
    now = require(found)

    def gain(resource: str, added: int, unit: str, best: Candidate | None) -> Gain:
        assert best is not None  # more of a resource never makes a candidate infeasible
        return Gain(
            resource,
            float(added),
            unit,
            best.predicted.decode_tokens_per_s,
            best.predicted.ttft_s,
            best.objective_s,
            now.objective_s / best.objective_s,
        )

    gains = []
    for added in vram_gib if found.profile.accelerator else ():
        best = found.within(**_more_memory(found, added * _GIB)).best
        gains.append(gain("accelerator memory", added, "GiB", best))
    for added in bandwidth_gb_per_s:
        faster = _faster_memory(found.profile, added * _GB_PER_S)
        best = search(found.model, faster, found.workload, found.limits, found.space).best
        gains.append(gain("host memory bandwidth", added, "GB/s", best))
    return tuple(gains)


def _more_memory(found: Search, added: int) -> dict[str, int | None]:
    _, own = memory_bytes(found.profile, found.limits)
    weights = found.limits.accelerator_weights_bytes
    return {
        "accelerator_bytes": own + added,
        "accelerator_weights_bytes": None if weights is None else weights + added,
    }


def _faster_memory(profile: Profile, added: float) -> Profile:
    """All of the CPU's bandwidths scaled as that of the placed dtype with most of it."""
    cpu = profile.cpu
    factor = 1.0 + added / max(cpu.matvec_bytes_per_s.values())
    cpu = dataclasses.replace(
        cpu,
        matmul_flops=scaled_flops(cpu.matmul_flops, cpu.matvec_bytes_per_s, factor, 1.0),
        attention_flops=scaled_flops(cpu.attention_flops, cpu.attention_bytes_per_s, factor, 1.0),
        thread_sweep={count: rate * factor for count, rate in cpu.thread_sweep.items()},
        matvec_bytes_per_s={d: rate * factor for d, rate in cpu.matvec_bytes_per_s.items()},
        attention_bytes_per_s={d: rate * factor for d, rate in cpu.attention_bytes_per_s.items()},
        activation_bytes_per_s=cpu.activation_bytes_per_s * factor,
    )
    return dataclasses.replace(profile, cpu=cpu)


def cpu_decode_rate(config: ModelConfig, plan: Plan, profile: Profile, sequences: int = 1) -> float:
    """Decode tokens/s of so many sequences together, of a plan that lies on the CPU, on the machine
    of `profile`. Raises ProfileError if the profile lacks a rate or the plan's thread count."""
    model = costed_graph(plan, build_graph(config))
    share = mapped_share(plan.tensors, model.formats, None)
    host = dataclasses.replace(profile, accelerator=None, link=None)
    host = loaded_profile(host, plan.loading, share)
    work = dataclasses.replace(Workload.within(plan.limits.context), batch=sequences)
    space = Space(threads=(plan.threads,))
    best = Search(model, host, work, space=space).unlimited.best
    assert best is not None  # memory was no object
    return best.predicted.decode_tokens_per_s


def costed_graph(plan: Plan, graph: Graph) -> CostedGraph:
    """The graph with the formats of `plan`, which was made for it."""
    wholes = {tensor.name: tensor.whole for tensor in plan.tensors}
    formats = {wholes[held.tensor]: uncompressed(held.format) for held in plan.slices}
    cpu = {tensor.whole: held.format for tensor, held in plan.held("cpu")}
    return CostedGraph(graph, formats, plan.kv.dtype, cpu)
