"""`helm-llm profile`: measures this machine, or shows what was measured before."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.commands.common import binary_bytes, say

if TYPE_CHECKING:
    from helm.profile import Profile

HELP = "measure this machine's rates, on which plans are based"
EPILOG = """examples:
  helm-llm profile                        measured once, then from the cache
  helm-llm profile --recalibrate          after a change of hardware or settings
  helm-llm profile --json --output my-machine.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument("--recalibrate", action="store_true", help="measure even if cached")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.add_argument("--output", metavar="FILE", help="also write the profile to a file")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from helm.profile_cache import cache_path, machine_profile, save_profile

    start = time.monotonic()
    with MeasureProgress() as progress:
        profile = machine_profile(recalibrate=args.recalibrate, progress=progress.update)
    took_s = time.monotonic() - start
    if args.output is not None:
        save_profile(profile, Path(args.output))
    if args.json:
        print(profile.to_json())
        return 0
    show(profile)
    origin = f"measured in {took_s:.1f} s" if progress.measured else "from the cache"
    say(f"[{origin}: {cache_path()}]")
    return 0


class MeasureProgress:
    """A bar on a terminal's stderr while the machine is measured."""

    def __init__(self) -> None:
        self.measured = False
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> MeasureProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, what: str, share: float) -> None:
        """Called before each visit of a quantity."""
        self.measured = True
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = ("measuring", BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
        self._bar.update(self._task, completed=share, description=what)


def show(profile: Profile) -> None:
    """The profile as tables."""
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width of its own: lines stay whole there.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _facts(profile):
        facts.add_row(name, text)
    console.print(facts)
    cpu = profile.cpu
    rates = Table(box=None, pad_edge=False, title="rates by dtype", title_justify="left")
    rates.add_column("")
    dtypes = list(cpu.matvec_bytes_per_s)
    for dtype in dtypes:
        rates.add_column(dtype, justify="right")
    rates.add_column("unit")
    rates.add_row("matrix x vector", *_row(cpu.matvec_bytes_per_s, 1e9, dtypes), "GB/s of weights")
    for tokens in sorted(cpu.matmul_flops[dtypes[0]]):
        by_dtype = {dtype: cpu.matmul_flops[dtype].get(tokens, 0.0) for dtype in dtypes}
        rates.add_row(f"products, {tokens} tokens", *_row(by_dtype, 1e9, dtypes), "GFLOP/s")
    rates.add_row("attention, 1 row", *_row(cpu.attention_bytes_per_s, 1e9, dtypes), "GB/s of KV")
    for rows in sorted(cpu.attention_flops[dtypes[0]]):
        by_dtype = {dtype: cpu.attention_flops[dtype].get(rows, 0.0) for dtype in dtypes}
        name = f"attention, {rows} row{'s' * (rows > 1)}"
        rates.add_row(name, *_row(by_dtype, 1e9, dtypes), "GFLOP/s")
    console.print(rates)
    for name in profile.unsettled:
        console.print(f"unsettled: {name}")
    if profile.unsettled:
        console.print(
            "Other programs left too few undisturbed runs of these, so their figures may be off; "
            "measure again on a quieter machine with helm-llm profile --recalibrate"
        )


def _row(rates: Any, unit: float, dtypes: list[str]) -> list[str]:
    return [f"{rates[dtype] / unit:,.1f}" if rates.get(dtype) else "-" for dtype in dtypes]


def _facts(profile: Profile) -> list[tuple[str, str]]:
    cpu, who = profile.cpu, profile.identity
    sweep = ", ".join(f"{n}: {rate / 1e9:,.1f}" for n, rate in sorted(cpu.thread_sweep.items()))
    device = profile.accelerator.name if profile.accelerator is not None else "none"
    return [
        ("CPU", f"{who.get('cpu', '?')}, {who.get('isa', '?')} kernels"),
        ("memory", f"{binary_bytes(cpu.memory_bytes)} free, cgroup limits included"),
        ("threads", f"{cpu.threads} (threads: GB/s of matrix x vector {{{sweep}}})"),
        ("op", f"{cpu.op_s * 1e6:,.2f} us fixed"),
        ("step", f"{cpu.step_s * 1e6:,.2f} us fixed"),
        ("elementwise", f"{cpu.activation_bytes_per_s / 1e9:,.1f} GB/s of activations"),
        ("accelerator", device),
    ]
