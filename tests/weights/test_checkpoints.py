"""Matrices of GPTQ, AWQ, compressed-tensors, FP8 and gpt-oss checkpoints, which the tests write, in
HELM's formats: against the published formulas in float32, bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from helm import _helm
from helm.base.formats import parse
from helm.errors import CheckpointError, InvalidError
from packed_oracle import MX4, read_back

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Case(NamedTuple):
    """A matrix as a checkpoint has it, and its values by the formula."""

    stored: str
    pieces: dict[str, Any]
    values: Floats  # [rows, cols]
    exact: str

    def encode(self, to: str = "", sort_columns: bool = False) -> npt.NDArray[np.uint8]:
        out: npt.NDArray[np.uint8] = _helm.encode_weights(
            self.stored, self.pieces, *self.values.shape, to, sort_columns=sort_columns
        )
        return out


def piece(dtype: str, array: npt.NDArray[Any]) -> tuple[str, list[int], npt.NDArray[np.uint8]]:
    return dtype, list(array.shape), np.frombuffer(array.tobytes(), np.uint8)


def pack(codes: Ints, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Any:
    """Integers along an axis in words of 32 bits; order[i] is the place of code i of a word."""
    per = 32 // bits
    moved = np.moveaxis(codes, axis, -1)
    short = -moved.shape[-1] % per
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, short)])
    words = moved.reshape(*moved.shape[:-1], -1, per)
    out = np.zeros(words.shape[:-1], np.uint64)
    for i in range(per):
        out |= words[..., order[i] if order else i].astype(np.uint64) << np.uint64(bits * i)
    return np.ascontiguousarray(np.moveaxis(out, -1, axis)).astype(np.uint32).view(np.int32)


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[Any, Floats]:
    """As stored, of all sizes and signs, and in f32."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 8, shape)
    values.flat[0] = 6e-8  # denormal in f16
    if dtype == "f16":
        half = values.astype(np.float16)
        return half, half.astype(np.float32)
    if dtype == "bf16":
        short = torch.tensor(values, dtype=torch.bfloat16)
        return short.view(torch.int16).numpy(), short.float().numpy()
    return values.astype(np.float32), values.astype(np.float32)


def by_formula(codes: Ints, zeros: Ints, scale: Floats, group_of: Ints) -> Floats:
    """scale * (code - zero) of codes [rows, cols], zeros and scale [rows, groups]."""
    less = (codes - zeros[:, group_of]).astype(np.float32)
    values: Floats = scale[:, group_of] * less
    return values


def gptq(
    bits: int, rows: int, cols: int, group: int, *, seed: int = 0, v2: bool = False,
    dtype: str = "f16", symmetric: bool = False, act_order: bool = False,
) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    groups = cols // group
    codes = rng.integers(0, 1 << bits, (rows, cols))
    zeros = rng.integers(1, 1 << bits, (rows, groups))
    if symmetric:
        zeros[:] = 1 << bits - 1
    elif not v2 and bits == 4:
        zeros[0, 0] = 16  # stored as 15
    stored, scale = scales(rng, (groups, rows), dtype)
    group_of = np.arange(cols) // group
    if act_order:
        rng.shuffle(group_of)
    pieces = {
        "qweight": piece("i32", pack(codes.T, bits, 0)),
        "qzeros": piece("i32", pack((zeros.T - (0 if v2 else 1)), bits, 1)),
        "scales": piece(dtype, stored),
        "g_idx": piece("i32", group_of.astype(np.int32)),
    }
    values = by_formula(codes, zeros, np.ascontiguousarray(scale.T), group_of)
    own = 128 if groups == 1 else next(g for g in (128, 64, 32) if group % g == 0)
    exact = "f32" if dtype == "f32" else f"c{bits}.z{own}{'b' if dtype == 'bf16' else ''}"
    return Case(f"gptq{bits}{'v2' if v2 else ''}", pieces, values, exact)


def awq(rows: int, cols: int, group: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, cols))
    zeros = rng.integers(0, 16, (rows, cols // group))
    stored, scale = scales(rng, (cols // group, rows), "f16")
    pieces = {
        "qweight": piece("i32", pack(codes.T, 4, 1, AWQ_ORDER)),
        "qzeros": piece("i32", pack(zeros.T, 4, 1, AWQ_ORDER)),
        "scales": piece("f16", stored),
    }
    values = by_formula(codes, zeros, np.ascontiguousarray(scale.T), np.arange(cols) // group)
    return Case("awq4", pieces, values, f"c4.z{group}")


def compressed_tensors(
    bits: int, rows: int, cols: int, group: int, *, seed: int = 0, packed: bool = True,
    zero_points: bool = False, dtype: str = "bf16", act_order: bool = False,
) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    middle = 1 << bits - 1
    groups = cols // group
    codes = rng.integers(-middle, middle, (rows, cols))
    zeros = rng.integers(-middle, middle, (rows, groups)) * zero_points
    stored, scale = scales(rng, (rows, groups), dtype)
    group_of = np.arange(cols) // group
    pieces = {"weight_scale": piece(dtype, stored)}
    if act_order:
        rng.shuffle(group_of)
        pieces["weight_g_idx"] = piece("i32", group_of.astype(np.int32))
    if packed:
        pieces["weight_packed"] = piece("i32", pack(codes + middle, bits, 1))
    else:
        pieces["weight"] = piece("i8", codes.astype(np.int8))
    if zero_points:
        pieces["weight_zero_point"] = (
            piece("i32", pack(zeros + middle, bits, 0))
            if packed
            else piece("i8", zeros.astype(np.int8))
        )
    values = by_formula(codes, zeros, scale, group_of)
    kind = "z" if zero_points else "s"
    own = 128 if groups == 1 else next(g for g in (128, 64, 32) if group % g == 0)
    exact = f"c{bits}.{kind}{own}{'b' if dtype == 'bf16' else ''}"
    if bits == 8 and groups == 1 and not zero_points:
        exact = "c8.r"
    elif dtype == "f32":
        exact = "f32"
    return Case(f"ct{bits}", pieces, values, exact)


CASES = {
    "gptq4": [gptq(4, 24, 256, 32), gptq(4, 40, 640, 128, seed=1), gptq(4, 8, 384, 384),
              gptq(4, 16, 512, 64, v2=True), gptq(4, 16, 768, 256, dtype="bf16"),
              gptq(4, 16, 256, 128, dtype="f32")],
    "gptq8": [gptq(8, 24, 256, 32), gptq(8, 40, 640, 128, v2=True), gptq(8, 16, 192, 192)],
    "awq4": [awq(24, 256, 32), awq(40, 640, 128, 1), awq(8, 192, 64, 2)],
    "ct4": [compressed_tensors(4, 17, 256, 32), compressed_tensors(4, 33, 640, 128, seed=1),
            compressed_tensors(4, 40, 512, 64, zero_points=True),
            compressed_tensors(4, 5, 192, 192, dtype="f16", zero_points=True),
            compressed_tensors(4, 3, 128, 64, dtype="f32")],
    "ct8": [compressed_tensors(8, 17, 100, 100, packed=False),
            compressed_tensors(8, 33, 640, 640, packed=False, dtype="f32"),
            compressed_tensors(8, 21, 256, 64, packed=False, dtype="f16"),
            compressed_tensors(8, 21, 512, 128, packed=True),
            compressed_tensors(8, 6, 256, 128, packed=False, zero_points=True)],
}  # fmt: skip


def same(got: Floats, want: Floats) -> bool:
    return np.array_equal(got.view(np.uint32), want.view(np.uint32))


def check_dense(case: Case) -> None:
    """Reads and conversions of any matrix."""
    rows, cols = case.values.shape
    assert same(_helm.read_weights(case.stored, case.pieces, rows, cols), case.values)
    assert same(case.encode("f32").view(np.float32).reshape(rows, cols), case.values)
    bf16 = torch.from_numpy(case.values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(case.encode("bf16").view(np.int16), bf16.ravel())


@pytest.mark.parametrize("stored", CASES)
def test_integers_have_the_values_of_their_formula(stored: str) -> None:
    for case in CASES[stored]:
        rows, cols = case.values.shape
        assert _helm.exact_format(case.stored, case.pieces, rows, cols) == case.exact
        check_dense(case)
        if case.exact != "f32":
            packed = case.encode()
            assert packed.size == parse(case.exact).bytes(rows, cols)
            assert same(read_back(case.exact, packed, rows, cols), case.values)


def test_one_scale_may_be_for_all_rows() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(-128, 128, (19, 70)).astype(np.int8)
    pieces = {
        "weight": piece("i8", codes),
        "weight_scale": piece("f32", np.array([0.0123], np.float32)),
    }
    case = Case("ct8", pieces, codes.astype(np.float32) * np.float32(0.0123), "c8.r")
    check_dense(case)
    assert same(read_back("c8.r", case.encode("c8.r"), 19, 70), case.values)


def test_zero_points_in_the_middle_need_not_be_kept() -> None:
    case = gptq(4, 24, 256, 64, symmetric=True)
    assert same(read_back("c4.s64", case.encode("c4.s64"), 24, 256), case.values)
    eight = gptq(8, 8, 128, 32, symmetric=True, dtype="bf16")
    assert same(read_back("c8.s32b", eight.encode("c8.s32b"), 8, 128), eight.values)
    with pytest.raises(InvalidError, match=r"row 0 has a zero point other than 8; expected c4.z64"):
        gptq(4, 24, 256, 64).encode("c4.s64")
    with pytest.raises(InvalidError, match=r"cannot become c4.s32, expected c4.z64, which"):
        case.encode("c4.s32")


@pytest.mark.parametrize(
    "case",
    [
        gptq(4, 24, 384, 64, act_order=True),
        gptq(8, 8, 512, 128, act_order=True),
        compressed_tensors(4, 19, 256, 32, act_order=True, zero_points=True),
        compressed_tensors(8, 19, 256, 64, act_order=True, packed=False),
    ],
    ids=lambda case: case.stored,
)
def test_act_order_is_exact_with_sorted_columns(case: Case) -> None:
    rows, cols = case.values.shape
    shape = (case.stored, case.pieces, rows, cols)
    assert _helm.exact_format(*shape) == "f32", "columns stay where they are"
    check_dense(case)
    index = "g_idx" if "g_idx" in case.pieces else "weight_g_idx"
    groups = case.pieces[index][2].view(np.int32)
    order = np.array(_helm.column_order(*shape))
    assert np.array_equal(order, np.argsort(groups, kind="stable"))
    exact = _helm.exact_format(*shape, sort_columns=True)
    assert exact == case.exact
    packed = case.encode(exact, sort_columns=True)
    assert same(read_back(exact, packed, rows, cols), np.ascontiguousarray(case.values[:, order]))
    with pytest.raises(InvalidError, match="cannot become"):
        case.encode(exact)


def test_groups_in_order_or_not_said_need_no_sorting() -> None:
    case = compressed_tensors(4, 16, 256, 32)
    case.pieces["weight_g_idx"] = piece("i32", np.full(256, -1, np.int32))
    assert same(read_back(case.exact, case.encode(), 16, 256), case.values)
    assert _helm.column_order("ct4", case.pieces, 16, 256) == []


def fp8(rows: int, cols: int, scale: str, dtype: str = "f32") -> Case:
    rng = np.random.default_rng(rows)
    bits = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    bits[(bits & 127) == 127] = 0  # NaN
    shape = {
        "one": (), "row": (rows, 1), "block": (-(-rows // 128), -(-cols // 128)),
    }[scale]  # fmt: skip
    stored, wide = scales(rng, shape or (1,), dtype)
    values = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    every = wide
    if scale == "block":
        every = np.repeat(np.repeat(wide, 128, axis=0), 128, axis=1)[:rows, :cols]
    name = "weight_scale_inv" if scale == "block" else "weight_scale"
    pieces = {"weight": piece("f8e4m3", bits), name: piece(dtype, stored)}
    return Case("f8e4m3", pieces, (values * every).astype(np.float32), "f32")


@pytest.mark.parametrize("scale", ["one", "row", "block"])
def test_fp8_has_the_values_of_its_formula_rounded_once(scale: str) -> None:
    for rows, cols in [(1, 1), (3, 130), (129, 256), (260, 300)]:
        check_dense(fp8(rows, cols, scale))
    check_dense(fp8(17, 256, scale, "bf16"))


def test_every_fp8_code_has_its_value() -> None:
    codes = np.array([[c for c in range(256) if c & 127 != 127]], np.uint8)
    pieces = {
        "weight": piece("f8e4m3", codes),
        "weight_scale": piece("f32", np.ones(1, np.float32)),
    }
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert same(_helm.read_weights("f8e4m3", pieces, *codes.shape), want)


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_mxfp4_of_gpt_oss_has_the_values_of_its_formula(rows: int) -> None:
    rng = np.random.default_rng(rows)
    for cols in (32, 288, 2880):
        codes = rng.integers(0, 16, (rows, cols))
        exponents = rng.integers(0, 250, (rows, cols // 32), dtype=np.uint8)
        blocks = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        half = np.array(MX4, np.float32) / 2  # E2M1
        powers = np.repeat(exponents.astype(np.int32) - 127, 32, axis=1)
        values = np.ldexp(half[codes], powers).astype(np.float32)
        pieces = {"blocks": piece("u8", blocks), "scales": piece("u8", exponents)}
        case = Case("mx4", pieces, values, "mx4.e32")
        check_dense(case)
        assert same(read_back("mx4.e32", case.encode(), rows, cols), values)


def test_what_does_not_fit_is_refused_by_name() -> None:
    good = gptq(4, 16, 256, 64)

    def refused(case: Case, said: str, **changed: Any) -> None:
        pieces = {k: v for k, v in {**case.pieces, **changed}.items() if v is not None}
        with pytest.raises(InvalidError, match=said):
            _helm.encode_weights(case.stored, pieces, *case.values.shape, "f32")

    refused(good, "lacks its scales, which gptq4 needs", scales=None)
    refused(good, "lacks its qzeros", qzeros=None)
    refused(good, r"qweight of i32 \[32, 8\] .* expected i32 \[32, 16\]",
            qweight=piece("i32", np.zeros((32, 8), np.int32)))  # fmt: skip
    refused(good, "scales of i8", scales=piece("i8", np.zeros((4, 16), np.int8)))
    refused(good, "3 groups of scales for 256 columns",
            scales=piece("f16", np.ones((3, 16), np.float16)))  # fmt: skip
    for group in (-1, 4, 1 << 30):
        order = np.arange(256, dtype=np.int32) // 64
        order[77] = group
        refused(good, f"group {group} for column 77, expected 0 to 3", g_idx=piece("i32", order))
    refused(good, r"expected i32 \[256\]", g_idx=piece("i32", np.zeros(255, np.int32)))
    name, shape, data = good.pieces["qweight"]
    refused(good, "in 2044 bytes", qweight=(name, shape, data[:-4]))
    refused(good, "expected i32", qweight=(name, [1 << 40, 1 << 40], data))
    refused(awq(8, 128, 32), "lacks its qzeros", qzeros=None)
    refused(compressed_tensors(4, 8, 128, 32), "lacks its weight_scale", weight_scale=None)
    refused(fp8(3, 130, "row"), "lacks its weight_scale", weight_scale=None)
    refused(
        fp8(3, 300, "block"),
        "weight_scale_inv",
        weight_scale_inv=piece("f32", np.ones((2, 3), np.float32)),
    )


def test_unequal_groups_are_no_act_order() -> None:
    case = gptq(4, 16, 256, 64, act_order=True)
    order = case.pieces["g_idx"][2].view(np.int32).copy()
    order[np.flatnonzero(order == 2)[0]] = 1
    case.pieces["g_idx"] = piece("i32", order)
    with pytest.raises(InvalidError, match="65 columns in group 1, expected 64 in each"):
        case.encode("c4.z64", sort_columns=True)


def test_zero_points_beyond_a_byte_are_refused() -> None:
    case = gptq(8, 16, 128, 32)
    case.pieces["qzeros"] = piece("i32", np.full((4, 4), -1, np.int32))  # 255, and one
    with pytest.raises(InvalidError, match=r"zero point 256 in row 0, .*bf16"):
        case.encode("c8.z32")
    assert np.all(np.isfinite(case.encode("f32").view(np.float32)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scales_and_weights_that_are_not_finite_are_refused(bad: float) -> None:
    case = gptq(4, 16, 512, 64)
    half = case.pieces["scales"][2].view(np.float16).copy().reshape(8, 16)
    half[5, 3] = bad
    case.pieces["scales"] = piece("f16", half)
    for to in ("", "f32"):
        with pytest.raises(CheckpointError, match="NaN or infinite in row 3, columns 256 to 511"):
            case.encode(to)
    row = compressed_tensors(8, 17, 100, 100, packed=False, dtype="f32")
    wide = row.pieces["weight_scale"][2].view(np.float32).copy().reshape(17, 1)
    wide[9] = bad
    row.pieces["weight_scale"] = piece("f32", wide)
    with pytest.raises(CheckpointError, match="in row 9, columns 0 to 99"):
        row.encode("c8.r")
    eight = fp8(3, 300, "row")
    bits = eight.pieces["weight"][2].copy().reshape(3, 300)
    bits[2, 299] = 0xFF
    eight.pieces["weight"] = piece("f8e4m3", bits)
    with pytest.raises(CheckpointError, match="in row 2, columns 256 to 299"):
        eight.encode("bf16")
