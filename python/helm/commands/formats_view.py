"""Shows what a model would take and reach in each format; decides and computes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from helm.base.familiar import as_options
from helm.base.sizes import counted, rate_text, seconds_text, size_text
from helm.commands.console import console
from helm.compiler.format_choice import FormatRow
from helm.compiler.planning_problem import Problem

_PIPE_WIDTH = 100
_DEVICES = {"cpu": "RAM", "accelerator": "VRAM"}


def to_dict(problem: Problem, rows: Sequence[FormatRow]) -> dict[str, Any]:
    """For --json, see docs/json.md."""
    profile = problem.profile
    assert profile is not None
    return {
        "model": {"name": problem.name, "architecture": problem.config.architecture},
        "profile": {"name": profile.name, "estimated": profile.estimated},
        "workload": dataclasses.asdict(problem.work),
        "formats": [_row(row) for row in rows],
        "notices": [as_options(notice) for notice in problem.notices],
    }


def _row(row: FormatRow) -> dict[str, Any]:
    return {**row.to_dict(), "notices": [as_options(notice) for notice in row.notices]}


def show(problem: Problem, rows: Sequence[FormatRow]) -> None:
    """Prints the table."""
    out, profile, work = console(_PIPE_WIDTH), problem.profile, problem.work
    assert profile is not None
    out.print(
        Text.assemble(
            (problem.name, "bold"), " on ", (profile.name, "bold"),
            "; an estimate, not measured" if profile.estimated else "",
        )
    )  # fmt: skip
    out.print(
        f"for {counted(work.batch, 'request')} of {counted(work.prompt, 'prompt token')} and "
        f"{counted(work.output, 'output token')}, in a context of {work.context:,}\n"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    devices = [d for d in _DEVICES if any(row.memory.get(d) for row in rows)]
    right = ("weights", *(_DEVICES[d] for d in devices), "first token", "tokens/s", "error")
    table.add_column("held")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        table.add_row(
            row.format,
            size_text(row.weights_bytes),
            *(size_text(row.memory[d]) if d in row.memory else "" for d in devices),
            "" if row.ttft_s is None else seconds_text(row.ttft_s),
            "" if row.decode_tokens_per_s is None else rate_text(row.decode_tokens_per_s),
            _error(row),
            _asked(row) if row.fits else _lacks(row),
            style=None if row.fits else "dim",
        )
    out.print(table)
    if any(row.relative_rms for row in rows):
        out.print(
            "\nThe error is that of normally distributed weights, by their size, both as root mean "
            "squares.\nhelm-llm quantize measures it, and what it does to answers, on this model."
        )
    said = dict.fromkeys(notice for row in rows for notice in row.notices)
    for notice in (*problem.notices, *said):
        out.print(f"note: {as_options(notice)}")


def _error(row: FormatRow) -> str:
    if row.relative_rms is None:
        return "not known"
    return f"{row.relative_rms * 100:.2g} %" if row.relative_rms else "exact"


def _asked(row: FormatRow) -> str:
    ((name, value),) = row.options.items()
    return f"--{name} {value}"


def _lacks(row: FormatRow) -> str:
    parts = (f"{size_text(size)} of {_DEVICES[device]}" for device, size in row.missing.items())
    return f"lacks {' and '.join(parts)}"
