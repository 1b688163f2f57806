"""Itemises the memory of every layer partition at once, and what of it is missing. Knows no times
and no objective."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from helm.base.formats import FORMATS
from helm.compiler.memory import (
    DEVICE_ALIGNMENT,
    OverflowBytes,
    accelerator_workspace_bytes,
    activation_bytes,
    overflow_bytes,
    split_limits,
    upload_bytes,
    workspace_bytes,
)
from helm.compiler.overflow import Bools, least_slots
from helm.compiler.problem import MOST_RESERVE_BYTES, Mode, ResourceLimits, host_reserve
from helm.compiler.setting import Setting, Site
from helm.compiler.times import F64, attentions
from helm.machine.profile import Profile
from helm.model.graph import Layer, Unit
from helm.plan.kv import KvSpec
from helm.plan.schema import Limits

Purpose = Literal["weights", "kv", "activations", "workspace", "staging", "reserve"]
PURPOSES: tuple[Purpose, ...] = (
    "weights", "kv", "activations", "workspace", "staging", "reserve",
)  # fmt: skip
Items = dict[Purpose, npt.NDArray[np.int64]]
# [rows] whether a device has the embedding, layers before the last, the last layer, the head
Stages = tuple[Bools, Bools, Bools, Bools]
_F32 = 4
_SLOTS = 2  # steps on their way at once
_GUESSED_ROWS = 8  # of logits that a step has at least: a token, and guesses of what follows


@dataclass(frozen=True)
class Budget:
    """Bytes [rows, pages] by purpose on each device; all zero where a device is not used."""

    cpu: Items
    accelerator: Items

    def at(self, row: int, page: int) -> dict[str, dict[str, int]]:
        """One candidate's items: device -> purpose -> bytes."""
        devices = {"cpu": self.cpu, "accelerator": self.accelerator}
        return {
            device: {purpose: int(items[purpose][row, page]) for purpose in PURPOSES}
            for device, items in devices.items()
        }


@dataclass(frozen=True)
class StageBytes:
    """Scratch of a device that has the units of subset i of `Stages`, at place i as in `_subsets`.
    The same wherever those units are placed. uploading: of host memory, while weights go up to an
    accelerator. activations: of a device by whether it has each of `parts`: the embedding, layers
    of each kind, the head; and by a step's rows. kind: [classes] their place among the parts."""

    workspace: npt.NDArray[np.int64]
    accelerator_workspace: npt.NDArray[np.int64]
    uploading: int
    parts: tuple[tuple[Unit, ...], ...]
    kind: npt.NDArray[np.int64]
    activations: Callable[[tuple[bool, ...], Limits], int]


def stage_bytes(setting: Setting) -> StageBytes:
    """Of `setting`, for any head and mode."""
    spec, limits = geometry(setting)
    key = "stages", spec, limits, setting.cpu.threads
    return setting.once(key, _stage_bytes, setting, spec, limits)


def _stage_bytes(setting: Setting, spec: KvSpec, limits: Limits) -> StageBytes:
    graph, threads = setting.model.graph, setting.cpu.threads
    packed = any(FORMATS[name].packed for name in setting.model.formats.values())
    classes = setting.classes
    last = classes.member[-1]
    before = [layer for i, layer in enumerate(classes.units) if i != last]
    layers = (_units(before), graph.layers[-1].units)
    parts = _subsets(graph.units[:1], *layers, graph.units[-1:])
    sizes = [
        (
            workspace_bytes(graph, part, limits, spec, threads),
            accelerator_workspace_bytes(graph, part, limits, spec, packed=packed),
        )
        for part in parts
    ]
    workspace, accelerator_workspace = np.array(sizes, np.int64).T
    uploading = upload_bytes(graph, setting.model.formats, threads)
    shapes = [tuple(graph.kinds[unit.name].name for unit in each.units) for each in classes.units]
    first = {shape: each.units for shape, each in zip(shapes, classes.units, strict=True)}
    kinds = (graph.units[:1], *first.values(), graph.units[-1:])
    places = np.array([1 + list(first).index(shape) for shape in shapes], np.int64)

    @functools.cache
    def activations(has: tuple[bool, ...], limits: Limits) -> int:
        units = [unit for part, here in zip(kinds, has, strict=True) if here for unit in part]
        return activation_bytes(graph, units, limits)

    return StageBytes(workspace, accelerator_workspace, uploading, kinds, places, activations)


def _activations(
    each: StageBytes, limits: Limits, embedding: Bools, layers: Bools, head: Bools
) -> npt.NDArray[np.int64]:
    """[rows]. layers: [rows, classes] whether the device computes any of them."""
    has = np.zeros((len(layers), len(each.parts)), bool)
    has[:, 0], has[:, -1] = embedding, head
    for member, place in enumerate(each.kind):
        has[:, place] |= layers[:, member]
    rows = [tuple(row) for row in has.tolist()]
    sizes = {row: each.activations(row, limits) for row in set(rows)}
    return np.array([sizes[row] for row in rows], np.int64)


def itemise(setting: Setting, head: Site, mode: Mode, each: StageBytes | None = None) -> Budget:
    """Everything that each device must hold for the workload's full context. each: the setting's
    `stage_bytes`, for calls that differ in head and mode."""
    rows, pages = setting.rows, setting.pages
    used = rows.uses_accelerator(head)
    visits = used & (mode == "visit") & (rows.boundary > 0)
    nothing = np.zeros((len(rows.boundary), len(pages)), np.int64)

    def whole(values: Any) -> npt.NDArray[np.int64]:
        values = np.asarray(values, np.int64)
        return np.asarray(nothing + (values[:, None] if values.ndim == 1 else values))

    spec, limits = geometry(setting)
    counts, rest = setting.counts()
    key = "kv", setting.batch, limits.step_tokens  # the same wherever the head lies
    host_kv, device_kv = setting.once(key, _kv_bytes, setting, spec)
    here, there = np.full_like(used, head == "cpu"), np.full_like(used, head == "accelerator")
    before = rows.boundary < rows.blocks - 1
    cpu_stages = (~rows.embedded, rows.boundary > 0, ~rows.has_blocks, here)
    own_stages = (rows.embedded, before | visits, rows.has_blocks | visits, there)
    each = stage_bytes(setting) if each is None else each
    on_cpu, own = subset_of(cpu_stages), subset_of(own_stages)
    computed = (rest > 0) | visits[:, None] & (counts > 0)
    second = split_limits(limits, visits=mode == "visit")
    own_activations, of_second = (
        _activations(each, of, rows.embedded, computed, there) for of in (limits, second)
    )
    overflows, more = _overflow(setting, spec, limits, second)

    def paged(without: npt.NDArray[np.int64], overflowing: Any) -> npt.NDArray[np.int64]:
        """[rows, pages] with what overflowing KV pages add."""
        return whole(without) + overflows * whole(overflowing)

    crossing = functools.partial(_crossing, setting, used, cpu_stages, own_stages)
    cpu: Items = {
        "weights": whole(_weights(setting, counts, cpu_stages, "cpu")),
        "kv": whole(host_kv),
        "activations": whole(_activations(each, limits, ~rows.embedded, counts > 0, here)),
        "workspace": paged(each.workspace[on_cpu], more.host_workspace),
        "staging": paged(
            _SLOTS * (crossing(limits) + _logits(setting, limits, there)),
            crossing(second) + more.host_staging,
        ),
    }
    own_items: Items = {
        "weights": whole(_weights(setting, rest, own_stages, "accelerator")),
        "kv": whole(device_kv),
        "activations": paged(own_activations, of_second + more.activations),
        "workspace": whole(each.accelerator_workspace[own]),
        "staging": paged(_device_staging(setting, spec, visits), more.visiting),
    }
    return with_reserves(setting, each, cpu, own_items, used[:, None])


def with_reserves(
    setting: Setting, each: StageBytes, cpu: Items, own: Items, used: Bools
) -> Budget:
    """What stays free besides. used: the accelerator."""
    limits, taken = setting.limits, _total(cpu)
    host = np.where(used, MOST_RESERVE_BYTES, host_reserve(taken))
    if limits.cpu_reserve_bytes is not None:
        host = np.full_like(taken, limits.cpu_reserve_bytes)
    # What only steps take is not there yet while weights are loaded.
    loading = (own["weights"] > 0) * each.uploading - (taken - cpu["weights"])
    there = 0 if setting.accelerator is None else setting.accelerator.reserve_bytes
    if limits.accelerator_reserve_bytes is not None:
        there = limits.accelerator_reserve_bytes
    reserve = np.broadcast_to(used * there, taken.shape)
    return Budget({**cpu, "reserve": np.maximum(host, loading)}, {**own, "reserve": reserve})


def step_limits(context: int, step_tokens: int, sequences: int) -> Limits:
    """With logits for a token of every sequence, and so many that one sequence may have guesses."""
    tokens = max(step_tokens, sequences)
    return Limits(context, tokens, max(sequences, min(tokens, _GUESSED_ROWS)), sequences)


def geometry(setting: Setting) -> tuple[KvSpec, Limits]:
    graph, work = setting.model.graph, setting.workload
    tokens = min(setting.limits.page_tokens, work.context)
    kv = graph.kv
    spec = KvSpec(setting.model.kv_dtype, tokens, kv.layers, kv.kv_heads, kv.head_dim, 0)
    return spec, step_limits(work.context, setting.limits.step_tokens, setting.most_sequences)


def _weights(setting: Setting, counts: F64, stages: Stages, device: Site) -> npt.NDArray[np.int64]:
    """[rows] on the device that holds `counts` [rows, classes] of the layers."""
    blocks, ends = setting.once(("weights", device), _held, setting, device)
    at = np.asarray(stages[0], np.int64) + 2 * np.asarray(stages[-1], np.int64)
    return np.asarray((counts @ np.array(blocks, np.float64)).astype(np.int64) + np.array(ends)[at])


def _held(setting: Setting, device: Site) -> tuple[list[int], list[int]]:
    """Weights of a layer of each class, and of the embedding and the head: of neither, one and
    both, where a tensor that they share is counted once."""
    model, units = setting.model, setting.model.graph.units

    def held(part: Iterable[Unit | Layer]) -> int:
        if device == "cpu":
            return model.host_bytes(part)
        return model.weight_bytes(part, DEVICE_ALIGNMENT)

    blocks = [held([unit]) for unit in setting.classes.units]
    return blocks, [held(part) for part in _subsets(units[:1], units[-1:])]


def _kv_bytes(setting: Setting, spec: KvSpec) -> tuple[npt.NDArray[np.int64], ...]:
    """[rows, pages] in host memory and on the accelerator: whole pages of whole contexts. Layers
    with a window keep the pages that it needs, or all where pages of the accelerator overflow."""
    pages = setting.batch * setting.pages[None, :]
    most = setting.batch * setting.pages_of(setting.workload.context)
    ops = [attentions(unit) for unit in setting.classes.units]
    overflows = setting.rows.has_blocks[:, None] & setting.pool.overflows
    few = np.where(overflows, most, setting.window_blocks())
    host, own = np.zeros_like(few), np.zeros_like(few)
    for windows in (False, True):
        layers = np.array([sum((op.window > 0) == windows for op in of) for of in ops], np.float64)
        first, second = ((n @ layers).astype(np.int64)[:, None] for n in setting.counts())
        there = np.where(overflows, pages, few if windows else pages)
        each = few if windows else most
        host += first * each + second * np.where(overflows, most - pages, 0)
        own += second * there
    return host * spec.page_bytes, own * spec.page_bytes


def _units(layers: Iterable[Layer]) -> tuple[Unit, ...]:
    return tuple(unit for layer in layers for unit in layer.units)


def _subsets(*parts: tuple[Unit, ...]) -> list[list[Unit]]:
    """The units of every subset of `parts`; bit i of the place says whether part i is in it."""
    return [
        [unit for bit, part in enumerate(parts) if subset >> bit & 1 for unit in part]
        for subset in range(1 << len(parts))
    ]


def subset_of(stages: Stages) -> npt.NDArray[np.int64]:
    """[rows] the place in `_subsets` of the stages' units."""
    return np.asarray(sum(stage.astype(np.int64) << bit for bit, stage in enumerate(stages)))


def _crossing(
    setting: Setting, used: Bools, cpu_stages: Stages, own_stages: Stages, limits: Limits
) -> npt.NDArray[np.int64]:
    """[rows] page-locked memory of the activations of a step that cross, where both devices work.
    Only those asked for cross between the last layer and the head."""
    both = used & np.logical_or.reduce(cpu_stages)
    embedded, _, last, _ = own_stages
    rows = np.where(last & ~embedded, limits.step_tokens, limits.step_outputs)
    return np.asarray(both * (_F32 * rows * setting.hidden))


def _logits(setting: Setting, limits: Limits, head: Bools) -> npt.NDArray[np.int64]:
    """[rows] likewise those of the accelerator's logits."""
    return np.asarray(head * (_F32 * limits.step_outputs * setting.vocab))


def _device_staging(setting: Setting, spec: KvSpec, visits: Bools) -> npt.NDArray[np.int64]:
    """[rows] where weights visit, two layers and a layer's pages of the batch's prompts."""
    blocks, _ = setting.once(("weights", "accelerator"), _held, setting, "accelerator")
    members = np.array(blocks, np.int64)[setting.classes.member]
    largest = np.maximum.accumulate(np.insert(members, 0, 0))[setting.rows.boundary]
    return np.asarray(visits * (2 * largest + setting.visit_pages * spec.page_bytes))


def _overflow(
    setting: Setting, spec: KvSpec, limits: Limits, second: Limits
) -> tuple[Bools, OverflowBytes]:
    """[rows, pages] whether KV pages overflow, and what that adds."""
    overflows = setting.rows.has_blocks[:, None] & setting.pool.overflows
    model, units = setting.model, _units(setting.classes.units)
    if not overflows.any():
        return overflows, OverflowBytes(0, 0, 0, 0)
    of = limits, spec, setting.cpu.threads, second.step_tokens
    return overflows, setting.once(("overflow", *of), overflow_bytes, model.graph, units, *of)


def executable(setting: Setting) -> Bools:
    """[rows, pages] whether the accelerator's slots for KV blocks are enough for any step, as the
    runtime asks where KV overflows."""
    _, limits = geometry(setting)
    least = least_slots(limits.step_tokens, limits.sequences, setting.limits.page_tokens)
    pool = setting.pool
    enough = ~pool.overflows | (pool.slots >= least)
    return np.asarray(~setting.rows.has_blocks[:, None] | enough)


def memory_bytes(profile: Profile, limits: ResourceLimits) -> tuple[int, int]:
    """What a plan may take of the CPU's and of the accelerator's memory."""
    own = 0 if profile.accelerator is None else profile.accelerator.memory_bytes
    return (
        profile.cpu.memory_bytes if limits.cpu_bytes is None else limits.cpu_bytes,
        own if limits.accelerator_bytes is None else limits.accelerator_bytes,
    )


def missing(
    budget: Budget, available: tuple[int, int], limits: ResourceLimits
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[rows, pages] bytes by which the CPU's and the accelerator's memory are exceeded."""
    cpu = np.maximum(0, _total(budget.cpu) - available[0])
    if limits.cpu_near_bytes is not None:
        others = _total(budget.cpu) - budget.cpu["weights"]
        cpu = np.maximum(cpu, others - limits.cpu_near_bytes)
    own = np.maximum(0, _total(budget.accelerator) - available[1])
    bounds: tuple[tuple[Purpose, int | None], ...] = (
        ("weights", limits.accelerator_weights_bytes),
        ("kv", limits.accelerator_kv_bytes),
    )
    for purpose, most in bounds:
        if most is not None:
            own = np.maximum(own, budget.accelerator[purpose] - most)
    return cpu, own


def _total(items: Items) -> npt.NDArray[np.int64]:
    return np.asarray(sum(items.values()))
