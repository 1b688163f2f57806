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
from helm.model.families import llama, mistral, opt, qwen2, qwen3
from helm.model.families.family import Family
from helm.model.graph import Graph
from helm.model.quantization import read_quantization

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY for module in (llama, mistral, opt, qwen2, qwen3)
}


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
            f"[plan] architecture {config.architecture} is not supported; supported are "
            + ", ".join(architectures())
        )
    return FAMILIES[config.architecture].build(config)


def _read(node: Reader) -> ModelConfig:
    family = _family(node)
    quantization = read_quantization(node)
    return dataclasses.replace(family.read(node), quantization=quantization)


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
            f"[{node.subject}] architectures: {said} is not supported; supported are "
            + ", ".join(architectures())
        )
    if model_type and model_type != found.model_type:
        kind.reject(
            f"{kind.value!r} contradicts architecture {found.architecture}, "
            f"expected {found.model_type!r}"
        )
    return found
