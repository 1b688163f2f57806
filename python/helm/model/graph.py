"""The typed op graph of one step, and the builder that families use. Knows no family, no machine.

A value is a matrix [rows, width] of f32; rows "tokens" has one row per token of the step, rows
"outputs" one per token whose logits are asked for. Every block reuses the same value names, so
there is one buffer per name. Field `input` is written "in" in a plan.

Every op says which values it `uses()`, reading or writing them, which weights it reads
(`weight_names()`), and under `names` which of its fields name weights or a KV layer: what an op
costs depends on all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from helm.base.jsonio import encode
from helm.errors import InvalidError
from helm.model.rope import RopeTable

MAX_WIDTH = 2**24  # the runtime's bound of a value's width
Rows = Literal["tokens", "outputs"]
NormKind = Literal["rms", "layer"]
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Embedding:
    """out(t, :) = table[token(t), :]"""

    op: ClassVar[str] = "embedding"
    names: ClassVar[tuple[str, ...]] = ("table",)
    table: str  # [vocab, width]
    out: str

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
    """Normalises `groups` runs of `size` elements that lie side by side from in_offset."""

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
    """Rotates pairs (i, i + rotary/2) of `heads` heads side by side from offset, in place."""

    op: ClassVar[str] = "rope"
    names: ClassVar[tuple[str, ...]] = ()
    value: str
    offset: int
    heads: int
    head_dim: int
    rotary: int
    table: int  # index into the graph's rope tables

    def uses(self) -> tuple[str, ...]:
        return (self.value,)

    def weight_names(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Attention:
    """Appends K and V to the cache of `layer`, then out = softmax(scale q k^T + mask) v.

    window w > 0: position i sees only j with 0 <= i - j < w.
    """

    op: ClassVar[str] = "attention"
    names: ClassVar[tuple[str, ...]] = ("layer",)
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

    def uses(self) -> tuple[str, ...]:
        return (self.input, self.out)

    def weight_names(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Activation:
    """gated: in is [gate | up], out = act(gate) * up; plain: out = act(in), may be in place."""

    op: ClassVar[str] = "activation"
    names: ClassVar[tuple[str, ...]] = ()
    kind: ActivationKind
    gated: bool
    input: str
    out: str
    size: int

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


Op = Embedding | PositionEmbedding | Norm | Linear | Rope | Attention | Activation | Select
OPS: dict[str, type[Op]] = {
    cls.op: cls
    for cls in (Embedding, PositionEmbedding, Norm, Linear, Rope, Attention, Activation, Select)
}


@dataclass(frozen=True)
class Value:
    """A buffer [rows, width] of f32."""

    name: str
    width: int
    rows: Rows


@dataclass(frozen=True)
class Unit:
    """A partition unit: what a plan places as a whole. "embedding", "block.<i>" or "head"."""

    name: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class KvGeometry:
    """The shape of the KV cache: per position and layer 2 * kv_heads * head_dim elements."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Graph:
    """One step of one model. tensors: name -> shape of every weight the ops read."""

    architecture: str
    units: tuple[Unit, ...]
    values: tuple[Value, ...]
    tensors: dict[str, tuple[int, ...]]
    rope: tuple[RopeTable, ...]
    kv: KvGeometry
    logits: str

    def ops(self) -> Iterator[Op]:
        for unit in self.units:
            yield from unit.ops

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, field by field."""
        encoded: dict[str, Any] = encode(self)
        return encoded


@dataclass
class GraphBuilder:
    """Collects a graph op by op; the widths of what each op reads and writes must agree.

    Weights go by the names that transformers saves; prefix: what those of the base model begin
    with, as "model.".
    """

    prefix: str
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _values: dict[str, Value] = field(default_factory=dict)
    _units: list[Unit] = field(default_factory=list)
    _ops: list[Op] = field(default_factory=list)
    _rope: list[RopeTable] = field(default_factory=list)

    def tensor(self, name: str, *shape: int) -> str:
        """Declares a weight of the base model and returns its whole name."""
        return self.absolute(self.prefix + name, *shape)

    def absolute(self, name: str, *shape: int) -> str:
        """Declares a weight whose name has no prefix."""
        assert self.tensors.get(name, shape) == shape, f"{name} has two shapes"
        self.tensors[name] = shape
        return name

    def value(self, name: str, width: int, rows: Rows = "tokens") -> str:
        """Declares a buffer [rows, width]; InvalidError if no runtime could hold a row."""
        if width > MAX_WIDTH:
            raise InvalidError(
                f"[plan] value {name!r} would be {width} elements wide; at most {MAX_WIDTH} are "
                "possible; check the sizes in config.json"
            )
        value = Value(name, width, rows)
        assert self._values.get(name, value) == value, f"value {name} has two shapes"
        self._values[name] = value
        return name

    def value_like(self, rows_of: str, name: str, width: int) -> str:
        """As `value`, with the rows of another value."""
        rows = self._values[rows_of].rows
        return self.value(name if rows == "tokens" else f"{name}_out", width, rows)

    def select(self, input: str) -> str:
        """A value of its own with the rows of `input` whose logits were asked for. The last block
        goes on with those alone once keys and values are cached."""
        out = self.value(f"{input}_out", self.width(input), "outputs")
        self.add(Select(input, out))
        return out

    def rope_table(self, table: RopeTable) -> int:
        if table not in self._rope:
            self._rope.append(table)
        return self._rope.index(table)

    def width(self, name: str) -> int:
        return self._values[name].width

    def add(self, op: Op) -> None:
        self._ops.append(op)

    def linear(
        self,
        input: str,
        out: str,
        parts: list[tuple[str, int]],
        *,
        bias: bool = False,
        accumulate: bool = False,
    ) -> None:
        """parts: (module name, rows) of each "<module>.weight" [rows, width(input)]."""
        made = tuple(
            Part(
                self.tensor(f"{module}.weight", rows, self.width(input)),
                self.tensor(f"{module}.bias", rows) if bias else None,
            )
            for module, rows in parts
        )
        assert sum(rows for _, rows in parts) == self.width(out), f"{parts} do not fill {out}"
        self.add(Linear(input, out, made, accumulate))

    def norm(
        self,
        kind: NormKind,
        module: str,
        input: str,
        out: str,
        eps: float,
        *,
        offset: int = 0,
        groups: int = 1,
        size: int | None = None,
    ) -> None:
        """Norm with "<module>.weight" (and ".bias" for layer norm) of `groups` runs of `size`."""
        size = self.width(input) if size is None else size
        assert offset + groups * size <= min(self.width(input), self.width(out))
        weight = self.tensor(f"{module}.weight", size)
        bias = self.tensor(f"{module}.bias", size) if kind == "layer" else None
        self.add(Norm(kind, input, offset, out, offset, groups, size, weight, bias, eps))

    def head(self, input: str, vocab_size: int, tied: bool) -> None:
        """logits = head input, with the embedding as the head when tied."""
        out = self.value("logits", vocab_size, "outputs")
        width = self.width(input)
        if tied:
            weight = self.tensor("embed_tokens.weight", vocab_size, width)
        else:
            weight = self.absolute("lm_head.weight", vocab_size, width)
        self.add(Linear(input, out, (Part(weight, None),), False))

    def unit(self, name: str) -> None:
        """Closes the unit made of the ops added since the last call."""
        self._units.append(Unit(name, tuple(self._ops)))
        self._ops.clear()

    def graph(self, architecture: str, kv: KvGeometry) -> Graph:
        assert not self._ops, "the last unit is not closed"
        return Graph(
            architecture,
            tuple(self._units),
            tuple(self._values.values()),
            dict(self.tensors),
            tuple(self._rope),
            kv,
            "logits",
        )
