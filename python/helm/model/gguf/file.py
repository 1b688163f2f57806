"""A model in GGUF: one file, or the parts of a split one together; knows no architecture."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from helm.base.arguments import short, shown
from helm.base.files import open_file, present
from helm.base.jsonio import Reader
from helm.errors import CheckpointError, UnsupportedModelError
from helm.model.gguf.cursor import Array, Source
from helm.model.gguf.reader import GgufTensor, Header, read_header

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)
_MOST_PARTS = 10_000
_STEP_BYTES = 1 << 20  # of one read of a header here
_MOST_VECTOR = 1 << 20  # elements of a tensor that a configuration holds

Open = Callable[[str], AbstractContextManager[Source]]  # by the file's name


@dataclass(frozen=True)
class Gguf:
    """A model. source: file, as messages call it. folder: what the tensors' files are relative to;
    None where they are not on this machine. files: their names, the first part first."""

    source: str
    folder: Path | None
    files: tuple[str, ...]
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]
    vectors: dict[str, tuple[float, ...]]

    def node(self) -> Reader:
        """The keys, to be read with checks; errors name file and key."""
        return Reader(self.keys, self.source, CheckpointError)

    def array(self, key: str) -> Array | None:
        """The array `key`, None where there is none; CheckpointError where it is no array."""
        found = self.keys.get(key)
        if found is not None and not isinstance(found, Array):
            self.node()[key].reject("expected an array")
        return found


def read_gguf(path: Path, vectors: tuple[str, ...] = ()) -> Gguf:
    """The model in `path`, which may be any part of a split one. vectors: tensors in f32 that are
    read, too, where they are there. Raises CheckpointError that names file and key or tensor, and
    UnsupportedModelError for a GGUF file that is no language model."""
    folder = path.parent
    return _read(path.name, folder, str(path), lambda name: local(folder / name), vectors)


def read_remote(name: str, opened: Open, vectors: tuple[str, ...] = ()) -> Gguf:
    """The same of files that `opened` gives, of which it reads no more than the headers."""
    return _read(name, None, name, opened, vectors)


def needed(node: Reader, key: str) -> Reader:
    """The key, which every file has."""
    if node.get(key).null:
        node.get(key).reject("is missing; convert the original checkpoint again")
    return node[key]


def part_names(name: str) -> tuple[str, ...]:
    """The names of all parts of the split model that `name` is one of; else `name` alone."""
    found = _PART.fullmatch(name)
    parts = int(found["parts"]) if found else 1
    if not found or not 1 <= parts <= _MOST_PARTS:
        return (name,)
    return tuple(f"{found['stem']}-{i:05}-of-{parts:05}{SUFFIX}" for i in range(1, parts + 1))


@dataclass(frozen=True)
class _LocalFile:
    """A `Source` on this machine."""

    name: str
    size: int
    stream: BinaryIO
    step: int = _STEP_BYTES

    def read(self, begin: int, count: int) -> bytes:
        self.stream.seek(begin)
        data = self.stream.read(count)
        if len(data) != count:
            raise CheckpointError(
                f"[load] {short(self.name, 1000)} ended at byte {begin + len(data)} while it was "
                f"read, it had {self.size}; let its download end, then try again"
            )
        return data


@contextlib.contextmanager
def local(path: Path) -> Iterator[Source]:
    """The file `path` as a source."""
    if not present(path):
        raise CheckpointError(f"[load] {short(str(path), 1000)} does not exist; give a GGUF file")
    with open_file(path, gguf=True) as (stream, size):
        yield _LocalFile(str(path), size, stream)


def _read(
    name: str, folder: Path | None, source: str, opened: Open, vectors: tuple[str, ...]
) -> Gguf:
    files = part_names(name)
    keys: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    values: dict[str, tuple[float, ...]] = {}
    for index, file in enumerate(files):
        with _part(opened, file, files) as stream:
            header = read_header(stream, file)
            _check_part(header, index, files)
            if index == 0:
                keys = header.keys
                _check_kind(header.node())
            for tensor in header.tensors.values():
                if tensor.name in tensors:
                    raise CheckpointError(
                        f"[load] {source}: tensor {shown(tensor.name)} is in "
                        f"{tensors[tensor.name].file} and in {file}; expected it once; download "
                        "all parts again"
                    )
                tensors[tensor.name] = tensor
            for wanted in vectors:
                if wanted in header.tensors:
                    values[wanted] = _vector(stream, header.tensors[wanted])
    _check_total(source, keys, tensors, files)
    return Gguf(source, folder, files, keys, tensors, values)


@contextlib.contextmanager
def _part(opened: Open, file: str, files: tuple[str, ...]) -> Iterator[Source]:
    """One of the files; an error says that it is one part of several."""
    try:
        with opened(file) as stream:
            yield stream
    except CheckpointError as reason:
        if len(files) == 1 or "does not exist" not in str(reason):
            raise
        raise CheckpointError(
            f"{reason}; it is one of the {len(files)} parts of this model, which must lie in one "
            "folder"
        ) from None


def _check_part(header: Header, index: int, files: tuple[str, ...]) -> None:
    """That the file is the part that its name says."""
    node = header.node()
    parts = node.get("split.count", 1).integer(0, 2**16) or 1
    if parts != len(files):
        node.get("split.count", 1).reject(
            f"it is one of {parts} parts, its name says {len(files)}; expected names such as "
            f"model-00001-of-{parts:05}{SUFFIX}; give all parts their names back"
        )
    number = node.get("split.no", 0).integer(0, 2**16)
    if number != index:
        node["split.no"].reject(
            f"it is part {number + 1} of {parts}, its name says {index + 1}; give the parts their "
            "names back, or download them again"
        )


def _check_total(
    source: str, keys: dict[str, Any], tensors: dict[str, GgufTensor], files: tuple[str, ...]
) -> None:
    wanted = Reader(keys, source, CheckpointError).get("split.tensors.count")
    if len(files) > 1 and not wanted.null and wanted.integer(0, 2**31) != len(tensors):
        wanted.reject(
            f"the model has {wanted.value} tensors, its {len(files)} parts hold {len(tensors)}; "
            "the parts belong to different models, download all of them again"
        )


def _check_kind(node: Reader) -> None:
    """UnsupportedModelError for what is no whole language model."""
    architecture = needed(node, "general.architecture").string()
    kind = node.get("general.type", "model").string()
    subject = f"[{node.subject}] general.architecture is {shown(architecture)}"
    if kind == "adapter" or "adapter.type" in node.names():
        raise UnsupportedModelError(
            f"[{node.subject}] general.type: it is a LoRA adapter, no whole model; merge it into "
            "its model with llama-export-lora, and give that file"
        )
    if architecture == "clip" or kind == "mmproj":
        raise UnsupportedModelError(
            f"{subject}: it is a vision projector, which HELM does not use; give the language "
            "model's GGUF file, which lies beside it"
        )
    if kind in ("imatrix", "vocab") or architecture == "imatrix":
        raise UnsupportedModelError(
            f"[{node.subject}] general.type: it is {shown(kind)}, expected a model; give the "
            "model's GGUF file"
        )


def _vector(stream: Source, tensor: GgufTensor) -> tuple[float, ...]:
    """A tensor's values; a few numbers that belong to the configuration."""
    what = f"[load] {short(stream.name, 1000)}: tensor {shown(tensor.name)}"
    if tensor.stored != "f32" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_VECTOR:
        raise CheckpointError(
            f"{what} is {tensor.stored} of shape {list(tensor.shape)}, expected a vector of f32; "
            "convert the original checkpoint again"
        )
    values: npt.NDArray[np.float32] = np.frombuffer(
        stream.read(tensor.offset, tensor.nbytes), "<f4"
    )
    return tuple(float(value) for value in values)
