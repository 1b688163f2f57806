"""Small random models of every family with awkward shapes, written once per session.

The weights are scaled so that logits spread and no norm weight or bias is trivially one or zero.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from whole import WHOLE

torch.set_num_threads(1)
PROMPT = [3, 17, 99, 130, 0, 42, 42, 7, 64, 127, 5, 88, 21]  # longer than every window below
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One model: `family` names transformers' classes, `changes` go into its config."""

    name: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    sharded: bool = False


_ROTARY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 600,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_OPT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "ffn_dim": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 600,
    "word_embed_proj_dim": 48,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


_LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = {"num_hidden_layers": 3, "sliding_window": 5, "layer_types": _KINDS}
_PATTERN = {"query_pre_attn_scalar": 16, "sliding_window": 5, "tie_word_embeddings": True}
_GEMMA = {**_WINDOWS, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
_GEMMA_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
}
_OLMO_ROPES = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 150,
            "rope_theta": 10000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
_THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
_LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 3.0],
        "long_factor": [1.5, 2.1, 3.3, 4.7, 6.5, 8.0],
    },
    "original_max_position_embeddings": 600,
}
_STABLE = {"head_dim": 12, "use_qkv_bias": True, "partial_rotary_factor": 0.5}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}
_NO_EXPERTS = {
    "num_local_experts": 0,
    "shared_intermediate_size": 72,
    "layer_types": ["full_attention"] * 2,
    "position_embedding_type": "rope",
    "head_dim": 12,
    "mamba_n_heads": 4,
}
_PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_EXPERTS = {"intermediate_size": 32, "num_experts_per_tok": 2}
_QWEN_MOE = {
    "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True
}  # fmt: skip
_GLM_MOE = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.7, "num_hidden_layers": 3, "attention_bias": True,
}  # fmt: skip
_SHARED = {"shared_expert_intermediate_size": 40, "head_dim": 12}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}
_CLASSES = {"GPT2": "GPT2LMHeadModel"}
CASES = {
    case.name: case
    for case in (
        Case("llama", "Llama"),
        Case("llama_one_kv_head", "Llama", {"num_key_value_heads": 1, "head_dim": 10}),
        Case("llama_tied_sharded", "Llama", {"tie_word_embeddings": True}, sharded=True),
        Case("llama_biases", "Llama", {"attention_bias": True, "mlp_bias": True}),
        Case("llama_plain_heads", "Llama", {"head_dim": 12, "num_key_value_heads": 4}),
        Case("llama_gelu", "Llama", {"hidden_act": "gelu"}),
        Case("llama_gelu_tanh", "Llama", {"hidden_act": "gelu_pytorch_tanh"}),
        Case("llama_linear", "Llama", _rope("linear", factor=4.0)),
        Case("llama_dynamic", "Llama", _rope("dynamic", factor=2.0)),
        Case("llama3", "Llama", _LLAMA3),
        Case(
            "llama_yarn",
            "Llama",
            _rope("yarn", factor=4.0, original_max_position_embeddings=16),
        ),
        Case("mistral", "Mistral", {"sliding_window": None}),
        Case("mistral_window", "Mistral", {"sliding_window": 4}, sharded=True),
        Case("qwen2", "Qwen2", {"head_dim": 12, "tie_word_embeddings": True}),
        Case("qwen2_window", "Qwen2", {"num_hidden_layers": 3, **_QWEN_WINDOW}),
        Case("qwen3", "Qwen3", {"tie_word_embeddings": True}),
        Case("qwen3_untied_sharded", "Qwen3", {"attention_bias": True}, sharded=True),
        Case("qwen3_window", "Qwen3", _QWEN_WINDOW),
        Case("gemma3", "Gemma3", {**_GEMMA, **_GEMMA_ROPES}),
        Case("gemma3_biases", "Gemma3", {"num_hidden_layers": 7, "attention_bias": True}),
        Case("gemma3_pattern", "Gemma3", {**_PATTERN, "num_hidden_layers": 7}),
        Case("gemma2_pattern", "Gemma2", {**_PATTERN, "num_hidden_layers": 3}),
        Case("gemma2", "Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0}),
        Case("gemma2_tight", "Gemma2", {"final_logit_softcapping": 6.0, "attention_bias": True}),
        Case("phi3", "Phi3", {"head_dim": 12}),
        Case("phi3_window", "Phi3", {"head_dim": 12, "sliding_window": 5}),
        Case("phi3_longrope", "Phi3", {**_THREE_HEADS, **_LONGROPE}),
        Case("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
        Case("smollm3_listed", "SmolLM3", {"no_rope_layers": [0, 1], "mlp_bias": True}),
        Case("granite", "Granite", _GRANITE),
        Case("granite_biases", "Granite", {**_GRANITE, "attention_bias": True, "mlp_bias": True}),
        Case("granite4", "GraniteMoeHybrid", {**_GRANITE, **_NO_EXPERTS}),
        Case(
            "granite4_unrotated",
            "GraniteMoeHybrid",
            {**_GRANITE, **_NO_EXPERTS, "position_embedding_type": None},
        ),
        Case("olmo2", "Olmo2", {"head_dim": 12}),
        Case("olmo3", "Olmo3", {**_WINDOWS, **_OLMO_ROPES}),
        Case("olmo3_pattern", "Olmo3", {**_PATTERN, "num_hidden_layers": 4, **_OLMO_ROPES}),
        Case("glm", "Glm"),
        Case("glm4", "Glm4", {"attention_bias": False}),
        Case("ministral", "Ministral", _WINDOWS),
        Case("cohere", "Cohere", {"tie_word_embeddings": True, "logit_scale": 0.5}),
        Case("cohere_biases", "Cohere", {"attention_bias": True, "logit_scale": 0.7}),
        Case("cohere2", "Cohere2", {**_WINDOWS, "head_dim": 12, "logit_scale": 0.5}),
        Case(
            "cohere2_pattern",
            "Cohere2",
            {**_PATTERN, "num_hidden_layers": 4, "head_dim": 12, "logit_scale": 0.5},
        ),
        Case("stablelm", "StableLm", {"head_dim": 12, "partial_rotary_factor": 0.5}),
        Case("stablelm_norms", "StableLm", {**_STABLE, "qk_layernorm": True}),
        Case("stablelm_parallel", "StableLm", {**_STABLE, "use_parallel_residual": True}),
        Case("qwen3_moe", "Qwen3Moe", _QWEN_MOE),
        Case(
            "qwen3_moe_dense_layers",
            "Qwen3Moe",
            {**_QWEN_MOE, "num_hidden_layers": 4, "mlp_only_layers": [1], "norm_topk_prob": False},
            sharded=True,
        ),
        Case("qwen3_moe_uneven", "Qwen3Moe", {**_QWEN_MOE, "moe_intermediate_size": 20}),
        Case("qwen3_moe_window", "Qwen3Moe", {**_QWEN_MOE, **_QWEN_WINDOW}),
        Case("qwen2_moe", "Qwen2Moe", {**_QWEN_MOE, **_SHARED, "norm_topk_prob": False}),
        Case("mixtral", "Mixtral", {**_EXPERTS, "num_local_experts": 4}),
        Case("olmoe", "Olmoe", {**_EXPERTS, "num_experts": 5, "head_dim": 12}),
        Case("granitemoe", "GraniteMoe", {**_GRANITE, **_EXPERTS, "head_dim": 12}),
        Case("phimoe", "Phimoe", {**_EXPERTS, "head_dim": 12, "attention_bias": True}),
        Case("phimoe_biases", "Phimoe", {**_EXPERTS, "head_dim": 12, "lm_head_bias": True}),
        Case("glm4_moe", "Glm4Moe", _GLM_MOE),
        Case(
            "glm4_moe_norms",
            "Glm4Moe",
            {**_GLM_MOE, "use_qk_norm": True, "n_group": 1, "topk_group": 1},
        ),
        Case("gpt2", "GPT2", {"n_inner": 72, "tie_word_embeddings": True}),
        Case("gpt_neox", "GPTNeoX", {"rope_parameters": _PART, "head_dim": 12}),
        Case(
            "gpt_neox_serial",
            "GPTNeoX",
            {
                "head_dim": 12,
                "rope_parameters": _PART,
                "use_parallel_residual": False,
                "tie_word_embeddings": True,
            },
        ),
        Case("opt", "OPT"),
        Case("opt_350m", "OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
        Case("opt_bare", "OPT", {"enable_bias": False, "_remove_final_layer_norm": True}),
        Case("opt_gelu", "OPT", {"activation_function": "gelu", "word_embed_proj_dim": 20}),
    )
}
# More layers, and heads so wide that attention can be cut where that of CASES cannot.
WIDE = {
    case.name: case
    for case in (
        Case("llama_deep", "Llama", {"num_hidden_layers": 5}),
        Case("qwen2_wide", "Qwen2", {"hidden_size": 64, "tie_word_embeddings": True}),
        Case("llama_wide_heads", "Llama", {"head_dim": 32, "num_key_value_heads": 4}),
        Case("opt_wide", "OPT", {"hidden_size": 128, "word_embed_proj_dim": 128}),
        Case("opt_350m_wide", "OPT", {
            "hidden_size": 128, "do_layer_norm_before": False, "word_embed_proj_dim": 20,
        }),
    )
}  # fmt: skip


# Unlike in what they hold: caches, windows, ties, experts. HELM_TEST_WHOLE=1 takes all.
UNLIKE = (
    "llama_tied_sharded", "llama_one_kv_head", "mistral_window", "qwen2_window", "qwen3",
    "gemma2_pattern", "gemma3_pattern", "phi3_window", "granite", "olmo3_pattern", "glm",
    "cohere2_pattern", "stablelm_parallel", "qwen3_moe_dense_layers", "mixtral", "glm4_moe",
    "gpt_neox", "opt", "opt_350m",
)  # fmt: skip
SOME = tuple(CASES) if WHOLE else UNLIKE
MIXTURES = tuple(
    name
    for name, case in CASES.items()
    if case.family == "Mixtral" or case.family.lower().endswith("moe")
)


@functools.lru_cache(maxsize=1)
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="helm-small-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.2 * noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def make_model(name: str, dtype: str = "f32", seed: int = 0) -> torch.nn.Module:
    """A fresh model of CASES[name] or WIDE[name] in `dtype`, in eval mode."""
    case = CASES[name] if name in CASES else WIDE[name]
    base = _OPT if case.family == "OPT" else _ROTARY
    config_class = getattr(transformers, _CONFIGS.get(case.family, f"{case.family}Config"))
    config = config_class(**{**base, **case.changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, _CLASSES.get(case.family, f"{case.family}ForCausalLM"))(config)
    _randomise(model, seed)
    return model.to(_DTYPES[dtype]).eval()


@functools.cache
def model_dir(name: str, dtype: str = "f32") -> Path:
    """The folder of that model as save_pretrained writes it; shared, so do not change it."""
    folder = _root() / f"{name}-{dtype}"
    shard = {"max_shard_size": "40KB"} if name in CASES and CASES[name].sharded else {}
    make_model(name, dtype).save_pretrained(folder, safe_serialization=True, **shard)
    return folder


@functools.cache
def expected_logits(name: str, dtype: str = "f32") -> torch.Tensor:
    """transformers' f32 logits [len(PROMPT), vocab] from the weights stored in `dtype`."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir(name, dtype), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return loaded(torch.tensor([PROMPT])).logits[0]
