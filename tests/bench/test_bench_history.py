"""bench/history.py and the history.csv that was made with it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from history import COLUMNS, rows_of

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
RUN = "epyc-zen3-2core-compare-qwen3-1.7b-bf16"


def test_a_row_is_what_its_run_s_file_says() -> None:
    document = json.loads((RESULTS / f"{RUN}.json").read_text(encoding="utf-8"))
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(RUN, document)]
    (process,) = [p for p in document["models"][0]["rounds"][0] if p["engine"] == "llama.cpp"]
    (run,) = [run for run in process["runs"] if run["scenario"] == "decode-x4"]
    (row,) = [
        row
        for row in found
        if (row["engine"], row["scenario"], row["figure"]) == ("llama.cpp", "decode-x4", "tok/s")
    ]
    tokens = 4 * document["settings"]["tokens"]
    expected = tokens / run.get("typical_seconds", run["seconds"])
    assert float(row["median"]) == pytest.approx(expected, rel=1e-3)
    assert (row["machine"], row["isa"], row["rounds"]) == ("epyc-zen3-2core", "avx2", "1")
    assert (row["shape"], row["dtype"], row["commit"]) == ("qwen3-1.7b", "bf16", "9b34d60")
    starts = {row["figure"] for row in found if row["scenario"] == "start"}
    assert "start to first token s" in starts


def test_a_file_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[bench\] read x: format is 'other'"):
        list(rows_of("x", {"format": "other"}))


def test_the_history_holds_runs_whose_files_are_gone() -> None:
    with (RESULTS / "history.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    for line in lines:
        assert float(line["least"]) <= float(line["median"]) <= float(line["most"]), line
    runs = {line["run"] for line in lines}
    assert len(runs) >= 26
    assert [run for run in sorted(runs) if (RESULTS / f"{run}.json").exists()] == []
    keys = [tuple(line[name] for name in COLUMNS[:-3]) for line in lines]
    assert len(set(keys)) == len(keys)
