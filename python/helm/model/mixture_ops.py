"""The ops of a mixture of experts, as `helm.model.graph` has others. Knows no family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "scale", "softcap", "swiglu_limit"]
RouteScore = Literal["softmax", "softmax_selected", "sigmoid", "sparsemixer"]
GateUp = Literal["apart", "halves", "neighbours"]
_OPTIONAL = {"optional": True}  # absent from a plan where a field has its default


@dataclass(frozen=True)
class Route:
    """out(t, :) = [ids | weights] of a token's `chosen` experts, ids ascending.

    s = score(in), over all experts or over those chosen; s + bias chooses, equal ones by the lower
    id, among the `groups_kept` groups of neighbours where the `group_best` greatest add up to the
    most; weights = scale * s, over their sum first where `normalise`. near: of sparsemixer, how far
    below the greatest, as a share, a logit may be to count in its softmax.
    """

    op: ClassVar[str] = "route"
    names: ClassVar[tuple[str, ...]] = ("bias",)
    input: str  # [rows, experts]
    out: str  # [rows, 2 * chosen]
    chosen: int
    score: RouteScore
    normalise: bool = field(default=False, metadata=_OPTIONAL)
    scale: float = field(default=1.0, metadata=_OPTIONAL)
    bias: str | None = field(default=None, metadata=_OPTIONAL)  # [experts]
    groups: int = field(default=1, metadata=_OPTIONAL)
    groups_kept: int = field(default=1, metadata=_OPTIONAL)
    group_best: int = field(default=1, metadata=_OPTIONAL)
    near: float = field(default=0.0, metadata=_OPTIONAL)

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        return () if self.bias is None else (self.bias,)


@dataclass(frozen=True)
class Experts:
    """out(t, :) += sum over a token's experts of weight * (Down act(Gate in, Up in)).

    The matrices of all experts are stacked, and so are biases. layout: gate and up lie "apart" in
    two matrices, or in one, `gate`: of each expert in "halves", or as "neighbours", a row of gate
    and one of up in turn. factor: the limit of activation swiglu_limit.
    """

    op: ClassVar[str] = "experts"
    names: ClassVar[tuple[str, ...]] = (
        "gate", "up", "down", "gate_bias", "up_bias", "down_bias"
    )  # fmt: skip
    input: str
    routes: str  # what a Route op writes
    out: str
    experts: int
    chosen: int
    size: int
    layout: GateUp
    gate: str  # [experts * size, width(in)], twice as many rows unless apart
    up: str | None  # [experts * size, width(in)]
    down: str  # [experts * width(out), size]
    activation: ActivationKind
    gate_bias: str | None = field(default=None, metadata=_OPTIONAL)
    up_bias: str | None = field(default=None, metadata=_OPTIONAL)
    down_bias: str | None = field(default=None, metadata=_OPTIONAL)
    factor: float = field(default=1.0, metadata=_OPTIONAL)

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.routes, self.out)

    def matrices(self) -> tuple[str, ...]:
        return tuple(name for name in (self.gate, self.up, self.down) if name is not None)

    def weight_names(self) -> tuple[str, ...]:
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return (*self.matrices(), *(name for name in biases if name is not None))

    def expected(self, rows: int) -> float:
        """How many different experts `rows` tokens have, each chosen as often as any other."""
        return float(self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** rows))
