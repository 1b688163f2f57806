"""Writes transformers' models as GGUF files with the gguf package; shares nothing with HELM.

Keys and order of rows are those that llama.cpp's converter writes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

import small_models
from gguf_file import gguf_name

VARIABLE = "HELM_TEST_MODELS"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = [*SPECIAL, *LETTERS, "Ġ", "Ċ", "Ġa", "Ġt", "he", "Ġthe"]
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, 3, *[1] * (len(TOKENS) - 4)],
    "tokenizer.ggml.merges": ["Ġ a", "Ġ t", "h e", "Ġt he"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "glm4": "glm4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "gpt_neox": "gptneox",
    "gpt2": "gpt2",
}
_IN_NEIGHBOURS = ("llama", "smollm3", "granite", "granitemoe")


def real(name: str) -> Path:
    """A published file in the folder that HELM_TEST_MODELS names; skips the test without it."""
    folder = os.environ.get(VARIABLE)
    if not folder or not (path := Path(folder) / name).is_file():
        pytest.skip(f"{VARIABLE} names no folder with {name}")
    return path


def talking(folder: Path) -> Path:
    """A small random model with a tokenizer and a chat template, in the new `folder`."""
    folder.mkdir()
    case = small_models.model_dir("llama_tied_sharded")
    return write(case, folder / "x.gguf", keys=VOCABULARY)


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, in which rotation pairs (i, i + n/2), as rotation of (2i, 2i + 1) needs
    them."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(
    folder: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: Mapping[str, Any] | None = None,
    blocks: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """The model in `folder` as the file `path`, matrices in `kind`. keys: more strings, numbers
    and lists. blocks: matrices by transformers' names that are in `kind` already, as bytes."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "gpt2":
        config = _by_usual_names(config)
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    rope = config.get("rope_parameters") or {}
    rotary = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if architecture == "llama" or rotary != head_dim:
        writer.add_rope_dimension_count(rotary)
    if config.get("sliding_window") and not architecture.startswith("qwen"):
        writer.add_sliding_window(config["sliding_window"])
    _add_own(writer, config)
    _add_rope(writer, config, head_dim)
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if ".experts." in name or "put_linear" in name:
                continue
            array = tensor.float().numpy()
            if name == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            if ".c_" in name and array.ndim == 2:  # stored as [columns, rows]
                array = array.T
            quantised = name in (blocks or {})
            if blocks is not None and quantised:
                array = blocks[name]
            if architecture in _IN_NEIGHBOURS and ".self_attn.q_proj." in name:
                array = neighbours(array, heads)
            if architecture in _IN_NEIGHBOURS and ".self_attn.k_proj." in name:
                array = neighbours(array, kv_heads)
            if ".query_key_value." in name:  # rows [head][q, k, v]
                by_head = array.reshape(heads, 3, -1, *array.shape[1:])
                array = by_head.swapaxes(0, 1).reshape(array.shape)
            if architecture.startswith("gemma") and name.endswith("norm.weight"):
                array = 1 + array
            own = np.ascontiguousarray(array, np.uint8 if quantised else np.float32)
            _add_tensor(writer, _name(architecture, config, name), own, kind)
    for name, array in experts_of(folder).items():
        _add_tensor(writer, name, np.ascontiguousarray(array, np.float32), kind)
    for name, array in mxfp4_experts_of(folder).items():
        if array.dtype == np.uint8:
            writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _by_usual_names(config: dict[str, Any]) -> dict[str, Any]:
    names = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    return config | {usual: config[own] for own, usual in names.items()}


def experts_of(folder: Path) -> dict[str, np.ndarray]:
    """Matrices of experts, stacked, as llama.cpp's converter names them."""
    tensors = {n: t.float().numpy() for f in folder.glob("*.safetensors")
               for n, t in load_file(f).items()}  # fmt: skip
    places = {"gate": "gate", "w1": "gate", "up": "up", "w3": "up", "down": "down", "w2": "down"}
    found: dict[str, dict[int, np.ndarray]] = {}
    made: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        of_expert = re.search(r"layers\.(\d+)\..*\.experts\.(\d+)\.(\w+?)(_proj)?\.weight", name)
        if of_expert:
            layer, expert, part = of_expert[1], int(of_expert[2]), places[of_expert[3]]
            found.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[expert] = array
        both = re.search(r"layers\.(\d+)\..*\.(in|out)put_linear\.weight", name)
        if both and both[2] == "out":
            made[f"blk.{both[1]}.ffn_down_exps.weight"] = array
        elif both:
            half = array.shape[1] // 2
            made[f"blk.{both[1]}.ffn_gate_exps.weight"] = array[:, :half]
            made[f"blk.{both[1]}.ffn_up_exps.weight"] = array[:, half:]
    return made | {name: np.stack([own[e] for e in sorted(own)]) for name, own in found.items()}


def mxfp4_experts_of(folder: Path) -> dict[str, np.ndarray]:
    """Of gpt-oss: the blocks of experts as bytes [experts, rows, bytes], and their biases."""
    tensors = {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if ".mlp.experts." in name and "_proj_" in name
    }
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        at = f"blk.{name.split('.')[2]}"
        module, _, part = name.rpartition("_")
        if part == "scales" or not module.endswith(("gate_up_proj", "down_proj")):
            continue
        if part == "bias":
            own, ending = tensor.float().numpy(), "bias"
        else:  # codes 2 i and 2 i + 1 share a byte, in ggml's i and i + 16
            pairs = tensor.numpy()
            codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(*pairs.shape[:-1], 32)
            bytes_ = codes[..., :16] | codes[..., 16:] << 4
            scales = tensors[f"{module}_scales"].numpy()[..., None]
            own = np.concatenate((scales, bytes_), -1).reshape(*pairs.shape[:2], -1)
            ending = "weight"
        if module.endswith("down_proj"):
            found[f"{at}.ffn_down_exps.{ending}"] = own
        else:
            found[f"{at}.ffn_gate_exps.{ending}"] = np.ascontiguousarray(own[:, ::2])
            found[f"{at}.ffn_up_exps.{ending}"] = np.ascontiguousarray(own[:, 1::2])
    return found


def _name(architecture: str, config: dict[str, Any], name: str) -> str:
    """As the gguf package says, which knows more architectures than the benchmarks."""
    if config["model_type"] != "mixtral" and architecture in ("llama", "qwen2", "qwen3"):
        return gguf_name(name)
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return f"{found}.weight" if name.endswith(".sinks") else found


_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")


def _add_own(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Keys that a family has of its own."""
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
    ):
        if config.get(name) is not None:
            add(config[name])
    experts = next((config[n] for n in _COUNTS if n in config), None)
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "n_shared_experts" in config:
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if array.ndim == 1 or "ffn_gate_inp" in name:  # routers are never quantised
        own = array[0] if name.endswith("_shexp.weight") and "gate_inp" in name else array
        writer.add_tensor(name, own)
        return
    if array.dtype == np.uint8:
        writer.add_tensor(name, array, raw_dtype=kind)
        return
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    writer.add_rope_freq_base(theta)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        original = rope["original_max_position_embeddings"]
        factor = (1 + np.log(rope["factor"]) / np.log(original)) ** 0.5
        writer.add_rope_scaling_attn_factors(factor)
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, theta, head_dim))


def llama3_factors(rope: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """What the wavelength of each pair is multiplied by."""
    original = rope["original_max_position_embeddings"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = (original / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(
            1.0 if wavelength < high else rope["factor"] if wavelength > low else between
        )
    return np.array(factors, np.float32)
