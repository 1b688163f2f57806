"""Measures plans over the CPU and an accelerator beside their prediction, the machine and a peer.

For each shape and each limit of accelerator memory: plans with the machine's measured profile and
says what it predicts, loads random weights, verifies, and only then times decode and prefill in
turn, round by round, with a probe of the host's memory around each round. Hugging Face Accelerate
gets the same memory afterwards, in a process of its own.

    python bench/partitioned.py --device cuda --shapes qwen3-8b --vram 8GiB --json out.json
    python bench/partitioned.py --device sim:link=8GB/s,latency=20us,threads=1 --shapes qwen3-0.6b \
        --layers 4 --vram 2GiB --cpu-blocks 2

On a simulated accelerator the same cores compute both sides and the search may well keep all on
the CPU; --cpu-blocks sets the cut. Its figures say whether things work, not how fast a GPU is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from helm import _helm
from helm.base.sizes import parse_size, size_text
from helm.compiler.counts import CostedGraph
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.solve import solve
from helm.errors import HelmError, OutOfMemoryError
from helm.machine.devices import Accelerator, open_accelerator
from helm.machine.profile import Profile, load_profile
from helm.machine.resources import cpu_affinity, default_threads, memory_available
from helm.measure.accelerator import measure_accelerator
from helm.measure.cpu import measure_profile
from helm.measure.profile_cache import machine_profile
from helm.model.config import ModelConfig
from helm.model.families import build_graph, parse_config
from helm.plan.records import OBJECTIVES, Predicted, Workload
from helm.plan.schema import Plan
from helm.session.here import with_thread_counts
from partition import Layout, costed, place, price, price_plan, weights_read
from partitioned_report import Result, Round, announcement, figures, roofline_s, show
from peers.engines_here import machine, settings_of
from peers.partitioned_peer import SKIPPED, add_peer, peer_ratio, run_peer, write
from random_weights import random_weights
from synthetic import SHAPES, TORCH_DTYPE

PROMPT, GREEDY = 64, 16  # tokens given and wanted when verifying
VERIFY_LAYERS = 2
# Of the logits' standard deviation. Devices sum in other orders, and cuBLAS rounds activations to
# the dtype of the weights; a wrong row or layer differs by a deviation and more.
TOLERANCE = 0.05
PROBE_BYTES, PROBE_S = 1 << 30, 0.2


class Loaded:
    """A model of random weights on its plan, before and after it is loaded."""

    def __init__(self, config: ModelConfig, profile: Profile, cap: int | None, args: Any) -> None:
        self.config, self.profile, self.args = config, profile, args
        self.graph = build_graph(config)
        self.infos, self.tensors = random_weights(self.graph.tensors, args.dtype)
        decoded = args.context + 1 + args.tokens
        context = max(max(args.prefill) + 1, decoded, PROMPT + GREEDY)
        workload = Workload(args.context, args.tokens, context=context, objective=args.objective)
        self.plan: Plan = solve(Problem(
            config, self.infos, max_sequences=1, dtype=args.dtype, kv_dtype=args.dtype,
            memory_bytes=memory_available(), profile=profile, workload=workload,
            accelerator_bytes=cap,
        )).plan  # fmt: skip
        self.model: CostedGraph = costed(self.plan, self.graph)
        if args.cpu_blocks is not None:
            self.cut(min(args.cpu_blocks, config.num_hidden_layers), workload, cap)

    def cut(self, cpu_blocks: int, workload: Workload, cap: int | None) -> None:
        """Places anew: the embedding and the first blocks on the CPU, the rest not. Raises
        OutOfMemoryError."""
        limits = ResourceLimits(
            step_tokens=self.plan.limits.step_tokens, page_tokens=self.plan.kv.page_tokens
        )
        layout = Layout("cpu", cpu_blocks, "accelerator")
        found = price(self.model, self.profile, workload, layout, limits, Space(kv="device"))
        taken = found.total_bytes("accelerator")
        if cap is not None and taken > cap:
            raise OutOfMemoryError(
                f"[plan] --cpu-blocks {cpu_blocks} needs {size_text(taken)} on the accelerator, "
                f"{size_text(cap)} are allowed; raise either"
            )
        self.plan = place(self.plan, self.model, found)

    def predict(self, prompt: int, output: int) -> Predicted:
        workload = Workload(prompt, output, context=self.plan.limits.context)
        return price_plan(self.plan, self.model, self.profile, workload).predicted

    def load(self) -> Any:
        bound = {t.name: self.tensors[t.name] for t in self.plan.tensors}
        return _helm.Engine(self.plan.to_json(), "", bound, device=self.args.device)


def prompt_of(tokens: int, vocabulary: int) -> list[int]:
    return [(i * 7919 + 13) % vocabulary for i in range(tokens)]


def generate(engine: Any, request: Any) -> tuple[list[int], list[float]]:
    """The tokens, and the seconds of each step."""
    generation = _helm.Generation(engine, [request])
    tokens, steps = [], []
    while not generation.done:
        begin = time.perf_counter()
        new = generation.advance(0.0)
        steps.append(time.perf_counter() - begin)
        tokens += [token.id for token in new]
    return tokens, steps


class Bench:
    """Verifies and times one engine."""

    def __init__(self, engine: Any, loaded: Loaded) -> None:
        self.engine, self.plan, self.args = engine, loaded.plan, loaded.args
        longest = max(*self.args.prefill, self.args.context, PROMPT)
        self.prompt = prompt_of(longest, self.plan.model.vocab_size)
        self.sequence = engine.open(self.plan.limits.context)

    def verify(self) -> None:
        """The same greedy tokens twice, out of finite logits."""
        runs = []
        for _ in range(2):
            self.engine.truncate(self.sequence, 0)
            request = _helm.Request(
                prompt=self.prompt[:PROMPT], sequence=self.sequence, max_tokens=GREEDY
            )
            runs.append(generate(self.engine, request)[0])
        if runs[0] != runs[1] or len(runs[0]) != GREEDY:
            raise SystemExit(f"two runs differ: {runs[0]} and {runs[1]}")
        self.engine.truncate(self.sequence, 0)
        logits = self.engine.forward(self.sequence, np.array(self.prompt[:PROMPT], np.int32))
        if not np.isfinite(logits).all():
            raise SystemExit("logits are not finite")

    def prefill(self, tokens: int) -> float:
        self.engine.truncate(self.sequence, 0)
        request = _helm.Request(prompt=self.prompt[:tokens], sequence=self.sequence, max_tokens=1)
        return sum(generate(self.engine, request)[1])

    def decode(self) -> float:
        """Seconds of a step, over steps after `context` cached tokens."""
        context, tokens = self.args.context, self.args.tokens
        request = _helm.Request(
            prompt=[*self.prompt[:context], 1], sequence=self.sequence, cached=context,
            max_tokens=tokens,
        )  # fmt: skip
        found, steps = generate(self.engine, request)
        assert len(found) == tokens
        return sum(steps) / tokens

    def round(self) -> Round:
        before = self._dram()
        prefill_s = {tokens: self.prefill(tokens) for tokens in self.args.prefill}
        self.prefill(self.args.context)
        decode_s = self.decode()
        return Round(decode_s, prefill_s, (before + self._dram()) / 2)

    def _dram(self) -> float:
        rate = _helm.stream_read_bytes_per_s(self.plan.threads, PROBE_BYTES, PROBE_S)
        return float(rate)

    def rounds(self) -> list[Round]:
        self.round()  # warms up: buffers, graphs, clocks
        found: list[Round] = []
        end = time.perf_counter() + self.args.seconds
        while len(found) < self.args.rounds and (not found or time.perf_counter() < end):
            found.append(self.round())
        return found


def verify_against_cpu(raw: dict, profile: Profile, args: Any) -> dict[str, Any]:
    """A model of the same widths with few layers, cut in the middle, against the CPU alone. On a
    simulated accelerator tokens and logits must be equal."""
    layers = min(VERIFY_LAYERS, raw["num_hidden_layers"])
    config = parse_config({**raw, "num_hidden_layers": layers}, "shape")
    small = {**vars(args), "prefill": [PROMPT], "context": PROMPT, "tokens": 1}
    alone = dataclasses.replace(profile, accelerator=None, link=None)
    found = []
    for use, cpu_blocks in ((profile, layers // 2), (alone, None)):
        how = argparse.Namespace(**{**small, "cpu_blocks": cpu_blocks})
        loaded = Loaded(config, use, None, how)
        engine = loaded.load()
        prompt = np.array(prompt_of(PROMPT, config.vocab_size), np.int32)
        found.append(engine.forward(engine.open(PROMPT), prompt, True))
        del engine, loaded
    own, cpu = found
    deviation = float(np.abs(own - cpu).max() / cpu.std())
    allowed = 0.0 if args.device.startswith("sim") else TOLERANCE
    if not deviation <= allowed:
        raise SystemExit(f"logits differ from the CPU's by {deviation:.3g} deviations")
    return {"layers": layers, "against": "cpu", "deviation": deviation, "allowed": allowed}


def plan_facts(loaded: Loaded) -> dict[str, Any]:
    plan = loaded.plan
    return {
        "units_cpu": plan.units_cpu,
        "units_accelerator": plan.units_accelerator,
        "chosen_by": "search" if loaded.args.cpu_blocks is None else "--cpu-blocks",
        "threads": plan.threads,
        "schedule": dataclasses.asdict(plan.schedule),
        "memory": {device: dataclasses.asdict(use) for device, use in plan.memory.items()},
        "weights_read_bytes": weights_read(plan, loaded.model),
    }


def predictions(loaded: Loaded) -> dict[str, Any]:
    args = loaded.args
    decode = loaded.predict(args.context, args.tokens)
    return {
        "decode_s": decode.decode_s,
        "decode_terms": decode.decode_terms,
        "prefill_s": {tokens: loaded.predict(tokens, 1).ttft_s for tokens in args.prefill},
    }


def run_case(
    result: Result, raw: dict, profile: Profile, args: argparse.Namespace, console: Console
) -> None:
    """Fills in `result` but for the peer, and frees both memories. Raises OutOfMemoryError where
    the case does not fit, HelmError for a fault."""
    cap = result.vram_bytes
    loaded = Loaded(parse_config(raw, result.shape), profile, cap, args)
    result.plan, result.predicted = plan_facts(loaded), predictions(loaded)
    console.print(announcement(result), markup=False, highlight=False)
    result.verified = verify_against_cpu(raw, profile, args)
    begin = time.perf_counter()
    engine = loaded.load()
    loaded.tensors.clear()
    result.load_s = time.perf_counter() - begin
    bench = Bench(engine, loaded)
    bench.verify()
    result.verified["greedy_tokens_repeated"] = GREEDY
    result.rounds = bench.rounds()
    result.roofline_s = roofline_s(result, profile, args.dtype)
    result.figures = figures(result, args)


def shape_of(name: str, layers: int | None) -> tuple[str, dict[str, Any]]:
    """Of shapes.json, or a config.json; `layers` of it at most."""
    raw = dict(SHAPES[name]) if name in SHAPES else json.loads(Path(name).read_text())
    if layers is not None:
        raw["num_hidden_layers"] = min(layers, raw["num_hidden_layers"])
    return (name if name in SHAPES else Path(name).parent.name or name), raw


def profile_of(device: Accelerator, args: Any, threads: int | None = None) -> Profile:
    """A given profile, or this machine's: cached, or measured now. threads: of the CPU, whose
    rates are then measured with so many."""
    if args.profile is not None:
        profile = load_profile(args.profile)
        counts = [threads or default_threads(cpu_affinity())]
        return dataclasses.replace(profile, cpu=with_thread_counts(profile.cpu, counts))
    if threads is None:
        return machine_profile(device)
    profile = measure_profile(threads=threads)
    own, link, unsettled = measure_accelerator(device, profile.cpu)
    return dataclasses.replace(
        profile, accelerator=own, link=link, unsettled=(*profile.unsettled, *unsettled)
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or sim:...")
    parser.add_argument(
        "--shapes", nargs="+", default=["qwen3-8b"], metavar="SHAPE",
        help=f"{', '.join(SHAPES)}, or a config.json",
    )  # fmt: skip
    parser.add_argument("--vram", nargs="+", default=["8GiB"], metavar="SIZE")
    parser.add_argument("--layers", type=int, help="blocks of each shape at most")
    parser.add_argument("--cpu-blocks", type=int, help="set the cut instead of searching it")
    parser.add_argument("--objective", choices=OBJECTIVES, default="total")
    parser.add_argument("--dtype", choices=list(TORCH_DTYPE), default="bf16")
    parser.add_argument("--context", type=int, default=512, help="tokens before decode")
    parser.add_argument("--tokens", type=int, default=32, help="decode steps of a round")
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="after which no round begins")
    parser.add_argument("--profile", help="a preset or file (default: this machine's)")
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--no-peer", action="store_true", help="leave Accelerate out")
    peer.add_argument("--only-peer", action="store_true", help="add it to the results in --json")
    parser.add_argument("--peer-seconds", type=float, default=120.0, help="which it may take")
    parser.add_argument("--json", type=Path, help="written before the peer runs and after it")
    args = parser.parse_args()
    if args.only_peer and args.json is None:
        parser.error("--only-peer needs --json")
    return args


def cases_of(args: Any) -> list[tuple[str, dict[str, Any], int]]:
    """(shape, its config, bytes of accelerator memory) in order. Raises HelmError."""
    caps = [parse_size(text, "--vram") for text in args.vram]
    return [(*shape_of(name, args.layers), cap) for name in args.shapes for cap in caps]


def main() -> None:
    args = arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    cases = cases_of(args)
    if args.only_peer:
        return add_peer(cases, args, console)
    device = open_accelerator(args.device)
    if args.profile is None:
        console.print(f"profile of this machine with {device.name}: cached, or measured now")
    profile = profile_of(device, args)
    if profile.unsettled:
        console.print("unsettled in the profile:", ", ".join(profile.unsettled), style="yellow")
    threads = argparse.Namespace(threads=profile.cpu.threads)
    head = {
        "machine": {**machine(threads), "device": device.name},
        "settings": settings_of(args),
        "profile": profile.to_dict(),
    }
    results: list[Result] = []

    def save() -> None:
        if args.json:
            write(args.json, {**head, "results": [dataclasses.asdict(r) for r in results]})

    for shape, raw, cap in cases:
        result = Result(shape, raw["num_hidden_layers"], cap)
        results.append(result)
        try:
            if cap > device.free_bytes:
                free = size_text(device.free_bytes)
                raise OutOfMemoryError(f"[bench] {device.name} has {free} free")
            run_case(result, raw, profile, args, console)
            save()  # should the peer take too long
            result.peer = run_peer(raw, cap, args)
            decode_s = [r.decode_s for r in result.rounds]
            result.figures["over_peer"] = peer_ratio(result.peer, decode_s)
        except OutOfMemoryError as reason:
            result.skipped = str(reason)
            console.print(f"{shape}, {size_text(cap)}: {reason}", style="yellow", markup=False)
        save()
    show(results, args, console)
    if all(result.skipped for result in results):
        print(f"no case was measured: {results[0].skipped}")
        raise SystemExit(SKIPPED)


if __name__ == "__main__":
    try:
        main()
    except HelmError as reason:
        raise SystemExit(str(reason)) from None
