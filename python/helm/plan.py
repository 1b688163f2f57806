"""Makes plans: places a model on the CPU within a memory budget. Reads no file, loads nothing.

What does not fit is made smaller where the user left room, or refused with the numbers. The
format itself is in `helm.plan_format`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from helm.checkpoint import TensorInfo
from helm.config import ModelConfig
from helm.errors import CheckpointError, InvalidError, OutOfMemoryError
from helm.graph import Attention, Graph
from helm.models import build_graph
from helm.plan_format import (
    DTYPE_BYTES,
    DType,
    KvSpec,
    Limits,
    MemoryUse,
    ModelIdentity,
    PlacedTensor,
    PlacedUnit,
    Plan,
    Source,
)

__all__ = ["DEFAULT_RESERVE_BYTES", "MemoryUse", "Plan", "check_checkpoint", "make_plan"]

DEFAULT_RESERVE_BYTES = 512 << 20  # interpreter, tokenizer, page tables, the system's own needs
_PACKING_BYTES = 1 << 20  # above every tier's scratch for packed matrix panels, per thread
_QUERY_BLOCK = 32  # queries that one worker attends at once
_SHOWN = 8  # names listed in one message
_HARMLESS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|embed_positions\._float_tensor)$"
    r"|^(model\.)?decoder\.version$"
)


@dataclass(frozen=True)
class _Budget:
    """What the KV cache may take. fixed: everything else, its KV field zero."""

    memory_bytes: int
    reserve_bytes: int
    resident_bytes: int  # weights used where they already lie in memory
    fixed: MemoryUse

    @property
    def kv_bytes(self) -> int:
        taken = self.fixed.total_bytes - self.resident_bytes
        return self.memory_bytes - self.reserve_bytes - taken


def make_plan(
    config: ModelConfig,
    checkpoint_tensors: Mapping[str, TensorInfo] | None,
    *,
    context: int | None = None,
    max_sequences: int = 8,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    page_tokens: int = 512,
    step_tokens: int = 512,
    threads: int,
    memory_bytes: int,
    reserve_bytes: int = DEFAULT_RESERVE_BYTES,
) -> Plan:
    """Places every unit on the CPU.

    checkpoint_tensors: from `read_checkpoint`, or `TensorInfo.in_memory` for bound tensors; None
    plans from the configuration alone, with weights of `config.dtype` (f32 when it names none).
    context: positions per sequence; None takes the model's, less if memory is short. dtype: placed
    dtype of matrices, "auto" as stored; vectors are always f32. kv_dtype "auto": that of most
    matrix bytes. memory_bytes: what the machine has free, of which `reserve_bytes` stay untouched.

    Raises InvalidError for arguments out of range, CheckpointError when the checkpoint does not
    fit the model, OutOfMemoryError with every item's size when weights and the smallest KV cache
    do not fit.
    """
    wanted = config.max_context if context is None else context
    limits = Limits(wanted, step_tokens, max_sequences, max_sequences)
    _check_arguments(config, limits, page_tokens, threads, (dtype, kv_dtype))
    graph = build_graph(config, None if checkpoint_tensors is None else checkpoint_tensors.keys())
    if checkpoint_tensors is not None:
        check_checkpoint(graph, checkpoint_tensors)
    tensors = _place_tensors(graph, config, checkpoint_tensors, dtype)
    kv = KvSpec(
        dtype=cast(DType, _dominant_dtype(tensors) if kv_dtype == "auto" else kv_dtype),
        page_tokens=min(page_tokens, wanted),
        layers=graph.kv.layers,
        kv_heads=graph.kv.kv_heads,
        head_dim=graph.kv.head_dim,
        pages=0,
    )
    fixed = _memory_use(graph, tensors, limits, kv, threads)
    resident = _resident_bytes(tensors, checkpoint_tensors)
    budget = _Budget(memory_bytes, reserve_bytes, resident, fixed)
    limits, kv, notices = _fit_kv(budget, limits, kv, shrink=context is None)
    notices += _head_notice(config, checkpoint_tensors)
    return Plan(
        model=_identity(config, checkpoint_tensors),
        limits=limits,
        threads=threads,
        kv=kv,
        rope=graph.rope,
        tensors=tensors,
        values=graph.values,
        units=tuple(PlacedUnit(unit.name, "cpu", unit.ops) for unit in graph.units),
        logits=graph.logits,
        memory={"cpu": _memory_use(graph, tensors, limits, kv, threads)},
        notices=tuple(notices),
    )


def _check_arguments(
    config: ModelConfig, limits: Limits, page_tokens: int, threads: int, dtypes: tuple[str, str]
) -> None:
    if not 1 <= limits.context <= config.max_context:
        raise InvalidError(
            f"[plan] a context of {limits.context} was asked for, the model allows 1 to "
            f"{config.max_context}; choose one in that range"
        )
    for name, value, most in (
        ("max_sequences", limits.sequences, 4096),
        ("step_tokens", limits.step_tokens, 2**20),
        ("page_tokens", page_tokens, 2**20),
        ("threads", threads, 4096),
    ):
        if not 1 <= value <= most:
            raise InvalidError(f"[plan] {name} is {value}; expected 1 to {most}")
    if limits.step_tokens < limits.sequences:
        raise InvalidError(
            f"[plan] step_tokens is {limits.step_tokens}, max_sequences {limits.sequences}; a step "
            "must hold a token of every sequence: raise step_tokens or lower max_sequences"
        )
    for name, dtype in zip(("dtype", "kv_dtype"), dtypes, strict=True):
        if dtype not in ("auto", *DTYPE_BYTES):
            raise InvalidError(
                f"[plan] {name} is {dtype!r}; expected auto, {', '.join(DTYPE_BYTES)}"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def check_checkpoint(graph: Graph, tensors: Mapping[str, TensorInfo]) -> None:
    """Every weight is there with its shape and none is left over; CheckpointError otherwise.

    Left over may be what older exporters stored beside the weights (rotary tables, causal masks)
    and the head of a tied model.
    """
    missing = [name for name in graph.tensors if name not in tensors]
    if missing:
        raise CheckpointError(
            f"[plan] {graph.architecture} needs {len(missing)} tensors that the checkpoint lacks: "
            f"{_listed(missing)}; expected a complete checkpoint of the config's model"
        )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in graph.tensors.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(
            f"[plan] {len(wrong)} tensors do not have the shape that config.json implies: "
            f"{_listed(wrong)}"
        )
    unknown = [
        name
        for name in tensors
        if name not in graph.tensors and name != "lm_head.weight" and not _HARMLESS.search(name)
    ]
    if unknown:
        raise CheckpointError(
            f"[plan] the checkpoint has {len(unknown)} tensors that {graph.architecture} does not "
            f"use: {_listed(unknown)}; the answer would be wrong without them, so config.json and "
            "checkpoint must match"
        )


def _place_tensors(
    graph: Graph, config: ModelConfig, infos: Mapping[str, TensorInfo] | None, dtype: str
) -> tuple[PlacedTensor, ...]:
    placed = []
    for name, shape in graph.tensors.items():
        info = None if infos is None else infos[name]
        stored = (config.dtype or "f32") if info is None else info.weight_dtype
        chosen = "f32" if len(shape) == 1 else stored if dtype == "auto" else dtype
        source = None
        if info is not None and info.file is not None:
            source = Source(info.file, info.offset, cast(DType, stored))
        placed.append(PlacedTensor(name, shape, cast(DType, chosen), source))
    return tuple(placed)


def _dominant_dtype(tensors: tuple[PlacedTensor, ...]) -> str:
    """The dtype of most matrix bytes."""
    total = dict.fromkeys(DTYPE_BYTES, 0)
    for tensor in tensors:
        if len(tensor.shape) == 2:
            total[tensor.dtype] += tensor.nbytes
    return max(total, key=lambda dtype: total[dtype])


def _resident_bytes(
    tensors: tuple[PlacedTensor, ...], infos: Mapping[str, TensorInfo] | None
) -> int:
    """Bytes of bound tensors whose dtype is as placed: they are used where they lie."""
    return sum(
        tensor.nbytes
        for tensor in tensors
        if infos is not None
        and infos[tensor.name].file is None
        and infos[tensor.name].weight_dtype == tensor.dtype
    )


def _memory_use(
    graph: Graph, tensors: tuple[PlacedTensor, ...], limits: Limits, kv: KvSpec, threads: int
) -> MemoryUse:
    rows = {"tokens": limits.step_tokens, "outputs": limits.step_outputs}
    activations = sum(_line(4 * value.width * rows[value.rows]) for value in graph.values)
    return MemoryUse(
        weights_bytes=sum(tensor.nbytes for tensor in tensors),
        kv_bytes=kv.pages * kv.page_bytes,
        activations_bytes=activations,
        workspace_bytes=_workspace_bytes(graph, limits, kv, threads),
    )


def _workspace_bytes(graph: Graph, limits: Limits, kv: KvSpec, threads: int) -> int:
    """An upper bound of the CPU stage's scratch: per-thread packing and partial attention, one
    partial result per (sequence, KV head, page), and the step's rotary tables."""
    worker, partials = _PACKING_BYTES, 0
    pages = -(-limits.context // kv.page_tokens)
    for op in (op for op in graph.ops() if isinstance(op, Attention)):
        group, dim = op.heads // op.kv_heads, op.head_dim
        floats = 2 * _QUERY_BLOCK * group * (dim + 32) + 256 * (dim + 64)
        worker = max(worker, _PACKING_BYTES + 4 * floats)
        partials = max(partials, 4 * limits.sequences * op.kv_heads * pages * group * (dim + 32))
    tables = sum(2 * _line(4 * limits.step_tokens * len(table.inv_freq)) for table in graph.rope)
    return threads * worker + partials + tables


def _line(size: int) -> int:
    """`size` in whole cache lines of 64 bytes."""
    return -(-size // 64) * 64


def _fit_kv(
    budget: _Budget, limits: Limits, kv: KvSpec, shrink: bool
) -> tuple[Limits, KvSpec, list[str]]:
    """The largest cache up to full contexts for all sequences; at least one full context, which
    is lowered if `shrink`. Raises OutOfMemoryError."""
    block_bytes = kv.page_bytes * kv.layers  # one page of every layer
    room = max(0, budget.kv_bytes // block_bytes)
    one = -(-limits.context // kv.page_tokens)
    notices: list[str] = []
    if room < one and not (shrink and room > 0):
        raise OutOfMemoryError(_refusal(budget, limits, kv, room))
    if room < one:
        context = room * kv.page_tokens
        notices.append(
            f"memory holds a context of {context} tokens, the model allows {limits.context}"
        )
        limits, one = dataclasses.replace(limits, context=context), room
    blocks = min(room, one * limits.sequences)
    if blocks < one * limits.sequences:
        notices.append(
            f"the KV cache holds {blocks * kv.page_tokens} tokens in all, not the "
            f"{limits.context} of each of {limits.sequences} sequences; more wait their turn"
        )
    return limits, dataclasses.replace(kv, pages=blocks * kv.layers), notices


def _refusal(budget: _Budget, limits: Limits, kv: KvSpec, room: int) -> str:
    fixed = budget.fixed
    blocks = -(-limits.context // kv.page_tokens)
    kv_bytes = blocks * kv.page_bytes * kv.layers
    fits = f"a context of {room * kv.page_tokens} would fit"
    if room == 0:
        short = kv.page_bytes * kv.layers - budget.kv_bytes
        fits = (
            f"even a context of {kv.page_tokens} lacks {_size(short)}; free memory, choose a "
            "smaller model, a 16-bit dtype or fewer step_tokens"
        )
    return (
        f"[plan] needs weights {_size(fixed.weights_bytes - budget.resident_bytes)} + KV cache "
        f"{_size(kv_bytes)} for a context of {limits.context} + activations "
        f"{_size(fixed.activations_bytes)} + workspace {_size(fixed.workspace_bytes)} + reserve "
        f"{_size(budget.reserve_bytes)}; {_size(budget.memory_bytes)} are available; {fits}"
    )


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _head_notice(config: ModelConfig, infos: Mapping[str, TensorInfo] | None) -> list[str]:
    head = None if infos is None else infos.get("lm_head.weight")
    if not config.tie_word_embeddings or head is None or head.file is None:
        return []
    return ["config.json ties the head to the embedding, so lm_head.weight is not used"]


def _identity(config: ModelConfig, infos: Mapping[str, TensorInfo] | None) -> ModelIdentity:
    table = [dataclasses.astuple(infos[name]) for name in sorted(infos)] if infos else []
    identity = json.dumps([dataclasses.asdict(config), table], sort_keys=True)
    return ModelIdentity(
        config.architecture,
        hashlib.sha256(identity.encode()).hexdigest(),
        config.vocab_size,
        config.hidden_size,
        config.max_context,
    )
