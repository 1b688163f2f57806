"""The builder with which families make graphs. Knows no family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from helm.errors import InvalidError
from helm.model.graph import (
    Attention,
    FarRope,
    Graph,
    KvGeometry,
    Linear,
    Norm,
    NormKind,
    Op,
    Part,
    Rows,
    Select,
    Unit,
    UnitKind,
    Value,
)
from helm.model.rope import RopeConfig, RopeTable, rope_table

MAX_WIDTH = 2**24  # the runtime's bound of a value's width


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
    _far_rope: dict[int, FarRope] = field(default_factory=dict)

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
        """A value of its own with the rows of `input` whose logits were asked for. The last layer
        goes on with those alone once keys and values are cached."""
        out = self.value(f"{input}_out", self.width(input), "outputs")
        self.add(Select(input, out))
        return out

    def rope_table(self, rope: RopeConfig, head_dim: int) -> int:
        """The place of the table of heads of `head_dim`, and of what takes its place far away."""
        table = rope_table(rope, head_dim)
        if table not in self._rope:
            self._rope.append(table)
        index = self._rope.index(table)
        if rope.rope_type == "longrope":
            instead = rope_table(rope, head_dim, far=True)
            self._far_rope[index] = FarRope(index, rope.original_context, instead)
        return index

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
        plus: float = 0.0,
        accumulate: bool = False,
        biased: bool = True,
    ) -> None:
        """Norm with "<module>.weight" (and ".bias" for layer norm, if `biased`) of `groups` runs of
        `size`."""
        size = self.width(input) if size is None else size
        assert offset + groups * size <= min(self.width(input), self.width(out))
        weight = self.tensor(f"{module}.weight", size)
        bias = self.tensor(f"{module}.bias", size) if kind == "layer" and biased else None
        runs = (input, offset, out, offset, groups, size)
        self.add(Norm(kind, *runs, weight, bias, eps, plus, accumulate))

    def head(
        self,
        input: str,
        vocab_size: int,
        tied: bool,
        biased: bool = False,
        table: str = "embed_tokens.weight",
    ) -> None:
        """logits = head input, with the embedding as the head when tied, which `table` names."""
        out = self.value("logits", vocab_size, "outputs")
        width = self.width(input)
        if tied:
            weight = self.tensor(table, vocab_size, width)
        else:
            weight = self.absolute("lm_head.weight", vocab_size, width)
        bias = self.absolute("lm_head.bias", vocab_size) if biased else None
        self.add(Linear(input, out, (Part(weight, bias),), False))

    def unit(self, kind: UnitKind, layer: int | None = None) -> None:
        """Closes the unit made of the ops added since the last call. layer: of an attention or
        mlp."""
        name = kind if layer is None else f"layer.{layer}.{kind}"
        self._units.append(Unit(name, kind, layer, tuple(self._ops)))
        self._ops.clear()

    def graph(self, architecture: str, kv: KvGeometry) -> Graph:
        """kv: its layers get the windows of the attention ops."""
        assert not self._ops, "the last unit is not closed"
        ops = [op for unit in self._units for op in unit.ops if isinstance(op, Attention)]
        windows = {op.layer: op.window for op in ops}
        layers = (replace(entry, window=windows.get(i, 0)) for i, entry in enumerate(kv.layers))
        kv = replace(kv, layers=tuple(layers))
        return Graph(
            architecture,
            tuple(self._units),
            tuple(self._values.values()),
            dict(self.tensors),
            tuple(self._rope),
            kv,
            "logits",
            tuple(self._far_rope.values()),
        )
