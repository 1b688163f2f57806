"""Measures a loaded model: prefill, decode, and where the CPU's time goes. Prints nothing.

Every round times one prefill of all prompts and one decode of all sequences between two probes of
the machine's ceilings, because machines drift; figures are medians over the rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from helm.base.arguments import shown
from helm.base.formats import FORMATS
from helm.compiler.times import Queries, causal_pairs, prefill_queries
from helm.errors import InvalidError
from helm.model.graph import Attention, Linear
from helm.model.mixture_ops import Experts

if TYPE_CHECKING:
    from helm.plan.schema import Plan

PROBE_BYTES = 1 << 29  # beyond every cache
PROBE_S = 0.2
MOST_ROUNDS = 10_000


@dataclass(frozen=True)
class Load:
    """What is measured: `batch` sequences of `prompt` tokens that each decode `output` more."""

    prompt: int
    output: int
    batch: int

    @property
    def decode_context(self) -> float:
        """Positions that a decode step attends to on average."""
        return self.prompt + (self.output + 1) / 2


@dataclass(frozen=True)
class OpShare:
    """Time of one kind of op in a phase. op: "linear", "attention", ..., or "rest": sampling, the
    engine's own work, and waiting for an accelerator. seconds: per decode step or per prefill,
    barriers included. bytes, flops: what the CPU's part must read and compute; 0 where it is not
    worth counting."""

    op: str
    seconds: float
    bytes: float
    flops: float


@dataclass(frozen=True)
class Phase:
    """seconds: of a decode step of all sequences, or to the last first token; by round. ops: on
    the CPU, medians over the rounds, the longest first."""

    seconds: tuple[float, ...]
    tokens: int  # that such a step or prefill handles
    ops: tuple[OpShare, ...]

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """By round."""
        return tuple(self.tokens / s for s in self.seconds)


@dataclass(frozen=True)
class Report:
    """ceilings: bytes/s that the plan's threads read from memory and f32 operations/s they do in
    registers, by round, the mean of before and after. step_bytes: weights and KV that a decode
    step must read, on all devices. experts: of a mixture, how many different ones an op of a decode
    step reads: expected, and counted on the CPU (0: none ran there)."""

    load: Load
    prefill: Phase
    decode: Phase
    read_bytes_per_s: tuple[float, ...]
    fma_flops: tuple[float, ...]
    step_bytes: float
    experts: tuple[float, float] | None = None

    @property
    def decode_share(self) -> tuple[float, ...]:
        """Bytes per second of decode over the read ceiling, by round."""
        pairs = zip(self.decode.seconds, self.read_bytes_per_s, strict=True)
        return tuple(self.step_bytes / s / ceiling for s, ceiling in pairs)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every round's figures."""
        return {
            **dataclasses.asdict(self),
            "decode_tokens_per_s": self.decode.tokens_per_s,
            "prefill_tokens_per_s": self.prefill.tokens_per_s,
            "decode_share_of_read_ceiling": self.decode_share,
        }


def measure(
    engine: Any,
    plan: Plan,
    load: Load,
    rounds: int = 5,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """Runs `load` on an engine (_helm.Engine) that executes `plan`; nothing else may use it.

    Raises InvalidError for a load that the plan cannot run.
    """
    _check(plan, load, rounds)
    bench = _Bench(engine, plan, load)
    try:
        bench.prefill()
        ceilings, prefills, decodes = [bench.ceilings()], [], []
        for done in range(rounds):
            progress(done, rounds)
            prefills.append(bench.prefill())
            decodes.append(bench.decode())
            ceilings.append(bench.ceilings())
        progress(rounds, rounds)
    finally:
        bench.close()
    means = [
        tuple(statistics.mean(pair) for pair in zip(before, after, strict=True))
        for before, after in itertools.pairwise(ceilings)
    ]
    work = _Work.of_decode(plan, load)
    return Report(
        load=load,
        prefill=_phase(prefills, load.batch * load.prompt, _Work.of_prefill(plan, load).by_op()),
        decode=_phase(decodes, load.batch, work.by_op()),
        read_bytes_per_s=tuple(mean[0] for mean in means),
        fma_flops=tuple(mean[1] for mean in means),
        step_bytes=engine.stats["decode_bytes"] + work.more_experts_bytes() + work.kv_bytes(),
        experts=work.experts(bench.counted_experts),
    )


def _check(plan: Plan, load: Load, rounds: int) -> None:
    if not isinstance(load, Load):
        raise InvalidError(
            "[bench] expected helm.measure.benchmark.Load(prompt, output, batch), got "
            f"{shown(load)}"
        )
    prompt = load.prompt if type(load.prompt) is int else 0
    for name, value, most in (
        ("prompt", load.prompt, plan.limits.context - 1),
        ("output", load.output, plan.limits.context - prompt),
        ("batch", load.batch, plan.limits.sequences),
        ("rounds", rounds, MOST_ROUNDS),
    ):
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidError(
                f"[bench] {name} is {shown(value)}; this plan, of context {plan.limits.context} "
                f"for {plan.limits.sequences} at once, allows 1 to {max(most, 0)}; plan for "
                "more with context= or batch="
            )


_Timed = tuple[float, dict[str, float]]  # seconds, and of them by kind of op


class _Bench:
    """Sequences over an engine, filled and continued again and again."""

    def __init__(self, engine: Any, plan: Plan, load: Load) -> None:
        from helm import _helm

        self._native, self._engine, self._load, self._threads = _helm, engine, load, plan.threads
        vocab = plan.model.vocab_size
        # No prompt begins like another: nothing can be shared.
        self._prompts = [
            [(b + 1 + i * 7919 * (i > 0)) % vocab for i in range(load.prompt)]
            for b in range(load.batch)
        ]
        self._sequences: list[int] = []
        self.counted_experts = 0.0  # of an op of a decode step, on average
        self._experts = {"runs": 0, "distinct": 0}
        try:
            for _ in range(load.batch):
                self._sequences.append(engine.open(load.prompt + load.output))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for sequence in self._sequences:
            self._engine.close(sequence)

    def ceilings(self) -> tuple[float, float]:
        threads = self._threads
        read = self._native.stream_read_bytes_per_s(threads, PROBE_BYTES, PROBE_S)
        return read, self._native.fma_flops(threads, PROBE_S / 2)

    def prefill(self) -> _Timed:
        """To the last first token."""
        for sequence in self._sequences:
            self._engine.truncate(sequence, 0)
        steps, ops = self._run(0, 1)
        return sum(steps), ops

    def decode(self) -> _Timed:
        """A token of every sequence, after a prefill: two groups have theirs in own steps."""
        before = self._engine.stats["experts"]
        steps, ops = self._run(self._load.prompt, self._load.output)
        after = self._engine.stats["experts"]
        for name in self._experts:
            self._experts[name] += after[name] - before[name]
        self.counted_experts = self._experts["distinct"] / max(1, self._experts["runs"])
        output = self._load.output
        return sum(steps) / output, {op: s / output for op, s in ops.items()}

    def _run(self, cached: int, output: int) -> tuple[list[float], dict[str, float]]:
        tail = [1] if cached else []
        requests = [
            self._native.Request(
                prompt=[*prompt, *tail], sequence=sequence, cached=cached, max_tokens=output
            )
            for prompt, sequence in zip(self._prompts, self._sequences, strict=True)
        ]
        generation = self._native.Generation(self._engine, requests)
        steps = []
        self._engine.count_op_times(True)
        while not generation.done:
            begin = time.perf_counter()
            generation.advance(0.0)
            steps.append(time.perf_counter() - begin)
        self._engine.count_op_times(False)
        ops = {time["op"]: time["seconds"] for time in self._engine.stats["cpu_ops"]}
        return steps, ops


class _Work:
    """What the CPU's units must read and compute in a phase.

    queries: the new tokens of all sequences. outputs: rows of logits. output_passes: steps in
    which any are asked for, as only those read what lies behind the last attention. cached:
    whether the keys and values come from memory, as in decode, or mostly from caches.
    """

    def __init__(
        self, plan: Plan, queries: Queries, outputs: int, output_passes: int, cached: bool
    ) -> None:
        self._plan, self._queries, self._cached = plan, queries, cached
        self._outputs, self._output_passes = outputs, output_passes

    @classmethod
    def of_prefill(cls, plan: Plan, load: Load) -> _Work:
        queries = prefill_queries(load.prompt, load.batch, plan.limits.step_tokens)
        ending = queries.step[queries.past + queries.tokens == load.prompt]
        return cls(plan, queries, load.batch, len(np.unique(ending)), cached=False)

    @classmethod
    def of_decode(cls, plan: Plan, load: Load) -> _Work:
        past = np.full(load.batch, round(load.decode_context) - 1)
        one = np.ones(load.batch, np.int64)
        return cls(plan, Queries(past, one, 0 * one), load.batch, 1, cached=True)

    def by_op(self) -> dict[str, tuple[float, float]]:
        """(bytes, FLOPs) by kind of op."""
        held = {tensor.name: (tensor.shape, own) for tensor, own in self._plan.held("cpu")}
        per_output = {value.name for value in self._plan.values if value.rows == "outputs"}
        read = flops = 0.0
        for linear in self._ops(Linear):
            rows, passes = int(self._queries.tokens.sum()), self._queries.steps
            if linear.out in per_output:
                rows, passes = self._outputs, self._output_passes
            for part in linear.parts:
                shape, own = held[part.weight]
                read += passes * FORMATS[own.format].read_bytes(*shape)
                flops += 2.0 * math.prod(shape) * rows
        attended = sum(
            4.0 * op.heads * op.head_dim * self._pairs(op) for op in self._ops(Attention)
        )
        kv = self.kv_bytes("cpu") if self._cached else 0.0
        mixtures = [self._experts_work(op, per_output, held) for op in self._ops(Experts)]
        return {
            "linear": (read, flops),
            "attention": (kv, attended),
            "experts": (sum(b for b, _ in mixtures), sum(f for _, f in mixtures)),
        }

    def _experts_work(self, op: Experts, per_output: set[str], held: Any) -> tuple[float, float]:
        rows, passes = int(self._queries.tokens.sum()), self._queries.steps
        if op.out in per_output:
            rows, passes = self._outputs, self._output_passes
        distinct = passes * op.expected(round(rows / passes))
        read = flops = 0.0
        for name in op.matrices():
            shape, own = held[name]
            read += FORMATS[own.format].read_bytes(*shape) * distinct / op.experts
            flops += 2.0 * math.prod(shape) / op.experts * op.chosen * rows
        return read, flops

    def experts(self, counted: float) -> tuple[float, float] | None:
        """(expected, counted) for a report; None where there is no mixture."""
        expected = [op.expected(self._outputs) for op in self._ops(Experts, None)]
        return (statistics.mean(expected), counted) if expected else None

    def more_experts_bytes(self) -> float:
        """Of the expected experts, beyond those of one token."""
        held = {
            tensor.name: FORMATS[own.format].read_bytes(*tensor.shape)
            for device in self._plan.devices
            for tensor, own in self._plan.held(device.name)
            if len(tensor.shape) == 2
        }
        more: float = sum(
            sum(held[name] for name in op.matrices())
            * (op.expected(self._outputs) - op.chosen)
            / op.experts
            for op in self._ops(Experts, None)
        )
        return more

    def kv_bytes(self, device: str | None = None) -> float:
        """Keys and values that the queries see, of layers on `device` or on all."""
        spec = self._plan.kv
        position = spec.page_bytes // spec.page_tokens
        return sum(position * self._pairs(op) for op in self._ops(Attention, device))

    def _pairs(self, op: Attention) -> float:
        return float(causal_pairs(op, self._queries).sum())

    def _ops(self, kind: type, device: str | None = "cpu") -> Iterator[Any]:
        for unit in self._plan.units:
            if device in (None, unit.device):
                yield from (op for op in unit.ops if isinstance(op, kind))


def _phase(
    runs: Sequence[tuple[float, dict[str, float]]],
    tokens: int,
    work: dict[str, tuple[float, float]],
) -> Phase:
    """Of (seconds, seconds by kind of op) of every round."""
    kinds = dict.fromkeys(kind for _, ops in runs for kind in ops)
    seconds = {kind: statistics.median(ops.get(kind, 0.0) for _, ops in runs) for kind in kinds}
    seconds["rest"] = statistics.median(whole - sum(ops.values()) for whole, ops in runs)
    shares = [OpShare(kind, s, *work.get(kind, (0.0, 0.0))) for kind, s in seconds.items()]
    shares.sort(key=lambda share: (share.op == "rest", -share.seconds))
    return Phase(tuple(whole for whole, _ in runs), tokens, tuple(shares))
