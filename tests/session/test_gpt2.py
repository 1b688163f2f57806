"""GPT-2, whose checkpoints have matrices as [columns, rows]."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import helm
import small_models
from helm.errors import CheckpointError, UnsupportedModelError

PROMPT = small_models.PROMPT
OPTIONS = {"threads": 1, "context": 64, "device": "cpu"}


def logits(model: Path, **options: object) -> np.ndarray:
    with helm.LLM(model, **{**OPTIONS, **options}) as llm:
        return np.array(llm.logits(PROMPT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_models.model_dir("gpt2"), tmp_path / "model"))


def rewrite(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")  # type: ignore[operator]


def test_the_first_checkpoints_have_no_prefix_and_masks(folder: Path) -> None:
    """As OpenAI's are on the hub."""
    expected = logits(folder)
    mask = torch.ones(1, 1, 600, 600).tril()

    def older(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plain = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        return plain | {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}

    rewrite(folder, older)
    np.testing.assert_array_equal(logits(folder), expected)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_module_in_memory_has_the_logits_of_its_folder(dtype: str) -> None:
    with helm.LLM.from_torch(small_models.make_model("gpt2", dtype), **OPTIONS) as llm:
        found = np.array(llm.logits(PROMPT))
    np.testing.assert_array_equal(found, logits(small_models.model_dir("gpt2", dtype)))


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_quantised_folders_have_the_logits_of_quantising_while_loading(
    dtype: str, folder: Path, tmp_path: Path
) -> None:
    helm.quantize(folder, tmp_path / "packed", to=dtype, compare_answers=False)
    np.testing.assert_array_equal(logits(tmp_path / "packed"), logits(folder, dtype=dtype))


def test_weights_that_are_not_finite_are_refused_by_name(folder: Path) -> None:
    def broken(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["transformer.h.1.mlp.c_fc.weight"][5, 3] = float("nan")
        return tensors

    rewrite(folder, broken)
    with pytest.raises(helm.HelmError, match=r"h\.1\.mlp\.c_fc\.weight.*row 3"):
        logits(folder)


def test_a_matrix_of_another_shape_or_dtype_is_refused_by_name(folder: Path) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].T.contiguous()})
    with pytest.raises(CheckpointError, match=r"c_attn\.weight is \[48, 144\], expected \[144, 48"):
        logits(folder)
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"c_attn\.weight.*F32, F16 or BF16"):
        logits(folder)


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_what_is_not_run_is_refused_by_name(key: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: True}))
    with pytest.raises(UnsupportedModelError, match=key):
        logits(folder)


def test_the_mlp_is_four_times_as_wide_where_nothing_says() -> None:
    from helm.model.families import parse_config

    shape = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 600,
             "vocab_size": 131}  # fmt: skip
    assert parse_config(shape).intermediate_size == 4 * 48
    assert parse_config({**shape, "n_inner": None}).intermediate_size == 4 * 48
    assert parse_config({**shape, "n_inner": 72}).intermediate_size == 72
