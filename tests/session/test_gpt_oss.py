"""gpt-oss with its experts in MXFP4, as its checkpoints have them, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_models as made
import torch
import transformers
from safetensors.torch import save_file

import gguf_models
import helm
import small_models
from helm.errors import CheckpointError

EXPERTS = "model.layers.0.mlp.experts"
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6,
    "num_experts_per_tok": 3, "sliding_window": 5, "swiglu_limit": 0.6, "eos_token_id": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors; experts' matrices become those of the blocks in `model`, too."""
    quantise, _ = made.mxfp4()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value.clone()
            continue
        experts, cols, rows = value.shape  # transformers multiplies from the left
        flat = value.transpose(1, 2).reshape(experts * rows, cols)
        pieces, exact = quantise(flat)
        value.copy_(exact.reshape(experts, rows, cols).transpose(1, 2))
        blocks = pieces["weight_blocks"].reshape(experts, rows, cols // 32, 16)
        scales = pieces["weight_scales"].reshape(experts, rows, cols // 32)
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    return tensors


@pytest.fixture(scope="module")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    config = transformers.GptOssConfig(**SIZES)
    config._attn_implementation = "eager"
    model = transformers.GptOssForCausalLM(config)
    small_models._randomise(model, 3)
    folder = tmp_path_factory.mktemp("gpt-oss")
    config.save_pretrained(folder)
    with torch.no_grad():
        save_file(stored(model), folder / "model.safetensors")
    stated = json.loads((folder / "config.json").read_text())
    stated |= {"architectures": ["GptOssForCausalLM"]}
    stated |= {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder, model.eval()


def logits(folder: Path, **options: Any) -> np.ndarray:
    with helm.LLM(folder, threads=2, context=128, kv_dtype="f32", **options) as llm:
        return np.array(llm.logits(small_models.PROMPT))


def test_logits_and_greedy_tokens_equal_transformers(
    made_model: tuple[Path, torch.nn.Module],
) -> None:
    folder, model = made_model
    prompt = torch.tensor([small_models.PROMPT])
    with torch.no_grad():
        want = model(prompt).logits[0].numpy()
        longer = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    got = logits(folder, dtype="f32", device="cpu")
    bound = 2000 * 2.0**-24 * np.abs(want).max(axis=1, keepdims=True)
    assert (np.abs(got - want) <= bound).all()
    with helm.LLM(folder, threads=1, context=128, dtype="f32", kv_dtype="f32", device="cpu") as llm:
        found = llm.generate([small_models.PROMPT], max_tokens=12, temperature=0, ignore_eos=True)
    assert list(found[0].tokens) == longer[0, len(small_models.PROMPT) :].tolist()


def test_a_module_in_memory_has_the_same_logits(
    made_model: tuple[Path, torch.nn.Module],
) -> None:
    folder, model = made_model
    with helm.LLM.from_torch(model, threads=2, context=128, kv_dtype="f32", device="cpu") as llm:
        got = np.array(llm.logits(small_models.PROMPT))
    np.testing.assert_array_equal(got, logits(folder, dtype="f32", device="cpu"))


def test_experts_are_held_as_stored_and_the_same_on_the_simulated_accelerator(
    made_model: tuple[Path, torch.nn.Module],
) -> None:
    folder, _ = made_model
    exact = logits(folder, dtype="f32", device="cpu")
    held = logits(folder, device="cpu")
    np.testing.assert_array_equal(logits(folder, device="sim:vram=2GiB"), held)
    assert 0 < np.linalg.norm(held - exact) / np.linalg.norm(exact) < 0.05
    with helm.LLM(folder, threads=1, context=64, device="cpu") as llm:
        formats = {one.tensor: one.format for one in llm.plan.slices}
    assert formats[f"{EXPERTS}.gate_up_proj.weight"] == "mx4.e32"
    assert formats["model.layers.0.mlp.router.weight"] == "f32"


def test_a_gguf_file_has_the_checkpoints_logits(
    made_model: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    """Its experts in MXFP4, gate and up apart. It has no key for the limit, which is 7 then, and of
    rope it knows bounds that are whole numbers."""
    stated = json.loads((made_model[0] / "config.json").read_text())
    stated["swiglu_limit"] = 7.0
    stated["rope_parameters"]["truncate"] = True
    (tmp_path / "config.json").write_text(json.dumps(stated))
    (tmp_path / "model.safetensors").symlink_to(made_model[0] / "model.safetensors")
    (tmp_path / "gguf").mkdir()
    path = gguf_models.write(tmp_path, tmp_path / "gguf" / "x.gguf")
    np.testing.assert_array_equal(logits(path, device="cpu"), logits(tmp_path, device="cpu"))
    with helm.LLM(path, threads=1, context=64, device="cpu") as llm:
        formats = {one.tensor: one.format for one in llm.plan.slices}
    assert formats[f"{EXPERTS}.up_proj.weight"] == "mx4.e32"


def test_unquantised_experts_are_refused_with_what_is_expected(
    made_model: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    folder, model = made_model
    model.save_pretrained(tmp_path)
    stated = json.loads((folder / "config.json").read_text())
    del stated["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    said = r"unquantised, as f32 \[6, 64, 64\] of \[experts, in, out\]; expected MXFP4"
    with pytest.raises(CheckpointError, match=said):
        logits(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), "lacks its scales"),
        (lambda t: t.pop(f"{EXPERTS}.gate_up_proj_bias"), "gate_up_proj_bias"),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_bias": torch.zeros(5, 64)}),
            "expected 6 experts",
        ),
    ],
)
def test_damaged_experts_are_refused(
    made_model: tuple[Path, torch.nn.Module], tmp_path: Path, damage: Any, said: str
) -> None:
    folder, model = made_model
    with torch.no_grad():
        tensors = stored(model)
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=said):
        logits(tmp_path, device="cpu")
