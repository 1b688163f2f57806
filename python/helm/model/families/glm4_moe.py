"""GLM-4.5: experts in groups, a bias chooses them. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import DEFAULTS, Style, build_decoder, read_decoder
from helm.model.families.family import Family
from helm.model.families.mixture import MixtureStyle, read_mixture
from helm.model.graph import Graph

_ARCHITECTURE = "Glm4MoeForCausalLM"
_DEFAULTS = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
}
_MIXTURE = MixtureStyle(choice_bias="gate.e_score_correction_bias", shared="shared_experts")


def read(node: Reader) -> ModelConfig:
    """The first layers are dense; layers behind the last guess tokens."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE, partial=0.5)
    keys.get("scoring_func", "sigmoid").choice(("sigmoid",))
    first = keys["first_k_dense_replace"].integer(0, config.num_hidden_layers)
    mixture = read_mixture(
        keys, count="n_routed_experts", score="sigmoid", dense=tuple(range(first))
    )
    groups = keys["n_group"].integer(1, mixture.experts)
    if mixture.experts % groups:
        keys["n_group"].reject(f"expected a divisor of the {mixture.experts} experts")
    kept = keys["topk_group"].integer(1, groups)
    each = mixture.experts // groups
    if mixture.chosen > kept * each:
        keys["topk_group"].reject(
            f"{kept} groups have {kept * each} experts, {mixture.chosen} are chosen"
        )
    shared = keys["n_shared_experts"].integer(0, 64)
    mixture = dataclasses.replace(
        mixture,
        scale=keys["routed_scaling_factor"].number(-1e6, 1e6),
        groups=groups,
        groups_kept=kept,
        group_best=min(2, each),
        shared_size=shared * mixture.expert_size,
    )
    return dataclasses.replace(
        config,
        mixture=mixture,
        heads_normed=keys.flag("use_qk_norm"),
        drafting_layers=keys["num_nextn_predict_layers"].integer(0, 64),
    )


def build(config: ModelConfig) -> Graph:
    """The shared decoder; o has no bias."""
    style = Style(config.attention_bias, mixture=_MIXTURE)
    if config.heads_normed:
        style = dataclasses.replace(style, qk_norm="head")
    return build_decoder(config, style)


FAMILY = Family(_ARCHITECTURE, "glm4_moe", _DEFAULTS, read, build)
