"""Matrices of GGUF files in HELM's formats: every type, against the gguf package, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

gguf = pytest.importorskip("gguf")

from helm import _helm  # noqa: E402
from helm.base.formats import parse  # noqa: E402
from helm.errors import CheckpointError, InvalidError  # noqa: E402
from helm.model.gguf.types import TYPES  # noqa: E402
from packed_oracle import read_back  # noqa: E402

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Where a block has bits of f16.
HALVES = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q2_k": [80, 82],
    "q3_k": [108], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "iq4_nl": [0], "iq4_xs": [0],
    "mxfp4": [],
}  # fmt: skip
DENSE = ("f32", "f16", "bf16")
ENCODINGS = {entry["name"]: entry for entry in _helm.stored_encodings() if entry["block_bytes"]}
EXACT = {
    "q4_0": "c4.s32", "q4_1": "c4.m32", "q5_0": "c5.s32", "q5_1": "c5.m32", "q8_0": "c8.s32",
    "q2_k": "c4.km16", "q3_k": "c4.k16o4", "q4_k": "c4.km32", "q5_k": "c5.km32",
    "q6_k": "c6.k16", "iq4_nl": "nl4.s32", "iq4_xs": "nl4.k32", "mxfp4": "mx4.e32",
}  # fmt: skip
ROWS = (1, 7, 15, 16, 17, 40)


def qtype(stored: str) -> Any:
    return gguf.GGMLQuantizationType[stored.removeprefix("ggml.").upper()]


def columns(stored: str) -> list[int]:
    block = ENCODINGS[stored]["block_cols"]
    return [block * n for n in ((1, 2, 3) if block == 256 else (1, 2, 7, 8, 9, 17, 33))]


def halves(rng: np.random.Generator, n: int) -> npt.NDArray[np.float16]:
    """Finite f16 of all sizes: both zeros, denormals, the largest."""
    bits = rng.integers(0, 0x7C00, n, dtype=np.uint16)
    edges = np.array([0, 1, 0x3FF, 0x400, 0x7BFF], np.uint16)
    bits[rng.random(n) < 0.2] = rng.choice(edges)
    return (bits | rng.integers(0, 2, n, dtype=np.uint16) << 15).view(np.float16)


def blocks(stored: str, rows: int, cols: int, seed: int) -> Bytes:
    """Random bytes [rows, bytes], with finite scales."""
    rng = np.random.default_rng(seed)
    entry = ENCODINGS[stored]
    n, size = rows * cols // entry["block_cols"], entry["block_bytes"]
    data = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for at in HALVES[stored.removeprefix("ggml.")]:
        data[:, at : at + 2] = halves(rng, n).view(np.uint8).reshape(n, 2)
    if stored == "ggml.mxfp4":
        data[:, 0] = rng.choice([0, 1, 2, 3, 100, 127, 128, 250, 252], n)
    return data.reshape(rows, -1)


def expected(stored: str, data: Bytes) -> Floats:
    values: Floats = gguf.dequantize(data, qtype(stored))
    return values


def pieces(data: Bytes) -> dict[str, Any]:
    return {"weight": ("u8", list(data.shape), data.reshape(-1))}


def encode(stored: str, data: Bytes, cols: int, to: str) -> Bytes:
    out: Bytes = _helm.encode_weights(stored, pieces(data), data.shape[0], cols, to)
    return out


def read(stored: str, data: Bytes, cols: int) -> Floats:
    values: Floats = _helm.read_weights(stored, pieces(data), data.shape[0], cols)
    return values


def exact_of(stored: str) -> str:
    return EXACT[stored.removeprefix("ggml.")]


def same(got: Floats, want: Floats) -> bool:
    return got.shape == want.shape and bool(
        np.array_equal(got.view(np.uint32), want.view(np.uint32))
    )


def test_every_type_of_the_table_is_one_of_ggml_s() -> None:
    assert set(ENCODINGS) - set(DENSE) == {f"ggml.{name}" for name in HALVES}
    for stored, entry in ENCODINGS.items():
        sizes = gguf.GGML_QUANT_SIZES[qtype(stored)]
        assert (entry["block_cols"], entry["block_bytes"]) == tuple(sizes)


def test_python_and_cpp_have_the_same_table() -> None:
    assert {t.stored: (t.elements, t.block_bytes) for t in TYPES.values()} == {
        name: (entry["block_cols"], entry["block_bytes"]) for name, entry in ENCODINGS.items()
    }
    for of_file in TYPES.values():
        row = {"weight": ("u8", [1, of_file.block_bytes], np.zeros(of_file.block_bytes, np.uint8))}
        exact = _helm.exact_format(of_file.stored, row, 1, of_file.elements)
        assert exact == of_file.format


@pytest.mark.parametrize("stored", [f"ggml.{name}" for name in HALVES])
def test_exact_formats_read_back_as_gguf_dequantises(stored: str) -> None:
    exact = exact_of(stored)
    for seed, rows in enumerate(ROWS):
        for cols in columns(stored):
            data = blocks(stored, rows, cols, seed)
            want = expected(stored, data)
            packed = encode(stored, data, cols, exact)
            assert packed.size == parse(exact).bytes(rows, cols)
            assert same(read_back(exact, packed, rows, cols), want), (rows, cols)
            assert same(read(stored, data, cols), want)


@pytest.mark.parametrize("stored", [f"ggml.{name}" for name in HALVES])
def test_dense_formats_round_each_value_once(stored: str) -> None:
    cols = columns(stored)[-1]
    data = blocks(stored, 19, cols, 5)
    want = expected(stored, data)
    assert same(encode(stored, data, cols, "f32").view(np.float32).reshape(want.shape), want)
    with np.errstate(over="ignore"):
        half = want.astype(np.float16)
    assert np.array_equal(
        encode(stored, data, cols, "f16").view(np.uint16), half.view(np.uint16).ravel()
    )
    bf16 = gguf.quantize(want, gguf.GGMLQuantizationType.BF16)
    assert np.array_equal(encode(stored, data, cols, "bf16"), bf16.ravel())


@pytest.mark.parametrize("stored", ["ggml.q4_0", "ggml.q3_k", "ggml.q6_k"])
@pytest.mark.parametrize("to", ["c8.s32", "c4.km32"])
def test_helm_s_own_formats_are_quantised_from_the_values(stored: str, to: str) -> None:
    cols = columns(stored)[-1]
    data = blocks(stored, 19, cols, 8)
    for at in HALVES[stored.removeprefix("ggml.")]:  # within f16
        shaped = data.reshape(-1, ENCODINGS[stored]["block_bytes"])
        shaped[:, at : at + 2] = np.array([0x2401], "<u2").view(np.uint8)
    values = expected(stored, data)
    want = encode("f32", values.view(np.uint8), cols, to)
    assert np.array_equal(encode(stored, data, cols, to), want)
    error = np.abs(read_back(to, want, 19, cols) - values)
    assert np.all(error <= np.abs(values).max() / (100 if to == "c8.s32" else 6))


@pytest.mark.parametrize("stored", DENSE)
def test_dense_types_stay_as_they_are(stored: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((5, 37), np.float32)
    data = {
        "f32": values.view(np.uint8),
        "f16": halves(rng, 5 * 37).reshape(5, 37).view(np.uint8),
        "bf16": gguf.quantize(values, gguf.GGMLQuantizationType.BF16),
    }[stored]
    assert np.array_equal(encode(stored, data, 37, stored), data.ravel())
    assert same(read(stored, data, 37), expected(stored, data))


@pytest.mark.parametrize("stored", [f"ggml.{name}" for name in HALVES if HALVES[name]])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7FFF])
def test_scales_that_are_not_finite_are_refused_with_their_row(stored: str, bits: int) -> None:
    entry = ENCODINGS[stored]
    cols = columns(stored)[-1]
    for at in HALVES[stored.removeprefix("ggml.")]:
        data = blocks(stored, 21, cols, 2)
        last = data.shape[1] - entry["block_bytes"] + at  # of row 18's last block
        data[18, last : last + 2] = np.array([bits], "<u2").view(np.uint8)
        first = (cols - 1) // 256 * 256
        said = rf"tensor \"weights\" .*NaN.* in row 18, columns {first} to {cols - 1},"
        for to in (exact_of(stored), "f32"):
            with pytest.raises(CheckpointError, match=said):
                encode(stored, data, cols, to)


def test_infinite_weights_of_mxfp4_are_refused() -> None:
    for exponent, code, good in [
        (255, 0, False), (254, 4, False), (254, 3, True), (254, 11, True), (254, 12, False),
        (253, 6, False), (253, 5, True), (253, 14, False), (252, 7, True), (252, 15, True),
    ]:  # fmt: skip
        data = blocks("ggml.mxfp4", 3, 288, 1)
        data[1, 8 * 17] = exponent
        data[1, 8 * 17 + 1 : 9 * 17] = code | code << 4
        with np.errstate(over="ignore"):
            want = expected("ggml.mxfp4", data)
        assert np.all(np.isfinite(want)) == good or exponent == 255
        if good:
            assert same(
                read_back("mx4.e32", encode("ggml.mxfp4", data, 288, "mx4.e32"), 3, 288), want
            )
            continue
        with pytest.raises(CheckpointError, match="row 1, columns 256 to 287"):
            encode("ggml.mxfp4", data, 288, "mx4.e32")


def test_what_does_not_fit_is_refused() -> None:
    data = np.zeros((4, 18), np.uint8)
    for stored, rows, cols, to, said in [
        ("ggml.q4_2", 4, 32, "c4.s32", "known: f32, f16, bf16, ggml.q4_0, "),
        ("ggml.q4_0", 4, 33, "c4.s32", "whole blocks, of 32 columns"),
        (
            "ggml.q4_0",
            3,
            32,
            "c4.s32",
            r"weight of u8 \[4, 18\] in 72 bytes, expected u8 \[3, 18\]",
        ),
        ("ggml.q4_0", 4, 32, "c4.m32", "cannot become c4.m32, expected c4.s32, which holds"),
        ("ggml.q4_0", 4, 32, "c4", "no format has the name"),
        ("ggml.q4_0", 0, 32, "c4.s32", "72 bytes, too few for"),
        ("ggml.q4_0", 1 << 40, 1 << 40, "f32", "72 bytes, too few for"),
    ]:
        with pytest.raises(InvalidError, match=said):
            _helm.encode_weights(stored, pieces(data), rows, cols, to)
    short = {"weight": ("u8", [4, 18], data.reshape(-1)[:-1])}
    with pytest.raises(InvalidError, match="in 71 bytes"):
        _helm.encode_weights("ggml.q4_0", short, 4, 32, "f32")


def real_files() -> list[Path]:
    folder = os.environ.get("HELM_TEST_MODELS")
    return sorted(Path(folder).glob("*.gguf")) if folder else []


def matrices(path: Path) -> Iterator[Any]:
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) == 2 and tensor.tensor_type.name.lower() not in DENSE:
            yield tensor


@pytest.mark.slow
@pytest.mark.skipif(not real_files(), reason="no .gguf file in the folder HELM_TEST_MODELS")
@pytest.mark.parametrize("path", real_files(), ids=lambda path: path.stem)
def test_real_files_read_back_as_gguf_dequantises(path: Path) -> None:
    seen = 0
    for tensor in matrices(path):
        stored = f"ggml.{tensor.tensor_type.name.lower()}"
        exact = exact_of(stored)
        data = np.asarray(tensor.data)
        rows, cols = data.shape[0], int(tensor.shape[0])
        packed = encode(stored, data, cols, exact)
        strip = parse(exact).bytes(16, cols)
        for row in range(0, rows, 4096):
            end = min(rows, row + 4096)
            part = packed[row // 16 * strip : -(-end // 16) * strip]
            got = read_back(exact, part, end - row, cols)
            assert same(got, expected(stored, data[row:end])), (tensor.name, row)
        seen += 1
    assert seen > 0
