"""The experts of a transformers module, by the names and in the order that a graph has. Imports
neither torch nor transformers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from helm.model.config import ModelConfig
from helm.model.families import build_graph
from helm.model.graph import Graph, Linear
from helm.model.mixture_ops import Experts, Route

if TYPE_CHECKING:
    from torch import Tensor

# Of all experts of a layer, [experts, rows, columns], or [experts, in, out] of what multiplies from
# the right, which is where a graph has rows of gate and up in turn; and the router.
_MODULE = re.compile(
    r"(?P<base>.*\blayers\.(?P<layer>\d+)\.)[^.]+\."
    r"(?P<part>experts\.(?:gate_up|down)_proj(?:_bias)?|(?:gate|router)\.weight)"
)


def with_experts(
    state: Mapping[str, Tensor], config: ModelConfig
) -> tuple[dict[str, Tensor], ModelConfig]:
    """The weights with experts as `config`'s graph reads them, and the configuration of that graph:
    gate and up stay one matrix where the module has one, so that both are views of its memory. Of
    a module with modules for experts, and of what is turned, they are copies."""
    mixture = config.mixture
    if mixture is None:
        return dict(state), config
    joined = any(name.endswith(".experts.gate_up_proj") for name in state)
    config = dataclasses.replace(config, mixture=dataclasses.replace(mixture, joined=joined))
    graph = build_graph(config)
    return (_joined if joined else _stacked)(state, graph), config


def _joined(state: Mapping[str, Tensor], graph: Graph) -> dict[str, Tensor]:
    layers = _layers(graph)
    found = {}
    for key, tensor in state.items():
        match = _MODULE.fullmatch(key)
        op, router = (None, "") if match is None else layers.get(match["layer"], (None, ""))
        if match is None or op is None:
            found[key] = tensor
            continue
        parts = {
            "experts.gate_up_proj": op.gate,
            "experts.down_proj": op.down,
            "experts.gate_up_proj_bias": op.gate_bias,
            "experts.down_proj_bias": op.down_bias,
        }
        name = parts.get(match["part"], router)
        if match["part"] in parts:
            if tensor.ndim == 3 and op.layout == "neighbours":
                tensor = tensor.transpose(1, 2).contiguous()
            tensor = tensor.flatten(0, 1)
        found[key if name is None else match["base"] + _in_layer(name)] = tensor
    return found


def _layers(graph: Graph) -> dict[str, tuple[Experts, str]]:
    """Of each layer with a mixture, by its number, the op and the router's weight."""
    found = {}
    for unit in graph.units:
        for op in unit.ops:
            if isinstance(op, Experts) and op.experts > 1:
                logits = next(
                    r.input for r in unit.ops if isinstance(r, Route) and r.out == op.routes
                )
                linear = next(o for o in unit.ops if isinstance(o, Linear) and o.out == logits)
                number = op.gate.partition("layers.")[2].partition(".")[0]
                found[number] = op, linear.parts[0].weight
    return found


def _in_layer(name: str) -> str:
    return name.partition("layers.")[2].partition(".")[2]


def _stacked(state: Mapping[str, Tensor], graph: Graph) -> dict[str, Tensor]:
    """Of modules with a module for each expert. What is not there in full stays as it is, and
    `helm.model.stacked` says what is missing."""
    found = dict(state)
    keys = {key[key.find("layers.") :]: key for key in state if "layers." in key}
    for op in graph.ops():
        if isinstance(op, Experts):
            for name in op.weight_names():
                own = "layers." + name.partition("layers.")[2]
                names = [keys.get(own.replace("*", str(i)), "") for i in range(op.experts)]
                if "*" in own and all(names):
                    _stack(found, own, names)
    return found


def _stack(found: dict[str, Tensor], own: str, names: list[str]) -> None:
    """Takes these tensors of `found` for one of them all, if they are alike."""
    parts = [found[name] for name in names]
    if any(part.shape != parts[0].shape for part in parts):
        return
    whole = parts[0].new_empty((len(parts), *parts[0].shape))
    for name, place in zip(names, whole, strict=True):
        place.copy_(found.pop(name))
    found[names[0].partition("layers.")[0] + own] = whole.flatten(0, 1)
