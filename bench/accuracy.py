"""Compares what the cost model predicts with what the engine does, on this machine's CPU.

Every prediction is made before its run, from a profile whose shapes are none of those tested. Two
errors are given, both predicted over measured time less one:

error: the prediction as the profile makes it, over the median of the rounds.
corrected error: a shared machine drifts by tens of percent within seconds, so right before and
after each round the product that dominates it is timed as the profile times it, on memory of its
own. `drift` is its rate then over its rate in the profile. The terms that it stands for (decode:
products and attention; prefill: products bound by arithmetic) are priced at that rate, the others
as before, and the result is set against the time of that same round; the median over the rounds.

Runs in which another program took a core of ours are left out where enough others remain in the
round; cases with fewer are marked *.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from helm.calibrate import Quantity, measure_profile, probe_bytes
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

# hidden, inner, layers, heads, kv_heads, head_dim, vocabulary: no shape of the profile's. All
# matrices together exceed 8 times a last-level cache of 32 MiB in 16 bit, as people's models do.
SHAPES = {
    "llama-147m": ("llama", 1024, 2816, 10, 16, 4, 64, 32768),
    "qwen3-187m": ("qwen3", 1280, 3584, 7, 10, 2, 128, 49152),
    "qwen3-250m": ("qwen3", 1792, 4864, 6, 16, 2, 128, 24576),
    "llama-270m": ("llama", 2048, 5632, 5, 32, 16, 64, 16384),
    "qwen2-331m": ("qwen2", 2304, 6144, 4, 18, 18, 128, 32768),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPES = ("f32", "f16", "bf16")
LOADS = ((1, 128), (1, 2048), (2, 640), (4, 128), (8, 128))  # sequences, context
OUTPUT = 16  # decode steps per round
STEP_TOKENS = 512
PROBE_S = 0.03
ENOUGH = 3  # undisturbed runs


@dataclass(frozen=True)
class Case:
    shape: str
    dtype: str
    batch: int
    context: int


@dataclass(frozen=True)
class Round:
    """seconds: of a decode step, or to the last first token. drift: of the product that dominates
    it."""

    seconds: float
    drift: float
    undisturbed: int


@dataclass
class Result:
    """One phase of one case. predicted_s and measured_s as in Round; scaled_s: the part of the
    prediction that drift corrects."""

    case: Case
    phase: str
    predicted_s: float
    scaled_s: float
    rounds: list[Round]

    @property
    def measured_s(self) -> float:
        return statistics.median(r.seconds for r in self.rounds)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def drift(self) -> float:
        return statistics.median(r.drift for r in self.rounds)

    @property
    def corrected_error(self) -> float:
        def expected_s(drift: float) -> float:
            return self.predicted_s + self.scaled_s * (1 / drift - 1)

        return statistics.median(expected_s(r.drift) / r.seconds for r in self.rounds) - 1

    @property
    def disturbed(self) -> bool:
        """Whether the quickest runs stand for undisturbed ones in most rounds."""
        return statistics.median(r.undisturbed for r in self.rounds) < self.enough

    @property
    def enough(self) -> int:
        return ENOUGH if self.phase == "decode" else 1


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


def cases(args: argparse.Namespace) -> list[Case]:
    """Every third of the product, so that each value meets each other, or all of it."""
    found = []
    for i, shape in enumerate(args.shapes):
        for j, dtype in enumerate(args.dtypes):
            for k, (batch, context) in enumerate(LOADS):
                if args.all or (i + j + k) % 3 == 0:
                    found.append(Case(shape, dtype, batch, context))
    return found


class Model:
    """An engine over random weights, its threads each on a core of its own."""

    def __init__(self, case: Case, cpus: list[int]) -> None:
        config = config_of(case.shape)
        self.graph: Graph = build_graph(config, None)
        stored = "f16" if case.dtype == "f32" else "f32"  # converted, so placed in the arena
        tile = 0.03 * np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
        numbers = np.resize(
            tile.astype(np.float16 if stored == "f16" else np.float32),
            max(math.prod(shape) for shape in self.graph.tensors.values()),
        )
        tensors = {
            name: numbers[: math.prod(shape)].reshape(shape)
            for name, shape in self.graph.tensors.items()
        }
        infos = {n: TensorInfo.in_memory(n, stored, t.shape) for n, t in tensors.items()}
        self.plan = make_plan(
            config, infos, context=case.context + OUTPUT, max_sequences=case.batch,
            dtype=case.dtype, kv_dtype=case.dtype, threads=len(cpus), step_tokens=STEP_TOKENS,
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
    limits = ResourceLimits(sequences=case.batch, step_tokens=STEP_TOKENS)
    space = Space(threads=(profile.cpu.threads,))
    best = search(model.costed, profile, work, limits, space).best
    assert best is not None
    return best.predicted


def typical(runs: list[tuple[float, float]], enough: int) -> tuple[float, int]:
    """(seconds of an undisturbed run, how many there were) of (seconds, waited seconds)."""
    undisturbed = [seconds for seconds, waited in runs if waited < 0.01 * seconds]
    if len(undisturbed) >= enough:
        return statistics.median(undisturbed), len(undisturbed)
    return float(np.quantile([seconds for seconds, _ in runs], 0.05)), len(undisturbed)


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


class Bench:
    """Runs the phases of one case, round by round, with the probe before and after each."""

    def __init__(self, model: Model, case: Case, profile: Profile, probe: Any) -> None:
        self.model, self.case, self.profile, self.probe = model, case, profile, probe
        vocab = model.plan.model.vocab_size
        self.rows = {
            model.engine.open(case.context + OUTPUT): [
                (i * 7919 + 13 + 101 * b) % vocab for i in range(case.context)
            ]
            for b in range(case.batch)
        }
        self._fill(min(case.context, STEP_TOKENS))  # touches the buffers
        self.phases = {
            "prefill": (self._prefill, min(STEP_TOKENS, case.batch * case.context), 1),
            "decode": (self._decode, case.batch, ENOUGH),
        }

    def rounds(self, phase: str, most: int, seconds: float) -> list[Round]:
        """At least one round, at most `most`, none begun after `seconds`."""
        run, tokens, enough = self.phases[phase]
        found: list[Round] = []
        end = time.perf_counter() + seconds
        while len(found) < most and (not found or time.perf_counter() < end):
            before = self._slowness(tokens)
            runs = run()
            drift = 2 / (before + self._slowness(tokens))
            found.append(Round(typical(runs, enough)[0], drift, typical(runs, enough)[1]))
        return found

    def _slowness(self, tokens: int) -> float:
        """Time of the product now over its time in the profile."""
        cpu, dtype = self.profile.cpu, self.case.dtype
        quantity = Quantity("", lambda s: self.probe.matmul(cpu.threads, dtype, tokens, s))
        quantity.visit(PROBE_S)
        return float(cpu.matmul_rate(dtype, tokens)) / quantity.flops_per_s

    def _fill(self, tokens: int) -> tuple[float, float]:
        """Prefills the first `tokens` of every prompt into empty sequences."""
        for sequence in self.rows:
            self.model.engine.truncate(sequence, 0)
        requests = [
            _helm.Request(prompt=p[:tokens], sequence=q, max_tokens=1) for q, p in self.rows.items()
        ]
        seconds, waited = map(sum, zip(*timed_steps(self.model, requests), strict=True))
        return seconds, waited

    def _prefill(self) -> list[tuple[float, float]]:
        return [self._fill(self.case.context)]

    def _decode(self) -> list[tuple[float, float]]:
        """After a prefill."""
        requests = [
            _helm.Request(prompt=[*p, 1], sequence=q, cached=self.case.context, max_tokens=OUTPUT)
            for q, p in self.rows.items()
        ]
        steps = timed_steps(self.model, requests)
        for sequence in self.rows:
            self.model.engine.truncate(sequence, self.case.context)
        return steps


def run_case(
    case: Case, profile: Profile, probe: Any, cpus: list[int], args: argparse.Namespace
) -> Iterator[Result]:
    model = Model(case, cpus)
    guess = predict(model, case, profile)
    terms, scaled = guess.decode_terms, ("cpu_memory_s", "cpu_compute_s", "cpu_attention_s")
    decode_s = sum(terms[name] for name in scaled)
    bench = Bench(model, case, profile, probe)
    for phase, predicted_s, scaled_s in (
        ("prefill", guess.ttft_s, guess.prefill_terms["cpu_compute_s"]),
        ("decode", guess.decode_s, decode_s),
    ):
        rounds = bench.rounds(phase, args.rounds, args.seconds)
        yield Result(case, phase, predicted_s, scaled_s, rounds)


def summary(results: list[Result]) -> dict[str, dict[str, float]]:
    """Median and worst absolute errors."""
    groups = {
        "all": results,
        "decode": [r for r in results if r.phase == "decode"],
        "prefill": [r for r in results if r.phase == "prefill"],
        "undisturbed": [r for r in results if not r.disturbed],
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
    columns = ("batch", "context", "rounds", "measured", "predicted", "error", "drift", "corrected")
    for name in columns:
        table.add_column(name, justify="right")
    for r in results:
        mark = "*" if r.disturbed else ""
        table.add_row(
            r.case.shape, r.case.dtype, r.phase, str(r.case.batch), str(r.case.context),
            str(len(r.rounds)),
            f"{r.measured_s * 1e3:.2f} ms{mark}", f"{r.predicted_s * 1e3:.2f} ms",
            f"{r.error:+.1%}", f"{r.drift:.2f}", f"{r.corrected_error:+.1%}",
        )  # fmt: skip
    console.print(table)
    console.print("* too few undisturbed runs: the quickest instead")
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
    parser.add_argument("--all", action="store_true", help="every combination, not a third")
    parser.add_argument("--rounds", type=int, default=5, help="at most, of a phase of a case")
    parser.add_argument("--seconds", type=float, default=3.0, help="after which no round begins")
    parser.add_argument("--profile", help="a profile file (default: measured now)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    profile = load_profile(args.profile) if args.profile else measure_profile()
    if profile.unsettled:
        print("unsettled in the profile:", ", ".join(profile.unsettled), file=sys.stderr)
    affinity = cpu_affinity()
    cpus = one_cpu_per_core(affinity)[: profile.cpu.threads]
    probe = _helm.StageProbe(probe_bytes(affinity), cpus)
    results: list[Result] = []
    for case in cases(args):
        for result in run_case(case, profile, probe, cpus, args):
            results.append(result)
            line = f"{case} {result.phase} {result.error:+.1%} {result.corrected_error:+.1%}"
            print(line, file=sys.stderr)
    if args.json:
        report = {
            "profile": profile.to_dict(),
            "results": [as_row(result) for result in results],
            "summary": summary(results),
        }
        print(json.dumps(report, indent=1))
    else:
        show(results)


def as_row(result: Result) -> dict[str, Any]:
    names = ("measured_s", "error", "drift", "corrected_error", "disturbed")
    return {**dataclasses.asdict(result), **{name: getattr(result, name) for name in names}}


if __name__ == "__main__":
    main()
