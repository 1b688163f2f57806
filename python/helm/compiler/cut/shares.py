"""What two devices can share of a unit: the products along KV heads, intermediate elements or rows
of the vocabulary, and what comes before and behind them. Knows no family, machine or time."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from helm.model.graph import (
    Activation,
    Attention,
    Linear,
    Norm,
    Op,
    Rope,
    Select,
    Unit,
)
from helm.model.mixture_ops import Experts
from helm.plan.units import CPU

ACCELERATOR = "accelerator"


@dataclass(frozen=True)
class Shares:
    """A unit as its cut sees it: `begin` at home, `first` to `last` on both devices, `end` at home.
    `apart` are ops among the latter that the home alone has."""

    begin: tuple[Op, ...]
    first: Linear
    inner: tuple[Op, ...]
    last: Linear | None
    end: tuple[Op, ...]
    apart: tuple[Op, ...] = ()

    @property
    def homes(self) -> tuple[str, ...]:
        """An accelerator's own share comes before its guest's, and would change what that reads
        where no norm stands between."""
        same = self.last is not None and self.first.input == self.last.out
        return (CPU,) if same else (CPU, ACCELERATOR)


@functools.cache
def attention_shares(unit: Unit) -> Shares | str:
    """Of an attention unit, or why it is not cut."""
    ops = unit.ops
    at = next((i for i, op in enumerate(ops) if isinstance(op, Attention)), None)
    if at is None:
        return "there is no attention"
    attention = ops[at]
    assert isinstance(attention, Attention)
    if attention.sinks is not None:
        return "its heads have sinks"
    makers = [i for i, op in enumerate(ops[:at]) if isinstance(op, Linear)]
    if len(makers) != 1:
        return "attention is not fed by one product"
    first = ops[makers[0]]
    assert isinstance(first, Linear)
    if first.out != attention.input or first.accumulate:
        return "the product before attention does not feed it"
    inner: list[Op] = [*ops[makers[0] + 1 : at], attention]
    if not all(_in_place(op, attention) for op in inner[:-1]):
        return "what comes before attention mixes its heads"
    attended, apart = attention.out, list[Op]()
    for place in range(at + 1, len(ops)):
        op = ops[place]
        if isinstance(op, Select):
            mine = op.input == attended
            (inner if mine else apart).append(op)
            attended = op.out if mine else attended
            continue
        if isinstance(op, Linear) and op.input == attended and op.accumulate and len(op.parts) == 1:
            return Shares(ops[: makers[0]], first, tuple(inner), op, ops[place + 1 :], tuple(apart))
        break
    return "the product behind attention does not add to the residual"


def _in_place(op: Op, attention: Attention) -> bool:
    """Whether it treats heads one by one."""
    size = attention.head_dim
    if isinstance(op, Norm):
        there = op.input == op.out == attention.input and op.in_offset == op.out_offset
        return there and op.size == size and op.in_offset % size == 0
    if isinstance(op, Rope):
        return op.value == attention.input and op.head_dim == size and op.offset % size == 0
    return False


@functools.cache
def mlp_shares(unit: Unit) -> Shares | str:
    """Of an mlp, or why it is not cut."""
    ops = unit.ops
    at = next((i for i, op in enumerate(ops) if isinstance(op, Linear)), len(ops))
    if len(ops) < at + 3:
        return "an mlp is not product, activation, product"
    first, activation, last = ops[at : at + 3]
    if not (
        isinstance(first, Linear)
        and isinstance(activation, Activation)
        and isinstance(last, Linear)
        and first.out == activation.input
        and activation.out == last.input
    ):
        return "an mlp is not product, activation, product"
    if not (last.accumulate and len(last.parts) == 1) or first.accumulate:
        return "the last product of an mlp does not add to the residual"
    return Shares(ops[:at], first, (activation,), last, ops[at + 3 :])


@functools.cache
def head_shares(unit: Unit) -> Shares | str:
    """Of the head, or why it is not cut."""
    products = [i for i, op in enumerate(unit.ops) if isinstance(op, Linear)]
    if not products:
        return "the head has no product"
    at = products[-1]
    first = unit.ops[at]
    assert isinstance(first, Linear)
    if first.accumulate:
        return "the head's product adds to another value"
    return Shares(unit.ops[:at], first, (), None, unit.ops[at + 1 :])


def shares_of(unit: Unit) -> Shares | str:
    """Of any unit, or why it is not cut."""
    kinds = {"attention": attention_shares, "mlp": mlp_shares, "head": head_shares}
    return kinds[unit.kind](unit) if unit.kind in kinds else "an embedding is not cut"


def priced_shares(unit: Unit) -> Shares | str:
    """Those that plans are made of: where nothing stands before the first product, a guest's share
    would be one with the unit before."""
    shares = shares_of(unit)
    if isinstance(shares, Shares) and not shares.begin:
        return "no norm stands before its first product"
    return shares


def size_of(unit: Unit) -> int:
    """How many KV heads, or elements, a unit has that is cut along these."""
    for op in unit.ops:
        if isinstance(op, Attention):
            return op.kv_heads
        if isinstance(op, (Activation, Experts)):
            return op.size
    return 0
