"""Which weights a plan places, in which dtype and from where. Knows no machine and no placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from helm.checkpoint import TensorInfo
from helm.compiler.loading import Loading
from helm.config import ModelConfig
from helm.dtypes import DTYPE_BYTES, DType
from helm.errors import CheckpointError
from helm.graph import Graph
from helm.plan_format import PlacedTensor, Source
from helm.weight_names import HEAD, listed

# Of compressed matrices.
_CHUNK_WEIGHTS, _CHUNK_BYTES, _ROW_BYTES = 128, 192, 8
_WEIGHTS_PER_ESCAPE, _ESCAPE_BYTES = 256, 4
_MOST_COLUMNS = 65536


def check_checkpoint(graph: Graph, tensors: Mapping[str, TensorInfo]) -> None:
    """Every weight is there with its shape and none is left over; CheckpointError otherwise.

    tensors: by transformers' names, see `helm.weight_names`.
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


def place_tensors(
    graph: Graph, config: ModelConfig, infos: Mapping[str, TensorInfo] | None, dtype: str
) -> tuple[PlacedTensor, ...]:
    """Every weight of the graph; dtype is that of matrices, "auto" as stored, vectors are f32."""
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


def mappable(tensor: PlacedTensor, stored: str | None) -> bool:
    """Whether the runtime can read it where its file is mapped: stored as it is placed, elements
    aligned. stored: the dtype of all tensors of a model whose checkpoint is not there; None: it
    is, and a tensor without a source is bound from memory."""
    source = tensor.source
    if source is None:
        return tensor.dtype == stored
    return source.dtype == tensor.dtype and source.offset % DTYPE_BYTES[tensor.dtype] == 0


def compressible(tensor: PlacedTensor, stored: str | None) -> bool:
    """Whether the runtime can hold it compressed on the CPU: a bf16 matrix that becomes smaller,
    unless it is bound from memory. stored: see `mappable`."""
    if tensor.dtype != "bf16" or len(tensor.shape) != 2 or tensor.shape[1] > _MOST_COLUMNS:
        return False
    there = tensor.source is not None or stored is not None
    return there and compressed_bytes(tensor) < tensor.nbytes


def compressed_bytes(tensor: PlacedTensor) -> int:
    """What a compressed matrix takes: see cpp/cpu/kernels/compressed.h."""
    rows, cols = tensor.shape
    return _compressed_rows(tensor) + (rows * cols // _WEIGHTS_PER_ESCAPE + 64) * _ESCAPE_BYTES


def read_bytes(tensor: PlacedTensor, loading: Loading) -> int:
    """What the CPU reads of a matrix in a product: of a compressed one its rows, as hardly any of
    them has escapes."""
    if loading == "compressed" and compressible(tensor, None):
        return _compressed_rows(tensor)
    return tensor.nbytes


def _compressed_rows(tensor: PlacedTensor) -> int:
    rows, cols = tensor.shape
    return rows * (-(-cols // _CHUNK_WEIGHTS) * _CHUNK_BYTES + _ROW_BYTES)


def compressed_tensors(
    tensors: tuple[PlacedTensor, ...], loading: Loading, stored: str | None
) -> dict[str, int]:
    """Those that are compressed on the CPU when weights are loaded so, and what they take there."""
    if loading != "compressed":
        return {}
    return {t.name: compressed_bytes(t) for t in tensors if compressible(t, stored)}


def dominant_dtype(tensors: tuple[PlacedTensor, ...]) -> str:
    """The dtype of most matrix bytes."""
    total = dict.fromkeys(DTYPE_BYTES, 0)
    for tensor in tensors:
        if len(tensor.shape) == 2:
            total[tensor.dtype] += tensor.nbytes
    return max(total, key=lambda dtype: total[dtype])


def resident_bytes(
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
