"""Configuration and names of weights in GGUF files, against the checkpoints that they were made
from."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from model_tensors import tensors_of

import gguf_models
import small_models
from gguf_bytes import ARRAY, F32, I32, STRING, U32, File, Tensor
from helm.errors import CheckpointError, HelmError, UnsupportedModelError
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.families import build_graph, load_config, parse_config
from helm.model.gguf.config import VECTORS, config_of
from helm.model.gguf.file import Gguf, read_gguf
from helm.model.gguf.names import name_tensors
from helm.model.model_files import gguf_config, gguf_weights

KINDS = gguf.GGMLQuantizationType
CASES = (
    "llama", "llama_biases", "llama_one_kv_head", "llama_tied_sharded", "llama_plain_heads",
    "llama_linear", "llama_yarn", "llama3", "mistral", "mistral_window", "qwen2", "qwen3",
    "qwen3_untied_sharded", "gemma2_pattern", "gemma3_pattern", "phi3_window", "smollm3", "granite",
    "granite_biases", "olmo2", "olmo3_pattern", "glm4", "cohere", "cohere2_pattern",
    "stablelm", "stablelm_parallel", "gpt_neox",
)  # fmt: skip
_TOKENS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def opened(path: Path) -> tuple[Gguf, ModelConfig]:
    found = read_gguf(path, VECTORS)
    return found, parse_config(config_of(found), str(path))


@pytest.mark.parametrize("case", [*CASES, "gpt2"])
def test_the_configuration_is_the_checkpoints(case: str, tmp_path: Path) -> None:
    folder = small_models.model_dir(case)
    _, config = opened(gguf_models.write(folder, tmp_path / "x.gguf", keys=_TOKENS))
    expected = load_config(folder)
    if case == "mistral":  # without a window it is a Llama, to GGUF
        assert (config.architecture, build_graph(config).units) == (
            "LlamaForCausalLM",
            build_graph(expected).units,
        )
        expected = replace(expected, architecture=config.architecture)
    if case == "llama3":  # by factors; the frequencies are compared below
        assert config.rope is not None
        assert expected.rope is not None
        expected = replace(expected, rope=config.rope)
    if case.startswith("gemma"):  # norms hold 1 + w
        assert (config.norm_plus, expected.norm_plus) == (0.0, 1.0)
        expected = replace(expected, norm_plus=0.0)
    ours, theirs = (dataclasses.asdict(c) for c in (config, replace(expected, dtype=None)))
    assert ours == theirs


def rows(folder: Path, tensor: TensorInfo) -> np.ndarray:
    """The bytes of a tensor's rows, [rows, bytes of one], by its extents alone."""
    row_bytes = tensor.nbytes // tensor.shape[0]
    found = []
    for extent in tensor.extents:
        data = (folder / extent.file).read_bytes()
        stride = extent.row_stride or row_bytes
        begins = [extent.offset + row * stride for row in range(extent.rows)]
        found += [np.frombuffer(data, np.uint8, row_bytes, begin) for begin in begins]
    return np.stack(found)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("case", CASES)
def test_tensors_are_the_checkpoints(case: str, kind: str, tmp_path: Path) -> None:
    """Name, shape and every value, in the order of rows that transformers has."""
    folder = small_models.model_dir(case)
    found, config = opened(gguf_models.write(folder, tmp_path / "x.gguf", KINDS[kind]))
    tensors = name_tensors(found, config)
    graph = build_graph(config)
    assert {name: tensor.shape for name, tensor in tensors.items()} == graph.tensors
    stored = tensors_of(folder)
    for name, tensor in tensors.items():
        own = KINDS.F32 if len(tensor.shape) == 1 else KINDS[kind]
        assert tensor.stored == own.name.lower()
        data = rows(tmp_path, tensor)
        assert len(data) == tensor.shape[0]
        values = rows(folder, stored[name]).view(np.float32).reshape(tensor.shape)
        if case.startswith("gemma") and name.endswith("norm.weight"):
            values = 1 + values
        expected = gguf.quants.quantize(values, own)
        expected = np.ascontiguousarray(expected).view(np.uint8).reshape(data.shape)
        np.testing.assert_array_equal(data, expected, err_msg=name)


def test_only_q_and_k_of_llama_have_other_rows(tmp_path: Path) -> None:
    for case, moved in (("llama", {"q_proj", "k_proj"}), ("qwen3", set())):
        folder = small_models.model_dir(case)
        found, config = opened(gguf_models.write(folder, tmp_path / f"{case}.gguf"))
        several = {
            name.split(".")[-2]
            for name, tensor in name_tensors(found, config).items()
            if len(tensor.extents) > 1
        }
        assert several == moved


def test_rows_that_are_not_rotated_stay(tmp_path: Path) -> None:
    """A partial rotation: of 10 elements of a head 6 are rotated, the last 4 keep their place."""
    folder = small_models.model_dir("llama_one_kv_head")
    path = gguf_models.write(folder, tmp_path / "x.gguf")
    found = read_gguf(path)
    keys = {**found.keys, "llama.rope.dimension_count": 6}
    found = replace(found, keys=keys)
    config = parse_config(config_of(found))
    tensor = name_tensors(found, config)["model.layers.0.self_attn.k_proj.weight"]
    row = tensor.nbytes // 10
    places = [
        (extent.offset - tensor.extents[0].offset) // row + i * (extent.row_stride or row) // row
        for extent in tensor.extents
        for i in range(extent.rows)
    ]
    assert places == [0, 2, 4, 1, 3, 5, 6, 7, 8, 9]


# --- by hand -------------------------------------------------------------------------------------

VALID = File(
    keys=(
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", U32, 1),
        ("llama.context_length", U32, 128),
        ("llama.embedding_length", U32, 32),
        ("llama.feed_forward_length", U32, 64),
        ("llama.attention.head_count", U32, 4),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-6),
        ("llama.rope.freq_base", F32, 500000.0),
    ),
    tensors=(Tensor("token_embd.weight", (32, 7), 0), Tensor("output_norm.weight", (32,), 0)),
)


def config_by_hand(file: File, folder: Path) -> dict[str, Any]:
    return config_of(read_gguf(file.write(folder / "x.gguf"), VECTORS))


def test_numbers_are_as_a_checkpoint_writes_them(tmp_path: Path) -> None:
    found = config_by_hand(VALID, tmp_path)
    assert (found["rms_norm_eps"], found["rope_theta"]) == (1e-6, 500000.0)
    assert (found["head_dim"], found["num_key_value_heads"]) == (8, 4)
    assert (found["vocab_size"], found["tie_word_embeddings"]) == (7, True)


def test_values_per_layer_that_are_one(tmp_path: Path) -> None:
    file = VALID.with_keys(("llama.attention.head_count_kv", ARRAY, (U32, [2, 2])))
    assert config_by_hand(file, tmp_path)["num_key_value_heads"] == 2


def test_ids_that_end_an_answer(tmp_path: Path) -> None:
    file = VALID.with_keys(
        ("tokenizer.ggml.bos_token_id", U32, 3),
        ("tokenizer.ggml.eos_token_id", U32, 4),
        ("tokenizer.ggml.eot_token_id", U32, 5),
        ("tokenizer.ggml.eom_token_id", U32, 4),
        ("tokenizer.ggml.padding_token_id", U32, 6),
        (
            "tokenizer.ggml.tokens",
            ARRAY,
            (STRING, ["<|im_end|>", "a", "</s>", "<|eot_id|>", "b", "c", "d"]),
        ),
        ("tokenizer.ggml.token_type", ARRAY, (I32, [3, 3, 3, 1, 3, 1, 1])),
    )
    found = read_gguf(file.write(tmp_path / "x.gguf"))
    config = parse_config(config_of(found))
    assert config.bos_token_id == 3
    assert config.eos_token_ids == (4, 5, 0, 2)
    assert config.pad_token_id == 6


def vector(*values: float) -> Tensor:
    data = np.array(values, np.float32).tobytes()
    return Tensor("rope_freqs.weight", (len(values),), 0, data)


def with_tensor(tensor: Tensor) -> File:
    return replace(VALID, tensors=(*VALID.tensors, tensor))


def key(name: str, kind: int, content: object) -> File:
    return VALID.with_keys((name, kind, content))


BAD: dict[str, tuple[File, str]] = {
    "an architecture that HELM lacks": (
        key("general.architecture", STRING, "gemma3n"),
        "'gemma3n' is not supported; the nearest that is: gemma3; supported in GGUF are .*gemma2",
    ),
    "experts": (key("llama.expert_count", U32, 8), "llama.expert_used_count: is missing"),
    "soft caps": (key("llama.attn_logit_softcapping", F32, 50.0), "softcapping: 50.0 needs"),
    "a missing key": (
        VALID.without("llama.block_count"),
        "llama.block_count: is missing; convert the original checkpoint again",
    ),
    "no epsilon": (
        VALID.without("llama.attention.layer_norm_rms_epsilon"),
        "layer_norm_rms_epsilon: is missing",
    ),
    "no layers": (key("llama.block_count", U32, 0), "llama.block_count: expected an integer from"),
    "text for a number": (
        key("llama.embedding_length", STRING, "32"),
        "llama.embedding_length: expected an integer",
    ),
    "heads per layer that differ": (
        key("llama.attention.head_count_kv", ARRAY, (U32, [2, 4])),
        r"head_count_kv: differs between layers \(2 values\)",
    ),
    "heads that do not divide": (
        key("llama.attention.head_count", U32, 5),
        "head_count: 5 does not divide embedding_length 32",
    ),
    "values of another size": (
        VALID.with_keys(
            ("llama.attention.key_length", U32, 8), ("llama.attention.value_length", U32, 4)
        ),
        "value_length: 4 differs from key_length 8",
    ),
    "a base that is NaN": (key("llama.rope.freq_base", F32, float("nan")), "rope.freq_base: exp"),
    "too large an epsilon": (
        key("llama.attention.layer_norm_rms_epsilon", F32, 3e38),
        "rms_norm_eps: expected a number from 0 to 1",
    ),
    "more rotated than there are": (
        key("llama.rope.dimension_count", U32, 16),
        "rope.dimension_count: 16 is over the 8 elements",
    ),
    "longrope without its context": (
        key("llama.rope.scaling.type", STRING, "longrope"),
        "llama.rope.scaling.original_context_length: is missing",
    ),
    "longrope without factors": (
        VALID.with_keys(
            ("llama.rope.scaling.type", STRING, "longrope"),
            ("llama.rope.scaling.original_context_length", U32, 64),
        ),
        "tensor 'rope_factors_short.weight' is missing; expected 4 factors",
    ),
    "an unknown scaling": (key("llama.rope.scaling.type", STRING, "x"), "scaling.type: expected"),
    "linear scaling without a factor": (
        key("llama.rope.scaling.type", STRING, "linear"),
        "llama.rope.scaling.factor: is missing",
    ),
    "factors of another number": (
        with_tensor(vector(1, 2, 3)),
        "tensor 'rope_freqs.weight' has 3 values, expected 4 from",
    ),
    "a factor of 0": (with_tensor(vector(1, 0, 1, 1)), "rope_freqs.weight' has 4 values, expected"),
    "a factor that is NaN": (with_tensor(vector(1, float("nan"), 1, 1)), "expected 4 from 1e-6"),
    "factors in f16": (
        with_tensor(Tensor("rope_freqs.weight", (4,), 1)),
        "'rope_freqs.weight' is f16 of shape .*, expected a vector of f32",
    ),
    "factors beside a scaling": (
        with_tensor(vector(1, 2, 3, 4)).with_keys(("llama.rope.scaling.type", STRING, "yarn")),
        "yarn and tensor 'rope_freqs.weight' both scale rope",
    ),
    "no embedding": (
        VALID.without("token_embd.weight"),
        "tensor 'token_embd.weight' is missing or no matrix",
    ),
    "an embedding of one dimension": (
        replace(VALID, tensors=(Tensor("token_embd.weight", (32,), 0),)),
        "tensor 'token_embd.weight' is missing or no matrix",
    ),
    "a vocabulary of another size": (
        key("llama.vocab_size", U32, 8),
        "llama.vocab_size: is 8, tensor 'token_embd.weight' has 7 rows",
    ),
    "more tokens than rows": (
        key("tokenizer.ggml.tokens", ARRAY, (STRING, list("abcdefgh"))),
        "tokenizer.ggml.tokens has 8 tokens, tensor 'token_embd.weight' has 7 rows",
    ),
    "a negative id": (
        key("tokenizer.ggml.eos_token_id", 5, -1),
        "tokenizer.ggml.eos_token_id: expected an integer from 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configurations_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    file, words = BAD[name]
    with pytest.raises(HelmError) as caught:
        parse_config(config_by_hand(file, tmp_path), "x.gguf")
    message = str(caught.value)
    assert "x.gguf" in message
    assert re.search(words, message), message
    if name == "an architecture that HELM lacks":
        assert isinstance(caught.value, UnsupportedModelError)


def test_q_of_another_size_than_its_heads(tmp_path: Path) -> None:
    file = with_tensor(Tensor("blk.0.attn_q.weight", (32, 30), 0))
    found, config = opened(file.write(tmp_path / "x.gguf"))
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_q.weight' has the shape \[30, 32\]"):
        name_tensors(found, config)


def test_a_vector_in_blocks(tmp_path: Path) -> None:
    file = with_tensor(Tensor("blk.0.attn_norm.weight", (32,), 8))
    found, config = opened(file.write(tmp_path / "x.gguf"))
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_norm.weight' is a vector in blocks"):
        name_tensors(found, config)


def test_what_old_converters_left_is_no_weight(tmp_path: Path) -> None:
    file = with_tensor(Tensor("blk.0.attn_rot_embd.weight", (4,), 0))
    found, config = opened(file.write(tmp_path / "x.gguf"))
    assert set(name_tensors(found, config)) == {"model.embed_tokens.weight", "model.norm.weight"}


def complete(folder: Path) -> tuple[Path, Gguf]:
    path = gguf_models.write(small_models.model_dir("qwen2"), folder / "x.gguf")
    return path, read_gguf(path)


def test_tensors_that_are_missing_are_named_as_in_the_file(tmp_path: Path) -> None:
    _, found = complete(tmp_path)
    tensors = dict(found.tensors)
    for name in ("blk.1.attn_k.bias", "output_norm.weight", "blk.0.ffn_down.weight"):
        del tensors[name]
    found = replace(found, tensors=tensors)
    with pytest.raises(CheckpointError) as caught:
        gguf_weights(found, gguf_config(found))
    assert "x.gguf: qwen2 needs 3 tensors that the file lacks: blk.0.ffn_down.weight, " in str(
        caught.value
    )
    assert "blk.1.attn_k.bias, output_norm.weight; download" in str(caught.value)


def test_tensors_of_another_shape_or_model_are_named(tmp_path: Path) -> None:
    _, found = complete(tmp_path)
    config = gguf_config(found)
    odd = replace(found.tensors["blk.0.ffn_up.weight"], shape=(4, 864))
    wrong = replace(found, tensors={**found.tensors, odd.name: odd})
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' has the shape \[4, 864\]"):
        gguf_weights(wrong, config)
    extra = replace(odd, name="blk.0.ffn_gate_inp.weight")
    more = replace(found, tensors={**found.tensors, extra.name: extra})
    with pytest.raises(CheckpointError, match=r"1 tensors that qwen2 does not use: blk.0.ffn"):
        gguf_weights(more, config)


# --- published files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family", "stored"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "LlamaForCausalLM", {"ggml.q4_1", "ggml.q8_0"}),
        ("Qwen2.5-Coder-1.5B-Q4_K_M.gguf", "Qwen2ForCausalLM", {"ggml.q4_k", "ggml.q6_k"}),
    ],
)
def test_published_files(name: str, family: str, stored: set[str]) -> None:
    found, config = opened(gguf_models.real(name))
    tensors = name_tensors(found, config)
    assert config.architecture == family
    assert {n: t.shape for n, t in tensors.items()} == build_graph(config).tensors
    assert {t.stored for t in tensors.values() if len(t.shape) == 2} == stored
