"""Decode at growing context with room for few KV pages on the accelerator, and what paging costs
while everything fits.

    python bench/long_context.py                     # 1K to 32K, both sites of overflow attention
    python bench/long_context.py --cost              # one page, many pages, overflow on, in turn
    python bench/long_context.py --device cuda --json out.json

All blocks lie on the accelerator (--cpu-blocks moves some), whose KV pages take no more than those
of --budget tokens; the rest is in host memory. In every round every site and context decodes, with
a measurement of the machine around each site. What is predicted is the median of what these say:
shared machines have moments of other speeds. Before that greedy tokens of a short sequence, with
pages that overflow, must be those of the CPU alone. The cache is filled with that of a short prompt
again and again, which takes seconds where a prompt of 32K tokens takes minutes: values do not
matter to speed. `--prefill N` also sends a prompt of N tokens through the overflow.

On a simulated accelerator the same cores and memory serve both sides: figures say what moving and
merging costs, nothing about a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from helm import _helm
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.solve import solve
from helm.machine.devices import CPU, open_accelerator
from helm.machine.profile import Profile
from helm.machine.resources import cpu_affinity, default_threads, memory_available
from helm.model.families import build_graph, parse_config
from helm.plan.records import Workload
from helm.plan.schema import Plan
from long_cache import write_long_cache
from partition import Layout, costed, place, price
from partitioned import profile_of
from peers.engines_here import machine, settings_of
from random_weights import random_weights
from setups import SIM
from synthetic import SHAPES

SITES = ("stream", "cpu")
TOKENS = 8  # decoded per round
STEP_TOKENS = 256
PROBE_BYTES, PROBE_S = 1 << 29, 0.1


@dataclass
class Row:
    """bytes: weights and KV that a decode step must read on all devices. By round: seconds of a
    step, and the host's streaming rate around it. predicted_s: by measurement of the machine.
    device_bytes: the most that the accelerator ever held."""

    name: str
    context: int
    bytes: float
    seconds: list[float] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    read_bytes_per_s: list[float] = field(default_factory=list)
    device_bytes: int = 0
    evicted_blocks: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def errors(self) -> list[float]:
        """Of the predicted seconds' median, by round."""
        predicted = statistics.median(self.predicted_s)
        return [predicted / seconds - 1 for seconds in self.seconds]


class Model:
    """Random weights of a shape, planned as asked."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = SHAPES[args.shape]
        if args.layers is not None:
            shape = {**shape, "num_hidden_layers": args.layers}
        self.config = parse_config(shape, args.shape)
        self.graph = build_graph(self.config)
        self.infos, self.tensors = random_weights(self.graph.tensors, args.dtype)
        self.args = args

    def on_cpu(
        self, context: int, page_tokens: int, sequences: int = 1, step_tokens: int | None = None
    ) -> Plan:
        return solve(Problem(
            self.config, self.infos, context=context, max_sequences=sequences,
            dtype=self.args.dtype, kv_dtype=self.args.kv_dtype, page_tokens=page_tokens,
            step_tokens=step_tokens or STEP_TOKENS, threads=self.args.threads,
            memory_bytes=memory_available(),
        )).plan  # fmt: skip

    def on_both(
        self, plan: Plan, profile: Profile, site: str, kv_bytes: int | None, context: int
    ) -> tuple[Plan, float]:
        """`plan` with the accelerator's blocks there, and the predicted seconds of a decode step
        at `context`. kv_bytes: memory for KV pages there; None: of all."""
        model = costed(plan, self.graph)
        most = plan.limits.context
        work = Workload(context, 1, plan.limits.sequences, most, "decode")
        limits = ResourceLimits(
            accelerator_kv_bytes=kv_bytes,
            step_tokens=plan.limits.step_tokens,
            page_tokens=plan.kv.page_tokens,
            sequences=plan.limits.sequences,
        )
        space = Space(
            kv="device" if kv_bytes is None else "any",
            overflow=(site,),
            prefill=("compute",),
            overlap=(False,),
            decode_groups=(1,),
            threads=(plan.threads,),
        )
        layout = Layout("cpu", self.args.cpu_blocks, "accelerator")
        found = price(model, profile, work, layout, limits, space)
        return place(plan, model, found), found.predicted.decode_s

    def load(self, plan: Plan, device: str) -> Any:
        bound = {t.name: self.tensors[t.name] for t in plan.tensors}
        return _helm.Engine(plan.to_json(), "", bound, device=device)


def prompt_of(tokens: int, vocabulary: int) -> list[int]:
    return [(i * 7919 + 13) % vocabulary for i in range(tokens)]


def decoded(engine: Any, sequence: int, tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens after what the sequence holds, and the seconds of each step."""
    held = engine.length(sequence)
    request = _helm.Request(
        prompt=[1] * (held + 1), sequence=sequence, cached=held, max_tokens=tokens
    )
    generation, found, seconds = _helm.Generation(engine, [request]), [], []
    while not generation.done:
        begin = time.perf_counter()
        found += [token.id for token in generation.advance(0.0)]
        seconds.append(time.perf_counter() - begin)
    return found, seconds


def prompt_array(prompt: Sequence[int]) -> Any:
    import numpy as np

    return np.array(prompt, np.int32)


def verify(model: Model, profile: Profile, site: str, args: argparse.Namespace) -> None:
    """A short sequence that overflows gives the greedy tokens of the CPU alone, or SystemExit."""
    context = 3 * args.budget + 64
    plan = model.on_cpu(context, args.page_tokens)
    planned, _ = model.on_both(plan, profile, site, budget_bytes(plan, args), context - 1)
    found = []
    for engine in (model.load(plan, CPU), model.load(planned, args.device)):
        sequence = engine.open(context)
        engine.forward(sequence, prompt_array(prompt_of(2 * args.budget, planned.model.vocab_size)))
        found.append(decoded(engine, sequence, 32)[0])
        evicted = engine.stats["evicted_blocks"]
        del engine
    if not evicted:
        raise SystemExit("nothing overflowed; lower --budget")
    if found[0] != found[1]:
        raise SystemExit(f"{site}: other tokens than on the CPU alone: {found}")


def budget_bytes(plan: Plan, args: argparse.Namespace) -> int:
    """Of the pages of --budget tokens, of the accelerator's layers."""
    layers = len(plan.kv.layers) - args.cpu_blocks
    return args.budget // args.page_tokens * layers * plan.kv.page_bytes


def measured(args: argparse.Namespace) -> Profile:
    """The profile that is given, or the machine's rates of now, with so many threads of the CPU."""
    return profile_of(open_accelerator(args.device), args, args.threads)


def probe(threads: int) -> float:
    return float(_helm.stream_read_bytes_per_s(threads, PROBE_BYTES, PROBE_S))


def step_bytes(plan: Plan, engine: Any, context: int) -> float:
    return engine.stats["decode_bytes"] + engine.stats["kv_token_bytes"] * context


def extension(model: Model, args: argparse.Namespace) -> list[Row]:
    """Round by round, each site's rows between two measurements of the machine, unless a profile is
    given: what other programs leave of it changes within seconds."""
    rows: dict[tuple[str, int], Row] = {}
    profiles = [measured(args)]
    for done in range(args.rounds):
        for site in args.sites:
            if not done:
                verify(model, profiles[-1], site, args)
            one_site(model, profiles[-1], site, rows, args)
            profiles.append(measured(args))
    plan = model.on_cpu(max(args.contexts) + TOKENS, args.page_tokens)
    budget = budget_bytes(plan, args)
    for row in rows.values():
        row.predicted_s = [
            model.on_both(plan, profile, row.name, budget, row.context)[1] for profile in profiles
        ]
    return list(rows.values())


def one_site(
    model: Model, profile: Profile, site: str, rows: dict[tuple[str, int], Row],
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """One round of its rows, measured."""
    plan = model.on_cpu(max(args.contexts) + TOKENS, args.page_tokens)
    budget = budget_bytes(plan, args)
    planned, _ = model.on_both(plan, profile, site, budget, max(args.contexts))
    engine = model.load(planned, args.device)
    kept = _helm.PrefixCache(engine)
    for context in sorted(args.contexts):
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            path = Path(folder) / "cache.kv"
            write_long_cache(engine, kept, planned, context, path)
            tokens, _ = kept.load(str(path))
        sequence, cached = kept.open([*tokens, 1], context + TOKENS)
        assert cached == context
        decoded(engine, sequence, 2)
        engine.truncate(sequence, context)
        before = probe(planned.threads)
        seconds = statistics.median(decoded(engine, sequence, TOKENS)[1])
        after = probe(planned.threads)
        stats = engine.stats
        row = rows.setdefault(
            (site, context), Row(site, context, step_bytes(planned, engine, context))
        )
        row.seconds.append(seconds)
        row.read_bytes_per_s.append((before + after) / 2)
        row.device_bytes = max(row.device_bytes, stats["devices"][1]["peak_bytes"])
        row.evicted_blocks = stats["evicted_blocks"]
        print(f"{site} {context}: {seconds * 1e3:.1f} ms", file=sys.stderr)
        kept.close(sequence)
    if args.prefill:
        through_overflow(engine, planned, args.prefill)


def through_overflow(engine: Any, plan: Plan, tokens: int) -> None:
    sequence = engine.open(tokens)
    begin = time.perf_counter()
    engine.forward(sequence, prompt_array(prompt_of(tokens, plan.model.vocab_size)))
    seconds = time.perf_counter() - begin
    engine.close(sequence)
    print(f"prompt of {tokens}: {seconds:.1f} s, {tokens / seconds:.1f} tokens/s", file=sys.stderr)


def cost(model: Model, profile: Profile, args: argparse.Namespace) -> list[Row]:
    """One page as long as the context is a contiguous cache. Interleaved, round by round."""
    context = args.cost_context
    longest = context + TOKENS
    engines = {}
    for name, pages, device, slots in (
        ("cpu, contiguous", longest, CPU, None),
        ("cpu, pages", args.page_tokens, CPU, None),
        ("accelerator, contiguous", longest, args.device, None),
        ("accelerator, pages", args.page_tokens, args.device, None),
        ("accelerator, overflow on", args.page_tokens, args.device, 1.8),
    ):
        # Room for two sequences and, with overflow, slots for nearly as many: one alone fits.
        plan = model.on_cpu(longest, pages, 1 if slots is None else 2)
        if device != CPU:
            budget = None
            if slots is not None:
                blocks = int(slots * -(-longest // pages))
                budget = blocks * (len(plan.kv.layers) - args.cpu_blocks) * plan.kv.page_bytes
            plan, _ = model.on_both(plan, profile, "stream", budget, context)
        engine = model.load(plan, device)
        sequence = engine.open(longest)
        prompt = prompt_of(context, plan.model.vocab_size)
        engine.forward(sequence, prompt_array(prompt))
        engines[name] = (engine, sequence, plan)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, (engine, sequence, _plan) in engines.items():
            engine.truncate(sequence, context)
            found[name].append(statistics.median(decoded(engine, sequence, TOKENS)[1]))
    return [
        Row(
            name, context, step_bytes(plan, engine, context), found[name],
            device_bytes=engine.stats["devices"][-1]["peak_bytes"],
            evicted_blocks=engine.stats["evicted_blocks"],
        )
        for name, (engine, _sequence, plan) in engines.items()
    ]  # fmt: skip


def show_extension(rows: list[Row], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("site", "context", "tok/s", "[least, most]", "predicted", "error", "[least, most]",
                 "bytes/step", "GB/s", "of read ceiling", "on device", "evicted"):  # fmt: skip
        table.add_column(name, justify="left" if name == "site" else "right")
    for row in rows:
        rate = row.bytes / row.median_s
        table.add_row(
            row.name, f"{row.context}", f"{1 / row.median_s:.2f}",
            f"[{1 / max(row.seconds):.2f}, {1 / min(row.seconds):.2f}]",
            f"{1 / statistics.median(row.predicted_s):.2f}",
            f"{statistics.median(row.errors):+.0%}",
            f"[{min(row.errors):+.0%}, {max(row.errors):+.0%}]",
            f"{row.bytes / 1e9:.2f} GB", f"{rate / 1e9:.1f}",
            f"{rate / statistics.median(row.read_bytes_per_s):.0%}",
            f"{row.device_bytes / 2**20:.0f} MiB", f"{row.evicted_blocks}",
        )  # fmt: skip
    console.print(table)


def show_cost(rows: list[Row], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("cache", "ms/token", "over contiguous", "evicted blocks"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    base: Row | None = None
    for row in rows:
        if row.name.endswith("contiguous"):
            base = row
        assert base is not None
        ratios = [a / b for a, b in zip(row.seconds, base.seconds, strict=True)]
        table.add_row(
            row.name, f"{row.median_s * 1e3:.2f}",
            f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]",
            f"{row.evicted_blocks}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="cut the shape to so many blocks")
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), default="bf16")
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--budget", type=int, default=1024, help="tokens of KV on the accelerator")
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--cpu-blocks", type=int, default=0)
    parser.add_argument("--sites", nargs="+", choices=SITES, default=list(SITES))
    parser.add_argument("--device", default=SIM)
    parser.add_argument("--threads", type=int, help="of the CPU (default: one per core)")
    parser.add_argument(
        "--profile", help="a profile with this device (default: measured around each site)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, metavar="N", help="also a prompt of N tokens")
    parser.add_argument("--cost", action="store_true", help="what paging costs while all fits")
    parser.add_argument("--cost-context", type=int, default=4096)
    parser.add_argument("--scratch", default=os.environ.get("TMPDIR"), help="folder of KV files")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.threads is None:
        args.threads = default_threads(cpu_affinity())
    model = Model(args)
    rows = cost(model, measured(args), args) if args.cost else extension(model, args)
    (show_cost if args.cost else show_extension)(rows, Console(width=150))
    if args.json:
        report = {
            "machine": machine(args),
            "settings": settings_of(args),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
