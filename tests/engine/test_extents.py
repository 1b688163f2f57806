"""Weights stored as several runs of rows, over files and with other rows between them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from plans import make_plan

import small_models
from engine_helpers import logits_of, partitioned, prompt_of
from helm import _helm
from helm.compiler.load_cost import LoadingRequest
from helm.model.checkpoint import TensorInfo
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.config import ModelConfig
from helm.model.families import load_config
from helm.model.hub import bundled_model
from helm.model.source import Extent, row_width, stored_bytes
from helm.plan.schema import Plan

PROMPT = prompt_of(40)


def scattered(source: Path, folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint, of each the first rows in one file, of the others those that
    alternate in a second, at odd places, and the last in a third."""
    rng, infos = random.Random(5), {}
    names = ("first.bin", "deep/second.bin", "third.bin")
    (folder / "deep").mkdir()
    data = {name: bytearray(rng.randbytes(3 + i)) for i, name in enumerate(names)}
    for name, info in read_checkpoint(source).items():
        (extent,) = info.extents
        rows = info.shape[0]
        size = stored_bytes(info.stored, row_width(info.shape))
        stored = (source / extent.file).read_bytes()[extent.offset :][: rows * size]
        cuts = sorted(rng.sample(range(1, rows), 3))
        runs = [stored[a * size : b * size] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
        one, other = (
            [run[i : i + size] for i in range(0, len(run), size)] for run in (runs[1], runs[2])
        )
        junk = rng.randbytes(size)
        pairs = [
            (one[i] if i < len(one) else junk) + (other[i] if i < len(other) else junk)
            for i in range(max(len(one), len(other)))
        ]
        begins = [len(data[file]) for file in names]
        for file, run in zip(names, (runs[0], b"".join(pairs), runs[3]), strict=True):
            data[file] += run
        extents = (
            Extent(names[0], begins[0], cuts[0]),
            Extent(names[1], begins[1], cuts[1] - cuts[0], 2 * size),
            Extent(names[1], begins[1] + size, cuts[2] - cuts[1], 2 * size),
            Extent(names[2], begins[2], rows - cuts[2], size),
        )
        infos[name] = TensorInfo(name, info.shape, info.stored, extents)
    for file, content in data.items():
        (folder / file).write_bytes(content)
    return infos


def plan_of(config: ModelConfig, infos: dict[str, TensorInfo], weights: str) -> Plan:
    return make_plan(
        config, infos, threads=2, memory_bytes=4 << 30, context=64, max_sequences=1,
        loading=LoadingRequest(weights),
    )  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "weights"),
    [
        ("llama", "f32", "copied"),
        ("opt_350m", "bf16", "copied"),
        ("qwen3", "f16", "mapped"),
        ("bundled", "bf16", "compressed"),
    ],
)
def test_runs_of_rows_are_stacked(
    name: str, dtype: str, weights: str, split: bool, tmp_path: Path
) -> None:
    source = bundled_model() if name == "bundled" else small_models.model_dir(name, dtype)
    config, infos = load_config(source), scattered(source, tmp_path)
    assert {len(info.extents) for info in infos.values()} == {4}
    found = []
    for folder, tensors in ((source, read_checkpoint(source)), (tmp_path, infos)):
        plan = plan_of(config, tensors, weights)
        if split:
            half = len(plan.units) // 2  # within a layer or between two
            devices = ["cpu"] * half + ["accelerator"] * (len(plan.units) - half)
            plan = partitioned(plan, devices)
        plan = Plan.from_json(plan.to_json())
        engine = _helm.Engine(plan.to_json(), str(folder), device="sim" if split else "cpu")
        found.append((plan, logits_of(engine, PROMPT)))
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert found[0][0].loading == ("copied" if split and weights == "mapped" else weights)
    # What lies in pieces is copied, even where mapped weights were asked for.
    assert found[1][0].loading == ("compressed" if weights == "compressed" else "copied")
