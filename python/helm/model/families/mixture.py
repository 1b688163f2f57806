"""Mixtures of experts, as families share them: their keys, and the ops of a layer.

A family's differences arrive as arguments.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from helm.base.jsonio import Reader
from helm.model.builder import GraphBuilder
from helm.model.config import Keys, Mixture, ModelConfig
from helm.model.graph import Activation
from helm.model.mixture_ops import ActivationKind, Experts, GateUp, Route, RouteScore

_MOST_EXPERTS = 4096


@dataclass(frozen=True)
class MixtureStyle:
    """Names of a layer's modules. module: what has the experts; gate, up, down: the matrices of an
    expert, or of all in one tensor, where `up` is None and gate has its rows, too. shared: an MLP
    for all tokens, whose sum `shared_gate` scales."""

    module: str = "mlp"
    router: str = "gate"
    router_bias: bool = False
    choice_bias: str | None = None
    gate: str = "experts.*.gate_proj.weight"
    up: str | None = "experts.*.up_proj.weight"
    down: str = "experts.*.down_proj.weight"
    biases: tuple[str, str] | None = None  # of gate, with up's where they are one, and of down
    up_bias: str | None = None
    layout: GateUp = "apart"
    shared: str | None = None
    shared_gate: str | None = None


def read_mixture(
    keys: Keys,
    *,
    count: str = "num_experts",
    size: str = "moe_intermediate_size",
    score: RouteScore = "softmax",
    normalise: bool | None = None,
    dense: tuple[int, ...] = (),
) -> Mixture:
    """count, size: the keys of how many experts there are, and of their elements. normalise: None
    where norm_topk_prob says. dense: layers without experts. Raises ConfigError."""
    listed = _either(keys, count, "num_local_experts")
    experts = listed.integer(1, _MOST_EXPERTS)
    chosen = keys["num_experts_per_tok"].integer(1, _MOST_EXPERTS)
    if chosen > experts:
        keys["num_experts_per_tok"].reject(
            f"expected at most the {experts} experts of {listed.path}, found {chosen}"
        )
    if normalise is None:
        normalise = keys.flag("norm_topk_prob")
    return Mixture(experts, chosen, keys.size(size), score, normalise, dense_layers=dense)


def _either(keys: Keys, name: str, other: str) -> Reader:
    return keys[other] if keys.node.get(name).null and not keys.node.get(other).null else keys[name]


def dense_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    """Layers that mlp_only_layers names, and those between every decoder_sparse_step-th."""
    only, step = keys.get("mlp_only_layers", []), keys.get("decoder_sparse_step", 1)
    named = [] if only.null else [item.integer(0, layers - 1) for item in only.items()]
    each = step.integer(1, 2**31)
    return tuple(n for n in range(layers) if n in named or (n + 1) % each)


def add_mixture(
    b: GraphBuilder, config: ModelConfig, at: str, input: str, out: str, style: MixtureStyle
) -> None:
    """out += the mixture's sum. at: the layer's name."""
    mixture, module = config.mixture, f"{at}.{style.module}"
    assert mixture is not None
    if mixture.joined and style.layout == "apart":
        style = dataclasses.replace(
            style, gate="experts.gate_up_proj.weight", up=None, layout="halves"
        )
    logits = b.value_like(input, "router", mixture.experts)
    bias = style.router_bias
    b.linear(input, logits, [(f"{module}.{style.router}", mixture.experts)], bias=bias)
    routes = b.value_like(input, "routes", 2 * mixture.chosen)
    choice = None
    if style.choice_bias is not None:
        choice = b.tensor(f"{module}.{style.choice_bias}", mixture.experts)
    scale = mixture.scale * config.residual_scale
    b.add(
        Route(
            logits,
            routes,
            mixture.chosen,
            mixture.score,
            mixture.normalise,
            scale,
            choice,
            mixture.groups,
            mixture.groups_kept,
            mixture.group_best,
            mixture.near,
        )
    )
    counts = (mixture.experts, mixture.chosen, mixture.expert_size)
    b.add(_experts(b, config, module, (input, routes, out), counts, style))
    if style.shared is not None and mixture.shared_size:
        _add_shared(b, config, module, input, out, style)


def _experts(
    b: GraphBuilder,
    config: ModelConfig,
    module: str,
    values: tuple[str, str, str],
    counts: tuple[int, int, int],
    style: MixtureStyle,
) -> Experts:
    """values: what is read, its routes, what is added to. counts: experts, those chosen of them,
    and elements of each."""
    count, chosen, size = counts
    width, wide = b.width(values[0]), b.width(values[2])
    rows = count * size * (1 if style.layout == "apart" else 2)
    up = None if style.up is None else b.tensor(f"{module}.{style.up}", rows, width)
    first, last = style.biases or (None, None)
    limited = config.mixture is not None and config.mixture.limit > 0
    kind: ActivationKind = "swiglu_limit" if limited else config.hidden_act  # type: ignore[assignment]
    return Experts(
        *values,
        count,
        chosen,
        size,
        style.layout,
        b.tensor(f"{module}.{style.gate}", rows, width),
        up,
        b.tensor(f"{module}.{style.down}", count * wide, size),
        kind,
        None if first is None else b.tensor(f"{module}.{first}", rows),
        None if style.up_bias is None else b.tensor(f"{module}.{style.up_bias}", rows),
        None if last is None else b.tensor(f"{module}.{last}", count * wide),
        config.mixture.limit if limited and config.mixture is not None else 1.0,
    )


def _add_shared(
    b: GraphBuilder, config: ModelConfig, module: str, input: str, out: str, style: MixtureStyle
) -> None:
    """The shared MLP: as an mixture of one expert where a gate scales it."""
    mixture = config.mixture
    assert mixture is not None
    size, at = mixture.shared_size, f"{module}.{style.shared}"
    if style.shared_gate is not None:
        gate = b.value_like(input, "shared_gate", 1)
        b.linear(input, gate, [(f"{module}.{style.shared_gate}", 1)])
        routes = b.value_like(input, "shared_routes", 2)
        b.add(Route(gate, routes, 1, "sigmoid", scale=config.residual_scale))
        names = [f"{style.shared}.{part}_proj.weight" for part in ("gate", "up", "down")]
        own = MixtureStyle(style.module, gate=names[0], up=names[1], down=names[2])
        b.add(_experts(b, config, module, (input, routes, out), (1, 1, size), own))
        return
    assert config.residual_scale == 1.0
    gate_up = b.value_like(input, "shared_gate_up", 2 * size)
    act = b.value_like(input, "shared_act", size)
    b.linear(input, gate_up, [(f"{at}.gate_proj", size), (f"{at}.up_proj", size)])
    b.add(Activation(config.hidden_act, True, gate_up, act, size))  # type: ignore[arg-type]
    b.linear(act, out, [(f"{at}.down_proj", b.width(out))], accumulate=True)
