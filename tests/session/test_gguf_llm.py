"""Models in GGUF files, from the file to tokens: the same as the checkpoints that they were made
from."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import quantised_models
from near_logits import BEST_EXACT_TIER
from safetensors.numpy import load_file, save_file

import gguf_models
import helm
import small_models
from command import helm as command
from helm.errors import CheckpointError, TokenizerError
from helm.model.families import load_config
from helm.model.gguf.types import TYPES
from whole import one_in

KINDS = gguf.GGMLQuantizationType
PROMPT = small_models.PROMPT
CASES = (
    "llama", "llama_biases", "llama_one_kv_head", "llama_tied_sharded", "llama_linear",
    "llama_yarn", "mistral_window", "qwen2", "qwen3", "qwen3_untied_sharded", "phi3_window",
    "smollm3", "granite", "olmo2", "glm4", "cohere2_pattern", "stablelm_parallel", "gpt_neox",
    "gpt2", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe_norms",
)  # fmt: skip


def logits(model: Path, **options: Any) -> np.ndarray:
    with helm.LLM(model, threads=1, context=64, device="cpu", **options) as llm:
        return np.array(llm.logits(PROMPT))


@pytest.mark.parametrize(
    ("case", "dtype"), one_in(2, itertools.product(CASES, ("f32", "f16", "bf16")))
)
def test_logits_are_the_checkpoints_to_the_bit(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_models.model_dir(case, dtype)
    if dtype == "bf16" and load_config(folder).mixture is not None:
        # Files hold routers in f32, so no activation may be rounded that meets bf16 weights.
        monkeypatch.setenv("HELM_CPU_ISA", BEST_EXACT_TIER)
    path = gguf_models.write(folder, tmp_path / "x.gguf", KINDS[dtype.upper()])
    np.testing.assert_array_equal(logits(path), logits(folder))


@pytest.mark.parametrize("case", ["gemma2_pattern", "gemma3_pattern", "olmo3_pattern"])
def test_what_a_file_holds_otherwise_changes_no_more_than_rounding(
    case: str, tmp_path: Path
) -> None:
    """Norms of Gemma are stored with 1 added."""
    folder = small_models.model_dir(case)
    path = gguf_models.write(folder, tmp_path / "x.gguf")
    expected = logits(folder)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits(path), expected, rtol=0, atol=1e-5 * scale)


def test_factors_of_rope_change_no_more_than_their_rounding(tmp_path: Path) -> None:
    folder = small_models.model_dir("llama3")
    path = gguf_models.write(folder, tmp_path / "x.gguf")
    expected = logits(folder)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits(path), expected, rtol=0, atol=1e-4 * scale)


def test_files_are_mapped_where_they_lie_as_they_are_held(tmp_path: Path) -> None:
    folder = small_models.model_dir("llama", "bf16")
    path = gguf_models.write(folder, tmp_path / "x.gguf", KINDS.BF16)
    with helm.LLM(path, threads=1, context=64, device="cpu", weights="mapped") as llm:
        access = {held.tensor.split(".")[-2]: held.access for held in llm.plan.slices}
        assert access["gate_proj"] == "mapped"
        assert access["q_proj"] == "resident"  # its rows are in another order
        np.testing.assert_array_equal(np.array(llm.logits(PROMPT)), logits(folder))


def split_in_two(path: Path, folder: Path) -> list[Path]:
    """The same model in two files."""
    whole = gguf.GGUFReader(path)
    halves = (whole.tensors[: len(whole.tensors) // 2], whole.tensors[len(whole.tensors) // 2 :])
    paths = []
    for i, tensors in enumerate(halves):
        paths.append(folder / f"x-{i + 1:05}-of-00002.gguf")
        writer = gguf.GGUFWriter(paths[-1], "llama")
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for name, field in whole.fields.items() if i == 0 else ():
            if not name.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(name, field.contents(), field.types[0])
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_split_files_are_one_model(tmp_path: Path) -> None:
    whole = gguf_models.write(small_models.model_dir("llama"), tmp_path / "whole.gguf")
    (tmp_path / "parts").mkdir()
    first, second = split_in_two(whole, tmp_path / "parts")
    for given in (first, second, first.parent):
        np.testing.assert_array_equal(logits(given), logits(whole))
    second.unlink()
    with pytest.raises(CheckpointError, match="is one of the 2 parts of this model"):
        helm.LLM(first)


# --- quantised -----------------------------------------------------------------------------------


# Where the f16 scales of a block lie.
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
    "Q8_0": (0,),
}  # fmt: skip


def random_blocks(kind: Any, rows: int, cols: int, seed: int) -> np.ndarray:
    """Bytes of a matrix [rows, cols], all but the scales of blocks random; its values deviate from
    zero as weights do."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows * cols // elements, size), np.uint8)

    def scaled(scale: float) -> np.ndarray:
        for place in SCALES.get(kind.name, ()):
            blocks[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        if kind.name == "MXFP4":
            blocks[:, 0] = 128 + round(np.log2(scale))
        return blocks.reshape(rows, -1)

    wide = np.sqrt(np.mean(np.square(gguf.quants.dequantize(scaled(1.0), kind))))
    return scaled(0.05 / float(wide))


def quantised(source: Path, target: Path, plain: Path, kind: Any) -> None:
    """A GGUF file of random blocks, and a checkpoint in f32 of their values."""
    shutil.copytree(source, plain)
    made: dict[str, np.ndarray] = {}
    weights = load_file(source / "model.safetensors")
    for i, (name, array) in enumerate(sorted(weights.items())):
        if array.ndim == 2:
            blocks = random_blocks(kind, *array.shape, i)
            made[name] = blocks
            weights[name] = gguf.quants.dequantize(blocks, kind).astype(np.float32)
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    gguf_models.write(source, target, kind, blocks=made)


@pytest.mark.parametrize("kind", [k.name for k in TYPES.values() if k.elements > 1])
def test_every_type_read_in_f32_is_what_the_gguf_package_reads(kind: str, tmp_path: Path) -> None:
    source = quantised_models.wide_model(tmp_path / "source", seed=39)
    quantised(source, tmp_path / "x.gguf", tmp_path / "plain", KINDS[kind])
    found = logits(tmp_path / "x.gguf", dtype="f32")
    expected = logits(tmp_path / "plain")
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", [k.name for k in TYPES.values() if k.elements > 1])
def test_every_type_as_it_is_is_near(kind: str, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits, weights are not."""
    source = quantised_models.wide_model(tmp_path / "source", seed=39)
    quantised(source, tmp_path / "x.gguf", tmp_path / "plain", KINDS[kind])
    with helm.LLM(tmp_path / "x.gguf", threads=1, context=64, device="cpu") as llm:
        formats = {held.format for held in llm.plan.slices}
        found = np.array(llm.logits(PROMPT))
    expected = logits(tmp_path / "plain")
    assert formats == {"f32", next(k.format for k in TYPES.values() if k.name == kind)}
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 0.05


# --- text ----------------------------------------------------------------------------------------


@pytest.fixture
def talking(tmp_path: Path) -> Path:
    """A model with a tokenizer."""
    return gguf_models.talking(tmp_path / "one")


def test_text_in_and_out(talking: Path) -> None:
    with helm.LLM(talking, threads=1, context=64, device="cpu") as llm:
        assert llm.name == "x.gguf"
        assert llm.folder == talking.parent
        assert llm.config.eos_token_ids == (2, 3)
        assert llm.tokenizer is not None
        completion = llm.generate("the a", max_tokens=4)
        ids = llm.tokenizer.encode("the a")
        assert ids[0] == 1
        assert completion.tokens == llm.generate(ids, max_tokens=4).tokens
        assert llm.chat([{"role": "user", "content": "a"}], max_tokens=2).text


def test_the_file_its_folder_and_the_command(talking: Path) -> None:
    expected = command("run", str(talking), "a the", "-n", "3", "-q", "--raw").stdout
    assert command("run", str(talking.parent), "a the", "-n", "3", "-q", "--raw").stdout == expected
    shown = json.loads(command("show", str(talking), "--json").stdout)
    assert (shown["architecture"], shown["chat_template"]) == ("LlamaForCausalLM", True)
    listed = json.loads(command("list", "--json").stdout)["models"]
    assert str(talking) in [model["name"] for model in listed]


def test_another_tokenizer(talking: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    with helm.LLM(talking, threads=1, context=64, device="cpu") as llm:
        assert llm.tokenizer is not None
        llm.tokenizer.backend.save(str(other / "tokenizer.json"))
    bare = gguf_models.write(small_models.model_dir("qwen2"), tmp_path / "bare.gguf")
    with helm.LLM(bare, threads=1, context=64, device="cpu") as llm:
        assert llm.tokenizer is None
    for given in (other, talking):
        with helm.LLM(bare, tokenizer=given, threads=1, context=64, device="cpu") as llm:
            assert llm.tokenizer is not None
            assert llm.generate("the a", max_tokens=2).tokens
    shown = command("run", str(bare), "a", "-n", "2", "-q", "--raw", "--tokenizer", str(other))
    assert shown.stdout


def test_an_unknown_kind_of_words_names_the_way_out(tmp_path: Path) -> None:
    keys = {**gguf_models.VOCABULARY, "tokenizer.ggml.pre": "unheard-of"}
    path = gguf_models.write(small_models.model_dir("llama"), tmp_path / "x.gguf", keys=keys)
    with pytest.raises(
        TokenizerError, match=r"x\.gguf\] tokenizer\.ggml\.pre: 'unheard-of' is not"
    ):
        helm.LLM(path)
    shown = command("run", str(path), "a", status=2).stderr
    assert "give the model's own tokenizer with --tokenizer" in shown
