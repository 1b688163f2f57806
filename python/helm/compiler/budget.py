"""Itemises the memory of every layer partition at once. Knows no times and no objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from helm.compiler.cost import attentions, position_bytes
from helm.compiler.memory import activation_bytes, workspace_bytes
from helm.compiler.pricing import Setting, Site
from helm.compiler.workload import Mode
from helm.plan_format import KvSpec, Limits

Purpose = Literal["weights", "kv", "activations", "workspace", "staging", "reserve"]
PURPOSES: tuple[Purpose, ...] = (
    "weights", "kv", "activations", "workspace", "staging", "reserve",
)  # fmt: skip
Items = dict[Purpose, npt.NDArray[np.int64]]
_F32 = 4
_ACCELERATOR_THREADS = 1  # scratch per worker exists once there


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


def itemise(setting: Setting, head: Site, mode: Mode) -> Budget:
    """Everything that each device must hold for the workload's full context."""
    rows, pages = setting.rows, setting.pages
    used = rows.uses_accelerator(head) | ((mode != "compute") & (rows.boundary > 0))
    shape = (len(rows.boundary), len(pages))

    def whole(values: Any) -> npt.NDArray[np.int64]:
        values = np.asarray(values, np.int64)
        column = values[:, None] if values.ndim == 1 else values
        return np.broadcast_to(column, shape)

    spec, limits = _geometry(setting)
    first, second = weight_bytes(setting, head)
    host_kv, device_kv = _kv_bytes(setting, spec)
    no_row = np.zeros(len(rows.boundary), np.int64)
    activations, workspace = _activations(setting, limits), _workspace(setting, limits, spec)
    cpu_blocks, own_blocks = rows.boundary > 0, rows.has_blocks | ((mode != "compute") & used)
    cpu_stages = (~rows.embedded, cpu_blocks, np.full_like(cpu_blocks, head == "cpu"))
    own_stages = (rows.embedded, own_blocks, np.full_like(cpu_blocks, head == "accelerator"))
    staging = used * 2 * _F32 * limits.step_tokens * setting.hidden
    return Budget(
        cpu={
            "weights": whole(first),
            "kv": whole(host_kv),
            "activations": whole(_by_stages(activations, cpu_stages)),
            "workspace": whole(np.where(cpu_blocks, workspace["cpu"], 0)),
            "staging": whole(staging),
            "reserve": whole(no_row + setting.limits.cpu_reserve_bytes),
        },
        accelerator={
            "weights": whole(second),
            "kv": whole(device_kv),
            "activations": whole(_by_stages(activations, own_stages)),
            "workspace": whole(np.where(own_blocks, workspace["accelerator"], 0)),
            "staging": whole(_device_staging(setting, spec, mode)),
            "reserve": whole(used * setting.limits.accelerator_reserve_bytes),
        },
    )


def _geometry(setting: Setting) -> tuple[KvSpec, Limits]:
    graph, work = setting.model.graph, setting.workload
    tokens = min(setting.limits.page_tokens, work.context)
    kv = graph.kv
    spec = KvSpec(setting.model.kv_dtype, tokens, kv.layers, kv.kv_heads, kv.head_dim, 0)
    most = max(setting.limits.sequences, setting.batch)
    return spec, Limits(work.context, max(setting.limits.step_tokens, most), most, most)


def weight_bytes(setting: Setting, head: Site) -> tuple[npt.NDArray[np.int64], ...]:
    """([rows] on the CPU, [rows] on the accelerator). A tensor that the embedding and the head
    share is counted once on a device that has both, and on each device when they are apart."""
    model, rows = setting.model, setting.rows
    units = model.graph.units
    blocks = np.array([model.weight_bytes([unit]) for unit in setting.classes.units], np.float64)
    counts, rest = setting.counts()
    embedding, last = model.weight_bytes([units[0]]), model.weight_bytes([units[-1]])
    shared = embedding + last - model.weight_bytes([units[0], units[-1]])
    on_cpu = (counts @ blocks).astype(np.int64) + np.where(rows.embedded, 0, embedding)
    own = (rest @ blocks).astype(np.int64) + np.where(rows.embedded, embedding, 0)
    if head == "cpu":
        return on_cpu + np.where(rows.embedded, last, last - shared), own
    return on_cpu, own + np.where(rows.embedded, last - shared, last)


def _kv_bytes(setting: Setting, spec: KvSpec) -> tuple[npt.NDArray[np.int64], ...]:
    """[rows, pages] in host memory and on the accelerator: whole pages of whole contexts."""
    rows, pages = setting.rows, setting.pages[None, :]
    most = -(-setting.workload.context // spec.page_tokens)
    layers = np.array([len(attentions(unit)) for unit in setting.classes.units], np.float64)
    counts, rest = setting.counts()
    first = (counts @ layers).astype(np.int64)[:, None]
    second = (rest @ layers).astype(np.int64)[:, None]
    page = setting.batch * spec.page_bytes
    assert len(rows.boundary) == len(first)
    return (first * most + second * (most - pages)) * page, second * pages * page


def _activations(setting: Setting, limits: Limits) -> npt.NDArray[np.int64]:
    """[8] bytes for every subset of (embedding, blocks, head) on one device, as bits."""
    units = setting.model.graph.units
    parts = (units[:1], setting.classes.units, units[-1:])
    sizes = [
        activation_bytes(
            setting.model.graph,
            [unit for bit, part in enumerate(parts) if subset >> bit & 1 for unit in part],
            limits,
        )
        for subset in range(8)
    ]
    return np.array(sizes, np.int64)


def _by_stages(sizes: npt.NDArray[np.int64], stages: tuple[Any, ...]) -> npt.NDArray[np.int64]:
    subset = sum(np.asarray(stage, np.int64) << bit for bit, stage in enumerate(stages))
    return cast("npt.NDArray[np.int64]", sizes[subset])


def _workspace(setting: Setting, limits: Limits, spec: KvSpec) -> dict[str, int]:
    graph = setting.model.graph
    ops = [op for unit in setting.classes.units for op in unit.ops]
    return {
        "cpu": workspace_bytes(graph, ops, limits, spec, setting.cpu.threads),
        "accelerator": workspace_bytes(graph, ops, limits, spec, _ACCELERATOR_THREADS),
    }


def _device_staging(setting: Setting, spec: KvSpec, mode: Mode) -> npt.NDArray[np.int64]:
    """[rows, pages] two pages per sequence where KV overflows; where weights visit, two blocks
    and a layer's K and V of the batch's prompts, and their activations if they visit once."""
    rows, work = setting.rows, setting.workload
    most = -(-work.context // spec.page_tokens)
    overflows = rows.has_blocks[:, None] & (setting.pages < most)[None, :]
    staging = overflows * (2 * setting.batch * spec.page_bytes)
    if mode == "compute":
        return cast("npt.NDArray[np.int64]", staging)
    units = setting.classes.units
    block = np.array([setting.model.weight_bytes([unit]) for unit in units], np.int64)
    largest = np.maximum.accumulate(np.insert(block[setting.classes.member], 0, 0))
    prompts = setting.batch * work.prompt
    kv = max(sum(position_bytes(setting.model, op) for op in attentions(unit)) for unit in units)
    each = prompts * (kv + (_F32 * setting.hidden if mode == "stream_prompt" else 0))
    visits = np.where(rows.boundary > 0, 2 * largest[rows.boundary] + each, 0)
    return cast("npt.NDArray[np.int64]", staging + visits[:, None])
