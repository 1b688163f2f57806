"""Matrices that a checkpoint stores as several tensors: integers, scales, zero points, an order.

Puts the tensors of each together as its pieces, which the runtime reads. Whether they fit each
other, and which format holds them as they are, the runtime's own readers say.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helm.base.arguments import listed
from helm.base.files import open_file
from helm.errors import CheckpointError, InvalidError
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.source import Piece

# Of pieces, by safetensors' names, or HELM's of those that weights have, too.
_DTYPES = {
    **{dtype: dtype for dtype in ("f32", "f16", "bf16")},
    **{"F8_E4M3": "f8e4m3", "I32": "i32", "I8": "i8", "U8": "u8"},
}
_ORDERS = ("g_idx", "weight_g_idx")  # pieces whose values are looked at
# What is computed with while a model runs, where HELM measures anew: activations and KV.
_LEFT_OUT = re.compile(
    r"\.(input_scale|input_zero_point|input_global_scale|activation_scale|output_scale"
    r"|[qkv]_scale|[qkv]_zero_point|weight_shape)$"
)
_OWN = {"weight_blocks": "blocks", "weight_scales": "scales"}  # the runtime's names of pieces
_MIDDLE = {  # words of zero points as they are stored
    "gptq4": 0x77777777,
    "gptq4v2": 0x88888888,
    "gptq8": 0x7F7F7F7F,
    "gptq8v2": 0x80808080,
}
_EXPERTS = re.compile(r"(.*\.experts\.(?:gate_up|down)_proj)_(blocks|scales)")
_MOST_BIAS_BYTES = 1 << 22
_REMEDY = "the checkpoint is damaged or of an unknown kind; get it anew, or use the original model"


class _Kind(NamedTuple):
    """main: the piece by which a matrix is known, `dtypes` of its elements; others: the rest."""

    main: str
    dtypes: tuple[str, ...]
    others: tuple[str, ...]


_SCALED = ("weight_scale", "weight_zero_point", "weight_g_idx")
_GPTQ = _Kind("qweight", ("I32",), ("qzeros", "scales", "g_idx"))
_KINDS: dict[str, tuple[_Kind, ...]] = {
    **dict.fromkeys(("gptq4", "gptq4v2", "gptq8", "gptq8v2"), (_GPTQ,)),
    "awq": (_Kind("qweight", ("I32",), ("qzeros", "scales")),),
    "compressed-tensors": (
        _Kind("weight_packed", ("I32",), _SCALED),
        _Kind("weight", ("I8",), _SCALED),
        _Kind("weight", ("F8_E4M3",), ("weight_scale",)),
    ),
    "fp8": (_Kind("weight", ("F8_E4M3",), ("weight_scale_inv", "weight_scale")),),
    "mxfp4": (_Kind("weight_blocks", ("U8",), ("weight_scales",)),),
}


def with_pieces(
    folder: Path, tensors: Mapping[str, TensorInfo], config: ModelConfig
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """`tensors` of a checkpoint with its quantised matrices put together, and notices. Raises
    CheckpointError that names the tensor."""
    method = config.quantization
    if method is None:
        return dict(tensors), ()
    if method == "mxfp4":
        tensors = dict(_flat(name, info) for name, info in tensors.items())
    found: dict[str, TensorInfo] = {}
    taken: set[str] = set()
    for base, kind in _matrices(tensors, _KINDS[method]):
        name = f"{base}.weight"
        own = {part: tensors[f"{base}.{part}"] for part in (kind.main, *kind.others)
               if f"{base}.{part}" in tensors}  # fmt: skip
        taken |= {f"{base}.{part}" for part in own}
        if name in tensors and name not in taken:
            raise CheckpointError(
                f"[load] {folder / str(own[kind.main].file)}: the checkpoint has both {name!r} and "
                f"{base + '.' + kind.main!r}, expected one; {_REMEDY}"
            )
        found[name] = _matrix(folder, name, method, own, tensors.get(f"{base}.weight_shape"))
    left = [n for n in tensors if n not in taken and found and _LEFT_OUT.search(n)]
    rest = {n: info for n, info in tensors.items() if n not in taken and n not in left}
    return {**rest, **found}, tuple(_notices(found, left))


def _flat(name: str, info: TensorInfo) -> tuple[str, TensorInfo]:
    """A piece of gpt-oss's experts, whose dimensions are experts, rows, (blocks,) bytes, as one of
    all experts' rows."""
    found = _EXPERTS.fullmatch(name)
    if (
        found is None
        or info.stored != "U8"
        or len(info.shape) != (4 if found[2] == "blocks" else 3)
    ):
        return name, info
    experts, rows, *rest = info.shape
    flat = dataclasses.replace(info, shape=(experts * rows, math.prod(rest)))
    return f"{found[1]}.weight_{found[2]}", flat


def zero_biases(
    folder: Path, tensors: Mapping[str, TensorInfo], wanted: Container[str]
) -> list[str]:
    """Biases of quantised matrices that a model does not have, and that are zeros all over: some
    writers add them."""
    return [
        name
        for name, info in tensors.items()
        if name.endswith(".bias") and name not in wanted and info.nbytes <= _MOST_BIAS_BYTES
        and (matrix := tensors.get(f"{name.removesuffix('bias')}weight")) is not None
        and matrix.aux and info.extents and not any(_read(folder, info))
    ]  # fmt: skip


def _matrices(
    tensors: Mapping[str, TensorInfo], kinds: tuple[_Kind, ...]
) -> Iterator[tuple[str, _Kind]]:
    for name, info in tensors.items():
        base, _, part = name.rpartition(".")
        for kind in kinds:
            if part == kind.main and info.stored in kind.dtypes and base:
                yield base, kind


def _notices(found: Mapping[str, TensorInfo], left: list[str]) -> Iterator[str]:
    rounded = [name for name, info in found.items() if info.held == "bf16"]
    left = [name for name in left if not name.endswith(".weight_shape")]
    if rounded:
        yield (
            f"{len(rounded)} matrices have no format that holds them as they are stored: each "
            f"value is rounded once to bf16, and dtype='f32' rounds none: {listed(rounded)}"
        )
    if left:
        yield (
            f"left out {len(left)} scales of activations, which HELM measures itself: "
            f"{listed(left)}"
        )


def _matrix(
    folder: Path,
    name: str,
    method: str,
    own: Mapping[str, TensorInfo],
    shape: TensorInfo | None,
) -> TensorInfo:
    file = folder / str(next(iter(own.values())).file)
    stored, (rows, cols) = _shape(folder, method, own, shape, name)
    aux = []
    for part, info in own.items():
        if info.stored not in _DTYPES or min(info.shape, default=1) < 1 or len(info.shape) > 2:
            raise CheckpointError(
                f"[load] {file}: tensor {info.name!r} is {info.stored} of shape "
                f"{list(info.shape)}, expected a vector or a matrix in one of "
                f"{', '.join(_DTYPES)}; {_REMEDY}"
            )
        [place] = info.extents
        own_name = _OWN.get(part, part)
        aux.append(Piece(own_name, _DTYPES[info.stored], info.shape, place.file, place.offset))
    whole = TensorInfo(name, (rows, cols), stored, (), tuple(aux))
    return dataclasses.replace(whole, exact=_exact(folder, whole, own))


def _shape(
    folder: Path,
    method: str,
    own: Mapping[str, TensorInfo],
    stated: TensorInfo | None,
    name: str,
) -> tuple[str, tuple[int, int]]:
    """The stored encoding, and (rows, columns)."""
    main, info = next(iter(own.items()))
    if len(info.shape) != 2:
        raise CheckpointError(
            f"[load] {folder / str(info.file)}: tensor {info.name!r} has shape {list(info.shape)}, "
            f"expected two dimensions; {_REMEDY}"
        )
    first, second = info.shape
    if method.startswith("gptq"):
        return method, (second, first * 32 // int(method[4]))
    if method == "awq":
        return "awq4", (second * 8, first)
    if main == "weight_blocks":
        return "mx4", (first, second * 2)
    if info.stored == "F8_E4M3":
        return "f8e4m3", (first, second)
    if main == "weight":
        return "ct8", (first, second)
    cols = second * 8 if stated is None else _stated_cols(folder, stated)
    bits = 4 if -(-cols // 8) == second else 8
    return f"ct{bits}", (first, cols)


def _stated_cols(folder: Path, info: TensorInfo) -> int:
    """Of a `weight_shape`, [rows, columns]."""
    sizes = {"I64": np.int64, "I32": np.int32}
    if info.stored not in sizes or info.shape != (2,):
        raise CheckpointError(
            f"[load] {folder / str(info.file)}: tensor {info.name!r} is {info.stored} of shape "
            f"{list(info.shape)}, expected I64 [2]; {_REMEDY}"
        )
    cols = int(np.frombuffer(_read(folder, info), sizes[info.stored])[1])
    if not 1 <= cols < 2**31:
        raise CheckpointError(
            f"[load] {folder / str(info.file)}: tensor {info.name!r} says that there are {cols} "
            f"columns, expected at least 1; {_REMEDY}"
        )
    return cols


def _read(folder: Path, info: TensorInfo) -> bytes:
    [place] = info.extents
    with open_file(folder / place.file) as (stream, _):
        stream.seek(place.offset)
        return stream.read(info.nbytes)


def _exact(folder: Path, info: TensorInfo, own: Mapping[str, TensorInfo]) -> str:
    """The format that holds a matrix as it is stored; f32 where no packed one does."""
    from helm import _helm

    def content(piece: Piece) -> Any:
        if piece.name in _ORDERS:
            return np.frombuffer(_read(folder, own[piece.name]), np.uint8)
        return np.zeros(piece.nbytes, np.uint8)  # memory that nobody touches

    pieces = {piece.name: (piece.dtype, list(piece.shape), content(piece)) for piece in info.aux}
    rows, cols = info.shape
    try:
        found = str(_helm.exact_format(info.stored, pieces, rows, cols, info.name))
        return _centred(folder, info.stored, found, own)
    except InvalidError as reason:
        raise CheckpointError(f"{reason} ({folder / str(info.file)}); {_REMEDY}") from None


def _centred(folder: Path, stored: str, exact: str, own: Mapping[str, TensorInfo]) -> str:
    """The kind of scales without zero points, where GPTQ's are all in the middle."""
    middle = _MIDDLE.get(stored)
    if middle is None or ".z" not in exact:
        return exact
    words = np.frombuffer(_read(folder, own["qzeros"]), np.uint32)
    return exact.replace(".z", ".s") if np.all(words == middle) else exact
