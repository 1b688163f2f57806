"""What a plan says of weights: where tensors are stored, what each device holds of them, and the
checks of both. Knows nothing of the rest of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from helm.base.formats import FORMATS, LINE_BYTES
from helm.base.jsonio import Reader
from helm.model.graph import Op
from helm.model.source import (
    IN_PIECES,
    PACKED,
    PIECE_BYTES,
    STORED,
    Extent,
    Source,
    row_width,
    stored_bytes,
)

Access = Literal["resident", "mapped"]
_MOST_ROWS, _MOST_BYTES = 2**31, 2**46  # the runtime's bounds
_MOST_PIECES = 8


@dataclass(frozen=True)
class TensorSpec:
    """A weight of the model. shape: [rows, cols] or [size]. source None: bound from memory, or a
    plan that is only read."""

    name: str
    shape: tuple[int, ...]
    source: Source | None


@dataclass(frozen=True)
class Slice:
    """A tensor as the device of that name holds it. access "mapped": the CPU reads it where its
    file is mapped."""

    tensor: str
    device: str
    format: str
    access: Access


def check_weights(
    tensors: Sequence[TensorSpec],
    slices: Sequence[Slice],
    units: Iterable[tuple[str, bool, Sequence[Op]]],
    root: Reader,
) -> None:
    """Raises the error of `root`, a plan, naming the field. units: (device, whether their weights
    visit an accelerator, ops), whose names resolve."""
    for tensor, node in zip(tensors, root["tensors"].items(), strict=True):
        _check_tensor(tensor, node)
    _check_slices(tensors, slices, *_read(units), root["slices"])


def _check_tensor(tensor: TensorSpec, node: Reader) -> None:
    if len(tensor.shape) not in (1, 2) or min(tensor.shape) < 1:
        node["shape"].reject("expected one or two positive dimensions")
    if tensor.source is not None:
        _check_source(tensor, tensor.source, node["source"])


def _check_source(tensor: TensorSpec, source: Source, node: Reader) -> None:
    node["stored"].choice((*STORED, *IN_PIECES))
    if source.stored in IN_PIECES:
        _check_pieces(tensor, source, node)
        return
    if source.aux:
        node["aux"].reject(f"{source.stored} has no pieces")
    block, width = STORED[source.stored].elements, row_width(tensor.shape)
    if width % block:
        node["stored"].reject(f"a row of {width} is no multiple of the {block} of a block")
    for extent, item in zip(source.extents, node["extents"].items(), strict=True):
        _check_extent(extent, item, stored_bytes(source.stored, width))
    if source.stored in PACKED and len(tensor.shape) == 1:
        node["stored"].reject(f"vectors are not stored as {source.stored}")
    if source.stored in PACKED and not _in_one_piece(source):
        node["extents"].reject(f"a matrix of {source.stored} lies in one piece")
    rows = sum(extent.rows for extent in source.extents)
    if rows != tensor.shape[0]:
        node["extents"].reject(f"have {rows} rows, the tensor {tensor.shape[0]}")


def _check_pieces(tensor: TensorSpec, source: Source, node: Reader) -> None:
    """Whether they go together is told where they are loaded."""
    if len(tensor.shape) == 1:
        node["stored"].reject(f"vectors are not stored as {source.stored}")
    if source.extents:
        node["extents"].reject("expected none beside pieces")
    if not 1 <= len(source.aux) <= _MOST_PIECES:
        node.get("aux", []).reject(f"expected 1 to {_MOST_PIECES} pieces")
    for piece, item in zip(source.aux, node["aux"].items(), strict=True):
        if sum(other.name == piece.name for other in source.aux) > 1:
            item["name"].reject(f"{piece.name} is listed twice")
        item["dtype"].choice(PIECE_BYTES)
        if len(piece.shape) > 2:
            item["shape"].reject("expected at most two dimensions")
        for size in item["shape"].items():
            size.integer(1, _MOST_ROWS)
        _check_file(item["file"])
        item["offset"].integer(0, _MOST_BYTES)


def _check_file(node: Reader) -> None:
    file = node.string()
    if not file or file.startswith("/") or ".." in file.split("/"):
        node.reject(f"{file!r} leaves the model directory")


def _check_extent(extent: Extent, node: Reader, row_bytes: int) -> None:
    _check_file(node["file"])
    node["offset"].integer(0, _MOST_BYTES)
    node["rows"].integer(1, _MOST_ROWS)
    stride = node["row_stride"].integer(0, _MOST_BYTES)
    if 0 < stride < row_bytes:
        node["row_stride"].reject(f"is {stride}, a row takes {row_bytes}")


def _check_slices(
    listed: Iterable[TensorSpec],
    slices: Sequence[Slice],
    wanted: set[tuple[str, str]],
    visiting: set[str],
    node: Reader,
) -> None:
    """Exactly one for each tensor and device that has an op reading it."""
    tensors = {tensor.name: tensor for tensor in listed}
    seen: set[tuple[str, str]] = set()
    for held, item in zip(slices, node.items(), strict=True):
        if held.tensor not in tensors:
            item["tensor"].reject(f"unknown tensor {held.tensor!r}")
        place = (held.tensor, held.device)
        if place not in wanted:
            wrong = "is listed twice" if place in seen else "is read by no op there"
            item["tensor"].reject(f"{held.tensor!r} on the {held.device} {wrong}")
        seen.add(place)
        wanted.remove(place)
        _check_format(held, tensors[held.tensor], item["format"], visiting)
        if held.access == "mapped":
            _check_mapped(held, tensors[held.tensor], item["access"])
    if wanted:
        name, device = min(wanted)
        node.reject(f"there is none of {name!r} on the {device}, where ops read it")


def _read(
    units: Iterable[tuple[str, bool, Sequence[Op]]],
) -> tuple[set[tuple[str, str]], set[str]]:
    """(tensor, device) that ops read, and the CPU's tensors that visit the accelerator."""
    read, visiting = set[tuple[str, str]](), set[str]()
    for device, visits, ops in units:
        names = {name for op in ops for name in op.weight_names()}
        read |= {(name, device) for name in names}
        if visits:
            visiting |= names
    return read, visiting


def _check_format(held: Slice, tensor: TensorSpec, node: Reader, visiting: set[str]) -> None:
    chosen = FORMATS[node.choice(FORMATS)]
    if len(tensor.shape) == 1:
        if held.format != "f32":
            node.reject("vectors are held as f32")
        return
    if not chosen.takes(tensor.shape[1]):
        node.reject(f"{held.format} takes no matrix of {tensor.shape[1]} columns")
    if held.format == "bf16c" and held.device != "cpu":
        node.reject("bf16c is for the CPU alone")
    if held.format == "bf16c" and held.tensor in visiting:
        node.reject("weights that visit the accelerator cannot be bf16c")


def _check_mapped(held: Slice, tensor: TensorSpec, node: Reader) -> None:
    """Nothing to check where there is no source: what is bound lies in memory."""
    if held.device != "cpu":
        node.reject("mapped weights are for the CPU alone")
    if tensor.source is not None and not lies_as_held(tensor.source, held.format):
        node.reject(
            f"cannot be mapped: expected one run of rows side by side, stored as {held.format} "
            "and aligned"
        )


def lies_as_held(source: Source, held: str) -> bool:
    """Whether the CPU can read a tensor in its file's pages, in the format `held`."""
    if source.stored != held or not _in_one_piece(source):
        return False
    aligned = LINE_BYTES if held in PACKED else stored_bytes(held, 1)
    return source.extents[0].offset % aligned == 0


def _in_one_piece(source: Source) -> bool:
    return len(source.extents) == 1 and not source.extents[0].row_stride
