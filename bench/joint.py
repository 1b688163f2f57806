"""Eight requests at once with room for the KV of two on the accelerator: those that it does not
hold have theirs in host memory, where the CPU attends to them (joint steps), beside the same
requests where nothing of them may leave, so that they wait and are parked.

    python bench/joint.py                                  # 128/128 and 32/128 tokens, five rounds
    python bench/joint.py --work 256/128 1000/128 --json out.json
    python bench/joint.py --held 8                         # all of them fit: nothing may be lost

All blocks lie on a simulated accelerator of one thread, beside one of the CPU. Rounds are
interleaved. The machine is measured around each way. What is predicted is the median of what these
measurements say: shared machines have moments of other speeds. Tokens count from when the first
request ends until fewer are left. Before anything is timed, tokens must be those of the CPU alone
in both ways.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from long_context import Model
from rich.console import Console
from rich.table import Table
from serve import one_each

from compare_report import spread
from helm import _helm
from helm.compiler.problem import ResourceLimits
from helm.compiler.setting import make_setting
from helm.compiler.step_prices import StepPrices, rates_by_mode, step_prices
from helm.machine.devices import CPU, open_accelerator
from helm.machine.profile import Profile
from helm.plan.records import Workload
from helm.plan.schema import Plan
from partition import costed
from partitioned import profile_of
from peers.engines_here import machine, settings_of
from setups import SIM
from synthetic import SHAPES

WAYS = ("joint", "near")
USED = ("joint_steps", "split_steps", "far_rows", "evicted_blocks")  # of joint, of all rounds


def work_of(text: str) -> tuple[int, int]:
    """Tokens of prompt and output, from P/O."""
    prompt, _, output = text.partition("/")
    return int(prompt), int(output)


def plans(
    model: Model,
    profile: Profile,
    prices: StepPrices,
    work: tuple[int, int],
    args: argparse.Namespace,
) -> dict[str, Plan]:
    """By way, with the tables by which steps get their modes. Both have room for the KV of --held
    requests on the accelerator, joint for that of the others in host memory."""
    context, page = sum(work), args.page_tokens
    held = args.held * -(-context // page)
    plan = model.on_cpu(context, page, args.requests, args.step_tokens)
    room = held * len(plan.kv.layers) * plan.kv.page_bytes
    planned, _ = model.on_both(plan, profile, "cpu", room, context - 1)

    def with_blocks(blocks: int) -> Plan:
        kv = dataclasses.replace(planned.kv, blocks=blocks)
        own = held * len(kv.layers)
        pages = {"cpu": kv.pages - own, "accelerator": own}
        how = dataclasses.replace(planned.schedule, watermark=1.0, pages=pages)
        return dataclasses.replace(planned, kv=kv, schedule=how, predictor=prices.record(0))

    return {"joint": with_blocks(planned.kv.blocks), "near": with_blocks(held)}


def prices_of(
    model: Model, profile: Profile, work: tuple[int, int], args: argparse.Namespace
) -> StepPrices:
    """Of steps with all blocks and the head on the accelerator, as the profile has its rates."""
    priced = costed(model.on_cpu(sum(work), args.page_tokens, args.requests), model.graph)
    load = Workload(*work, args.requests, sum(work), "serve")
    limits = ResourceLimits(
        sequences=args.requests, page_tokens=args.page_tokens, step_tokens=args.step_tokens
    )
    setting = make_setting(priced, profile, load, limits, args.threads, args.requests)
    return step_prices(setting, "accelerator")


def predicted(
    prices: StepPrices, work: tuple[int, int], args: argparse.Namespace
) -> dict[str, float]:
    """Tokens per second of each way, while there are always as many requests."""
    near, far = np.array([args.held]), np.array([args.requests - args.held])
    rates = rates_by_mode(prices, near, far, *work)
    found = {way: float(rates[way][0, 0]) for way in WAYS}
    return {**found, "joint": max(found.values())}


@dataclass(frozen=True)
class Generated:
    """Greedy tokens of each request; when each of all tokens came, in seconds, and of which."""

    tokens: list[list[int]]
    came: list[tuple[float, int]]

    def steady_rate(self, at_once: int) -> float:
        """Tokens per second from when the first request ends until fewer than `at_once` are left,
        while as many others begin as end."""
        last = {request: second for second, request in self.came}
        ends = sorted(last.values())
        begin, end = ends[0], ends[len(ends) - at_once]
        if begin == end:  # they all begin at once
            begin, end = 0.0, ends[-1]
        return sum(begin < second <= end for second, _ in self.came) / (end - begin)


def generated(engine: Any, work: tuple[int, int], requests: int) -> Generated:
    prompts = one_each(requests, 10000, work[0])
    wanted = [_helm.Request(prompt=prompt, max_tokens=work[1]) for prompt in prompts]
    begin = time.perf_counter()
    generation = _helm.Generation(engine, wanted)
    found = Generated([[] for _ in prompts], [])
    while not generation.done:
        tokens = generation.advance(1.0)
        second = time.perf_counter() - begin
        for token in tokens:
            found.tokens[token.request].append(token.id)
            found.came.append((second, token.request))
    return found


def verify(
    model: Model, engines: dict[str, Any], work: tuple[int, int], args: argparse.Namespace
) -> None:
    """A few tokens of each request are those of the CPU alone, or SystemExit."""
    few = (work[0], min(work[1], 16))
    plan = model.on_cpu(sum(work), args.page_tokens, args.requests, args.step_tokens)
    want = generated(model.load(plan, CPU), few, args.requests).tokens
    for way, engine in engines.items():
        if generated(engine, few, args.requests).tokens != want:
            raise SystemExit(f"[bench] {way}: other tokens than on the CPU alone")


def measured(model: Model, work: tuple[int, int], args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    used: Counter[str] = Counter()
    profiles = [profile_now(args)]
    for number in range(args.rounds):
        prices = prices_of(model, profiles[-1], work, args)
        planned = plans(model, profiles[-1], prices, work, args)
        engines = {way: model.load(plan, args.device) for way, plan in planned.items()}
        if number == 0:
            verify(model, engines, work, args)
        for way in WAYS if number % 2 else reversed(WAYS):
            run = generated(engines[way], work, args.requests * args.waves)
            profiles.append(profile_now(args))
            rates[way].append(run.steady_rate(args.requests))
            print(f"{work[0]}/{work[1]} {way}: {rates[way][-1]:.1f} tokens/s", file=sys.stderr)
        used.update({name: engines["joint"].stats[name] for name in USED})
        del engines
    each = [predicted(prices_of(model, profile, work, args), work, args) for profile in profiles]
    expected = {way: [found[way] for found in each] for way in WAYS}
    middle = statistics.median(expected["joint"])
    return {
        "prompt": work[0],
        "output": work[1],
        "tokens_per_s": rates,
        "predicted_tokens_per_s": expected,
        "ratios": divided(rates["joint"], rates["near"]),
        "predicted_ratios": divided(expected["joint"], expected["near"]),
        "of_predicted": [rate / middle for rate in rates["joint"]],
        **used,
    }


def divided(some: Sequence[float], by: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(some, by, strict=True)]


def profile_now(args: argparse.Namespace) -> Profile:
    """The one given, or the machine's rates of now."""
    return profile_of(open_accelerator(args.device), args, args.threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=work_of, nargs="+", default=[(128, 128), (32, 128)],
                        metavar="P/O", help="tokens of prompt and output")  # fmt: skip
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument(
        "--waves",
        type=int,
        default=3,
        help="times as many requests come in all, which begin as others end",
    )
    parser.add_argument("--held", type=int, default=2, help="whose KV the accelerator has room for")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="cut the shape to so many blocks")
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), default="bf16")
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--step-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--device", default=SIM)
    parser.add_argument(
        "--profile", help="a profile with this device (default: measured around each way)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write what was measured there")
    args = parser.parse_args()
    args.cpu_blocks = 0  # for Model
    model = Model(args)
    rows = [measured(model, work, args) for work in args.work]
    table = Table("prompt/output", "joint, tokens/s", "near alone", "joint over near", "predicted",
                  "joint of predicted", "far rows")  # fmt: skip
    for row in rows:
        rates = (statistics.median(row["tokens_per_s"][way]) for way in WAYS)
        table.add_row(
            f"{row['prompt']}/{row['output']}", *(f"{rate:.1f}" for rate in rates),
            spread(row["ratios"], percent=False),
            spread(row["predicted_ratios"], percent=False),
            spread(row["of_predicted"], percent=False), str(row["far_rows"]),
        )  # fmt: skip
    Console(width=140).print(table)
    if args.json:
        report = {"machine": machine(args), "settings": settings_of(args), "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
