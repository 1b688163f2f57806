"""The registry of model families: which of them a config.json is of.

A family is one file that reads its config.json and turns it into ops. It knows nothing of machines
or placement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helm.base.files import present
from helm.base.jsonio import Reader, read_json
from helm.errors import CheckpointError, ConfigError, UnsupportedModelError
from helm.model.config import ModelConfig
from helm.model.families import (
    cohere,
    cohere2,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granitemoe,
    granitemoehybrid,
    llama,
    ministral,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
)
from helm.model.families.family import Family
from helm.model.families.unknown import said_of
from helm.model.graph import Graph
from helm.model.quantization import read_quantization

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY
    for module in (
        cohere,
        cohere2,
        gemma2,
        gemma3,
        glm,
        glm4,
        glm4_moe,
        gpt2,
        gpt_oss,
        gpt_neox,
        granite,
        granitemoe,
        granitemoehybrid,
        llama,
        ministral,
        mixtral,
        mistral,
        olmo2,
        olmo3,
        olmoe,
        opt,
        phi3,
        phimoe,
        qwen2,
        qwen2_moe,
        qwen3,
        qwen3_moe,
        smollm3,
        stablelm,
    )
}
_TIED = "tie_word_embeddings"
# Keys beside a text_config that are the text model's, too, where it has none of its own.
_SHARED = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def architectures() -> list[str]:
    """The supported architecture names, sorted."""
    return sorted(FAMILIES)


def load_config(directory: str | Path) -> ModelConfig:
    """Reads `directory`/config.json. Raises CheckpointError, ConfigError or
    UnsupportedModelError."""
    return read_config(Path(directory) / "config.json")


def read_config(path: Path) -> ModelConfig:
    """The same for the file itself, whatever its name."""
    if not present(path):
        raise CheckpointError(f"[load] {path} does not exist; expected a model directory")
    return _read(read_json(path, ConfigError))


def parse_config(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The same for a parsed config.json. ConfigError names `source` and the key."""
    return _read(Reader(values, source, ConfigError))


def build_graph(config: ModelConfig) -> Graph:
    """The graph of `config`. Raises UnsupportedModelError."""
    if config.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"[plan] architecture {config.architecture} is not supported"
            + said_of(config.architecture, {}, architectures())
        )
    return FAMILIES[config.architecture].build(config)


def _read(node: Reader) -> ModelConfig:
    node = _text_part(node)
    family = _family(node)
    quantization = read_quantization(node)
    return dataclasses.replace(family.read(node), quantization=quantization)


def _text_part(node: Reader) -> Reader:
    """What a multimodal model says of its text model, with its errors naming text_config."""
    inner, kind = node.get("text_config"), node.get("model_type")
    holds = [family for family in FAMILIES.values() if kind.value in family.multimodal]
    if inner.null or not holds:
        return node
    outer = {key: node.value[key] for key in _SHARED if node.value.get(key) is not None}
    own = {key: value for key, value in inner.names().items() if value is not None}
    values = {"model_type": holds[0].model_type, **outer, **own}
    if not node.get(_TIED).null:  # of the whole model, whose head it is
        values[_TIED] = node.value[_TIED]
    return Reader(values, node.subject, node.error, inner.path)


def _family(node: Reader) -> Family:
    """The one that `architectures` names, in any case of its letters and at any place, or else
    `model_type`, which alone counts for transformers."""
    listed, kind = node.get("architectures"), node.get("model_type")
    names = [] if listed.null else [item.string() for item in listed.items()]
    # A base model ("LlamaModel") has the same tensors without the head.
    spellings = {
        spelling.casefold(): family
        for name, family in FAMILIES.items()
        for spelling in (name, name.replace("ForCausalLM", "Model"))
    }
    known = [spellings[name.casefold()] for name in names if name.casefold() in spellings]
    model_type = "" if kind.null else kind.string().casefold()
    fitting = [family for family in known if family.model_type == model_type]
    of_type = [family for family in FAMILIES.values() if family.model_type == model_type]
    found = next(iter(fitting or known or of_type), None)
    if found is None:
        said = ", ".join(names) if names else f"type {kind.value!r}"
        raise UnsupportedModelError(
            f"[{node.subject}] architectures: {said} is not supported"
            + said_of(names[0] if names else str(kind.value), node.value, architectures())
        )
    if model_type and model_type != found.model_type:
        kind.reject(
            f"{kind.value!r} contradicts architecture {found.architecture}, "
            f"expected {found.model_type!r}"
        )
    return found
