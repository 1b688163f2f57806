"""Compares what the cost model predicts with what the engine does, on this machine's CPU.

Every prediction is made before its run, from a profile whose shapes are none of those tested. A
shared machine drifts by tens of percent within minutes, so the product that dominates a case is
measured again just before it: `drift` is its rate now over its rate in the profile, and the
prediction is given as the profile makes it and with that one product corrected. Runs in which
another program took a core of ours are left out where enough others remain, and marked * if not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helm import _helm
from helm.calibrate import Quantity, measure_profile
from helm.checkpoint import TensorInfo
from helm.compiler.op_cost import CostedGraph
from helm.compiler.search import search
from helm.compiler.workload import ResourceLimits, Space, Workload
from helm.config import ModelConfig
from helm.graph import Graph
from helm.machine import cpu_affinity, memory_available, one_cpu_per_core
from helm.models import build_graph
from helm.plan import make_plan
from helm.profile import Profile, load_profile

# hidden, inner, layers, heads, kv_heads, head_dim, vocabulary: none is a shape of the profile's.
SHAPES = {
    "llama-25m": ("llama", 512, 1536, 6, 8, 4, 64, 8192),
    "qwen3-55m": ("qwen3", 768, 2048, 8, 6, 2, 128, 16384),
    "llama-80m": ("llama", 1024, 2816, 6, 16, 4, 64, 16384),
    "qwen3-100m": ("qwen3", 1280, 3584, 4, 10, 2, 128, 24576),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = ("f32", "f16", "bf16")
BATCHES = (1, 4, 8)
CONTEXTS = (128, 2048)
OUTPUT = 16  # decode steps per round
MOST_FLOPS = 4e11  # of filling the context; larger combinations are left out
ROUND_S = 1.5  # rounds of one case are repeated for about this long
PREFILL_TOKENS = 64  # of the product that stands for prefill when drift is measured
ENOUGH = 3  # undisturbed runs


@dataclass(frozen=True)
class Case:
    shape: str
    dtype: str
    batch: int
    context: int


@dataclass
class Result:
    """One phase of one case. Seconds: a decode step, or the time to the last first token."""

    case: Case
    phase: str
    predicted_s: float
    corrected_s: float
    measured_s: float
    drift: float
    undisturbed: int

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def corrected_error(self) -> float:
        return self.corrected_s / self.measured_s - 1


def config_of(shape: str) -> ModelConfig:
    family, hidden, inner, layers, heads, kv_heads, dim, vocab = SHAPES[shape]
    raw = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    return ModelConfig.from_dict(raw, shape)


def fits(case: Case) -> bool:
    shapes = build_graph(config_of(case.shape), None).tensors.values()
    parameters = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    return 2.0 * parameters * case.batch * case.context <= MOST_FLOPS


def cases(args: argparse.Namespace) -> list[Case]:
    every = itertools.product(args.shapes, args.dtypes, args.batches, args.contexts)
    return [case for case in itertools.starmap(Case, every) if fits(case)]


class Model:
    """An engine over random weights, its threads each on a core of its own."""

    def __init__(self, case: Case, cpus: list[int]) -> None:
        config = config_of(case.shape)
        self.graph: Graph = build_graph(config, None)
        stored = "f16" if case.dtype == "f32" else "f32"  # converted, so placed in the arena
        numbers = np.random.default_rng(0).standard_normal(
            max(math.prod(shape) for shape in self.graph.tensors.values()), dtype=np.float32
        )
        numbers = (numbers * 0.03).astype(np.float16 if stored == "f16" else np.float32)
        tensors = {
            name: numbers[: math.prod(shape)].reshape(shape)
            for name, shape in self.graph.tensors.items()
        }
        infos = {n: TensorInfo.in_memory(n, stored, t.shape) for n, t in tensors.items()}
        self.plan = make_plan(
            config, infos, context=case.context + OUTPUT, max_sequences=case.batch,
            dtype=case.dtype, kv_dtype=case.dtype, threads=len(cpus),
            memory_bytes=memory_available(),
        )  # fmt: skip
        os.sched_setaffinity(0, cpus)  # new threads inherit it
        before = _thread_ids()
        self.engine = _helm.Engine(self.plan.to_json(), "", tensors)
        self.threads = [os.getpid(), *sorted(_thread_ids() - before)]
        for thread, cpu in zip(self.threads, cpus, strict=True):
            os.sched_setaffinity(thread, {cpu})
        self.costed = CostedGraph(
            self.graph, {t.name: t.dtype for t in self.plan.tensors}, self.plan.kv.dtype
        )

    def waited_s(self) -> float:
        """Time that our threads were ready to run and did not; 0 where the kernel does not tell."""
        return sum(_waited_ns(thread) for thread in self.threads) * 1e-9


def _thread_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def _waited_ns(thread: int) -> int:
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def predict(model: Model, case: Case, profile: Profile) -> Any:
    work = Workload(prompt=case.context, output=OUTPUT, batch=case.batch)
    limits = ResourceLimits(sequences=case.batch)
    space = Space(threads=(profile.cpu.threads,))
    best = search(model.costed, profile, work, limits, space).best
    assert best is not None
    return best.predicted


@dataclass
class Runs:
    """Times of repeated runs of one phase; the undisturbed ones apart."""

    every: list[float] = dataclasses.field(default_factory=list)
    undisturbed: list[float] = dataclasses.field(default_factory=list)

    def add(self, seconds: float, waited_s: float) -> None:
        self.every.append(seconds)
        if waited_s < 0.01 * seconds:
            self.undisturbed.append(seconds)

    @property
    def seconds(self) -> float:
        if len(self.undisturbed) >= ENOUGH:
            return statistics.median(self.undisturbed)
        return float(np.quantile(self.every, 0.05))


def timed_steps(model: Model, requests: list[Any]) -> list[tuple[float, float]]:
    """(seconds, waited seconds) of each step until all requests are done."""
    generation = _helm.Generation(model.engine, requests)
    steps = []
    while not generation.done:
        waited, begin = model.waited_s(), time.perf_counter()
        generation.advance(0.0)
        seconds = time.perf_counter() - begin
        steps.append((seconds, model.waited_s() - waited))
    return steps


def measure(model: Model, case: Case) -> tuple[Runs, Runs]:
    """(decode steps, times to the last first token)."""
    decode, prefill = Runs(), Runs()
    vocab, context = model.plan.model.vocab_size, case.context
    rows = {
        model.engine.open(context + OUTPUT): [
            (i * 7919 + 13 + 101 * b) % vocab for i in range(context)
        ]
        for b in range(case.batch)
    }
    end = time.perf_counter() + ROUND_S
    rounds = 0
    while rounds < 2 or time.perf_counter() < end:
        requests = [_helm.Request(prompt=p, sequence=q, max_tokens=1) for q, p in rows.items()]
        prefill.add(*map(sum, zip(*timed_steps(model, requests), strict=True)))
        for _ in range(2):
            requests = [
                _helm.Request(prompt=[*p, 1], sequence=q, cached=context, max_tokens=OUTPUT)
                for q, p in rows.items()
            ]
            for seconds, waited in timed_steps(model, requests):
                decode.add(seconds, waited)
            for sequence in rows:
                model.engine.truncate(sequence, context)
        for sequence in rows:
            model.engine.truncate(sequence, 0)
        rounds += 1
    return decode, prefill


def rate_now(probe: Any, dtype: str, tokens: int, threads: int) -> float:
    """FLOP/s of products now, measured as the profile measures them."""
    quantity = Quantity("", lambda s: probe.matmul(threads, dtype, tokens, s))
    end = time.perf_counter() + 0.3
    while not quantity.settled and time.perf_counter() < end:
        quantity.visit(0.01)
    return quantity.flops_per_s


def corrected(seconds: float, terms: Any, drift: float) -> float:
    """The prediction with the time of products divided by their drift."""
    products = terms["cpu_memory_s"] + terms["cpu_compute_s"]
    return seconds + products * (1 / drift - 1)


def run_case(case: Case, profile: Profile, probe: Any, cpus: list[int]) -> Iterator[Result]:
    cpu = profile.cpu
    model = Model(case, cpus)
    guess = predict(model, case, profile)
    expected = {"decode": guess.decode_s, "prefill": guess.ttft_s}
    terms = {"decode": guess.decode_terms, "prefill": guess.prefill_terms}
    drift = {}
    for phase, tokens in (("decode", case.batch), ("prefill", PREFILL_TOKENS)):
        now = rate_now(probe, case.dtype, tokens, cpu.threads)
        drift[phase] = now / float(cpu.matmul_rate(case.dtype, tokens))
    for phase, runs in zip(("decode", "prefill"), measure(model, case), strict=True):
        fixed = corrected(expected[phase], terms[phase], drift[phase])
        yield Result(
            case, phase, expected[phase], fixed, runs.seconds, drift[phase], len(runs.undisturbed)
        )


def summary(results: list[Result]) -> dict[str, dict[str, float]]:
    """Median and worst absolute errors."""
    groups = {
        "all": results,
        "decode": [r for r in results if r.phase == "decode"],
        "prefill": [r for r in results if r.phase == "prefill"],
        "undisturbed": [r for r in results if r.undisturbed >= ENOUGH],
    }
    return {
        name: {
            "cases": len(group),
            "median": statistics.median(abs(r.error) for r in group),
            "worst": max(abs(r.error) for r in group),
            "corrected_median": statistics.median(abs(r.corrected_error) for r in group),
            "corrected_worst": max(abs(r.corrected_error) for r in group),
        }
        for name, group in groups.items()
        if group
    }


def show(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(box=None, pad_edge=False)
    for name in ("shape", "dtype", "phase"):
        table.add_column(name)
    columns = ("batch", "context", "measured", "predicted", "error", "drift", "corrected", "error")
    for name in columns:
        table.add_column(name, justify="right")
    for r in results:
        mark = "" if r.undisturbed >= ENOUGH else "*"
        table.add_row(
            r.case.shape, r.case.dtype, r.phase, str(r.case.batch), str(r.case.context),
            f"{r.measured_s * 1e3:.2f} ms{mark}", f"{r.predicted_s * 1e3:.2f} ms",
            f"{r.error:+.1%}", f"{r.drift:.2f}", f"{r.corrected_s * 1e3:.2f} ms",
            f"{r.corrected_error:+.1%}",
        )  # fmt: skip
    console.print(table)
    console.print("* fewer than three runs were undisturbed: the quickest runs instead")
    for name, errors in summary(results).items():
        console.print(
            f"{name:<12} {errors['cases']:>3.0f} cases: median {errors['median']:.1%}, worst "
            f"{errors['worst']:.1%}; corrected for drift: median "
            f"{errors['corrected_median']:.1%}, worst {errors['corrected_worst']:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--profile", help="a profile file (default: measured now)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    profile = load_profile(args.profile) if args.profile else measure_profile()
    cpus = one_cpu_per_core(cpu_affinity())[: profile.cpu.threads]
    probe = _helm.StageProbe(1 << 27, cpus)
    results: list[Result] = []
    for case in cases(args):
        for result in run_case(case, profile, probe, cpus):
            results.append(result)
            line = f"{case} {result.phase} {result.error:+.1%} {result.corrected_error:+.1%}"
            print(line, file=sys.stderr)
    if args.json:
        rows = [
            {**dataclasses.asdict(r), "error": r.error, "corrected_error": r.corrected_error}
            for r in results
        ]
        report = {"profile": profile.to_dict(), "results": rows, "summary": summary(results)}
        print(json.dumps(report, indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
