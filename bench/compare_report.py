"""Tables of what compare.py measured, for a terminal or as Markdown. Runs nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from figures import (
    FLOPS,
    MEMORY,
    OF_PEAK,
    OF_READ,
    OTHER_OPS,
    PRODUCTS,
    RATE,
    Bar,
    around,
    bar_limits,
    bar_values,
    bars,
    bars_of_blocks,
    engines_of,
    process_figures,
    reads_compressed,
    rounds_of,
    scenarios_of,
    series,
    tier_of,
)

FORMAT = "helm-compare 2"
SHARES = (OF_READ, OF_PEAK, PRODUCTS, OTHER_OPS)


def spread(values: Sequence[float], percent: bool) -> str:
    """Median [least, most]."""
    scale, form = (100, "{:.0f}%") if percent else (1, "{:.3g}")
    cells = [form.format(scale * v) for v in (statistics.median(values), min(values), max(values))]
    return f"{cells[0]} [{cells[1]}, {cells[2]}]"


@dataclass(frozen=True)
class Sheet:
    """A table: the first `texts` columns are words, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    texts: int

    def print(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i < self.texts else "right")
        for row in self.rows:
            table.add_row(*(cell.replace("[", "\\[") for cell in row))
        console.print(table)

    def markdown(self) -> str:
        rule = ["---"] * self.texts + ["---:"] * (len(self.columns) - self.texts)
        lines = [self.columns, rule, *self.rows]
        return "\n".join([f"{self.title}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def speed_sheet(model: dict) -> Sheet:
    """A row per scenario and engine."""
    rounds, rows = rounds_of(model), []
    for scenario in scenarios_of(model):
        for engine in engines_of(model):
            cells = []
            for figure in (RATE, MEMORY, OF_READ, FLOPS, OF_PEAK, PRODUCTS, OTHER_OPS):
                values = series(rounds, engine, scenario.name, figure)
                cells.append(_cell(values, figure in SHARES))
            if cells[0]:
                rows.append((scenario.name, engine, *_joined(cells)))
    columns = ("scenario", "engine", RATE, "GB/s or GFLOP/s", "of ceiling", PRODUCTS, OTHER_OPS)
    return Sheet(f"{_name(model)}; {_ceilings(model)}", columns, rows, 2)


def start_sheet(model: dict) -> Sheet:
    """A row per engine: loading it, and whether it computes the right thing."""
    found = {engine: process_figures(model, engine) for engine in engines_of(model)}
    names = tuple(next(iter(found.values())))
    rows = [
        (engine, *(_cell(figures[name], name.startswith("peak RSS")) for name in names))
        for engine, figures in found.items()
    ]
    return Sheet(f"{_name(model)}, starting", ("engine", *names), rows, 1)


def bars_for(model: dict) -> list[Bar]:
    if model.get("weight_bytes"):
        return bars_of_blocks(model)
    return bars(model["engines"], tier_of(model), reads_compressed(model))


def bar_sheet(model: dict) -> Sheet:
    """A row per bar that applies to this shape."""
    rounds, rows = rounds_of(model), []
    for bar in bars_for(model):
        if bar.shapes is not None and model["shape"] not in bar.shapes:
            continue
        values, limits = bar_values(bar, rounds), bar_limits(bar, rounds)
        wanted = bar.wanted(limits)
        goal = f"{wanted:.0%}" if bar.percent else f"{wanted:.3g}x"
        sign = "<" if bar.at_most else ">="
        verdict = ("met" if bar.met(values, limits) else "NOT MET") if values else "not measured"
        measured, limit = _value(values, bar.percent), _value(limits, bar.percent)
        rows.append((bar.text, bar.engine, measured, limit, f"{sign} {goal}", verdict))
    columns = ("bar", "engine", "measured", "at the roofline", "goal", "")
    return Sheet(f"{_name(model)}, bars", columns, rows, 2)


def sheets(document: dict) -> list[Sheet]:
    """All tables, model by model."""
    return [
        sheet(model)
        for model in document["models"]
        if scenarios_of(model)
        for sheet in (speed_sheet, bar_sheet, start_sheet)
    ]


def provenance(document: dict) -> str:
    """A line that says where, when and with what."""
    machine, settings = document["machine"], document["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['threads']} threads, isa {machine['isa']}; "
        f"{machine['date']}; commit {machine['commit']}; {versions}; "
        f"rounds: {settings['rounds']}"
    )


def show(documents: Sequence[dict], console: Console, markdown: bool) -> None:
    """Prints all tables, and what was left out."""
    for document in documents:
        left_out = [
            f"{_name(model)}, left out: {line}"
            for model in document["models"]
            for line in model["left_out"]
        ]
        if markdown:
            texts = [sheet.markdown() for sheet in sheets(document)]
            print("\n\n".join([f"{provenance(document)}.", *texts, *left_out]), end="\n\n")
            continue
        console.print(provenance(document), markup=False, highlight=False)
        for sheet in sheets(document):
            sheet.print(console)
        for line in left_out:
            console.print(line, style="yellow", markup=False)


def _cell(values: Sequence[float], percent: bool) -> str:
    return spread(values, percent) if values else ""


def _value(values: Sequence[float], percent: bool) -> str:
    """As `spread`, with one more digit: a bar may lie between two."""
    if not values:
        return ""
    form = "{:.1%}" if percent else "{:.2f}x"
    cells = [form.format(v) for v in (statistics.median(values), min(values), max(values))]
    return f"{cells[0]} [{cells[1]}, {cells[2]}]"


def _joined(cells: Sequence[str]) -> tuple[str, ...]:
    """Decode has bytes where prefill has operations: one column for either."""
    rate, memory, of_read, flops, of_peak, products, other = cells
    return rate, memory or flops, of_read or of_peak, products, other


def _name(model: dict) -> str:
    return f"{model['shape']} {model['dtype']}"


def _ceilings(model: dict) -> str:
    runs = [run for processes in model["rounds"] for p in processes for run in p["runs"]]

    def all_of(name: str) -> list[float]:
        return [around(run, name) / 1e9 for run in runs]

    read, peak = spread(all_of("read_bytes_per_s"), False), spread(all_of("fma_flops"), False)
    return f"ceilings {read} GB/s read, {peak} GFLOP/s f32; median [least, most]"


def read_saved(file: Path) -> dict[str, Any]:
    """What compare.py wrote to `file`, else SystemExit."""
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as reason:
        raise SystemExit(f"[bench] cannot read {file}: {reason}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SystemExit(
            f"[bench] {file} is no result of this compare.py; expected format {FORMAT!r}"
        )
    return document
