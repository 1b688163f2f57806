"""Logits of small models, as digests: on the CPU, and split between it and a simulated device.

Weights are made of integers, so that they are the same everywhere. `python -m golden.logits CASES`
prints those of some cases for the instruction set that HELM_CPU_ISA names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from model_tensors import tensors_of
from plans import make_plan
from safetensors.numpy import load_file, save_file

import small_models
from engine_helpers import greedy, logits_in_chunks, partitioned, prompt_of
from helm import _helm
from helm.model.families import load_config
from helm.plan.schema import Plan

TESTS = Path(__file__).resolve().parents[1]
DTYPES = ("f32", "f16", "bf16")
_PROMPT = prompt_of(61)
_PROMPTS = [prompt_of(n) for n in (37, 5, 61, 18)]
_NEW = 12
_MIXTURES = ("qwen3_moe", "glm4_moe")


def cases() -> list[str]:
    """Every small model in f32, of mixtures two, and one of every family in the others."""
    names = [name for name in small_models.CASES if name not in small_models.MIXTURES]
    wide = [name for name in names if name in ("llama", "qwen3", "opt")]
    return [
        *(f"{name}/f32" for name in (*_MIXTURES, *names)),
        *(f"{name}/{dtype}" for name in wide for dtype in DTYPES[1:]),
    ]


def outcomes(names: Sequence[str], isa: str) -> dict[str, dict[str, str]]:
    """Digests of some cases by placement, made in a process of its own."""
    path = os.pathsep.join((str(TESTS / "support"), os.environ.get("PYTHONPATH", "")))
    result = subprocess.run(
        [sys.executable, "-m", "golden.logits", *names], cwd=TESTS, text=True, check=True,
        env={**os.environ, "HELM_CPU_ISA": isa, "PYTHONPATH": path}, stdout=subprocess.PIPE,
        timeout=600,
    )  # fmt: skip
    found: dict[str, dict[str, str]] = json.loads(result.stdout)
    return found


def digests(case: str) -> dict[str, str]:
    """By placement."""
    name, dtype = case.split("/")
    with tempfile.TemporaryDirectory() as folder:
        _write(name, dtype, Path(folder))
        plan = make_plan(
            load_config(Path(folder)), tensors_of(Path(folder)), threads=2, context=100,
            memory_bytes=4 << 30, page_tokens=16, step_tokens=24, max_sequences=4,
        )  # fmt: skip
        return {
            where: _digest(placed, folder, where) for where, placed in _placements(plan).items()
        }


def _placements(plan: Plan) -> dict[str, Plan]:
    """On the CPU; a half on a device; weights that visit it; KV pages that leave it."""
    count = len(plan.places)
    devices = ("cpu",) * (count // 2) + ("accelerator",) * (count - count // 2)
    split = partitioned(plan, devices)
    blocks = plan.kv.blocks
    visits = dataclasses.replace(
        split.schedule, prefill="visit", visit_tokens=4, visit_pages=blocks
    )
    found = {"cpu": plan, "split": split, "visits": dataclasses.replace(split, schedule=visits)}
    kv = dataclasses.replace(plan.kv, window_blocks=0)  # with all positions, as where it overflows
    whole = partitioned(dataclasses.replace(plan, kv=kv), devices)
    layers = whole.schedule.pages["accelerator"] // blocks
    pages = {"cpu": kv.pages - 10 * layers, "accelerator": 10 * layers}
    for site in ("stream", "cpu") if layers else ():
        schedule = dataclasses.replace(whole.schedule, pages=pages, overflow=site)
        found[f"overflow-{site}"] = dataclasses.replace(whole, schedule=schedule)
    return found


def _digest(plan: Plan, folder: str, where: str) -> str:
    """Of all logits of a prompt in one step and in three, and of tokens of several at once."""
    device = "sim" if plan.units_accelerator else "cpu"
    engine = _helm.Engine(plan.to_json(), folder, device=device)
    found = hashlib.sha256()
    for chunk in (7, 24):
        found.update(logits_in_chunks(engine, _PROMPT, chunk).tobytes())
    found.update(json.dumps(greedy(engine, _PROMPTS, _NEW)).encode())
    stats = engine.stats
    assert (stats["streamed_steps"] > 0) == (where == "visits")
    assert (stats["evicted_blocks"] > 0) == where.startswith("overflow")
    return found.hexdigest()[:16]


def _write(name: str, dtype: str, folder: Path) -> None:
    """The model with weights of k / 512, which every dtype holds exactly."""
    model = small_models.make_model(name, dtype)
    model.config.save_pretrained(folder)
    random = np.random.RandomState(7)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    tensors, state = {}, model.state_dict()
    if name in _MIXTURES:  # modules name experts otherwise than checkpoints
        state = load_file(small_models.model_dir(name) / _FILE)
    for key, parameter in sorted(state.items()):
        numbers = random.randint(-127, 128, tuple(parameter.shape)) / 512
        if "norm" in key and key.endswith("weight"):
            numbers = 1 + numbers
        if key not in tied or not model.config.tie_word_embeddings:
            tensors[key] = numbers.astype(np.float32)
    if dtype != "f32":
        import torch
        from safetensors.torch import save_file as save_torch

        own = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
        save_torch({k: torch.tensor(v).to(own) for k, v in tensors.items()}, folder / _FILE)
    else:
        save_file(tensors, folder / _FILE)


_FILE = "model.safetensors"

if __name__ == "__main__":
    print(json.dumps({case: digests(case) for case in sys.argv[1:]}))
