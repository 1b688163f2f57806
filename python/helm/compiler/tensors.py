"""Which model a plan is for, which weights it places, in which formats and from where. Knows no
machine and no placement."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from helm.base.arguments import listed
from helm.base.formats import DTYPE_BYTES, FORMATS, PACKED_POLICIES, STRIP_ROWS, tensor_bytes
from helm.errors import CheckpointError, PlanError
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.graph import (
    Attention,
    Embedding,
    Graph,
    Linear,
    PositionEmbedding,
    Select,
)
from helm.model.mixture_ops import Experts
from helm.model.source import Source
from helm.model.stacked import routers
from helm.model.weight_names import HEAD
from helm.plan.schema import ModelIdentity, Plan
from helm.plan.units import CPU, PlacedUnit
from helm.plan.weights import Slice, TensorSpec, lies_as_held

_Q8, _Q4 = "c8.s32", "c4.km32"
# The formats of most quantised checkpoints, where only their config.json is there.
_ASSUMED = {
    **dict.fromkeys(("gptq4", "gptq4v2", "awq"), "c4.z128"),
    **dict.fromkeys(("gptq8", "gptq8v2"), "c8.z128"),
    **{"compressed-tensors": "c8.s128b", "fp8": "bf16", "mxfp4": "mx4.e32"},
}
_FEW_WEIGHTS = 1 << 17  # a matrix of less is held in 8 bits under q4, too
# A matrix of less that passes on what attention found is held as stored under q8 and q4. It is read
# in no time, and its rounding costs the most accuracy of all.
_FEWEST_WEIGHTS = 1 << 15


def check_checkpoint(graph: Graph, tensors: Mapping[str, TensorInfo]) -> None:
    """Every weight is there with its shape and none is left over; CheckpointError otherwise.

    tensors: by transformers' names, see `helm.model.weight_names`.
    """
    missing = [name for name in graph.tensors if name not in tensors]
    unknown = [name for name in tensors if name not in graph.tensors]
    if missing == [HEAD] and not unknown:
        raise CheckpointError(
            f"[plan] the checkpoint has no {HEAD}, and config.json does not say that the model "
            "shares its embedding; expected a head; download the whole checkpoint of the causal LM"
        )
    if missing:
        beside = f", and has others: {listed(unknown)}" if unknown else ""
        raise CheckpointError(
            f"[plan] {graph.architecture} needs {len(missing)} tensors that the checkpoint lacks: "
            f"{listed(missing)}{beside}; expected a complete checkpoint of the config's model"
        )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in graph.tensors.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(
            f"[plan] {len(wrong)} tensors do not have the shape that config.json implies: "
            f"{listed(wrong)}"
        )
    if unknown:
        raise CheckpointError(
            f"[plan] the checkpoint has {len(unknown)} tensors that {graph.architecture} does not "
            f"use: {listed(unknown)}; the answer would be wrong without them, so config.json and "
            "checkpoint must match"
        )


def tensors_of(graph: Graph, infos: Mapping[str, TensorInfo] | None) -> tuple[TensorSpec, ...]:
    """Every weight of the graph, with its source where it has one. Raises CheckpointError where the
    checkpoint does not fit the model."""
    if infos is not None:
        check_checkpoint(graph, infos)

    def source(name: str) -> Source | None:
        info = None if infos is None else infos[name]
        if info is None or info.file is None:
            return None
        return Source(info.weight_dtype, info.extents, info.aux)

    return tuple(TensorSpec(name, shape, source(name)) for name, shape in graph.tensors.items())


def choose_formats(
    graph: Graph, config: ModelConfig, infos: Mapping[str, TensorInfo] | None, policy: str
) -> dict[str, str]:
    """Tensor -> format, on any device; policy: one of POLICIES. Vectors are f32."""
    wide = _tables_and_head(graph)
    attended = _of_values(graph)
    exact, uneven, experts = routers(graph), _uneven(graph), _of_experts(graph)

    def elements(name: str) -> str | None:
        if infos is not None:
            return infos[name].dtype
        return (config.dtype or "f32") if config.quantization is None else None

    def format(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) == 1:
            return "f32"
        if name in exact or (name in uneven and policy in PACKED_POLICIES):
            return elements(name) or (config.dtype or "f32")
        if policy == "auto" and infos is not None:
            return infos[name].held
        if policy == "auto":
            dense = config.quantization is None or name in wide
            dense |= config.quantization == "mxfp4" and name not in experts
            return (config.dtype or "f32") if dense else _ASSUMED[config.quantization or ""]
        if policy not in PACKED_POLICIES:
            return policy
        weights = shape[0] * shape[1]
        stored = elements(name) if name in attended and weights < _FEWEST_WEIGHTS else None
        if stored is not None:
            return stored
        few = weights < _FEW_WEIGHTS
        return _Q8 if policy == "q8" or few or name in wide else _Q4

    return {name: format(name, shape) for name, shape in graph.tensors.items()}


def _tables_and_head(graph: Graph) -> set[str]:
    """Embeddings, and the matrix that makes logits."""
    tables = {op.table for op in graph.ops() if isinstance(op, (Embedding, PositionEmbedding))}
    heads = (op for op in graph.ops() if isinstance(op, Linear) and op.out == graph.logits)
    return tables | {part.weight for op in heads for part in op.parts}


def _of_experts(graph: Graph) -> set[str]:
    return {name for op in graph.ops() if isinstance(op, Experts) for name in op.matrices()}


def _uneven(graph: Graph) -> set[str]:
    """Matrices of experts with a number of rows each that no packed format keeps together."""
    found = set[str]()
    for op in graph.ops():
        if isinstance(op, Experts):
            rows = {name: graph.tensors[name][0] // op.experts for name in op.matrices()}
            halves = 2 if op.layout == "halves" else 1
            found |= {n for n, count in rows.items()
                      if count % (STRIP_ROWS * (1 if n == op.down else halves))}  # fmt: skip
    return found


def _of_values(graph: Graph) -> set[str]:
    """The matrices before and after attention's sums of values: what makes V, and the output's."""
    found, makers, attended = set[str](), dict[str, Linear](), set[str]()
    for op in graph.ops():
        if isinstance(op, Attention):
            attended.add(op.out)
            row = 0  # of the stacked parts
            for part in makers[op.input].parts:
                rows = graph.tensors[part.weight][0]
                if row <= op.v_offset < row + rows:
                    found.add(part.weight)
                row += rows
        elif isinstance(op, Linear):
            if op.input in attended:
                found |= {part.weight for part in op.parts}
            makers[op.out] = op
            attended.discard(op.out)
        elif isinstance(op, Select) and op.input in attended:
            attended.add(op.out)
    return found


def slices_of(
    tensors: Iterable[TensorSpec],
    units: Iterable[PlacedUnit],
    format: Callable[[str, str], str],
    visiting: Container[str] = (),
) -> tuple[Slice, ...]:
    """What each device holds of `tensors` for its units. format: of a whole tensor on a device.
    visiting: tensors that the CPU holds for units elsewhere."""
    read = {
        (name, CPU if name in visiting else u.device)
        for u in units for op in u.ops for name in op.weight_names()
    }  # fmt: skip
    devices = sorted({device for _, device in read}, key=lambda device: (device != CPU, device))
    return tuple(
        Slice(tensor.name, device, format(tensor.whole, device), "resident")
        for tensor in tensors
        for device in devices
        if (tensor.name, device) in read
    )


def mappable(tensor: TensorSpec, format: str, stored: str | None) -> bool:
    """Whether the runtime can read it where its file is mapped: stored as it is held, elements
    aligned. stored: the dtype of all tensors of a model whose checkpoint is not there; None: it
    is, and a tensor without a source is bound from memory."""
    if tensor.source is None:
        return format == stored and tensor.shape[1:] == tensor.whole_shape[1:]
    return lies_as_held(tensor, format)


def compressible(tensor: TensorSpec, format: str, stored: str | None) -> bool:
    """Whether the runtime can hold it as bf16c on the CPU: a bf16 matrix that becomes smaller,
    unless it is bound from memory. stored: see `mappable`."""
    there = tensor.source is not None or stored is not None
    if not there or format != "bf16" or len(tensor.shape) != 2:
        return False
    smaller = FORMATS["bf16c"].bytes(*tensor.shape) < tensor_bytes(format, tensor.shape)
    return smaller and FORMATS["bf16c"].takes(tensor.shape[1])


def compressed_formats(
    tensors: Iterable[TensorSpec], formats: Mapping[str, str], stored: str | None
) -> dict[str, str]:
    """Those that the CPU holds in another format when weights are compressed."""
    return {t.name: "bf16c" for t in tensors if compressible(t, formats[t.name], stored)}


def dominant_format(graph: Graph, formats: Mapping[str, str]) -> str:
    """The format of most matrix bytes."""
    total = dict.fromkeys((*DTYPE_BYTES, *formats.values()), 0)
    for name, shape in graph.tensors.items():
        if len(shape) == 2:
            total[formats[name]] += tensor_bytes(formats[name], shape)
    return max(total, key=lambda format: total[format])


def dominant_dtype(
    graph: Graph,
    formats: Mapping[str, str],
    config: ModelConfig,
    infos: Mapping[str, TensorInfo] | None,
) -> str:
    """The dtype that goes with the weights: that of most matrix bytes; where those are packed, what
    the checkpoint has, in 16 bits."""
    found = dominant_format(graph, formats)
    if found in DTYPE_BYTES:
        return found
    stored = {config.dtype} if infos is None else {info.stored for info in infos.values()}
    return "bf16" if "bf16" in stored or config.dtype == "bf16" else "f16"


def resident_bytes(formats: Mapping[str, str], infos: Mapping[str, TensorInfo] | None) -> int:
    """Bytes of bound tensors whose dtype is the format: they are used where they lie."""
    return sum(
        tensor_bytes(info.stored, info.shape)
        for name, info in ({} if infos is None else infos).items()
        if info.file is None and info.weight_dtype == formats[name]
    )


def check_model(
    plan: Plan, config: ModelConfig, checkpoint_tensors: Mapping[str, TensorInfo] | None
) -> None:
    """PlanError unless `plan` was made for this configuration and checkpoint."""
    found = identity(config, checkpoint_tensors, plan.limits.context)
    if plan.model == found:
        return
    fields = dataclasses.asdict(found)
    differs = [name for name, value in fields.items() if getattr(plan.model, name) != value]
    shown = ", ".join(
        f"{name} {getattr(plan.model, name)!r} in the plan, {fields[name]!r} here"
        for name in differs
    )
    raise PlanError(
        f"[plan] the plan was made for another model: {shown}; make the plan anew for this one"
    )


_NONE = object()
# Fields that configurations did not always have, with their defaults.
_SINCE = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.default is not dataclasses.MISSING
}


def identity(
    config: ModelConfig, infos: Mapping[str, TensorInfo] | None, context: int
) -> ModelIdentity:
    """Of a configuration and its checkpoint, if that is there. KV that longrope's tables of short
    contexts have turned is not that of long ones: beyond them it is another model."""
    table = [infos[name].identity for name in sorted(infos)] if infos else []
    far = ["far"] if config.is_far(context) else []
    text = json.dumps([_stated(dataclasses.asdict(config)), table, *far], sort_keys=True)
    return ModelIdentity(
        config.architecture,
        hashlib.sha256(text.encode()).hexdigest(),
        config.vocab_size,
        config.hidden_size,
        config.max_context,
    )


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """Without what configurations had no field for before, where it says nothing: what was saved
    for a model stays of use."""
    said = {name: value for name, value in config.items() if value != _SINCE.get(name, _NONE)}
    rope = config.get("rope")
    if rope is None:
        return said
    listed = ("factors", "long_factors")
    return {**said, "rope": {k: v for k, v in rope.items() if k not in listed or v}}
