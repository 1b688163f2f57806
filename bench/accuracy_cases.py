"""The cases of accuracy.py: models, loads and schedules. Runs nothing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from helm.base.formats import KV_DTYPES
from helm.machine.devices import CPU
from helm.measure.cpu import WEIGHT_FORMATS
from helm.model.config import ModelConfig
from helm.model.families import parse_config

# hidden, inner, layers, heads, kv_heads, head_dim, vocabulary: no shape of the profile's. All
# matrices together exceed 8 times a last-level cache of 32 MiB in 16 bit, as people's models do.
SHAPES = {
    "llama-147m": ("llama", 1024, 2816, 10, 16, 4, 64, 32768),
    "qwen3-187m": ("qwen3", 1280, 3584, 7, 10, 2, 128, 49152),
    "qwen3-250m": ("qwen3", 1792, 4864, 6, 16, 2, 128, 24576),
    "llama-270m": ("llama", 2048, 5632, 5, 32, 16, 64, 16384),
    "qwen2-331m": ("qwen2", 2304, 6144, 4, 18, 18, 128, 32768),
    "qwen3-moe-346m": ("qwen3_moe", 1024, 3072, 4, 16, 4, 64, 32768),
}
# Experts, those of a token, elements of each: a narrow Qwen3-30B-A3B.
MIXTURES = {"qwen3-moe-346m": (64, 8, 384)}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
CLASSES = tuple(WEIGHT_FORMATS)  # of weights
LOADS = ((1, 128), (1, 2048), (2, 640), (4, 128), (8, 128))  # sequences, context
ALONE, CUT, OVERLAPPED, EXPERTS = "cpu", "cut", "overlapped", "experts"  # schedules
# Half of the blocks and the head on the accelerator, or all but embedding and experts; shape,
# dtype, sequences, context, schedule.
PARTITIONED = (
    ("llama-147m", "bf16", 1, 128, CUT),
    ("qwen3-187m", "f16", 1, 640, CUT),
    ("qwen3-250m", "f32", 2, 128, CUT),
    ("llama-147m", "f16", 4, 128, CUT),
    ("llama-147m", "bf16", 4, 640, OVERLAPPED),
    ("qwen3-187m", "bf16", 4, 256, OVERLAPPED),
    ("qwen3-moe-346m", "bf16", 1, 128, EXPERTS),
    ("qwen3-moe-346m", "f16", 4, 640, EXPERTS),
    ("qwen3-moe-346m", "bf16", 2, 128, CUT),
)


@dataclass(frozen=True)
class Case:
    shape: str
    dtype: str
    batch: int
    context: int
    schedule: str = ALONE

    @property
    def kv_dtype(self) -> str:
        return self.dtype if self.dtype in KV_DTYPES else "bf16"


def config_of(shape: str) -> ModelConfig:
    family, hidden, inner, layers, heads, kv_heads, dim, vocab = SHAPES[shape]
    raw = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    if shape in MIXTURES:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        raw |= dict(zip(names, MIXTURES[shape], strict=True), norm_topk_prob=True)
    return parse_config(raw, shape)


def cases(args: argparse.Namespace) -> list[Case]:
    """Every third of the product, so that each value meets each other, or all of it."""
    if args.only_partitioned:
        return []
    found = []
    for i, shape in enumerate(args.shapes):
        for j, dtype in enumerate(args.dtypes):
            for k, (batch, context) in enumerate(LOADS):
                if args.all or (i + j + k) % 3 == 0:
                    found.append(Case(shape, dtype, batch, context))
    return found


def partitioned_cases(args: argparse.Namespace) -> list[Case]:
    """Those of the shapes and dtypes asked for."""
    if args.device == CPU:
        return []
    found = [Case(*case) for case in PARTITIONED]
    return [case for case in found if case.shape in args.shapes and case.dtype in args.dtypes]
