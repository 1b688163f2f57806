"""The tensor table of a safetensors checkpoint, from the headers alone.

Format: https://huggingface.co/docs/safetensors. A file is an 8-byte little-endian header length,
a JSON header, and a buffer that the tensors must cover without overlaps or holes.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from helm.base.files import open_file, present
from helm.base.jsonio import Reader, parse, read_json
from helm.errors import CheckpointError
from helm.model.checkpoint import DTYPE_BITS, WEIGHT_DTYPES, TensorInfo
from helm.model.checkpoint.layout import with_matrices
from helm.model.folder_kinds import refuse_other
from helm.model.source import Extent

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES = 256 << 20
_MAX_DIMENSIONS = 64


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
    return with_matrices(str(path), metadata, {tensor.name: tensor for tensor in tensors})


def _read_entry(name: str, node: Reader, file: str, base: int) -> TensorInfo:
    node.only(("dtype", "shape", "data_offsets"))
    dtype = node["dtype"].string()
    if dtype not in DTYPE_BITS:
        node["dtype"].reject(f"unknown dtype {dtype!r}")
    shape = tuple(extent.integer(0, 2**48) for extent in node["shape"].items())
    if len(shape) > _MAX_DIMENSIONS:
        node["shape"].reject(f"{len(shape)} dimensions, expected at most {_MAX_DIMENSIONS}")
    bits = DTYPE_BITS[dtype]
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
    place = Extent(file, base + begin, shape[0] if shape else 1)
    return TensorInfo(name, shape, WEIGHT_DTYPES.get(dtype, dtype), (place,))


def _check_cover(path: Path, tensors: list[TensorInfo], base: int, file_bytes: int) -> None:
    """Tensors must follow each other from `base` to the end of the file."""
    place, last = base, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.extents[0].offset, t.nbytes)):
        offset = tensor.extents[0].offset
        if offset < place:
            raise CheckpointError(f"[load] {path}: tensor {tensor.name!r} overlaps {last}")
        if offset > place:
            raise CheckpointError(
                f"[load] {path}: {offset - place} unused bytes between {last} and tensor "
                f"{tensor.name!r}; the format forbids holes"
            )
        place, last = offset + tensor.nbytes, f"tensor {tensor.name!r}"
        if place > file_bytes:
            raise CheckpointError(
                f"[load] {path}: {last} ends at byte {place}, the file has {file_bytes}; it is "
                "truncated, download it again"
            )
    if place != file_bytes:
        raise CheckpointError(
            f"[load] {path}: {file_bytes - place} bytes after {last}; the format forbids holes"
        )
