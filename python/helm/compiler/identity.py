"""Which model a plan is for. Knows no machine and no placement."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from helm.errors import PlanError
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.plan.schema import ModelIdentity, Plan


def check_model(
    plan: Plan, config: ModelConfig, checkpoint_tensors: Mapping[str, TensorInfo] | None
) -> None:
    """PlanError unless `plan` was made for this configuration and checkpoint."""
    found = identity(config, checkpoint_tensors)
    if plan.model == found:
        return
    fields = dataclasses.asdict(found)
    differs = [name for name, value in fields.items() if getattr(plan.model, name) != value]
    shown = ", ".join(
        f"{name} {getattr(plan.model, name)!r} in the plan, {fields[name]!r} here"
        for name in differs
    )
    raise PlanError(
        f"[plan] the plan was made for another model: {shown}; make the plan anew for this one"
    )


def identity(config: ModelConfig, infos: Mapping[str, TensorInfo] | None) -> ModelIdentity:
    """Of a configuration and its checkpoint, if that is there."""
    table = [infos[name].identity for name in sorted(infos)] if infos else []
    text = json.dumps([_stated(dataclasses.asdict(config)), table], sort_keys=True)
    return ModelIdentity(
        config.architecture,
        hashlib.sha256(text.encode()).hexdigest(),
        config.vocab_size,
        config.hidden_size,
        config.max_context,
    )


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """Without what configurations had no field for before, where it says nothing: what was saved
    for a model stays of use."""
    rope = config.get("rope")
    if rope is None or rope["factors"]:
        return config
    return {**config, "rope": {name: value for name, value in rope.items() if name != "factors"}}
