"""What a model would take and reach in each format of its weights. Decides nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from helm.base.formats import FORMATS, PACKED_POLICIES, ROUNDING_RMS
from helm.base.sizes import rate_text, size_text
from helm.compiler.advice import cpu_decode_rate, nearest
from helm.compiler.candidate import Candidate
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import PUBLISHED_POLICIES
from helm.compiler.solve import solve
from helm.errors import OutOfMemoryError, ProfileError
from helm.machine.profile import Profile

AS_STORED = "as stored"


@dataclass(frozen=True)
class FormatRow:
    """A model in one format. format: AS_STORED, "bf16c", "q8" or "q4". options: of LLM(...), that
    ask for it. memory: device -> bytes in all, of the plan, or of the placement that is nearest to
    fitting; weights_bytes: of those, weights on all devices. missing: device -> bytes; empty where
    it fits, or where only a search would tell. ttft_s, decode_tokens_per_s: predicted; None where
    it does not fit or no profile is known. relative_rms: error of the weights by their size, both
    as root mean squares: 0 where every bit stays, that of normally distributed weights where they
    are rounded from 16 or 32 bits, None where they are rounded once more. notices: what
    the profile has no rate for."""

    format: str
    options: Mapping[str, str]
    fits: bool
    weights_bytes: int
    memory: Mapping[str, int]
    missing: Mapping[str, int]
    ttft_s: float | None
    decode_tokens_per_s: float | None
    relative_rms: float | None
    notices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)


def format_rows(problem: Problem) -> tuple[FormatRow, ...]:
    """As stored, bf16c where the CPU holds a matrix that becomes smaller, q8 and q4, each placed
    for itself; the problem's own dtype and access do not count. Raises what `solve` raises but for
    lack of memory."""
    stored = _with(problem, "auto", "copied")
    coarse = any(FORMATS[format].packed for format in stored.formats.values())
    rows = [_row(stored, AS_STORED, {"dtype": "auto"}, 0.0)]
    # What visits in every step is never compressed.
    may = problem.space.policy not in PUBLISHED_POLICIES
    if may and stored.model("compressed").cpu_formats:
        smaller = _with(problem, "auto", "compressed")
        row = _row(smaller, "bf16c", {"weights": "compressed"}, 0.0)
        if row.weights_bytes < rows[0].weights_bytes or not rows[0].fits:
            rows.append(row)
    for policy in PACKED_POLICIES:
        error = None if coarse else ROUNDING_RMS[policy]
        rows.append(_row(_with(problem, policy, "copied"), policy, {"dtype": policy}, error))
    return tuple(rows)


def others_text(problem: Problem) -> str:
    """What to add to the refusal of `problem`: the formats in which it fits; empty where none
    does."""
    asked = {"dtype": problem.dtype, "weights": problem.loading.weights}
    found = [
        _fits_text(row)
        for row in (() if problem.dtype == "fit" else format_rows(problem))
        if row.fits and not row.options.items() <= asked.items()
    ]
    return f"; {'; '.join(found)}" if found else ""


def _fits_text(row: FormatRow) -> str:
    ((name, value),) = row.options.items()
    names = {"cpu": "RAM", "accelerator": "VRAM"}
    taken = {names[device]: size_text(size) for device, size in row.memory.items() if size}
    sizes = " + ".join(f"{size} of {name}" for name, size in taken.items())
    rate = row.decode_tokens_per_s
    speed = "" if rate is None else f", {rate_text(rate)} tokens/s"
    return f"{name}='{value}' fits: {sizes}{speed}"


def _with(problem: Problem, dtype: str, weights: str) -> Problem:
    loading = dataclasses.replace(problem.loading, weights=weights)
    return dataclasses.replace(problem, dtype=dtype, loading=loading)


def _row(
    problem: Problem, format: str, options: Mapping[str, str], error: float | None
) -> FormatRow:
    if problem.profile is None:
        return _without_rates(problem, format, options, error)
    search = problem.search("compressed" if format == "bf16c" else "copied")
    best = search.result.best
    candidate = nearest(search) if best is None else best
    lacks = candidate.missing
    missing = {"cpu": lacks.cpu, "accelerator": lacks.accelerator}
    return FormatRow(
        format,
        options,
        fits=best is not None,
        weights_bytes=sum(items["weights"] for items in candidate.memory.values()),
        memory=dict(_used(candidate)),
        missing={device: size for device, size in missing.items() if size},
        ttft_s=None if best is None else best.predicted.ttft_s,
        decode_tokens_per_s=None if best is None else best.predicted.decode_tokens_per_s,
        relative_rms=error,
        notices=tuple(problem.profile.notices_of(problem.formats.values())),
    )


def _used(candidate: Candidate) -> Iterator[tuple[str, int]]:
    for device in candidate.memory:
        if device == "cpu" or candidate.uses_accelerator:
            yield device, candidate.total_bytes(device)


def _without_rates(
    problem: Problem, format: str, options: Mapping[str, str], error: float | None
) -> FormatRow:
    try:
        plan = solve(problem).plan
    except OutOfMemoryError:
        weights = problem.model("compressed" if format == "bf16c" else "copied")
        size = weights.host_bytes(problem.graph.units)
        return FormatRow(format, options, False, size, {}, {}, None, None, error)
    use, rate = plan.memory["cpu"], None
    if problem.loading.cpu is not None:
        here = Profile(name="this machine", estimated=False, identity={}, cpu=problem.loading.cpu)
        with contextlib.suppress(ProfileError):  # it knows no such weights or threads
            rate = cpu_decode_rate(problem.config, plan, here)
    taken = {"cpu": use.total_bytes + use.reserve_bytes}
    return FormatRow(format, options, True, use.weights_bytes, taken, {}, None, rate, error)
