"""Problems of a model that memory does not hold, and their solutions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from helm.compiler.planning_problem import Problem
from helm.compiler.problem import Drive
from helm.compiler.solve import Study, from_disk, solve
from helm.errors import OutOfMemoryError
from helm.machine.profile import Profile, load_profile
from helm.model.families import read_config
from helm.model.weight_names import read_weights
from helm.plan.records import Workload
from synthetic_folder import synthetic_folder

WORK = Workload(64, 16, context=128)
RATE = 1e8


def model_folder(folder: Path) -> Path:
    """Of eight layers, made there."""
    return synthetic_folder(
        folder,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
    )


def machine() -> Profile:
    return dataclasses.replace(load_profile("thesis-3090"), accelerator=None, link=None)


def problem(folder: Path, memory: int, **options: object) -> Problem:
    weights = read_weights(folder, read_config(folder / "config.json"))
    return Problem(
        weights.config, weights.tensors, workload=WORK, max_sequences=1, step_tokens=32,
        threads=machine().cpu.threads, profile=machine(), memory_bytes=memory,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def solved(problem: Problem, rate: float = RATE) -> Study:
    """In memory or, where nothing fits there, with weights on disk."""
    try:
        return solve(problem)
    except OutOfMemoryError as refused:
        return from_disk(problem, [Drive("model", rate)], refused)


def shared_problem(folder: Path, vram: int, **options: object) -> Problem:
    """Of a machine whose memories together do not hold the model. vram: bytes for weights, KV and
    what steps take; about 34 MB are scratch."""
    profile, reserve = load_profile("thesis-3090"), 64 << 20
    assert profile.accelerator is not None
    own = problem(folder, reserve + (94 << 20), reserve_bytes=reserve, **options)
    there = profile.accelerator.reserve_bytes + vram
    return dataclasses.replace(own, profile=profile, accelerator_bytes=there)
