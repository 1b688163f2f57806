"""What partitioned.py found: its records, the figures made of them, the table. Measures nothing."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from compare_report import spread
from helm.base.sizes import size_text
from helm.machine.profile import Profile


@dataclass
class Round:
    """decode_s: of a step. prefill_s: tokens -> seconds to the first token. dram_bytes_per_s: the
    host's streaming reads right before and after."""

    decode_s: float
    prefill_s: dict[int, float]
    dram_bytes_per_s: float


@dataclass
class Result:
    """One shape with one limit. predicted: made before the run. roofline_s: of a decode step, the
    weights of each device at its own streaming rate. peer: what Accelerate did, or "skipped"."""

    shape: str
    layers: int
    vram_bytes: int
    skipped: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    verified: dict[str, Any] = field(default_factory=dict)
    load_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    roofline_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)


def roofline_s(result: Result, profile: Profile, dtype: str) -> float:
    """The weights of each device at its streaming rate: the host's of this run's probes, the
    accelerator's of the profile."""
    read = result.plan["weights_read_bytes"]
    seconds: float = read["cpu"] / statistics.median(r.dram_bytes_per_s for r in result.rounds)
    if read["accelerator"]:
        assert profile.accelerator is not None
        seconds += read["accelerator"] / profile.accelerator.rate("matvec_bytes_per_s", dtype)
    return seconds


def figures(result: Result, args: Any) -> dict[str, Any]:
    """What the table shows: rates with their spread, and predicted over measured time less one."""
    decode_s = [r.decode_s for r in result.rounds]
    typical = statistics.median(decode_s)
    found: dict[str, Any] = {
        "decode_tokens_per_s": [1 / s for s in decode_s],
        "decode_error": result.predicted["decode_s"] / typical - 1,
        "roofline_share": result.roofline_s / typical,
        "prefill_tokens_per_s": {},
        "prefill_error": {},
        "over_peer": None,
    }
    for tokens in args.prefill:
        seconds = [r.prefill_s[tokens] for r in result.rounds]
        found["prefill_tokens_per_s"][tokens] = [tokens / s for s in seconds]
        error = result.predicted["prefill_s"][tokens] / statistics.median(seconds) - 1
        found["prefill_error"][tokens] = error
    return found


def announcement(result: Result) -> str:
    """The prediction, before the run."""
    plan, predicted = result.plan, result.predicted
    prefill = ", ".join(f"{n} tokens in {s:.2f} s" for n, s in predicted["prefill_s"].items())
    return (
        f"{result.shape}, {result.layers} layers, {size_text(result.vram_bytes)}: "
        f"{plan['units_cpu']} units on the CPU, {plan['units_accelerator']} on the accelerator "
        f"({plan['chosen_by']}), prefill {plan['schedule']['prefill']}; predicted "
        f"{1 / predicted['decode_s']:.2f} tok/s decode, prefill of {prefill}"
    )


def show(results: list[Result], args: Any, console: Console) -> None:
    """A row per figure, a column per case; goals in the names of their rows."""
    done = [result for result in results if not result.skipped]
    table = Table(title=f"{args.device}, {args.dtype}, decode after {args.context} tokens")
    table.add_column("median \\[least, most]")
    for result in done:
        table.add_column(f"{result.shape} {size_text(result.vram_bytes)}", justify="right")

    def row(name: str, cell: Any) -> None:
        table.add_row(name, *(cell(result) for result in done))

    row("units CPU + accelerator", units)
    row("decode tok/s", lambda r: spread(r.figures["decode_tokens_per_s"], False))
    row("predicted", lambda r: f"{1 / r.predicted['decode_s']:.3g}")
    row("error", lambda r: f"{r.figures['decode_error']:+.1%}")
    row("share of roofline (85 %)", lambda r: f"{r.figures['roofline_share']:.0%}")
    for tokens in args.prefill:
        row(
            f"prefill {tokens} tok/s",
            lambda r, n=tokens: spread(r.figures["prefill_tokens_per_s"][n], False),
        )
        row("error", lambda r, n=tokens: f"{r.figures['prefill_error'][n]:+.1%}")
    row("over Accelerate (5.1 x)", over_peer)
    if done:
        console.print(table)
    for result in done:
        if "skipped" in result.peer:
            console.print(f"Accelerate was skipped: {result.peer['skipped']}", markup=False)
            break


def units(result: Result) -> str:
    return f"{result.plan['units_cpu']} + {result.plan['units_accelerator']}"


def over_peer(result: Result) -> str:
    ratio = result.figures["over_peer"]
    return "skipped" if ratio is None else f"{ratio:.1f} x"
