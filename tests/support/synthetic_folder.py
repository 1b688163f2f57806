"""A model folder of random weights, of a size that a test chooses."""

from __future__ import annotations

import json
from pathlib import Path

from synthetic import make_checkpoint

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 500, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


def config_file(root: Path, **sizes: int) -> Path:
    """config.json in `root`; sizes: of the configuration, instead of SHAPE's."""
    file = root / "config.json"
    file.write_text(json.dumps({**SHAPE, **sizes}))
    return file


def synthetic_folder(root: Path, **sizes: int) -> Path:
    """With weights in f32."""
    return make_checkpoint(str(config_file(root, **sizes)), "f32", root)
