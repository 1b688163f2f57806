"""Models that memory does not hold: whether their weights may be read from disk in every step, from
which drives, and how fast those are."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from helm.compiler.format_choice import others_text
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import Drive
from helm.compiler.solve import Study, from_disk
from helm.errors import CheckpointError, HelmError, OutOfMemoryError, printable
from helm.machine.profile import Profile
from helm.model.checkpoint import TensorInfo
from helm.session.options import LoadOptions

# A checkpoint's files in its folder and in those of copies, by folder.
Drives: TypeAlias = Mapping[Path, Sequence[Path]]
ASSUMED_BYTES_PER_S = 2e9  # of a drive of a machine whose disk is not known


def drives_of(
    infos: Mapping[str, TensorInfo], directory: str | Path, copies: Iterable[Path]
) -> Drives:
    """The folder in which tensors lie, then those of copies; nothing of a module in memory. Raises
    CheckpointError for a copy that lacks a file, or has one of another size or the very same."""
    if not str(directory):
        return {}
    names = sorted({file for info in infos.values() for file in info.files})
    folders = [Path(directory), *copies]
    for name in names if len(folders) > 1 else ():
        _check_copies(name, folders)
    return {folder: [folder / name for name in names] for folder in folders}


def _check_copies(name: str, folders: Sequence[Path]) -> None:
    found = list[os.stat_result]()
    for folder in folders:
        wrong = ""
        try:
            status = (folder / name).stat()
        except (OSError, ValueError) as reason:
            wrong = f"cannot be read: {getattr(reason, 'strerror', None) or reason}"
        else:
            if any(os.path.samestat(status, other) for other in found):
                wrong = "is the same file as in a folder before it"
            elif found and status.st_size != found[0].st_size:
                wrong = f"has {status.st_size} bytes, in {folders[0]} {found[0].st_size}"
            found.append(status)
        if wrong:
            raise CheckpointError(
                f"[load] {folder / name} {wrong}; copies= takes folders with the model's files "
                "under their names, each on another drive"
            )


def unused_copies(study: Study, options: LoadOptions) -> Study:
    """Says that copies are of no use for a model that memory holds."""
    if not options.copies:
        return study
    return study.saying("memory holds all weights: steps read nothing from disk, nor from copies")


def study_from_disk(
    problem: Problem,
    drives: Drives,
    options: LoadOptions,
    refused: OutOfMemoryError,
    profiled: Callable[[], Problem] | None = None,
) -> Study:
    """What fits where some weights are left on disk. problem: with a profile, of this machine or,
    to find out whether anything fits, of any; profiled makes the one that counts then. Raises
    `refused`, or what else is to be said of it, where nothing fits."""
    own = problem.profile
    assert own is not None
    if not drives:
        raise refused
    assumed = [own.disk_bytes_per_s or ASSUMED_BYTES_PER_S] * len(drives)
    try:
        guess = from_disk(problem, _rated(drives, assumed), refused)
    except OutOfMemoryError as error:
        # Nothing fits, or another way does.
        if options.profile is not None or error is refused:
            raise
    else:
        if options.profile is not None:
            return _with_others(guess)
    if profiled is not None:
        problem = profiled()
    rates = measured_rates(drives, options) or assumed
    return _with_others(from_disk(problem, _rated(drives, rates), refused))


def _rated(drives: Drives, rates: Sequence[float]) -> list[Drive]:
    return [Drive(printable(str(folder)), rate) for folder, rate in zip(drives, rates, strict=True)]


def _with_others(study: Study) -> Study:
    """With the formats in which all would fit into memory among its notices."""
    others = others_text(study.problem).removeprefix("; ")
    return study.saying(f"without the disk, {others}") if others else study


def measured_rates(drives: Drives, options: LoadOptions) -> Sequence[float] | None:
    """Bytes per second of each; None where the files of one cannot be read."""
    from helm.measure.disk import measure_drives

    try:
        return measure_drives(list(drives.values()), options.measuring)
    except (OSError, HelmError):
        return None


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
