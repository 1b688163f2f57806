"""The typed op graph of one step. Knows no family, no machine.

A value is a matrix [rows, width] of f32; rows "tokens" has one row per token of the step, rows
"outputs" one per token whose logits are asked for. Every layer reuses the same value names, so
there is one buffer per name. Field `input` is written "in" in a plan.

Every op says which values it `uses()`, reading or writing them, which weights it reads
(`weight_names()`), and under `names` which of its fields name weights or a KV layer: what an op
costs depends on all others.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from helm.base.jsonio import encode
from helm.model.mixture_ops import ActivationKind, Experts, Route
from helm.model.rope import RopeTable

Rows = Literal["tokens", "outputs"]
NormKind = Literal["rms", "layer"]
UnitKind = Literal["embedding", "attention", "mlp", "head"]
RopePairs = Literal["halves", "neighbours"]
_OPTIONAL = {"optional": True}  # absent from a plan where a field has its default


@dataclass(frozen=True)
class Embedding:
    """out(t, :) = scale * table[token(t), :]"""

    op: ClassVar[str] = "embedding"
    names: ClassVar[tuple[str, ...]] = ("table",)
    table: str  # [vocab, width]
    out: str
    scale: float = field(default=1.0, metadata=_OPTIONAL)

    def uses(self) -> tuple[str, ...]:
        return (self.out,)

    def weight_names(self) -> tuple[str, ...]:
        return (self.table,)


@dataclass(frozen=True)
class PositionEmbedding:
    """out(t, :) += table[position(t) + offset, :]"""

    op: ClassVar[str] = "position_embedding"
    names: ClassVar[tuple[str, ...]] = ("table",)
    table: str  # [positions + offset, width]
    offset: int
    out: str

    def uses(self) -> tuple[str, ...]:
        return (self.out,)

    def weight_names(self) -> tuple[str, ...]:
        return (self.table,)


@dataclass(frozen=True)
class Norm:
    """Normalises `groups` runs of `size` elements that lie side by side from in_offset:
    out [+]= norm(in) * (weight_plus + weight) [+ bias]."""

    op: ClassVar[str] = "norm"
    names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    kind: NormKind
    input: str
    in_offset: int
    out: str
    out_offset: int
    groups: int
    size: int
    weight: str  # [size]
    bias: str | None  # [size]
    eps: float
    weight_plus: float = field(default=0.0, metadata=_OPTIONAL)
    accumulate: bool = field(default=False, metadata=_OPTIONAL)

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class Part:
    """Some rows of a linear op: weight [rows, width(in)], bias [rows]."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Linear:
    """out [+]= [W0 in + b0 | W1 in + b1 | ...]: the parts' rows are stacked."""

    op: ClassVar[str] = "linear"
    names: ClassVar[tuple[str, ...]] = ("parts",)
    input: str
    out: str
    parts: tuple[Part, ...]
    accumulate: bool

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        biases = (part.bias for part in self.parts if part.bias is not None)
        return (*(part.weight for part in self.parts), *biases)


@dataclass(frozen=True)
class Rope:
    """Rotates pairs of `heads` heads side by side from offset, in place: halves (i, i + rotary/2)
    or neighbours (2i, 2i + 1)."""

    op: ClassVar[str] = "rope"
    names: ClassVar[tuple[str, ...]] = ()
    value: str
    offset: int
    heads: int
    head_dim: int
    rotary: int
    table: int  # index into the graph's rope tables
    pairs: RopePairs = field(default="halves", metadata=_OPTIONAL)

    def uses(self) -> tuple[str, ...]:
        return (self.value,)

    def weight_names(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Attention:
    """Appends K and V to the cache, then out = softmax(cap(scale q k^T) + mask) v. layer: index of
    the KV cache's entry with these heads.

    window w > 0: position i sees only j with 0 <= i - j < w. softcap c > 0: cap(x) = c tanh(x / c).
    A head's sink s adds exp(s) to the sum of its softmax.
    """

    op: ClassVar[str] = "attention"
    names: ClassVar[tuple[str, ...]] = ("layer", "sinks")
    input: str
    q_offset: int
    k_offset: int
    v_offset: int
    out: str  # [tokens, heads * head_dim]
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float = field(default=0.0, metadata=_OPTIONAL)
    sinks: str | None = field(default=None, metadata=_OPTIONAL)  # [heads]

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        return () if self.sinks is None else (self.sinks,)


@dataclass(frozen=True)
class Activation:
    """gated: in is [gate | up], out [+]= act(gate) * up; plain: out [+]= act(in), may be in place.
    scale: factor * x; softcap: factor * tanh(x / factor); swiglu_limit, gated alone:
    h / (1 + exp(-1.702 h)) * (clamp(up, -factor, factor) + 1), h = min(gate, factor)."""

    op: ClassVar[str] = "activation"
    names: ClassVar[tuple[str, ...]] = ()
    kind: ActivationKind
    gated: bool
    input: str
    out: str
    size: int
    factor: float = field(default=1.0, metadata=_OPTIONAL)
    accumulate: bool = field(default=False, metadata=_OPTIONAL)

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Select:
    """Copies the rows whose logits were asked for."""

    op: ClassVar[str] = "select"
    names: ClassVar[tuple[str, ...]] = ()
    input: str  # rows "tokens"
    out: str  # rows "outputs"

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Add:
    """out += in, row by row."""

    op: ClassVar[str] = "add"
    names: ClassVar[tuple[str, ...]] = ()
    input: str
    out: str

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Concat:
    """out = [in0 | in1 | ...]: their columns side by side."""

    op: ClassVar[str] = "concat"
    names: ClassVar[tuple[str, ...]] = ()
    input: tuple[str, ...]
    out: str

    def uses(self) -> tuple[str, ...]:
        return (*self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        return ()


Op = (
    Embedding | PositionEmbedding | Norm | Linear | Rope | Attention | Activation | Select | Add
    | Concat | Route | Experts
)  # fmt: skip
OPS: dict[str, type[Op]] = {cls.op: cls for cls in get_args(Op)}
# By op the fields that name nothing.
_PLAIN_FIELDS = {
    cls: operator.attrgetter(*({item.name for item in fields(cls)} - set(cls.names)))
    for cls in OPS.values()
}


@dataclass(frozen=True)
class Value:
    """A buffer [rows, width] of f32."""

    name: str
    width: int
    rows: Rows


@dataclass(frozen=True)
class Unit:
    """A partition unit: what a plan places as a whole. name: "embedding", "layer.3.attention",
    "layer.3.mlp" or "head". layer: None of embedding and head."""

    name: str
    kind: UnitKind
    layer: int | None
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Layer:
    """Neighbouring units of one layer, which a search places on one device."""

    units: tuple[Unit, ...]

    @functools.cached_property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for unit in self.units for op in unit.ops)


@dataclass(frozen=True)
class KvLayer:
    """Heads of one layer in the KV cache: kv_heads of them from kv_head on, which lie together.
    window: positions that the layer's attention sees, the last ones; 0: all."""

    layer: int
    kv_head: int
    kv_heads: int
    window: int = field(default=0, metadata=_OPTIONAL)


@dataclass(frozen=True)
class KvGeometry:
    """The shape of the KV cache: per position and layer 2 * kv_heads * head_dim elements. layers:
    an entry for each layer, or for each device that has some of its heads."""

    layers: tuple[KvLayer, ...]
    kv_heads: int
    head_dim: int


def whole_layers(count: int, kv_heads: int) -> tuple[KvLayer, ...]:
    """An entry for each layer, with all heads."""
    return tuple(KvLayer(layer, 0, kv_heads) for layer in range(count))


@dataclass(frozen=True)
class FarRope:
    """In contexts of more than `beyond` positions `instead` takes the place of a rope table."""

    table: int  # index into the graph's rope tables
    beyond: int
    instead: RopeTable


@dataclass(frozen=True)
class Graph:
    """One step of one model. units: the embedding, of each layer the attention and the mlp, the
    head. tensors: name -> shape of every weight the ops read."""

    architecture: str
    units: tuple[Unit, ...]
    values: tuple[Value, ...]
    tensors: dict[str, tuple[int, ...]]
    rope: tuple[RopeTable, ...]
    kv: KvGeometry
    logits: str
    far_rope: tuple[FarRope, ...] = field(default=(), metadata=_OPTIONAL)

    def rope_of(self, context: int) -> tuple[RopeTable, ...]:
        """The tables for sequences of up to `context` positions."""
        tables = list(self.rope)
        for far in self.far_rope:
            if context > far.beyond:
                tables[far.table] = far.instead
        return tuple(tables)

    def ops(self) -> Iterator[Op]:
        for unit in self.units:
            yield from unit.ops

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        groups = itertools.groupby(self.units[1:-1], key=lambda unit: unit.layer)
        return tuple(Layer(tuple(units)) for _, units in groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, field by field."""
        encoded: dict[str, Any] = encode(self)
        return encoded

    @functools.cached_property
    def kinds(self) -> dict[str, Unit]:
        """By each unit's name the first unit that differs from it in names of weights and in the
        KV layer alone."""
        first: dict[tuple[object, ...], Unit] = {}
        return {
            unit.name: first.setdefault(tuple(map(self._shape, unit.ops)), unit)
            for unit in self.units
        }

    def _shape(self, op: Op) -> tuple[object, ...]:
        if isinstance(op, Linear):
            parts = tuple((self.tensors[part.weight], part.bias is None) for part in op.parts)
            return (op.input, op.out, parts, op.accumulate)
        absent = tuple(getattr(op, name) is None for name in op.names)
        return (type(op), _PLAIN_FIELDS[type(op)](op), absent)

    @functools.cached_property
    def footprint(self) -> Any:
        """_helm.Footprint: the runtime's count of the scratch of stages with units of these
        kinds."""
        from helm import _helm

        units = list({unit.name: unit for unit in self.kinds.values()}.values())
        names = dict.fromkeys(
            name for unit in units for op in unit.ops for name in op.weight_names()
        )
        parts = {name: encode(getattr(self, name)) for name in ("kv", "rope", "values", "logits")}
        bound = {"source": None, "part": None}
        tensors = [{"name": name, "shape": self.tensors[name], **bound} for name in names]
        text = json.dumps({**parts, "tensors": tensors, "units": [encode(unit) for unit in units]})
        return _helm.Footprint(text)
