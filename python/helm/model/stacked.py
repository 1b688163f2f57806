"""The matrices of a mixture's experts, stacked as its ops read them. Knows names, reads no file.

A graph names a stack by `*` in the place of the expert's number. A checkpoint has a tensor for each
expert, or one with a dimension for experts, which is the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from helm.errors import CheckpointError
from helm.model.checkpoint import TensorInfo
from helm.model.graph import (
    Graph,
)
from helm.model.mixture_ops import Experts, Route
from helm.model.source import Extent

_REMEDY = "the checkpoint is damaged or of another model; get it anew"


def with_stacks(tensors: Mapping[str, TensorInfo], graph: Graph) -> dict[str, TensorInfo]:
    """`tensors` with experts stacked, by the graph's names; CheckpointError, which names a tensor,
    where one is missing or unlike the others. Shapes are checked with all others' later."""
    found = dict(tensors)
    for name in routers(graph) & found.keys():
        found[name] = _as_row(found[name], graph.tensors[name])
    for op in graph.ops():
        if not isinstance(op, Experts):
            continue
        for name in op.weight_names():
            plain = name.removesuffix(".weight")
            if name not in found and plain != name and plain in found:
                raise _turned(found[plain], plain)
            if name in found:
                found[name] = _flat(found[name], len(graph.tensors[name]), op.experts)
            elif "*" in name:
                _stack(found, name, op.experts)
    return found


def check_routers(tensors: Mapping[str, TensorInfo], graph: Graph) -> None:
    """CheckpointError for a router that is quantised."""
    for name in routers(graph):
        info = tensors.get(name)
        if info is not None and info.stored not in ("f32", "f16", "bf16"):
            raise CheckpointError(
                f"[load] {info.file}: the router {info.name!r} is stored as {info.stored}, "
                "expected f32, f16 or bf16: its rounding would choose other experts; take another "
                "checkpoint of this model"
            )


def routers(graph: Graph) -> set[str]:
    """The matrices that make the logits of Route ops."""
    read = {op.input for op in graph.ops() if isinstance(op, Route)}
    return {
        part.weight
        for unit in graph.units
        for op in unit.ops
        if getattr(op, "out", None) in read
        for part in getattr(op, "parts", ())
    }


def _turned(info: TensorInfo, plain: str) -> CheckpointError:
    """Experts as modules multiply with them, which checkpoints of this family do not have."""
    return CheckpointError(
        f"[load] {info.file}: the experts {info.name!r} are stored unquantised, as {info.stored} "
        f"{list(info.shape)} of [experts, in, out]; expected MXFP4 as the model is released, in "
        f"{plain}_blocks and {plain}_scales, or a GGUF file of it"
    )


def _as_row(info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    """A router of one row, which some files have as a vector."""
    if shape[0] != 1 or info.shape != shape[1:] or info.aux:
        return info
    [place] = info.extents
    return dataclasses.replace(info, shape=shape, extents=(Extent(place.file, place.offset, 1),))


def _flat(info: TensorInfo, dimensions: int, experts: int) -> TensorInfo:
    """A tensor of all experts, its first two dimensions made one."""
    shape = info.shape
    if len(shape) != dimensions + 1 or info.aux:
        return info
    if shape[0] != experts:
        raise CheckpointError(
            f"[load] {info.file}: tensor {info.name!r} has the shape {list(shape)}, expected "
            f"{experts} experts in the first dimension; {_REMEDY}"
        )
    [place] = info.extents
    whole = Extent(place.file, place.offset, shape[0] * shape[1])
    return dataclasses.replace(info, shape=(shape[0] * shape[1], *shape[2:]), extents=(whole,))


def _stack(tensors: dict[str, TensorInfo], name: str, experts: int) -> None:
    """Takes the tensors of single experts for the stack `name`, if there is one."""
    own = {one: tensors.get(one) for one in _of_experts(name, experts)}
    if not any(own.values()):
        return
    first: TensorInfo | None = None
    for one, info in own.items():
        if info is None:
            lacking = [other for other, found in own.items() if found is None]
            raise CheckpointError(
                f"[load] the checkpoint lacks {len(lacking)} of {experts} experts, among them "
                f"{one!r}; {_REMEDY}"
            )
        first = first or info
        if info.aux:
            raise CheckpointError(
                f"[load] {info.file}: the expert {one!r} is stored as {info.stored}, in pieces; "
                "expected f32, f16 or bf16, or a GGUF file of this model"
            )
        if (info.shape, info.stored) != (first.shape, first.stored):
            raise CheckpointError(
                f"[load] {info.file}: the expert {one!r} is {info.stored} {list(info.shape)}, "
                f"{first.name!r} is {first.stored} {list(first.shape)}; expected the same of all "
                f"experts; {_REMEDY}"
            )
    assert first is not None
    infos = [tensors.pop(one) for one in own]
    shape = (experts * first.shape[0], *first.shape[1:])
    extents = tuple(extent for info in infos for extent in info.extents)
    tensors[name] = TensorInfo(name, shape, first.stored, extents)


def _of_experts(name: str, experts: int) -> Iterator[str]:
    return (name.replace("*", str(expert)) for expert in range(experts))
