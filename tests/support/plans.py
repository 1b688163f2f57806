"""Plans and studies for tests, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helm.compiler.planning_problem import Problem
from helm.compiler.solve import Study, solve
from helm.machine.profile import Profile
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.plan.schema import Plan
from helm.session.options import load_options


def make_plan(config: ModelConfig, infos: Mapping[str, TensorInfo] | None, **given: Any) -> Plan:
    """given: see Problem; None is as if not given."""
    said = {name: value for name, value in given.items() if value is not None}
    return solve(Problem(config, infos, **said)).plan


def study(
    name: str,
    config: ModelConfig,
    infos: Mapping[str, TensorInfo] | None,
    profile: Profile,
    **given: Any,
) -> Study:
    """As `helm-llm plan` makes it. given: see helm.LLM; some by shorter names."""
    given = {_SHORT.get(option, option): value for option, value in given.items()}
    machine = {name: given.pop(name) for name in ("accelerator_bytes",) if name in given}
    options = load_options({"max_sequences": given.get("batch", 1), **given})
    return solve(options.problem(config, infos, profile, name=name, **machine))


_SHORT = {
    "prompt": "prompt_tokens", "output": "output_tokens", "cpu_bytes": "memory_bytes",
}  # fmt: skip
