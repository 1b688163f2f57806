"""Plans of every preset for four models: a digest of every field, and what is predicted.

A change of one field shows as that field. Predicted times are figures, which are compared with a
tolerance and are in no digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

from plans import make_plan

from helm.compiler.load_cost import LoadingRequest
from helm.errors import HelmError
from helm.machine.profile import load_profile, preset_names
from helm.model.config import ModelConfig
from helm.model.families import parse_config
from helm.plan.records import Workload
from helm.plan.schema import Plan

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b", "llama-3.1-70b")
OBJECTIVES = ("total", "throughput")
WEIGHTS = ("copied", "mapped", "compressed")
_DIGITS = 8  # of SHA-256 in hex; a field has no adversary
# Fields whose fractions are predicted, not decided; of the first, the figures are kept.
_PREDICTED = ("predicted", "alternatives", "loading_choice")


def cases() -> list[str]:
    """Their names, in a fixed order."""
    parts = itertools.product(preset_names(), MODELS, OBJECTIVES, WEIGHTS)
    return ["/".join(part) for part in parts]


def outcome(case: str) -> dict[str, Any]:
    """Of one case: a digest by field, and figures by name; the error's type if there is no plan."""
    preset, model, objective, weights = case.split("/")
    batch = 8 if objective == "throughput" else 1
    work = Workload(512, 128, batch, 4096, objective)  # type: ignore[arg-type]
    try:
        plan = make_plan(
            _config(model), None, max_sequences=batch, profile=load_profile(preset), workload=work,
            loading=LoadingRequest(weights, objective=work.objective, batch=batch),
        )  # fmt: skip
    except HelmError as error:
        return {"refused": type(error).__name__}
    return {"fields": digests(plan), "figures": figures(plan)}


def digests(plan: Plan) -> dict[str, str]:
    """By field of the plan's text."""
    found = {}
    for name, value in json.loads(plan.to_json()).items():
        if name == "predictor":  # made of the profile's rates alone
            continue
        kept = _without_fractions(value) if name in _PREDICTED else value
        text = json.dumps(kept, sort_keys=True)
        found[name] = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    return found


def figures(plan: Plan) -> dict[str, float]:
    """What is predicted, without its terms."""
    assert plan.prediction is not None
    predicted = dataclasses.asdict(plan.prediction.predicted)
    found = {name: value for name, value in predicted.items() if isinstance(value, float)}
    for phase in ("decode", "prefill"):  # a hash of all terms that has their precision
        terms = predicted[f"{phase}_terms"]
        found[f"{phase}_terms"] = sum(i * s for i, s in enumerate(terms.values(), 1))
    others = plan.prediction.alternatives
    found["alternatives"] = sum(o.ttft_s + 1 / o.decode_tokens_per_s for o in others)
    return found


def _without_fractions(value: Any) -> Any:
    if isinstance(value, float):
        return None
    if isinstance(value, dict):
        return {key: _without_fractions(inner) for key, inner in value.items()}
    return [_without_fractions(inner) for inner in value] if isinstance(value, list) else value


def _config(model: str) -> ModelConfig:
    file = ROOT / "tests" / "data" / "configs" / f"{model}.json"
    if file.exists():
        return parse_config(json.loads(file.read_text()), model)
    shapes = json.loads((ROOT / "bench" / "shapes.json").read_text())
    return parse_config(shapes[model], model)
