"""The tensor table of a safetensors checkpoint, from the headers alone; reads tensors only to tell
whether two are the same.

Format: https://huggingface.co/docs/safetensors. A file is an 8-byte little-endian header length,
a JSON header, and a buffer that the tensors must cover without overlaps or holes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from helm.errors import CheckpointError
from helm.files import open_file, present
from helm.folder_kinds import refuse_other
from helm.jsonio import Reader, parse, read_json

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES = 256 << 20
_MAX_DIMENSIONS = 64
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
_COMPARED = 1 << 20  # elements at a time
_WEIGHT_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. dtype is safetensors' name ("BF16"); offset and nbytes are bytes,
    offset counts from the start of the file. file is relative to the model directory, or None
    for a tensor in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str | None
    offset: int
    nbytes: int

    @classmethod
    def in_memory(cls, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        """A tensor that the caller binds from memory; dtype "f32", "f16" or "bf16"."""
        elements = 1
        for extent in shape:
            elements *= extent
        stored = {own: name for name, own in _WEIGHT_DTYPES.items()}[dtype]
        return cls(name, stored, shape, None, 0, elements * _BITS[stored] // 8)

    @property
    def weight_dtype(self) -> str:
        """ "f32", "f16" or "bf16". Raises CheckpointError for a dtype no kernel reads."""
        if self.dtype not in _WEIGHT_DTYPES:
            raise CheckpointError(
                f"[load] tensor {self.name!r} in {self.file} is stored as {self.dtype}; expected "
                "F32, F16 or BF16; use an unquantised checkpoint of this model"
            )
        return _WEIGHT_DTYPES[self.dtype]


def read_checkpoint(directory: str | Path) -> dict[str, TensorInfo]:
    """The tensors of model.safetensors, or of the shards in model.safetensors.index.json.

    Raises CheckpointError naming the file and tensor when anything is missing or malformed.
    """
    folder = Path(directory)
    if present(folder / "model.safetensors"):
        return read_header(folder / "model.safetensors", "model.safetensors")
    if present(folder / "model.safetensors.index.json"):
        return _read_sharded(folder, folder / "model.safetensors.index.json")
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as reason:
        raise CheckpointError(f"[load] cannot read {folder}: {reason.strerror}") from None
    refuse_other(folder)
    if any(name.startswith("pytorch_model") and name.endswith(".bin") for name in names):
        raise CheckpointError(
            f"[load] {folder} holds PyTorch pickle files only; expected model.safetensors; convert "
            'them with transformers: AutoModelForCausalLM.from_pretrained("...")'
            '.save_pretrained("...")'
        )
    raise CheckpointError(
        f"[load] {folder} holds neither model.safetensors nor model.safetensors.index.json"
    )


def _read_sharded(folder: Path, index: Path) -> dict[str, TensorInfo]:
    """All that the listed shards hold, wherever the index places it."""
    weight_map = read_json(index, CheckpointError, _MAX_INDEX_BYTES)["weight_map"]
    shards: set[str] = set()
    tensors: dict[str, TensorInfo] = {}
    for name in weight_map.names():
        entry = weight_map[name]
        file = _inside(entry)
        if file in shards:
            continue
        shards.add(file)
        if not present(folder / file):
            entry.reject(f"shard {file} does not exist; download the whole checkpoint")
        for own, info in read_header(folder / file, file).items():
            if own in tensors:
                raise CheckpointError(
                    f"[load] {folder}: tensor {own!r} is in {tensors[own].file} and in {file}; "
                    "expected it once; download the checkpoint again"
                )
            tensors[own] = info
    for name in weight_map.names():
        if name not in tensors:
            weight_map[name].reject(
                f"tensor {name!r} is in no shard; download the whole checkpoint"
            )
    return tensors


def same_data(directory: str | Path, a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two stored tensors have the same values, read up to the first that differs; equal
    bytes are the same, be they NaN. Raises CheckpointError."""
    if a.shape != b.shape:
        return False
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= _WEIGHT_DTYPES.keys():
        return False
    with (
        open_file(Path(directory) / str(a.file)) as (left, _),
        open_file(Path(directory) / str(b.file)) as (right, _),
    ):
        left.seek(a.offset)
        right.seek(b.offset)
        if a.dtype == b.dtype:
            steps = range(0, a.nbytes, 4 * _COMPARED)
            sizes = [min(4 * _COMPARED, a.nbytes - begin) for begin in steps]
            return all(left.read(size) == right.read(size) for size in sizes)
        count = 8 * a.nbytes // _BITS[a.dtype]
        sizes = [min(_COMPARED, count - begin) for begin in range(0, count, _COMPARED)]
        return all(
            np.array_equal(_widened(left, a.dtype, size), _widened(right, b.dtype, size))
            for size in sizes
        )


def _widened(stream: BinaryIO, dtype: str, count: int) -> npt.NDArray[np.float32]:
    data = stream.read(count * _BITS[dtype] // 8)
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def _inside(entry: Reader) -> str:
    """The shard's path, refused when it could name anything outside the model directory."""
    file = entry.string()
    path = PurePosixPath(file)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file:
        entry.reject(f"shard path {file!r} leaves the model directory")
    return file


def read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; `file` is the name recorded in each TensorInfo."""
    with open_file(path) as (stream, file_bytes):
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > file_bytes - 8:
            raise CheckpointError(
                f"[load] {path} has {file_bytes} bytes, its header would end at byte "
                f"{8 + length}; the file is truncated or not safetensors"
            )
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"[load] {path}: a header of {length} bytes, over 100 MB")
        header = stream.read(length)
    if not header.startswith(b"{"):
        raise CheckpointError(f"[load] {path}: the header is not a JSON object")
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise CheckpointError(f"[load] {path}: the header is not UTF-8: {reason}") from None
    node = parse(text, str(path), CheckpointError)
    metadata = node.get("__metadata__", {})
    for key in metadata.names():
        metadata[key].string()
    tensors = [
        _read_entry(name, node[name], file, 8 + length)
        for name in node.names()
        if name != "__metadata__"
    ]
    _check_cover(path, tensors, 8 + length, file_bytes)
    return {tensor.name: tensor for tensor in tensors}


def _read_entry(name: str, node: Reader, file: str, base: int) -> TensorInfo:
    node.only(("dtype", "shape", "data_offsets"))
    dtype = node["dtype"].string()
    if dtype not in _BITS:
        node["dtype"].reject(f"unknown dtype {dtype!r}")
    shape = tuple(extent.integer(0, 2**48) for extent in node["shape"].items())
    if len(shape) > _MAX_DIMENSIONS:
        node["shape"].reject(f"{len(shape)} dimensions, expected at most {_MAX_DIMENSIONS}")
    bits = _BITS[dtype]
    for extent in shape:
        bits *= extent
    offsets = [offset.integer(0, 2**62) for offset in node["data_offsets"].items()]
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        node["data_offsets"].reject(f"expected [begin, end], found {offsets}")
    begin, end = offsets
    if bits != 8 * (end - begin):
        node["data_offsets"].reject(
            f"{end - begin} bytes for {dtype} of shape {list(shape)}, expected {-(-bits // 8)}"
        )
    return TensorInfo(name, dtype, shape, file, base + begin, end - begin)


def _check_cover(path: Path, tensors: list[TensorInfo], base: int, file_bytes: int) -> None:
    """Tensors must follow each other from `base` to the end of the file."""
    place, last = base, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < place:
            raise CheckpointError(f"[load] {path}: tensor {tensor.name!r} overlaps {last}")
        if tensor.offset > place:
            raise CheckpointError(
                f"[load] {path}: {tensor.offset - place} unused bytes between {last} and tensor "
                f"{tensor.name!r}; the format forbids holes"
            )
        place, last = tensor.offset + tensor.nbytes, f"tensor {tensor.name!r}"
        if place > file_bytes:
            raise CheckpointError(
                f"[load] {path}: {last} ends at byte {place}, the file has {file_bytes}; it is "
                "truncated, download it again"
            )
    if place != file_bytes:
        raise CheckpointError(
            f"[load] {path}: {file_bytes - place} bytes after {last}; the format forbids holes"
        )
