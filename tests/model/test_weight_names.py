"""Which stored tensor is which weight; transformers is the oracle where it loads such a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from plans import make_plan

import helm
import reference
import small_models
from helm.errors import CheckpointError
from helm.model.checkpoint import TensorInfo, same_data
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import load_config
from helm.model.source import Extent
from helm.model.weight_names import read_weights

Tensors = dict[str, torch.Tensor]
TIED = ["llama_tied_sharded", "qwen2", "qwen3", "opt", "opt_350m"]
PROMPT = small_models.PROMPT
COUNT = 20


def stored(name: str) -> Tensors:
    folder = small_models.model_dir(name)
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(safetensors.torch.load_file(file))
    return tensors


def changed(name: str, folder: Path, tensors: Tensors, **config: Any) -> Path:
    """CASES[name] with other tensors and another config in `folder`."""
    document = json.loads((small_models.model_dir(name) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **config}))
    safetensors.torch.save_file(
        {key: tensor.clone() for key, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def transformers_tokens(folder: Path) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return module_tokens(model)


def module_tokens(model: Any) -> list[int]:
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(COUNT):
            following = model(tokens).logits[0, -1].argmax()
            tokens = torch.cat([tokens, following.reshape(1, 1)], 1)
    return tokens[0, len(PROMPT) :].tolist()


def helm_tokens(llm: helm.LLM) -> list[int]:
    return llm.generate(PROMPT, max_tokens=COUNT, ignore_eos=True, temperature=0).tokens


def tokens_of(folder: Path) -> tuple[list[int], tuple[str, ...]]:
    with helm.LLM(folder, kv_dtype="f32", threads=1) as llm:
        return helm_tokens(llm), llm.plan.notices


def logits_of(folder: Path) -> np.ndarray[Any, Any]:
    weights = read_weights(folder, load_config(folder))
    plan = make_plan(weights.config, weights.tensors, threads=1, memory_bytes=1 << 32)
    document = json.loads(plan.to_json())
    return np.asarray(reference.run(document, reference.load_weights(document, folder), PROMPT))


def embedding(tensors: Tensors) -> str:
    return next(name for name in tensors if name.endswith("embed_tokens.weight"))


def another(matrix: torch.Tensor) -> torch.Tensor:
    return torch.randn(matrix.shape, generator=torch.Generator().manual_seed(5)) * 0.2


@pytest.mark.parametrize("name", TIED)
def test_a_stored_head_that_differs_is_the_head(name: str, tmp_path: Path) -> None:
    tensors = stored(name)
    plain = tokens_of(small_models.model_dir(name))[0]
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = another(tensors[embedding(tensors)])
    folder = changed(name, tmp_path, tensors)
    found, notices = tokens_of(folder)
    assert found == transformers_tokens(folder) != plain
    assert any("lm_head.weight is another matrix" in notice for notice in notices)


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("kept", ["both", "lm_head.weight", "embedding"])
def test_a_tied_matrix_is_loaded_once_by_whichever_name(
    name: str, kept: str, tmp_path: Path
) -> None:
    tensors = stored(name)
    at = embedding(tensors)
    if kept != "embedding":
        tensors["lm_head.weight"] = tensors[at]
    if kept == "lm_head.weight":
        del tensors[at]
    folder = changed(name, tmp_path, tensors)
    with helm.LLM(folder, kv_dtype="f32", threads=1) as llm:
        assert helm_tokens(llm) == transformers_tokens(folder)
        assert [t.name for t in llm.plan.tensors if t.shape == tuple(stored(name)[at].shape)] == [
            at
        ]
        assert llm.plan.notices == ()
        assert llm.config.tie_word_embeddings


def test_an_untied_model_needs_both() -> None:
    for name in ("llama", "mistral"):
        config = load_config(small_models.model_dir(name))
        assert not config.tie_word_embeddings
        tensors = read_checkpoint(small_models.model_dir(name))
        for missing in ("lm_head.weight", "model.embed_tokens.weight"):
            kept = {key: info for key, info in tensors.items() if key != missing}
            with pytest.raises(CheckpointError, match=missing):
                make_plan(config, kept, threads=1, memory_bytes=1 << 32)


@pytest.mark.parametrize("name", ["llama_tied_sharded", "opt"])
def test_a_modules_own_head_is_the_head(name: str) -> None:
    module: Any = small_models.make_model(name)
    tied = module_tokens(module)
    with helm.LLM.from_torch(module, kv_dtype="f32") as llm:
        assert helm_tokens(llm) == tied
        assert llm.plan.notices == ()
    module.lm_head.weight = torch.nn.Parameter(another(module.lm_head.weight.detach()))
    with helm.LLM.from_torch(module, kv_dtype="f32") as llm:
        assert helm_tokens(llm) == module_tokens(module) != tied
    module.lm_head.weight = torch.nn.Parameter(module.get_input_embeddings().weight.clone())
    with helm.LLM.from_torch(module, kv_dtype="f32") as llm:
        assert helm_tokens(llm) == tied
        assert "lm_head.weight" not in {tensor.name for tensor in llm.plan.tensors}


def test_a_compiled_module_has_its_weights_behind_a_wrapper() -> None:
    module = small_models.make_model("llama")
    wrapped = torch.compile(module)  # compiles nothing before it is called
    assert all(name.startswith("_orig_mod.") for name in wrapped.state_dict())
    with helm.LLM.from_torch(wrapped, kv_dtype="f32") as llm:
        assert helm_tokens(llm) == module_tokens(module)


RENAMED: dict[str, Callable[[str], str]] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "parallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "parts": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "doubled": lambda name: f"model.{name}",
    "nested": lambda name: f"language_model.{name}",
    "bare": lambda name: name.removeprefix("model."),
    "bare compiled": lambda name: f"_orig_mod.{name.removeprefix('model.')}",
    "head within": lambda name: name if name.startswith("model.") else f"model.{name}",
}


@pytest.mark.parametrize("way", RENAMED)
@pytest.mark.parametrize("name", ["llama", "qwen3", "opt_350m"])
def test_names_behind_a_prefix_are_recognised(name: str, way: str, tmp_path: Path) -> None:
    tensors = {RENAMED[way](key): tensor for key, tensor in stored(name).items()}
    folder = changed(name, tmp_path, tensors)
    want = logits_of(small_models.model_dir(name))
    np.testing.assert_array_equal(logits_of(folder), want)


def test_two_models_in_one_checkpoint_are_named(tmp_path: Path) -> None:
    tensors = stored("llama")
    both = {f"{who}.{key}": t for who in ("student", "teacher") for key, t in tensors.items()}
    folder = changed("llama", tmp_path, both)
    with pytest.raises(CheckpointError, match=r"2 models.*'student\.model\.', 'teacher\.model\.'"):
        tokens_of(folder)


def test_one_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = stored("llama")
    tensors["_orig_mod.model.norm.weight"] = tensors["model.norm.weight"] + 1
    with pytest.raises(CheckpointError, match=r"are both the weight 'model\.norm\.weight'"):
        tokens_of(changed("llama", tmp_path, tensors))


def test_names_that_nothing_explains_are_told(tmp_path: Path) -> None:
    tensors = {key.replace("layers", "blocks"): t for key, t in stored("llama").items()}
    with pytest.raises(CheckpointError, match=r"lacks: .*layers\.0.*has others: .*blocks\.0"):
        tokens_of(changed("llama", tmp_path, tensors))


LEFTOVERS = [
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.bias",
    "model.layers.0.attn.masked_bias",
    "model.rotary_emb.inv_freq",
    "v_head.summary.weight",
    "v_head.summary.bias",
    "module.score.weight",
    "decoder.version",
]


def test_leftovers_are_left_out_with_a_notice(tmp_path: Path) -> None:
    tensors = {**stored("llama"), **dict.fromkeys(LEFTOVERS, torch.ones(3, dtype=torch.int64))}
    tokens, notices = tokens_of(changed("llama", tmp_path, tensors))
    assert tokens == tokens_of(small_models.model_dir("llama"))[0]
    assert len(notices) == 1
    assert notices[0].startswith(f"left out {len(LEFTOVERS)} tensors that text does not need: ")


def test_leftovers_of_a_module_are_left_out_too() -> None:
    module: Any = small_models.make_model("llama")
    module.v_head = torch.nn.Linear(48, 1, dtype=torch.float64)
    with helm.LLM.from_torch(module, kv_dtype="f32") as llm:
        assert helm_tokens(llm) == module_tokens(module)
        assert len(llm.plan.notices) == 1
        assert "v_head.weight" in llm.plan.notices[0]


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("left", DTYPES)
@pytest.mark.parametrize("right", DTYPES)
def test_same_data_compares_values(
    left: torch.dtype, right: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helm.model.checkpoint._COMPARED", 7)
    a = torch.arange(-30, 30).reshape(6, 10) / 8
    values = {"a": a.to(left)}
    for change in (None, 0, 6, 7, 59):
        values["b"] = a.to(right, copy=True)
        if change is not None:
            values["b"].view(-1)[change] += 1
        safetensors.torch.save_file(values, tmp_path / "model.safetensors")
        infos = read_checkpoint(tmp_path)
        assert same_data(tmp_path, infos["a"], infos["b"]) == (change is None)
    flat = TensorInfo("b", (60,), "f32", (Extent("model.safetensors", 0, 60),))
    assert not same_data(tmp_path, infos["a"], flat)


def test_plan_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from helm.commands.cli import main

    tensors = stored("qwen3")
    tensors["lm_head.weight"] = another(tensors[embedding(tensors)])
    folder = changed("qwen3", tmp_path, tensors)
    assert main(["plan", str(folder), "--json", "--profile", "cpu-laptop-16gb"]) == 0
    notices = json.loads(capsys.readouterr().out)["notices"]
    assert any("lm_head.weight is another matrix" in notice for notice in notices)


def sharded(folder: Path, tensors: Tensors, index: dict[str, str]) -> Path:
    """Two shards of alternating tensors; index: changes of the honest one, "" to omit."""
    shutil.copy(small_models.model_dir("llama") / "config.json", folder)
    places = {name: f"{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in ("0.safetensors", "1.safetensors"):
        own = {name: tensors[name] for name, place in places.items() if place == file}
        safetensors.torch.save_file(own, folder / file, metadata={"format": "pt"})
    listed = {name: file for name, file in {**places, **index}.items() if file}
    document = {"metadata": {}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    "index",
    [
        {"lm_head.weight": ""},
        {"model.norm.weight": ""},
        dict.fromkeys(("lm_head.weight", "model.norm.weight"), "0.safetensors"),
        dict.fromkeys(("lm_head.weight", "model.norm.weight"), "1.safetensors"),
    ],
)
def test_shards_are_believed_over_their_index(index: dict[str, str], tmp_path: Path) -> None:
    folder = sharded(tmp_path, stored("llama"), index)
    assert tokens_of(folder)[0] == transformers_tokens(folder)
    assert transformers_tokens(folder) == transformers_tokens(small_models.model_dir("llama"))
