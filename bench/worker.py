"""Measures one engine on one checkpoint in a process of its own, scenario by scenario as told.

Run by compare.py. Commands are lines of JSON on stdin, answers on stdout, one for each and one once
the engine has given its first token. {"do": "verify"} compares logits with those in a file,
{"do": "logits"} writes them there, {"do": "prepare"} does what comes before a scenario's timed
parts, {"do": "run"} one of these, in order from "part" 0 on. Times are wall seconds, sizes bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helm.compiler.load_cost import WEIGHTS
from peers.engines import ENGINES, Engine, Timed
from resident import peak_rss_bytes
from scenarios import SHORT, Scenario, family, prompt_of

# When the process was asked for, so that interpreter and imports count.
SPAWNED = float(os.environ.get("HELM_BENCH_SPAWNED", time.time()))
PROMPTS, PROMPTS_S = 5, 2.0  # prompts of which one counts, at most, and seconds for them
VERIFIED = 24  # tokens of the prompt whose logits are compared
ALONE = 8  # of them that arrive one at a time


def since_spawned() -> float:
    """Seconds since this process was asked for."""
    return time.time() - SPAWNED


def deviation(logits: np.ndarray, expected: np.ndarray) -> float:
    """Of the worst row: root mean square of the difference over the deviation of `expected`."""
    assert logits.shape == expected.shape, f"{logits.shape} instead of {expected.shape}"
    error = np.sqrt(np.mean((logits - expected) ** 2, axis=1)) / expected.std(axis=1)
    return float(np.max(error))


def typical(step_s: Sequence[float]) -> float:
    """Seconds of all steps if each took as long as the median one. A neighbour on the machine who
    takes a core for a while is not in the probes either, whose rate is that of a median pass."""
    return statistics.median(step_s) * len(step_s) if step_s else 0.0


def typical_parts(engine: Engine, scenario: Scenario) -> Iterator[Timed]:
    """The parts of a decode; of a prompt one, that with the median time of as many as take
    PROMPTS_S seconds, at most PROMPTS: a short one may lie wholly in a neighbour's time."""
    if scenario.kind == "decode":
        yield from engine.run(scenario)
        return
    prompts: list[Timed] = []
    while len(prompts) < PROMPTS and sum(p.seconds for p in prompts) < PROMPTS_S:
        if prompts:
            engine.prepare(scenario)
        prompts += engine.run(scenario)
    yield sorted(prompts, key=lambda p: p.seconds)[(len(prompts) - 1) // 2]


class Worker:
    def __init__(self, args: argparse.Namespace) -> None:
        self._scenarios = {s.name: s for s in args.scenarios}
        self._vocabulary = json.loads((args.folder / "config.json").read_text())["vocab_size"]
        self._engine: Engine = ENGINES[family(args.engine)](args.folder, args.scenarios, args)
        self._loaded_s = since_spawned()
        self._engine.logits(prompt_of(8, self._vocabulary), 0)
        self._first_token_s = since_spawned()
        self._warm: set[str] = set()
        self._parts: Iterator[Timed] = iter(())  # that are left of a scenario

    def ready(self) -> dict[str, Any]:
        return {
            "load_s": self._loaded_s,
            "first_token_s": self._first_token_s,
            "details": self._engine.details,
            "weight_bytes": getattr(self._engine, "weight_bytes", None),
        }

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        what = command["do"]
        if what == "logits":
            file = Path(command["file"])
            partial = file.with_name(f"partial-{file.name}")
            np.save(partial, self._logits())
            partial.rename(file)
            return {}
        if what == "verify":
            logits = self._logits()
            return {"deviation": deviation(logits, np.load(command["file"]))}
        scenario = self._scenarios[command["scenario"]]
        if what == "prepare":
            self._prepare(scenario)
            return {}
        if command["part"] == 0:
            self._parts = typical_parts(self._engine, scenario)
        timed = next(self._parts)
        return {
            "seconds": timed.seconds,
            "typical_seconds": typical(timed.step_s),
            "ops": timed.ops,
            "alone_seconds": typical(timed.alone_s),
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def _logits(self) -> np.ndarray:
        return self._engine.logits(prompt_of(VERIFIED, self._vocabulary), ALONE)

    def _prepare(self, scenario: Scenario) -> None:
        self._engine.prepare(scenario)
        if scenario.name in self._warm or scenario.kind == "decode" or scenario.context > SHORT:
            return  # decode has prefilled; a long prompt warms up within a fraction of its time
        for _ in self._engine.run(scenario):
            pass
        self._engine.prepare(scenario)
        self._warm.add(scenario.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenarios", required=True, help="JSON: a list of Scenario fields")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--weights", choices=WEIGHTS, default="auto")
    parser.add_argument("--scratch", help="folder of temporary KV files")
    args = parser.parse_args()
    args.scenarios = [Scenario(**fields) for fields in json.loads(args.scenarios)]
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(args)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(worker.ready())
    for line in sys.stdin:
        say(worker.answer(json.loads(line)))


if __name__ == "__main__":
    main()
