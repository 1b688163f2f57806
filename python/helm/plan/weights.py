"""What a plan says of weights: where tensors are stored, what each device holds of them, and the
checks of both. Knows nothing of the rest of a plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from helm.base.formats import DTYPE_BYTES, FORMATS, LINE_BYTES, tensor_bytes
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
from helm.plan.units import CPU

Access = Literal["resident", "mapped", "disk"]
_MOST_ROWS, _MOST_BYTES = 2**31, 2**46  # the runtime's bounds
_MOST_PIECES = 8
_MOST_NODE = 1023
_MOST_PARTS = 64  # of a tensor
_DENSE_COLS, _PACKED_COLS = 32, 256  # a multiple of which columns are cut at


@dataclass(frozen=True)
class TensorPart:
    """Where a part lies: it begins at `row` and `col` (0 of a vector) of the checkpoint's `tensor`,
    which has `shape`."""

    tensor: str
    shape: tuple[int, ...]
    row: int
    col: int


@dataclass(frozen=True)
class TensorSpec:
    """A weight of the model, or a part of one. shape: [rows, cols] or [size]. source: of the whole;
    None: bound from memory, or a plan that is only read. part None: all of it."""

    name: str
    shape: tuple[int, ...]
    source: Source | None
    part: TensorPart | None = None

    @property
    def whole(self) -> str:
        """The checkpoint's name."""
        return self.name if self.part is None else self.part.tensor

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The checkpoint's."""
        return self.shape if self.part is None else self.part.shape


def part_of(whole: TensorSpec, rows: tuple[int, int], cols: tuple[int, int]) -> TensorSpec:
    """Rows and columns (from, to) of a tensor; of a vector, cols are (0, 1)."""
    matrix = len(whole.shape) == 2
    shape = (rows[1] - rows[0], cols[1] - cols[0])[: len(whole.shape)]
    part = TensorPart(whole.name, whole.shape, rows[0], cols[0])
    ranges = f"{rows[0]}:{rows[1]}" + f", {cols[0]}:{cols[1]}" * matrix
    return TensorSpec(f"{whole.name}[{ranges}]", shape, whole.source, part)


@dataclass(frozen=True)
class Slice:
    """A tensor as the device of that name holds it. access "mapped": the CPU reads it where its
    file is mapped; "disk": it is read from its file in every step, see `helm.plan.disk`. node: the
    memory node on which the CPU's copy lies; None: where its reader is."""

    tensor: str
    device: str
    format: str
    access: Access
    node: int | None = field(default=None, metadata={"optional": True})


def slice_bytes(
    tensors: Iterable[TensorSpec], slices: Iterable[Slice], device: str
) -> dict[str, int]:
    """By tensor what its slice takes on a device, nothing where it is on disk. A part with all
    columns of a tensor that is there as a whole, in the same format, takes nothing but in bf16c.
    """
    slices = [held for held in slices if held.device == device]
    formats = {held.tensor: held.format for held in slices}
    on_disk = {held.tensor for held in slices if held.access == "disk"}

    def lies_in_whole(tensor: TensorSpec) -> bool:
        part, own = tensor.part, formats[tensor.name]
        if part is None or formats.get(part.tensor) != own or own == "bf16c":
            return False  # rows of bf16c are not found without the whole's
        return tensor.shape[1:] == part.shape[1:] and part.row % FORMATS[own].row_unit == 0

    return {
        tensor.name: 0
        if tensor.name in on_disk or lies_in_whole(tensor)
        else tensor_bytes(formats[tensor.name], tensor.shape)
        for tensor in tensors
        if tensor.name in formats
    }


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
    _check_parts(tensors, root["tensors"].items())
    _check_slices(tensors, slices, *_read(units), root["slices"])


def _check_tensor(tensor: TensorSpec, node: Reader) -> None:
    if len(tensor.shape) not in (1, 2) or min(tensor.shape) < 1:
        node["shape"].reject("expected one or two positive dimensions")
    whole = tensor
    if tensor.part is not None:
        _check_part(tensor, tensor.part, node)
        whole = dataclasses.replace(tensor, shape=tensor.part.shape)
    if tensor.source is not None:
        _check_source(whole, tensor.source, node["source"])


def _check_part(tensor: TensorSpec, part: TensorPart, node: Reader) -> None:
    """It lies within the whole, on borders where the bytes of a row may be cut."""
    own = node["part"]
    if len(part.shape) != len(tensor.shape):
        own["shape"].reject(f"expected {len(tensor.shape)} dimensions, as the part has")
    for node_of_size in own["shape"].items():
        node_of_size.integer(1, _MOST_ROWS)
    begin = (own["row"].integer(0, _MOST_ROWS), own["col"].integer(0, _MOST_ROWS))
    if len(tensor.shape) == 1 and part.col != 0:
        own["col"].reject("expected 0, as a vector has no columns")
    for key, at, size, most in zip(("row", "col"), begin, tensor.shape, part.shape, strict=False):
        if at + size > most:
            own[key].reject(f"ends at {at + size}, {part.tensor!r} at {most}")
    if len(tensor.shape) == 2:
        unit = cut_cols(tensor.source)
        end = part.col + tensor.shape[1]
        if part.col % unit:
            own["col"].reject(f"columns are cut at multiples of {unit}, not at {part.col}")
        if end % unit and end != part.shape[1]:
            node["shape"].reject(f"columns are cut at multiples of {unit}, not at {end}")
    name = part_of(
        TensorSpec(part.tensor, part.shape, None),
        (begin[0], begin[0] + tensor.shape[0]),
        (begin[1], begin[1] + tensor.shape[-1]),
    ).name
    if tensor.name != name:
        node["name"].reject(f"expected {name!r}")


def cut_cols(source: Source | None) -> int:
    """Columns of a tensor that is stored so may be cut at multiples of so many."""
    return _DENSE_COLS if source is None or source.stored in DTYPE_BYTES else _PACKED_COLS


def _check_parts(tensors: Sequence[TensorSpec], nodes: Sequence[Reader]) -> None:
    """Those of one tensor are alike and cover it, each element once."""
    places: dict[str, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.part is not None:
            places.setdefault(tensor.part.tensor, []).append(place)
    wholes = {tensor.name: tensor for tensor in tensors if tensor.part is None}
    for name, found in places.items():
        first = tensors[found[0]]
        if len(found) > _MOST_PARTS:
            nodes[found[_MOST_PARTS]]["part"].reject(f"{name!r} has more than {_MOST_PARTS} parts")
        likes = [first, *([wholes[name]] if name in wholes else [])]
        for place in found:
            for like in likes:
                own = tensors[place]
                if (own.whole_shape, own.source) != (like.whole_shape, like.source):
                    nodes[place]["part"].reject(f"{name!r} has another shape or source elsewhere")
        _check_tiles(name, [(place, _rectangle(tensors[place])) for place in found], nodes)


_Rectangle = tuple[int, int, int, int]  # rows from, to, columns from, to


def _rectangle(tensor: TensorSpec) -> _Rectangle:
    assert tensor.part is not None
    rows, cols = (*tensor.shape, 1)[:2]
    row, col = tensor.part.row, tensor.part.col
    return row, row + rows, col, col + cols


def _check_tiles(
    name: str, parts: Sequence[tuple[int, _Rectangle]], nodes: Sequence[Reader]
) -> None:
    first = nodes[parts[0][0]]
    for number, (_, one) in enumerate(parts):
        for _, other in parts[:number]:
            rows = max(one[0], other[0]), min(one[1], other[1])
            cols = max(one[2], other[2]), min(one[3], other[3])
            if rows[0] < rows[1] and cols[0] < cols[1]:
                first["part"].reject(f"{_shown(rows, cols)} of {name!r} lie in two parts")
    shape = (*first["part"]["shape"].value, 1)[:2]
    if sum((r[1] - r[0]) * (r[3] - r[2]) for _, r in parts) == shape[0] * shape[1]:
        return
    # Where anything is left out, a cell between two borders is.
    borders = [
        itertools.pairwise(
            sorted({0, shape[axis], *(b for _, r in parts for b in r[2 * axis :][:2])})
        )
        for axis in (0, 1)
    ]
    for rows, cols in itertools.product(*borders):
        if not any(r[0] <= rows[0] < r[1] and r[2] <= cols[0] < r[3] for _, r in parts):
            first["part"].reject(f"{_shown(rows, cols)} of {name!r} lie in no part")


def _shown(rows: tuple[int, int], cols: tuple[int, int]) -> str:
    return f"rows {rows[0]} to {rows[1]}, columns {cols[0]} to {cols[1]}"


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
    """Exactly one for each tensor and device that has an op reading it; but where an accelerator
    has none the CPU's, from where it visits."""
    listed_at = {(held.tensor, held.device) for held in slices}
    for name, device in sorted(wanted - listed_at):
        if device != CPU and (name, CPU) in listed_at:
            wanted = wanted - {(name, device)} | {(name, CPU)}
            visiting = visiting | {name}
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
        if held.node is not None:
            item["node"].integer(0, _MOST_NODE)
            if held.device != CPU or held.access != "resident":
                item["node"].reject("only what is copied to the CPU's memory lies on a node")
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
    if tensor.source is not None and not lies_as_held(tensor, held.format):
        node.reject(
            f"cannot be mapped: expected one run of rows side by side, stored as {held.format} "
            "and aligned"
        )


def lies_as_held(tensor: TensorSpec, held: str) -> bool:
    """Whether the CPU can read a tensor with a source in its file's pages, in the format `held`."""
    source = tensor.source
    assert source is not None
    if source.stored != held or not _in_one_piece(source):
        return False
    offset = source.extents[0].offset
    if tensor.part is not None:
        width = row_width(tensor.part.shape)
        begin, end = tensor.part.row, tensor.part.row + tensor.shape[0]
        at_end = end == tensor.part.shape[0] or end % FORMATS[held].row_unit == 0
        if row_width(tensor.shape) != width or begin % FORMATS[held].row_unit or not at_end:
            return False
        offset += FORMATS[held].bytes(begin, width)
    aligned = LINE_BYTES if held in PACKED else stored_bytes(held, 1)
    return offset % aligned == 0


def _in_one_piece(source: Source) -> bool:
    return len(source.extents) == 1 and not source.extents[0].row_stride
