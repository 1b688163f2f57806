"""Models that memory does not hold: whether their weights may be read from disk in every step, and
how fast that disk is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from helm.compiler.format_choice import others_text
from helm.compiler.planning_problem import Problem
from helm.compiler.solve import Study, from_disk
from helm.errors import HelmError, OutOfMemoryError
from helm.machine.profile import Profile
from helm.model.checkpoint import TensorInfo
from helm.session.options import LoadOptions

ASSUMED_BYTES_PER_S = 2e9  # of a machine whose disk is not known


def study_from_disk(
    problem: Problem,
    files: Iterable[Path],
    options: LoadOptions,
    refused: OutOfMemoryError,
    profiled: Callable[[], Problem] | None = None,
) -> Study:
    """What fits where some weights are left on disk. problem: with a profile, of this machine or,
    to find out whether anything fits, of any; profiled makes the one that counts then. Raises
    `refused`, or what else is to be said of it, where nothing fits."""
    own, paths = problem.profile, sorted(set(files))
    assert own is not None
    if not paths:
        raise refused
    rate = own.disk_bytes_per_s or ASSUMED_BYTES_PER_S
    try:
        guess = from_disk(problem, rate, refused)
    except OutOfMemoryError as error:
        # Nothing fits, or another way does.
        if options.profile is not None or error is refused:
            raise
    else:
        if options.profile is not None:
            return _with_others(guess)
    if profiled is not None:
        problem = profiled()
    rate = measured_rate(paths, options) or rate
    return _with_others(from_disk(problem, rate, refused))


def _with_others(study: Study) -> Study:
    """With the formats in which all would fit into memory among its notices."""
    others = others_text(study.problem).removeprefix("; ")
    return study.saying(f"without the disk, {others}") if others else study


def measured_rate(paths: list[Path], options: LoadOptions) -> float | None:
    """Bytes per second; None where the files cannot be read."""
    from helm.measure.disk import measure_disk

    try:
        return measure_disk(paths, options.measuring)
    except (OSError, HelmError):
        return None


def files_of(infos: Mapping[str, TensorInfo], directory: str | Path) -> list[Path]:
    """Where tensors lie; nothing of a module in memory."""
    if not str(directory):
        return []
    return [Path(directory, file) for info in infos.values() for file in info.files]


def any_profile() -> Profile:
    """Rates of some machine, of which only memory counts."""
    from helm.machine.profile import load_profile, preset_names

    found = load_profile(preset_names()[0])
    return dataclasses.replace(found, accelerator=None, link=None)


def read_through_cache(stats: Mapping[str, Any]) -> list[str]:
    """Says so when a loaded model's weights on disk go through the page cache."""
    if stats["disk_step_bytes"] == 0 or stats["disk_direct"]:
        return []
    return [
        "the checkpoint's file system refuses direct reads, so its weights go through the page "
        "cache, which may be slower"
    ]
