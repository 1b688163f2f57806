"""Tiny models of every family as files, made without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import helm
from helm.model.families import FAMILIES, build_graph, parse_config
from helm.model.weight_names import lies_by_column

VOCAB, CONTEXT = 1024, 128
BUNDLED = Path(helm.__file__).parent / "bundled"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# By model_type: what a family's defaults would make large, or lacks.
_OPT = {"num_key_value_heads": 2, "ffn_dim": 48, "word_embed_proj_dim": 16}
_GPT2 = {
    "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT,
    "num_key_value_heads": 2,
}  # fmt: skip
_HYBRID = {"layer_types": ["attention"] * 2, "shared_intermediate_size": 48, "num_local_experts": 0}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_MIXTURES = (
    "glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"
)  # fmt: skip
_OWN = {
    "opt": _OPT,
    "gpt2": _GPT2,
    "granitemoehybrid": _HYBRID,
    **dict.fromkeys(_MIXTURES, _EXPERTS),
}
# The least that the host's memory must be for any model; see the reserve of a plan on the CPU.
MEMORY_BYTES = 1 << 30


def config_of(architecture: str) -> dict[str, Any]:
    """A config.json of one of FAMILIES."""
    model_type = FAMILIES[architecture].model_type
    own = _OWN.get(model_type, {})
    names = {"architectures": [architecture], "model_type": model_type, "dtype": "float32"}
    return {**names, **_SIZES, **own, "tie_word_embeddings": model_type in ("opt", "qwen3")}


def weights_of(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Random f32 weights by name."""
    parsed = parse_config(config)
    shapes = {
        name: shape[::-1] if lies_by_column(name, parsed) else shape
        for name, shape in build_graph(parsed).tensors.items()
    }
    generator = np.random.default_rng(seed)
    return {name: _noise(generator, name, shape) for name, shape in shapes.items()}


def _noise(
    generator: np.random.Generator, name: str, shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    noise = 0.2 * generator.standard_normal(shape, np.float32)
    return 1 + noise if "norm" in name and name.endswith("weight") else noise


def stored(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    """The bytes of f32 values as F32, F16 or BF16."""
    if dtype == "BF16":  # towards zero, which is as good as any
        return (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return array.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def safetensors(
    weights: dict[str, np.ndarray[Any, Any]], dtype: str
) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in weights.items():
        begin, data = len(data), data + stored(array, dtype)
        offsets = [begin, len(data)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
    return header, data


def file_of(header: bytes, data: bytes) -> bytes:
    """A file of a header as it is and its data."""
    return len(header).to_bytes(8, "little") + header + data


def write_model(
    folder: Path,
    architecture: str,
    dtype: str = "F32",
    shards: int = 1,
    changes: dict[str, Any] | None = None,
) -> None:
    """A model folder without a tokenizer. changes: of the configuration."""
    folder.mkdir(parents=True)
    config = {**config_of(architecture), **(changes or {})}
    weights = weights_of(config)
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = sorted(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = {name: weights[name] for name in names[shard::shards]}
        weight_map.update(dict.fromkeys(own, file))
        header, data = safetensors(own, dtype)
        path = folder / (file if shards > 1 else "model.safetensors")
        path.write_bytes(file_of(json.dumps(header).encode(), data))
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def add_tokenizer(folder: Path) -> None:
    """The bundled model's, of which the vocabulary is as large."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUNDLED / name, folder)


def load(folder: Path, **options: Any) -> helm.LLM:
    """An LLM of few resources."""
    return helm.LLM(folder, **{"threads": 1, "memory_bytes": MEMORY_BYTES, **options})
