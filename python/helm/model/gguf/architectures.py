"""The architectures of GGUF files that a family of HELM runs: one row each.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; constants that no key
states are those of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helm.model.gguf.keys import MOST, Keys

_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}


def _nothing(keys: Keys) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """family: transformers' class. adjacent: rows of q and k lie as rotation of neighbours needs
    them, where transformers' has halves. bias: q, k and v have one, o has none. names: of tensors
    of a block, beside those that all have; single: of single tensors there, with their kind; whole:
    of tensors outside of blocks; block: what names in a block begin with. follows: keys
    that other families do not run. more: of config.json, from its own keys."""

    family: str
    model_type: str
    adjacent: bool = False
    bias: bool = False
    bias_key: str = "attention_bias"  # of config.json, where the file's tensors tell
    layer_norm: bool = False  # else RMS norms
    names: Mapping[str, str] = field(default_factory=dict)
    single: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    block: str = "model.layers."
    follows: tuple[str, ...] = ()
    more: Callable[[Keys], dict[str, Any]] = _nothing


def _window(keys: Keys) -> int | None:
    node = keys.get("attention.sliding_window")
    return None if node.null else node.integer(0, MOST) or None


def _llama(keys: Keys) -> dict[str, Any]:
    """With experts it is Mixtral, with a window of all layers Mistral."""
    window = _window(keys)
    if keys.get("expert_count", 0).value:
        own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        return {**own, **_experts(keys), "sliding_window": window}
    if window is None:
        return {}
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def _gemma(keys: Keys, largest: int) -> dict[str, Any]:
    """Norms hold 1 + w. The model with so many layers, the largest, scales scores by the share of
    a head in the width, others by the size of a head."""
    hidden, heads = keys.integer("embedding_length"), keys.uniform("attention.head_count")
    head_dim = keys.get("attention.key_length", hidden // heads).integer(1, 4096)
    shared = keys.integer("block_count") == largest
    return {
        "norm_plus": 0.0,
        "query_pre_attn_scalar": hidden // heads if shared else head_dim,
        "sliding_window": _window(keys),
    }


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {
        **_gemma(keys, 46),
        "attn_logit_softcapping": keys.decimal("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.decimal("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    capped = keys.get("final_logit_softcapping", 0.0).value != 0
    caps = {"final_logit_softcapping": keys.decimal("final_logit_softcapping")} if capped else {}
    local = keys.decimal("rope.freq_base_swa", 10000.0)
    return {**_gemma(keys, 62), **caps, "rope_local_base_freq": local}


def _phi3(keys: Keys) -> dict[str, Any]:
    return {"sliding_window": _window(keys)}


def _granite(keys: Keys) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: keys.decimal(key) for name, key in names.items() if not keys.get(key).null}


def _olmo2(keys: Keys) -> dict[str, Any]:
    """With a window it is OLMo 3."""
    window = _window(keys)
    if window is None:
        return {}
    own = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return {**own, "sliding_window": window}


def _cohere(keys: Keys) -> dict[str, Any]:
    return {"logit_scale": keys.decimal("logit_scale", 1.0)}


def _cohere2(keys: Keys) -> dict[str, Any]:
    return {**_cohere(keys), "sliding_window": _window(keys)}


def _stablelm(keys: Keys) -> dict[str, Any]:
    return {"use_parallel_residual": keys.get("use_parallel_residual", True).boolean()}


def _experts(keys: Keys) -> dict[str, Any]:
    """How many experts there are, how many a token has, and how large they are."""
    counts = {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }
    size = keys.get("expert_feed_forward_length")
    return counts if size.null else {**counts, "moe_intermediate_size": size.integer(1, MOST)}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    shared = keys.integer("expert_shared_feed_forward_length")
    return {**_experts(keys), "shared_expert_intermediate_size": shared}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    """Weights of the experts chosen add up to one, which no key states."""
    return {**_experts(keys), "norm_topk_prob": True}


def _granite_moe(keys: Keys) -> dict[str, Any]:
    return {**_granite(keys), **_experts(keys), "experts_apart": True}


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    return {**_experts(keys), "sliding_window": _window(keys), "experts_apart": True}


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    """The last blocks guess tokens."""
    experts = _experts(keys)
    guessing = keys.get("nextn_predict_layers", 0).integer(0, 64)
    keys.get("expert_gating_func", 2).integer(2, 2)
    return {
        **experts,
        "n_routed_experts": experts["num_local_experts"],
        "num_hidden_layers": keys.integer("block_count") - guessing,
        "num_nextn_predict_layers": guessing,
        "n_shared_experts": keys.get("expert_shared_count", 0).integer(0, 64),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0).integer(0, MOST),
        "routed_scaling_factor": keys.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", True).boolean(),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


_EXPERTS = ("expert_count",)


def _names_of_experts(module: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    parts = {"gate_inp": router, "gate_exps": gate, "up_exps": up, "down_exps": down}
    return {f"ffn_{own}": f"{module}.{name}" for own, name in parts.items()}


_MIXTRAL = _names_of_experts(
    "block_sparse_moe", "gate", "experts.*.w1", "experts.*.w3", "experts.*.w2"
)
_QWEN = _names_of_experts(
    "mlp", "gate", "experts.*.gate_proj", "experts.*.up_proj", "experts.*.down_proj"
)


def _gpt_neox(keys: Keys) -> dict[str, Any]:
    return {
        "use_parallel_residual": keys.get("use_parallel_residual", True).boolean(),
        "rotary_pct": 1.0,  # where nothing says that less is rotated
        "rotary_emb_base": keys.decimal("rope.freq_base", 10000.0),
        "attention_bias": True,
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    return {
        "n_embd": keys.integer("embedding_length"),
        "n_layer": keys.integer("block_count"),
        "n_head": keys.uniform("attention.head_count"),
        "n_positions": keys.integer("context_length"),
        "n_inner": keys.uniform("feed_forward_length"),
        "layer_norm_epsilon": keys.decimal("attention.layer_norm_epsilon", 1e-5),
    }


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_GEMMA_NAMES = {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", "llama", adjacent=True, names=_MIXTRAL, follows=_EXPERTS, more=_llama
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        bias=True,
        names={
            **_QWEN,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **{f"ffn_{n}_shexp": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
        },
        follows=_EXPERTS,
        more=_qwen2_moe,
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", names=_QWEN, follows=_EXPERTS, more=_qwen3_moe
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM", "olmoe", names=_QWEN, follows=_EXPERTS, more=_experts
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        names={
            **_names_of_experts(
                "mlp", "router", "experts.gate_proj", "experts.up_proj", "experts.down_proj"
            ),
            "post_attention_norm": "post_attention_layernorm",
        },
        single={
            "attn_sinks.weight": "self_attn.sinks",
            **{f"ffn_{n}_exps.bias": f"mlp.experts.{n}_proj_bias" for n in ("gate", "up", "down")},
        },
        follows=_EXPERTS,
        more=_gpt_oss,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        names={
            **_QWEN,
            **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
            "post_attention_norm": "post_attention_layernorm",
        },
        single={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        follows=_EXPERTS,
        more=_glm4_moe,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", names=_GEMMA_NAMES, follows=_CAPS, more=_gemma2
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        names=_GEMMA_NAMES,
        follows=("final_logit_softcapping",),
        more=_gemma3,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        names={**_FUSED_GATE_UP, "attn_qkv": "self_attn.qkv_proj"},
        more=_phi3,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", adjacent=True),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        adjacent=True,
        follows=("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
        more=_granite,
    ),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        "granitemoe",
        adjacent=True,
        names=_names_of_experts(
            "block_sparse_moe", "router.layer", "gate_linear", "up_linear", "output_linear"
        ),
        follows=(
            "embedding_scale",
            "attention.scale",
            "residual_scale",
            "logit_scale",
            "expert_count",
        ),
        more=_granite_moe,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", names=_NORMS_BEHIND, more=_olmo2),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", layer_norm=True, follows=("logit_scale",), more=_cohere
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", "cohere2", layer_norm=True, follows=("logit_scale",), more=_cohere2
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        "stablelm",
        bias_key="use_qkv_bias",
        layer_norm=True,
        follows=("use_parallel_residual",),
        more=_stablelm,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        layer_norm=True,
        names={
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        whole={
            "token_embd.weight": "gpt_neox.embed_in.weight",
            "output_norm.weight": "gpt_neox.final_layer_norm.weight",
            "output_norm.bias": "gpt_neox.final_layer_norm.bias",
        },
        block="gpt_neox.layers.",
        follows=("use_parallel_residual",),
        more=_gpt_neox,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        layer_norm=True,
        names={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        whole={
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
        },
        block="transformer.h.",
        more=_gpt2,
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        names={
            **_FUSED_GATE_UP,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
}
