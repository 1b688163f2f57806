"""What compare.py measured, as rows of results/history.csv, so that a run's file can be removed.

    python bench/history.py out.json >> bench/results/history.csv

Runs nothing. A row is one figure of one engine in one scenario: its median, least and most over
the run's rounds. Git keeps the files from which the rows of today were made.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from compare_report import FORMAT
from figures import (
    AS_STORED,
    FLOPS,
    MEMORY,
    OF_PEAK,
    OF_READ,
    OTHER_OPS,
    PRODUCTS,
    RATE,
    TIMES,
    engines_of,
    process_figures,
    rounds_of,
    scenarios_of,
    series,
)

COLUMNS = (
    "run", "machine", "isa", "date", "commit", "shape", "dtype", "rounds",
    "engine", "scenario", "figure", "median", "least", "most",
)  # fmt: skip
FIGURES = (RATE, MEMORY, OF_READ, AS_STORED, FLOPS, OF_PEAK, PRODUCTS, OTHER_OPS, TIMES)
START = "start"  # the scenario of a process's own figures
PREFIX = "compare-"


def rows_of(run: str, document: dict) -> Iterator[tuple[str, ...]]:
    """Rows in the order of COLUMNS. run: the file's name without its end; shares are fractions.

    Raises ValueError, if the document is not one of compare.py's.
    """
    if document.get("format") != FORMAT:
        raise ValueError(
            f"[bench] read {run}: format is {document.get('format')!r}, expected {FORMAT!r}; "
            "name files that compare.py wrote"
        )
    machine = document["machine"]
    name = run.split(f"-{PREFIX}")[0]
    for model in document["models"]:
        rounds = rounds_of(model)
        head = (
            run, name, machine["isa"], machine["date"], machine["commit"],
            model["shape"], model["dtype"], str(len(rounds)),
        )  # fmt: skip
        for engine in engines_of(model):
            for scenario in scenarios_of(model):
                for figure in FIGURES:
                    values = series(rounds, engine, scenario.name, figure)
                    if values:
                        yield (*head, engine, scenario.name, figure, *spread(values))
            for figure, values in process_figures(model, engine).items():
                if values:
                    yield (*head, engine, START, figure, *spread(values))


def spread(values: Sequence[float]) -> tuple[str, str, str]:
    """Median, least and most with four digits."""
    figures = (statistics.median(values), min(values), max(values))
    return tuple(f"{value:.4g}" for value in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--header", action="store_true", help="begin with the columns' names")
    args = parser.parse_args()
    out = csv.writer(sys.stdout, lineterminator="\n")
    if args.header:
        out.writerow(COLUMNS)
    for file in args.files:
        try:
            out.writerows(rows_of(file.stem, json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
