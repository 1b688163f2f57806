"""`helm-llm profile`: measures this machine, or shows what was measured before."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from helm.base.sizes import counted
from helm.commands.common import binary_bytes
from helm.commands.lines import say
from helm.commands.options import add_device
from helm.commands.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from helm.machine.profile import Profile
    from helm.machine.rates import CpuProfile, DeviceProfile, LinkProfile, MemoryTier

HELP = "measure this machine's rates, on which plans are based"
EPILOG = """examples:
  helm-llm profile                        measured once, then from the cache
  helm-llm profile --recalibrate          after a change of hardware or settings
  helm-llm profile --device sim:link=16GB/s   with a simulated accelerator
  helm-llm profile --json --output my-machine.json
"""


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    add_device(parser)
    parser.add_argument("--recalibrate", action="store_true", help="measure even if cached")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.add_argument("--output", metavar="FILE", help="also write it to FILE (default: none)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from helm.commands.measuring import MeasureProgress
    from helm.machine.devices import find_accelerator
    from helm.measure.profile_cache import cache_path, machine_profile, save_profile

    notices: list[str] = []
    device = find_accelerator(args.device, notices)
    for notice in notices:
        say(f"note: {notice}")
    start = time.monotonic()
    with MeasureProgress() as progress:
        profile = machine_profile(device, recalibrate=args.recalibrate, progress=progress.update)
    took_s = time.monotonic() - start
    if args.output is not None:
        save_profile(profile, Path(args.output))
    if args.json:
        print(profile.to_json())
        return 0
    show(profile)
    origin = f"measured in {took_s:.1f} s" if progress.measured else "from the cache"
    kept = cache_path(device)
    where = str(kept) if os.path.isfile(kept) else f"not kept, as {kept} cannot be written"
    say(f"[{origin}: {where}]")
    return 0


def show(profile: Profile) -> None:
    """The profile as tables."""
    from helm.commands.console import console as stdout

    console = stdout(pipe_width=160)
    console.print(_facts(_cpu_facts(profile)))
    console.print(_rates(profile.cpu))
    if profile.accelerator is not None:
        _show_accelerator(profile, console)
    if profile.unsettled:
        console.print(
            f"\nOther programs disturbed {counted(len(profile.unsettled), 'measurement')}, so "
            "these rates may be off; --recalibrate measures them again, --json lists them: "
            f"{_kinds(profile.unsettled)}"
        )


def _kinds(names: Sequence[str]) -> str:
    """Names of quantities, which begin with their kind: "f16 products (4), bf16 attention (2)"."""
    kinds = Counter(name.partition(",")[0] for name in names)
    return ", ".join(kind if n == 1 else f"{kind} ({n})" for kind, n in kinds.items())


def _show_accelerator(profile: Profile, console: Console) -> None:
    assert profile.accelerator is not None
    assert profile.link is not None
    memory = f"{binary_bytes(profile.accelerator.memory_bytes)} free"
    own = [("accelerator", profile.accelerator.name), ("memory", memory)]
    console.print()
    console.print(_facts([*own, *_device_facts(profile.accelerator), *_link_facts(profile.link)]))
    console.print(_rates(profile.accelerator))


def _facts(rows: list[tuple[str, str]]) -> Table:
    from rich.table import Table

    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for row in rows:
        facts.add_row(*row)
    return facts


def _rates(device: DeviceProfile) -> Table:
    from rich.table import Table

    rates = Table(box=None, pad_edge=False, title="rates by format", title_justify="left")
    rates.add_column("")
    matvec, attention = device.matvec_bytes_per_s, device.attention_bytes_per_s
    formats = list(dict.fromkeys((*matvec, *attention)))
    for name in formats:
        rates.add_column(name, justify="right")
    rates.add_column("unit")
    rates.add_row("matrix x vector", *_row(matvec, formats), "GB/s of weights")
    for tokens, by_format in _by_count(device.matmul_flops):
        name = f"products, {counted(tokens, 'token')}"
        rates.add_row(name, *_row(by_format, formats), "GFLOP/s")
    rates.add_row("attention, 1 row", *_row(attention, formats), "GB/s of KV")
    for rows, by_format in _by_count(device.attention_flops):
        name = f"attention, {counted(rows, 'row')}"
        rates.add_row(name, *_row(by_format, formats), "GFLOP/s")
    return rates


def _by_count(
    flops: Mapping[str, Mapping[int, float]],
) -> Iterator[tuple[int, dict[str, float]]]:
    """(tokens or rows, rate by format), of every count that some format was measured with."""
    for count in sorted({count for rates in flops.values() for count in rates}):
        yield count, {name: rates[count] for name, rates in flops.items() if count in rates}


def _row(rates: Mapping[str, float], formats: list[str]) -> list[str]:
    return [f"{rates[name] / 1e9:,.1f}" if name in rates else "-" for name in formats]


def _cpu_facts(profile: Profile) -> list[tuple[str, str]]:
    cpu, who = profile.cpu, profile.identity
    return [
        ("CPU", f"{who.get('cpu', '?')}, {_kernels(who)}"),
        ("memory", f"{binary_bytes(cpu.memory_bytes)} free, cgroup limits included"),
        *((f"  node {t.node}", _tier(t)) for t in cpu.tiers),
        *(("  left out", why) for why in cpu.left_out),
        ("threads", f"{cpu.threads}; matrix x vector: {_sweep(cpu)}"),
        *([] if cpu.lone_op_s is None else [("an op, 1 thread", _fixed(cpu.lone_op_s))]),
        *_device_facts(cpu),
        *_loading_facts(cpu),
        *([("accelerator", "none")] if profile.accelerator is None else []),
    ]


def _tier(tier: MemoryTier) -> str:
    size = binary_bytes(tier.memory_bytes)
    return f"{size} of it, slower: matrix x vector {tier.bytes_per_s / 1e9:,.1f} GB/s"


def _kernels(who: Mapping[str, str | int | float]) -> str:
    isa, integers = who.get("isa", "?"), who.get("integer_isa")
    return f"{isa} kernels" + ("" if integers is None else f", {integers} for 8 and 4 bits")


def _loading_facts(cpu: CpuProfile) -> list[tuple[str, str]]:
    if cpu.mapped_matvec_ratio is None or cpu.copy_bytes_per_s is None:
        return []
    ratio = f"read at {cpu.mapped_matvec_ratio * 100:.0f} % of the rate of copied ones"
    copied = f"{cpu.copy_bytes_per_s / 1e9:,.1f} GB/s from the page cache"
    facts = [("mapped weights", ratio), ("copying them", copied)]
    if cpu.compressed_ratio is not None and cpu.compress_bytes_per_s is not None:
        ratios = sorted(cpu.compressed_ratio.items())
        rates = ", ".join(
            f"{ratio * 100:.0f} % at {counted(tokens, 'token')}" for tokens, ratio in ratios
        )
        faster = f"bf16 products, of the rate with plain weights: {rates}"
        compressed = f"{cpu.compress_bytes_per_s / 1e9:,.1f} GB/s from the page cache"
        facts += [("compressed weights", faster), ("compressing them", compressed)]
    return facts


def _sweep(cpu: CpuProfile) -> str:
    rates = sorted(cpu.thread_sweep.items())
    return ", ".join(f"{counted(n, 'thread')} {rate / 1e9:,.1f} GB/s" for n, rate in rates)


def _fixed(seconds: float) -> str:
    return f"{seconds * 1e6:,.2f} us fixed"


def _device_facts(device: DeviceProfile) -> list[tuple[str, str]]:
    return [
        ("an op", _fixed(device.op_s)),
        (
            "attention",
            f"{device.attention_query_s * 1e6:,.3f} us fixed for a query and head of a prompt",
        ),
        ("a step", _fixed(device.step_s)),
        ("elementwise", f"{device.activation_bytes_per_s / 1e9:,.1f} GB/s of activations"),
    ]


def _link_facts(link: LinkProfile) -> list[tuple[str, str]]:
    def rates(there: float, back: float) -> str:
        return f"{there / 1e9:,.1f} GB/s to the GPU, {back / 1e9:,.1f} back"

    pageable = rates(link.pageable_to_accelerator_bytes_per_s, link.pageable_to_host_bytes_per_s)
    return [
        ("link", rates(link.to_accelerator_bytes_per_s, link.to_host_bytes_per_s)),
        ("  pageable", pageable),
        ("  crossing", f"{link.latency_s * 1e6:,.2f} us fixed"),
        ("  queued copy", f"{link.page_s * 1e6:,.2f} us fixed"),
        ("  meanwhile", f"the CPU runs at {link.cpu_rate_while_copying * 100:.0f} % of its rate"),
        ("both read", f"at {link.rate_while_both_compute * 100:.0f} % of their rates"),
    ]
