"""Where a model would run, how fast and why: plans for a whole machine, loads nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from helm.base.arguments import shown
from helm.base.familiar import named
from helm.compiler.format_choice import FormatRow, format_rows, others_text
from helm.compiler.planning_problem import Problem
from helm.compiler.solve import Study, solve
from helm.errors import CheckpointError, InvalidError, OutOfMemoryError, printable
from helm.machine.devices import find_accelerator
from helm.machine.profile import Profile
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.families import read_config
from helm.model.hub import BUNDLED, is_gguf, resolve_config
from helm.model.model_files import read_model, read_remote_model
from helm.model.weight_names import read_weights
from helm.session.disk import Drives, drives_of, study_from_disk, unused_copies
from helm.session.here import measured_profile, with_thread_counts
from helm.session.options import LoadOptions, PlanKeywords, StudyKeywords, load_options


@named("study", StudyKeywords)
def study(
    model: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    **options: Unpack[StudyKeywords],
) -> Study:
    """Plans a model without loading it: `study(...).plan` is the Plan, `.best.predicted` its times
    in seconds and tokens/s, `.gains` what more memory or bandwidth would bring, `.steps` the tasks
    of a decode step and a prompt step over time.

    model: a folder, a GGUF file, a config.json, a Hugging Face id, of which the configuration alone
    is fetched, or None for the bundled model. profile: the machine, a Profile, a preset's name or
    a file; None: this one with `device`, which is measured for 10 to 15 s when first needed, and
    what of its memory is free now. policy: also "zigzag" (FlexGen: Sheng and others 2023),
    "helm-placement" and "all-cpu" (Gupta and Dwarkadas, heterogeneous host memory), or
    "workload-distribution" (Park and Egger). The other options are those of LLM(...), but for those
    that decide nothing before weights are read.

    Raises what LLM(...) raises before it reads weights: InvalidError, CheckpointError, DeviceError,
    ProfileError, and OutOfMemoryError where nothing fits, with what would.
    """
    asked = load_options(options)
    problem = problem_of(model, revision, asked)
    try:
        return _solved(problem, model, revision, asked)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}{others_text(problem)}") from None


def _solved(
    problem: Problem,
    model: str | os.PathLike[str] | None,
    revision: str | None,
    options: LoadOptions,
) -> Study:
    """In memory or, where nothing fits there, with weights on disk."""

    def drives() -> Drives:
        path, infos = resolve_config(model, revision), problem.checkpoint_tensors
        if infos is None or not isinstance(path, Path):
            return {}
        return drives_of(infos, path.parent, options.copies)

    if options.copies:
        drives()  # what is no copy is refused before the search
    try:
        return unused_copies(solve(problem), options)
    except OutOfMemoryError as refused:
        return study_from_disk(problem, drives(), options, refused)


@named("formats", PlanKeywords)
def formats(
    model: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    **options: Unpack[PlanKeywords],
) -> tuple[FormatRow, ...]:
    """What a model would take and reach as stored, in bf16c where that applies, in q8 and in q4.

    The arguments are those of `study`; dtype stays "auto". Raises what `study` raises, but for lack
    of memory: a row says whether its format fits.
    """
    asked = load_options(options)
    if asked.dtype != "auto":
        raise InvalidError(
            f"[plan] dtype is {shown(asked.dtype)}, but all formats are compared; leave dtype= out"
        )
    return format_rows(problem_of(model, revision, asked))


def problem_of(
    model: str | os.PathLike[str] | None, revision: str | None, options: LoadOptions
) -> Problem:
    """For the whole machine that the options name."""
    name, config, infos, notices = _read(model, revision)
    profile = machine_of(options, notices)
    if options.threads is not None:
        cpu = with_thread_counts(profile.cpu, [options.threads])
        profile = dataclasses.replace(profile, cpu=cpu)
    return options.problem(config, infos, profile, name=name, notices=tuple(notices))


def machine_of(options: LoadOptions, notices: list[str]) -> Profile:
    """What to plan for. notices: takes what is to be said of it."""
    if options.profile is None:
        return measured_profile(find_accelerator(options.device, notices), options, notices)
    if options.device is not None:
        raise InvalidError(
            "[plan] profile= names a machine and device= one of this machine's devices; give one "
            "of them"
        )
    notices += options.profile.notices
    return options.profile


def _read(
    model: str | os.PathLike[str] | None, revision: str | None
) -> tuple[str, ModelConfig, Mapping[str, TensorInfo] | None, list[str]]:
    """(name, configuration, tensors if the weights are there, notices)."""
    path = resolve_config(model, revision)
    if not isinstance(path, Path):
        config, weights = read_remote_model(path)
        return str(model), config, weights.tensors, list(weights.notices)
    given = os.path.expanduser(model or "")
    here = os.path.exists(given)
    if is_gguf(path):
        files = read_model(path)
        name = printable(path.stem) if here else str(model)
        return name, files.config, files.weights().tensors, []
    config = read_config(path)
    if model is None or model == BUNDLED:
        name = BUNDLED
    elif here:
        whole = path.resolve()
        name = printable(whole.parent.name if whole.name == "config.json" else whole.stem)
    else:
        return str(model), config, None, []  # an id, of which only the configuration was fetched
    if os.path.isfile(given) or not any(path.parent.glob("model*.safetensors*")):
        return name, config, None, []
    try:
        weights = read_weights(path.parent, config)
    except CheckpointError as error:
        return name, config, None, [f"planned from {path.name} alone: {error}"]
    return name, weights.config, weights.tensors, list(weights.notices)
