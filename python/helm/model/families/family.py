"""What a model family is: how its config.json is read, and how its graph is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helm.base.jsonio import Reader
from helm.model.config import ModelConfig
from helm.model.graph import Graph


@dataclass(frozen=True)
class Family:
    """architecture, model_type: transformers' names of it. defaults: values of absent keys, as in
    transformers. read raises ConfigError or UnsupportedModelError. multimodal: model types of
    configurations with a text_config that is of this family where it does not say. by_head:
    modules whose weight and bias a checkpoint has as rows [head][q, k, v], and HELM as
    [q, k, v][head]. by_column: modules whose weight a checkpoint has as [columns, rows]. aliases:
    names of weights in old checkpoints, with transformers' names."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    read: Callable[[Reader], ModelConfig]
    build: Callable[[ModelConfig], Graph]
    multimodal: tuple[str, ...] = ()
    by_head: tuple[str, ...] = ()
    by_column: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
