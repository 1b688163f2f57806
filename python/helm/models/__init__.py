"""The registry of model families: architecture name -> how to emit its graph.

A family is one file that turns a ModelConfig into ops. It knows nothing of machines or placement.
"""

from __future__ import annotations

from collections.abc import Callable

from helm.config import ModelConfig
from helm.errors import UnsupportedModelError
from helm.graph import Graph
from helm.models import llama, mistral, opt, qwen2, qwen3

Build = Callable[[ModelConfig], Graph]
BUILDERS: dict[str, Build] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "OPTForCausalLM": opt.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}


def architectures() -> list[str]:
    """The supported architecture names, sorted."""
    return sorted(BUILDERS)


def build_graph(config: ModelConfig) -> Graph:
    """The graph of `config`. Raises UnsupportedModelError."""
    if config.architecture not in BUILDERS:
        raise UnsupportedModelError(
            f"[plan] architecture {config.architecture} is not supported; supported are "
            + ", ".join(architectures())
        )
    return BUILDERS[config.architecture](config)
