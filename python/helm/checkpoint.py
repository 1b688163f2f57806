"""The tensor table of a safetensors checkpoint, from the headers alone. Never reads tensor data.

Format: https://huggingface.co/docs/safetensors. A file is an 8-byte little-endian header length,
a JSON header, and a buffer that the tensors must cover without overlaps or holes.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from helm.errors import CheckpointError
from helm.jsonio import Reader, parse

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
    try:
        if (folder / "model.safetensors").exists():
            return read_header(folder / "model.safetensors", "model.safetensors")
        if (folder / "model.safetensors.index.json").exists():
            return _read_sharded(folder, folder / "model.safetensors.index.json")
        names = sorted(entry.name for entry in folder.iterdir())
    except CheckpointError:
        raise
    except (OSError, ValueError) as reason:
        raise CheckpointError(f"[load] cannot read {folder}: {reason}") from None
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
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise CheckpointError(f"[load] {index} is over 256 MiB; it is not an index")
    weight_map = parse(index.read_bytes(), str(index), CheckpointError)["weight_map"]
    shards: dict[str, dict[str, TensorInfo]] = {}
    tensors: dict[str, TensorInfo] = {}
    for name in weight_map.names():
        entry = weight_map[name]
        file = _inside(entry)
        if file not in shards:
            if not (folder / file).exists():
                entry.reject(f"shard {file} does not exist; download the whole checkpoint")
            shards[file] = read_header(folder / file, file)
        if name not in shards[file]:
            entry.reject(f"tensor {name!r} is not in shard {file}; the index does not fit")
        tensors[name] = shards[file][name]
    return tensors


def _inside(entry: Reader) -> str:
    """The shard's path, refused when it could name anything outside the model directory."""
    file = entry.string()
    path = PurePosixPath(file)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file:
        entry.reject(f"shard path {file!r} leaves the model directory")
    return file


def read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; `file` is the name recorded in each TensorInfo."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"[load] {path} is not a regular file")
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > status.st_size - 8:
                raise CheckpointError(
                    f"[load] {path} has {status.st_size} bytes, its header would end at byte "
                    f"{8 + length}; the file is truncated or not safetensors"
                )
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"[load] {path}: a header of {length} bytes, over 100 MB")
            header = stream.read(length)
    except (OSError, ValueError) as reason:
        if isinstance(reason, CheckpointError):
            raise
        raise CheckpointError(f"[load] cannot read {path}: {reason}") from None
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
    _check_cover(path, tensors, 8 + length, status.st_size)
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
