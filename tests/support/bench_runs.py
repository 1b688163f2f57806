"""Made-up measurements of bench/compare.py."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench_config import CONFIG
from figures import Bar, bars, run_figures
from scenarios import DEFAULTS, scenario

# Of CONFIG: 2 blocks of q 32 x 24, k and v 16 x 24 each, o 24 x 32, gate, up and down 40 x 24 each.
BLOCKS = 2 * (32 * 24 + 2 * 16 * 24 + 24 * 32 + 3 * 40 * 24)
BEHIND = 24 * 32 + 3 * 40 * 24  # the last attention
HEAD = 300 * 24


def run_of(
    name: str,
    seconds: float,
    ops: dict[str, float] | None = None,
    read: tuple[float, ...] = (1e9, 3e9),
    alone: float = 0.0,
) -> dict[str, Any]:
    """A run whose parts are between these probes."""
    return {
        "scenario": name,
        "seconds": 1.25 * seconds,  # some steps took longer than the others
        "typical_seconds": seconds,
        "ops": ops or {},
        "alone_seconds": alone,
        "peak_rss_bytes": 4 * (BLOCKS + HEAD),
        "ceilings": [{"read_bytes_per_s": rate, "fma_flops": 1e9} for rate in read],
    }


def figures_of(run: dict[str, Any]) -> dict[str, float]:
    return run_figures(run, scenario(run["scenario"], 128, 64), CONFIG, "bf16")


def process_of(engine: str, *runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": engine,
        "load_s": 1.0,
        "first_token_s": 2.0,
        "details": {"isa": "avx512"} if engine == "helm" else {},
        "deviation": 0.01,
        "runs": list(runs),
    }


def model_of(*rounds: list[dict[str, Any]]) -> dict[str, Any]:
    engines = list(dict.fromkeys(p["engine"] for processes in rounds for p in processes))
    return {
        "shape": "made-up",
        "dtype": "bf16",
        "config": CONFIG,
        "engines": engines,
        "scenarios": [dataclasses.asdict(scenario(name, 128, 64)) for name in DEFAULTS],
        "left_out": [],
        "rounds": list(rounds),
    }


def bar(text: str, engines: list[str], engine: str = "helm") -> Bar:
    (found,) = [b for b in bars(engines) if b.text == text and b.engine == engine]
    return found
