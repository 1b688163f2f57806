"""Matrices that HELM has written as it holds them: what the metadata of their files says of them.

Such a matrix is a tensor U8 [bytes] for safetensors. Its format and shape stand in the file's
metadata, under `MATRICES`, with the layout's version. Reads no files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from helm.base.formats import FORMATS, LINE_BYTES
from helm.base.jsonio import Reader, parse
from helm.errors import CheckpointError
from helm.model.checkpoint import TensorInfo
from helm.model.source import PACKED, Extent

VERSION = 1
LAYOUT, MATRICES = "helm.layout", "helm.matrices"
_MOST = 2**31  # rows or columns
_REMEDY = "the file is damaged; make it anew with helm-llm quantize"


class Matrix(NamedTuple):
    """format: the name of one of PACKED. shape: [rows, cols]."""

    format: str
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return FORMATS[self.format].bytes(*self.shape)


def metadata_of(matrices: Mapping[str, Matrix]) -> dict[str, str]:
    """What a file with these matrices says of them."""
    stated = {name: {"format": m.format, "shape": list(m.shape)} for name, m in matrices.items()}
    return {LAYOUT: str(VERSION), MATRICES: json.dumps(stated)}


def with_matrices(
    path: str, metadata: Reader, tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """`tensors` of a file, those that its metadata names as the matrices that they are. Raises
    CheckpointError that names the file."""
    found = dict(tensors)
    if LAYOUT not in metadata.names() and MATRICES not in metadata.names():
        return found
    listed = _read(path, metadata)
    for name, info in tensors.items():
        if info.stored == "U8" and name not in listed:
            raise CheckpointError(
                f"[load] {path}: {MATRICES} does not name the matrix {name!r}; {_REMEDY}"
            )
    for name, matrix in listed.items():
        if name not in tensors:
            raise CheckpointError(
                f"[load] {path}: {MATRICES} names {name!r}, which the file lacks; {_REMEDY}"
            )
        info = tensors[name]
        [place] = info.extents
        if info.stored != "U8" or info.shape != (matrix.nbytes,):
            raise CheckpointError(
                f"[load] {path}: tensor {name!r} is {info.stored} of shape {list(info.shape)}, "
                f"expected U8 [{matrix.nbytes}] of {matrix.format}; {_REMEDY}"
            )
        if place.offset % LINE_BYTES:
            raise CheckpointError(
                f"[load] {path}: tensor {name!r} begins at byte {place.offset}, expected a "
                f"multiple of {LINE_BYTES}; {_REMEDY}"
            )
        own = Extent(place.file, place.offset, matrix.shape[0])
        found[name] = TensorInfo(name, matrix.shape, matrix.format, (own,))
    return found


def _read(path: str, metadata: Reader) -> dict[str, Matrix]:
    version = metadata.get(LAYOUT, "").string()
    if version.isascii() and version.isdecimal() and len(version) < 9 and int(version) > VERSION:
        raise CheckpointError(
            f"[load] {path} has weights in layout {version}, this HELM reads {VERSION}; update "
            "HELM, or make the file anew with helm-llm quantize"
        )
    if version != str(VERSION):
        metadata.reject(f"{LAYOUT} is {version!r}, expected {str(VERSION)!r}; {_REMEDY}")
    listed = parse(metadata[MATRICES].string(), f"{path}: {MATRICES}", CheckpointError)
    return {name: _matrix(listed[name]) for name in listed.names()}


def _matrix(node: Reader) -> Matrix:
    node.only(("format", "shape"))
    shape = [size.integer(1, _MOST) for size in node["shape"].items()]
    if len(shape) != 2:
        node["shape"].reject(f"expected [rows, columns], found {shape}; {_REMEDY}")
    return Matrix(node["format"].choice(PACKED), (shape[0], shape[1]))
