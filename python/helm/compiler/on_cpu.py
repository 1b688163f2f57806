"""The memory of a plan on the CPU alone: what fits, how large its KV cache becomes, and what is
said where nothing fits. Searches nothing."""

from __future__ import annotations

import dataclasses

from helm.base.sizes import size_text
from helm.compiler.candidate import Candidate
from helm.compiler.counts import CostedGraph
from helm.compiler.memory import activation_bytes, workspace_bytes
from helm.compiler.placement import Counted, fewer_at_once, less_context
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import beside_reserve, host_reserve
from helm.compiler.tensors import dominant_format
from helm.errors import OutOfMemoryError
from helm.plan.kv import KvSpec
from helm.plan.schema import Limits, MemoryUse, Schedule

_MOST_BLOCKS = 2**24  # of an entry


def on_cpu(
    problem: Problem,
    model: CostedGraph,
    limits: Limits,
    threads: int,
    best: Candidate | None,
) -> Counted:
    """With the largest cache up to full contexts for all sequences; at least one full context,
    which is lowered where the problem allows that and no search was made, which had lowered it.
    Returns what fits and what to say of it; raises OutOfMemoryError with every item's size.

    best: what a search found."""
    disk = None if best is None else best.disk
    if best is not None and disk is not None:
        limits = dataclasses.replace(limits, step_tokens=best.step_tokens)

    def use(limits: Limits, kv: KvSpec) -> MemoryUse:
        units = model.graph.units
        return MemoryUse(
            weights_bytes=model.host_bytes(units) - (0 if disk is None else disk.held_bytes),
            kv_bytes=kv.total_bytes,
            activations_bytes=activation_bytes(model.graph, units, limits),
            workspace_bytes=workspace_bytes(model.graph, units, limits, kv, threads),
            staging_bytes=0 if disk is None else disk.ring_bytes,
        )

    kv = problem.kv
    fixed = use(limits, kv)
    taken = fixed.total_bytes - problem.resident_bytes
    room, reserve = problem.room_bytes, problem.reserve_bytes
    left = _beside(room, reserve) - taken
    if problem.slower.near_bytes is not None:  # where weights need not be, and all else is
        others = fixed.total_bytes - fixed.weights_bytes
        left = min(left, _beside(problem.slower.near_bytes, reserve) - others)
    few = kv.most_window_blocks(limits.step_tokens, limits.sequences)
    most = _most_blocks(kv, few, left)
    one = -(-limits.context // kv.page_tokens)
    notices: list[str] = []
    if most < one:
        context = most * kv.page_tokens
        if context == 0 or best is not None or not problem.shrinks:
            raise OutOfMemoryError(_refusal(problem, fixed, limits, context))
        notices.append(less_context(context, limits))
        limits, one = dataclasses.replace(limits, context=context), most
    blocks = min(most, one * limits.sequences)
    if blocks < one * limits.sequences:
        notices.append(fewer_at_once(blocks * kv.page_tokens, limits))
    kv = dataclasses.replace(kv, blocks=blocks, window_blocks=few if few < blocks else 0)
    needs = use(limits, kv)
    beside = _reserve(problem, taken + needs.kv_bytes)
    memory = {"cpu": dataclasses.replace(needs, reserve_bytes=beside)}
    order = Schedule(pages={"cpu": kv.pages}, disk_ring_bytes=needs.staging_bytes)
    return limits, kv, memory, order, notices


def _beside(room: int, reserve: int | None) -> int:
    return beside_reserve(room) if reserve is None else room - reserve


def _most_blocks(kv: KvSpec, few: int, left: int) -> int:
    """Pages of an entry for which `left` bytes have room. few: those of an entry with a window, if
    that is less; 0 without windows."""
    most = max(0, left // kv.block_bytes)
    if not few or most <= few:
        return most
    heads = sum(entry.kv_heads for entry in kv.layers if not entry.window)
    left -= few * (kv.block_bytes - heads * kv.unit_bytes)
    return min(_MOST_BLOCKS, left // max(1, heads * kv.unit_bytes))


def _reserve(problem: Problem, taken: int) -> int:
    """Bytes that stay free beside a plan that takes so many."""
    return int(host_reserve(taken)) if problem.reserve_bytes is None else problem.reserve_bytes


def _refusal(problem: Problem, fixed: MemoryUse, limits: Limits, context: int) -> str:
    """context: what would fit."""
    kv, resident, room = problem.kv, problem.resident_bytes, problem.room_bytes
    page_bytes, taken = kv.block_bytes, fixed.total_bytes - resident
    kv_bytes = -(-limits.context // kv.page_tokens) * page_bytes
    fits = f"a context of {context} would fit"
    if context == 0:
        least = taken + page_bytes
        wide = dominant_format(problem.graph, problem.formats) == "f32"
        fits = (
            f"even a context of {kv.page_tokens} lacks "
            f"{size_text(least + _reserve(problem, least) - room)}; free memory, or allow "
            "more with memory_bytes= if that was limited, or choose a smaller model"
            f"{' or a 16-bit dtype=' if wide else ''}"
        )
    return (
        f"[plan] needs weights {size_text(fixed.weights_bytes - resident)} + KV cache "
        f"{size_text(kv_bytes)} for a context of {limits.context} + activations "
        f"{size_text(fixed.activations_bytes)} + workspace {size_text(fixed.workspace_bytes)} + "
        f"reserve {size_text(_reserve(problem, taken + kv_bytes))}; {size_text(room)} are "
        f"available; {fits}"
    )
