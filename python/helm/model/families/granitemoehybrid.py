"""Granite 4 where it is dense and has attention alone. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.errors import UnsupportedModelError
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import Style, build_decoder
from helm.model.families.family import Family
from helm.model.families.granite import DEFAULTS_OF_GRANITE, read_granite
from helm.model.graph import Graph

_ARCHITECTURE = "GraniteMoeHybridForCausalLM"
_DEFAULTS = {
    **{key: value for key, value in DEFAULTS_OF_GRANITE.items() if key != "mlp_bias"},
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
}
_NAMES = {"intermediate_size": "shared_intermediate_size"}
_KINDS = ("attention", "full_attention")


def read(node: Reader) -> ModelConfig:
    """Granite's keys; the mlp is what mixtures share. Layers of Mamba and experts are refused."""
    keys = Keys(node, _DEFAULTS, _NAMES)
    config = read_granite(keys, _ARCHITECTURE)
    listed = [name for name in ("layer_types", "layers_block_type") if not node.get(name).null]
    kinds = [item.string() for item in node[listed[0]].items()] if listed else ["mamba"]
    if not all(kind in _KINDS for kind in kinds):
        raise UnsupportedModelError(
            f"[{node.subject}] {listed[0] if listed else 'layer_types'}: HELM lacks state space "
            "layers; expected attention in every layer"
        )
    if len(kinds) != config.num_hidden_layers:
        node[listed[0]].reject(
            f"expected {config.num_hidden_layers} entries, one per layer, found {len(kinds)}"
        )
    if keys["num_local_experts"].integer(0, 2**20) > 0:
        raise UnsupportedModelError(
            f"[{node.subject}] num_local_experts: HELM lacks these mixtures; expected 0"
        )
    kind = node.get("position_embedding_type")
    rotated = not kind.null and kind.choice(("rope", "nope")) == "rope"
    layers = () if rotated else tuple(range(config.num_hidden_layers))
    return dataclasses.replace(config, unrotated=layers)


def build(config: ModelConfig) -> Graph:
    """The shared decoder; gate and up are one matrix."""
    bias = config.attention_bias
    names = ("shared_mlp", "input_linear", "output_linear")
    return build_decoder(config, Style(bias, bias, fused_gate_up=True, mlp_names=names))


FAMILY = Family(_ARCHITECTURE, "granitemoehybrid", _DEFAULTS, read, build)
