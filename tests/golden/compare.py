"""Makes, keeps and compares what plans, programs and logits are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from golden import logits, plans, programs
from helm import _helm

RECORDED = Path(__file__).resolve().parent / "recorded.json"
SHORT = 16  # of so many cases, one is in the sample
TOLERANCE = 1e-9  # of predicted figures
KINDS = ("plans", "programs", "logits")
Outcomes = dict[str, dict[str, Any]]  # kind -> case -> outcome
Progress = Callable[[int, int, str], None]
Job = tuple[str, list[str], str]  # kind, cases, instruction set of logits


def outcomes(
    kinds: Sequence[str], isa: str, step: int, progress: Progress = lambda *_: None
) -> Outcomes:
    """Those of every `step`-th case, all programs. isa: of the logits; "best": this machine's."""
    if isa == "best":
        isa = _best_isa()
    texts = {"plans": plans.cases()[::step], "programs": programs.cases()}
    jobs: list[Job] = [(k, [c], "") for k in texts if k in kinds for c in texts[k]]
    workers = os.cpu_count() or 1
    models = logits.cases()[:: max(1, step // 4)] if "logits" in kinds else []
    jobs += [("logits", models[i::workers], isa) for i in range(min(workers, len(models)))]
    found: Outcomes = {kind: {} for kind in kinds}
    with ProcessPoolExecutor(workers) as pool:
        for done, (job, outcome) in enumerate(zip(jobs, pool.map(_outcome, jobs), strict=True), 1):
            found[job[0]] |= outcome
            progress(done, len(jobs), job[1][0])
    return {kind: dict(sorted(cases.items())) for kind, cases in found.items()}


def _outcome(job: Job) -> dict[str, Any]:
    kind, names, isa = job
    if kind != "logits":
        made = plans.outcome if kind == "plans" else programs.outcome
        return {case: made(case) for case in names}
    return logits.outcomes(names, isa)


def _best_isa() -> str:
    usable = [tier["name"] for tier in _helm.isa_tiers() if tier["available"]]
    return str(usable[-1])


def differences(recorded: Outcomes, found: Outcomes) -> list[str]:
    """A line for each field of a case that is not what was recorded. A case that was not recorded
    is a difference; one that was not made now is none, as a sample leaves many out."""
    lines = []
    for kind, cases in found.items():
        for case, outcome in cases.items():
            if case not in recorded.get(kind, {}):
                lines.append(f"{kind} {case}: not recorded")
                continue
            lines += [f"{kind} {case}: {line}" for line in _changed(recorded[kind][case], outcome)]
    return lines


def _changed(before: Any, now: Any, name: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys((*before, *now))
        return [
            line
            for key in keys
            for line in _changed(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        ]
    if isinstance(before, float) and isinstance(now, float):
        same = math.isclose(before, now, rel_tol=TOLERANCE)
    else:
        same = before == now
    return [] if same else [f"{name} was {before}, is {now}"]


def read(path: Path) -> Outcomes:
    """What `write` wrote."""
    found: Outcomes = json.loads(path.read_text())
    return found


def write(path: Path, found: Outcomes) -> None:
    """A line for every case, so that a change of the file shows which."""
    parts = []
    for kind, cases in found.items():
        lines = [f"  {json.dumps(case)}: {json.dumps(value)}" for case, value in cases.items()]
        parts.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
