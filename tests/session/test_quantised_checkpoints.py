"""Checkpoints that others quantised, from their files to logits: the values of the published
formulas, as they are stored or rounded once, and never silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_models as made
import torch
from plans import make_plan
from safetensors.torch import load_file, save_file

import helm
from engine_helpers import logits_of, partitioned
from helm import _helm
from helm.errors import CheckpointError, InvalidError, UnsupportedModelError
from helm.model.families import load_config
from helm.model.weight_names import read_weights
from whole import one_in

PROMPT = [3, 17, 99, 130, 0, 42, 42, 7, 64, 127, 5, 88, 21]
UP = "model.layers.1.mlp.up_proj"
ONE, ODD_SCALES = torch.ones(1), torch.ones(3, 512).half()
CASES: dict[str, tuple[Any, str]] = {  # and the format as which the matrices are held
    "gptq4": (made.gptq(), "c4.z128"),
    "gptq4 in groups of 32": (made.gptq(group=32), "c4.z32"),
    "gptq4 v2": (made.gptq(group=64, v2=True), "c4.z64"),
    "gptq4 per row": (made.gptq(group=-1, symmetric=True), "c4.s128"),
    "gptq4 v2 symmetric": (made.gptq(group=32, v2=True, symmetric=True), "c4.s32"),
    "gptq4 without index": (made.gptq(index=False), "c4.z128"),
    "gptq4 act order": (made.gptq(act_order=True), "bf16"),
    "gptq8": (made.gptq(bits=8), "c8.z128"),
    "gptq8 symmetric": (made.gptq(bits=8, group=64, symmetric=True), "c8.s64"),
    "gptq8 in bf16": (made.gptq(bits=8, group=32, dtype=torch.bfloat16), "c8.z32b"),
    "gptq4 with scales in f32": (made.gptq(dtype=torch.float32), "bf16"),
    "awq": (made.awq(), "c4.z128"),
    "awq in groups of 32": (made.awq(32), "c4.z32"),
    "ct4": (made.compressed(), "c4.s128b"),
    "ct4 with zero points": (made.compressed(group=64, symmetric=False), "c4.z64b"),
    "ct4 act order": (made.compressed(act_order=True), "bf16"),
    "ct8 packed": (made.compressed(bits=8, group=32), "c8.s32b"),
    "ct8 (W8A16, W8A8)": (made.compressed(bits=8, group=-1, packed=False), "c8.r"),
    "ct8 in groups": (
        made.compressed(bits=8, group=64, packed=False, dtype=torch.float16),
        "c8.s64",
    ),
    "fp8 in blocks": (made.fp8("block"), "bf16"),
    "fp8 per tensor": (made.fp8("tensor"), "bf16"),
    "fp8 per row": (made.fp8("row", "compressed-tensors"), "bf16"),
    "mxfp4": (made.mxfp4(), "mx4.e32"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.wide_model(tmp_path_factory.mktemp("source") / "model")


def written(source: Path, folder: Path, how: Any) -> tuple[Path, Path]:
    """The quantised model, and a dense one of its values."""
    quantised, dense = folder / "quantised", folder / "dense"
    made.write(source, quantised, dense, *how)
    return quantised, dense


def logits(model: Path, **options: Any) -> np.ndarray:
    with helm.LLM(model, threads=1, context=64, device="cpu", **options) as llm:
        return np.array(llm.logits(PROMPT))


def change(folder: Path, edit: Any) -> None:
    """Edits the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def round_projections(tensors: made.Tensors) -> None:
    for name in tensors:
        if "_proj.weight" in name:
            tensors[name] = tensors[name].to(torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_values(name: str, source: Path, tmp_path: Path) -> None:
    how, format = CASES[name]
    quantised, dense = written(source, tmp_path, how)
    expected = logits(dense)
    np.testing.assert_array_equal(logits(quantised, dtype="f32"), expected)
    for dtype in one_in(3, ("bf16", "q8", "q4"), name):
        np.testing.assert_array_equal(logits(quantised, dtype=dtype), logits(dense, dtype=dtype))
    options = {"threads": 3, "context": 64, "device": "cpu", "kv_dtype": "f32"}
    with helm.LLM(quantised, **options) as llm:
        held = {s.format for s in llm.plan.slices if "_proj" in s.tensor}
        stored = np.array(llm.logits(PROMPT))
        noted = " ".join(llm.plan.notices)
    assert held <= {format, "bf16c" if format == "bf16" else format}
    # What rounding does: of activations to 8 bits, or of weights to bf16.
    error = np.sqrt(np.mean((stored - expected) ** 2))
    assert 0 < error < 0.1 * expected.std()
    assert ("rounded once to bf16, and dtype='f32' rounds none" in noted) == (format == "bf16")
    if format == "bf16":
        change(dense, round_projections)
        np.testing.assert_array_equal(stored, logits(dense, kv_dtype="f32"))


@pytest.mark.parametrize("name", ["gptq4", "ct8 packed", "fp8 in blocks"])
def test_on_two_devices_too(name: str, source: Path, tmp_path: Path) -> None:
    quantised, _ = written(source, tmp_path, CASES[name][0])
    with helm.LLM(quantised, threads=1, context=64, device="cpu", weights="copied") as llm:
        expected, whole = np.array(llm.logits(PROMPT)), llm.plan
    plan = partitioned(whole, ("cpu", "cpu", "accelerator", "accelerator"))
    engine = _helm.Engine(plan.to_json(), str(quantised), {}, device="sim:vram=256MiB")
    np.testing.assert_array_equal(logits_of(engine, PROMPT), expected)


def test_they_are_quantised_already(source: Path, tmp_path: Path) -> None:
    quantised, dense = written(source, tmp_path, made.gptq())
    with pytest.raises(InvalidError, match="quantised already: matrices are stored as gptq4"):
        helm.quantize(quantised, tmp_path / "x", to="q8")
    folder = helm.quantize(
        quantised, tmp_path / "x", to="q8", requantize=True, progress=False
    ).folder
    np.testing.assert_array_equal(logits(folder), logits(dense, dtype="q8"))


# --- what is refused, before anything is loaded --------------------------------------------------


GPTQ = {"quant_method": "gptq", "bits": 4}
COMPRESSED = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "aqlm"}, r"config\.json\] quantization_config: .* by 'aqlm' are not"),
        ({"quant_method": "gptq"}, "quantization_config: key 'bits' is missing"),
        ({**GPTQ, "bits": 3}, r"quantization_config\.bits: 3 bits are not supported"),
        ({**GPTQ, "bits": 4.0}, r"quantization_config\.bits: 4\.0 bits"),
        ({**GPTQ, "bits": True}, r"quantization_config\.bits: True bits"),
        ({**GPTQ, "checkpoint_format": "marlin"},
         r"checkpoint_format: 'marlin' is not supported; expected gptq or gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format: weights"),
        ({"quant_method": "awq", "version": "gemv"}, r"version: 'gemv' is not .* expected gemm"),
        ({"quant_method": "awq", "bits": 8}, r"bits: 8 bits are not supported; expected 4"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format: 'nvfp4-"),
        ({**COMPRESSED, "transform_config": {"a": 1}}, "transform_config"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\] is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2' is not supported; expected e4m3"),
        ({"quant_method": ["gptq"]}, "weights quantised by"),
    ],
)  # fmt: skip
def test_unknown_kinds_are_named(
    stated: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    with pytest.raises(InvalidError, match=message):
        helm.LLM(tmp_path)


def broken(source: Path, folder: Path, how: Any, edit: Any, message: str) -> None:
    quantised, _ = written(source, folder, how)
    change(quantised, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        helm.LLM(quantised, device="cpu", context=64)
    assert UP in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{UP}.scales"), r"lacks its scales, .*model\.safetensors"),
        (lambda t: t.pop(f"{UP}.qzeros"), r"lacks its qzeros, .*model\.safetensors"),
        (lambda t: t.pop(f"{UP}.qweight"), "lacks: model.*and has others"),
        (lambda t: t[f"{UP}.g_idx"].__setitem__(7, 9), "group 9 for column 7, expected 0 to 1"),
        (lambda t: t[f"{UP}.g_idx"].__setitem__(7, -2), "group -2 for column 7, expected 0 to 1"),
        (lambda t: t.update({f"{UP}.g_idx": torch.arange(255).int()}), r"expected i32 \[256\]"),
        (lambda t: t.update({f"{UP}.scales": torch.ones(3, 512).half()}), "3 groups of scales for"),
        (lambda t: t.update({f"{UP}.scales": torch.ones(2, 512).to(torch.int8)}), "scales of i8"),
        (lambda t: t.update({f"{UP}.scales": torch.ones(2, 512).double()}), "is F64 of shape"),
        (lambda t: t.update({f"{UP}.weight": torch.ones(512, 256)}), "has both .*expected one"),
        (lambda t: t.update({f"{UP}.qweight": torch.ones(16, 512).int()}), r"g_idx|\[512, 128\]"),
        (lambda t: t[f"{UP}.scales"].__setitem__((1, 3), float("nan")), "NaN or infinite in row 3"),
        (lambda t: t[f"{UP}.scales"].__setitem__((0, 9), float("inf")), "NaN or infinite in row 9"),
    ],
)  # fmt: skip
def test_damaged_gptq_is_named(edit: Any, message: str, source: Path, tmp_path: Path) -> None:
    broken(source, tmp_path, made.gptq(), edit, message)


@pytest.mark.parametrize(
    ("how", "edit", "message"),
    [
        (made.awq(), lambda t: t.pop(f"{UP}.qzeros"), "lacks its qzeros, which awq4 needs"),
        (made.awq(), lambda t: t.update({f"{UP}.scales": ODD_SCALES}), "3 groups of"),
        (made.compressed(), lambda t: t.pop(f"{UP}.weight_scale"), "lacks its weight_scale, which"),
        (made.compressed(), lambda t: t[f"{UP}.weight_shape"].fill_(-3), "there are -3 columns"),
        (made.compressed(), lambda t: t[f"{UP}.weight_shape"].fill_(98), "weight_packed of i32"),
        (made.compressed(), lambda t: t.update({f"{UP}.weight_shape": ONE}), "expected I64"),
        (made.compressed(8, packed=False), lambda t: t.pop(f"{UP}.weight_scale"), "lacks its w"),
        (made.fp8(), lambda t: t.pop(f"{UP}.weight_scale_inv"), "lacks its weight_scale, which"),
        (made.fp8(), lambda t: t[f"{UP}.weight_scale_inv"].__setitem__((1, 0), float("inf")),
         "NaN or infinite in row 128"),
        (made.fp8(), lambda t: t.update({f"{UP}.weight_scale_inv": ODD_SCALES}), "scale_inv"),
        (made.mxfp4(), lambda t: t.pop(f"{UP}.weight_scales"), "lacks its scales, which mx4 needs"),
    ],
)  # fmt: skip
def test_damage_of_others_is_named(
    how: Any, edit: Any, message: str, source: Path, tmp_path: Path
) -> None:
    broken(source, tmp_path, how, edit, message)


def test_scales_of_activations_are_left_out_and_told(source: Path, tmp_path: Path) -> None:
    quantised, dense = written(source, tmp_path, made.compressed(bits=8, group=-1, packed=False))
    change(quantised, lambda t: t.update({f"{UP}.input_scale": torch.ones(1)}))
    with helm.LLM(quantised, device="cpu", context=64, dtype="f32", threads=1) as llm:
        assert any("left out 1 scales of activations" in note for note in llm.plan.notices)
        np.testing.assert_array_equal(np.array(llm.logits(PROMPT)), logits(dense))


def test_biases_that_are_zeros_are_left_out_and_told(source: Path, tmp_path: Path) -> None:
    quantised, dense = written(source, tmp_path, made.gptq())
    change(quantised, lambda t: t.update({f"{UP}.bias": torch.zeros(512).half()}))
    with helm.LLM(quantised, device="cpu", context=64, dtype="f32", threads=1) as llm:
        assert any("left out 1 biases that are zeros" in note for note in llm.plan.notices)
        np.testing.assert_array_equal(np.array(llm.logits(PROMPT)), logits(dense))
    change(quantised, lambda t: t[f"{UP}.bias"].__setitem__(500, 1e-3))
    with pytest.raises(CheckpointError, match=f"does not use: {UP}.bias"):
        helm.LLM(quantised)


def test_a_module_of_them_is_refused(source: Path) -> None:
    import transformers

    module = transformers.AutoModelForCausalLM.from_pretrained(source)
    module.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedModelError, match="has quantised weights"):
        helm.LLM.from_torch(module)


def test_a_file_that_became_shorter_is_named(source: Path, tmp_path: Path) -> None:
    quantised, _ = written(source, tmp_path, made.gptq())
    with helm.LLM(quantised, threads=1, context=64, device="cpu") as llm:
        plan = llm.plan
    path = quantised / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes, .* ends at"):
        _helm.Engine(plan.to_json(), str(quantised), {})


def test_plans_of_a_configuration_alone_know_that_it_is_quantised(
    source: Path, tmp_path: Path
) -> None:
    quantised, _ = written(source, tmp_path, made.gptq())
    config = load_config(quantised)
    options: dict[str, Any] = {"context": 64, "threads": 1, "memory_bytes": 1 << 30}
    alone = make_plan(config, None, **options)
    whole = make_plan(config, read_weights(quantised, config).tensors, **options)
    assert [(s.tensor, s.format) for s in alone.slices] == [
        (s.tensor, s.format) for s in whole.slices
    ]
