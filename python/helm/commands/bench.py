"""`helm-llm bench`: measures a model on this machine, beside what the machine could do."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from helm.base.sizes import counted
from helm.commands import common, options
from helm.commands.parser import Parser
from helm.errors import InvalidError

if TYPE_CHECKING:
    from rich.console import Console

    from helm.measure.benchmark import Phase, Report
    from helm.session.llm import LLM

HELP = "measure prefill and decode, and where the time goes"
EPILOG = """examples:
  helm-llm bench ./my-model
  helm-llm bench ./my-model --ops         time and bandwidth by kind of op
  helm-llm bench ./my-model --prompt-tokens 4096 --batch 4 --json
"""


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    options.add_model(parser)
    options.refuse_counts(parser, prompt=True)
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="repetitions (default: 5)"
    )
    parser.add_argument("--ops", action="store_true", help="time and bandwidth by kind of op")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options.add_model_arguments(parser, rare=str)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from helm.measure.benchmark import MOST_ROUNDS, Load

    if not 1 <= args.rounds <= MOST_ROUNDS:
        raise InvalidError(f"[bench] --rounds is {args.rounds}; expected 1 to {MOST_ROUNDS}")
    with common.load(args) as llm:
        prompt = args.prompt_tokens or min(512, max(1, llm.context // 2))
        output = args.output_tokens or min(64, max(1, llm.context - prompt))
        if not args.quiet and not args.json:
            common.say_plan(llm)
        with _Progress() as progress:
            report = llm.benchmark(Load(prompt, output, args.batch), args.rounds, progress.update)
        if args.json:
            print(json.dumps({**report.to_dict(), **common.placement(llm)}))
        else:
            show(report, common.predicted_rate(llm), args.ops)
            print(_pages(llm))
    return 0


def show(report: Report, predicted: float | None, ops: bool) -> None:
    """The report as tables; predicted: decode tokens/s of one sequence."""
    from helm.commands.console import console as stdout

    console = stdout(pipe_width=100)
    load = report.load
    sequences = counted(load.batch, "sequence")
    rate = report.decode.tokens_per_s
    line = f"decode   {_spread(rate)} tokens/s, {sequences} after {counted(load.prompt, 'token')}"
    if predicted is not None and load.batch == 1:
        line += f"; predicted {predicted:,.1f}"
    console.print(line)
    gb = [report.step_bytes / s / 1e9 for s in report.decode.seconds]
    console.print(
        f"         {_spread(gb)} GB/s of weights and KV: "
        f"{statistics.median(report.decode_share):.0%} of the machine's read ceiling, "
        f"{_spread([c / 1e9 for c in report.read_bytes_per_s])} GB/s"
    )
    console.print(
        f"prefill  {_spread(report.prefill.tokens_per_s)} tokens/s, "
        f"{statistics.median(report.prefill.seconds) * 1e3:,.1f} ms for "
        f"{counted(report.prefill.tokens, 'token')}"
    )
    if report.experts is not None:
        expected, counted_ones = report.experts
        line = f"experts  {expected:,.1f} different ones expected in a layer of a decode step"
        if counted_ones > 0:
            line += f", {counted_ones:,.1f} counted"
        console.print(line)
    if ops:
        _show_ops(console, "decode step", report.decode, report)
        _show_ops(console, "prefill", report.prefill, report)
    console.print(f"medians [least, most] of {counted(len(rate), 'round')}")


def _pages(llm: LLM) -> str:
    """On which pages the host's weights lie."""
    stats = llm.stats
    copied, huge = stats["copied_bytes"], stats["huge_page_bytes"]
    if copied == 0:
        return "weights are read where they lie, on pages of the page cache or of their owner"
    told = "an amount the system does not tell" if huge is None else common.binary_bytes(huge)
    size = common.binary_bytes(copied)
    return f"weights {llm.plan.loading}: {size} in memory of their own, {told} on huge pages"


def _show_ops(console: Console, title: str, phase: Phase, report: Report) -> None:
    from rich.table import Table

    read = statistics.median(report.read_bytes_per_s)
    peak = statistics.median(report.fma_flops)
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for name in ("ms", "share", "GB/s", "of ceiling", "GFLOP/s", "of f32 peak"):
        table.add_column(name, justify="right")
    whole = sum(share.seconds for share in phase.ops)
    for share in phase.ops:
        bandwidth, rate = share.bytes / share.seconds, share.flops / share.seconds
        table.add_row(
            share.op,
            f"{share.seconds * 1e3:,.3f}",
            f"{share.seconds / whole:.1%}",
            *((f"{bandwidth / 1e9:,.1f}", f"{bandwidth / read:.0%}") if bandwidth else ("", "")),
            *((f"{rate / 1e9:,.1f}", f"{rate / peak:.0%}") if rate else ("", "")),
        )
    console.print()
    console.print(table)


def _spread(values: Sequence[float]) -> str:
    """ "12.3 [11.9, 12.8]"."""
    return f"{statistics.median(values):,.1f} [{min(values):,.1f}, {max(values):,.1f}]"


class _Progress:
    """A bar on stderr over the rounds, on a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, rounds: int) -> None:
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("measuring", total=rounds)
            self._bar.start()
        self._bar.update(self._task, completed=done)
