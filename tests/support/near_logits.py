"""Logits of small models, beside those that transformers computes."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from model_tensors import tensors_of
from plans import make_plan

import small_models
from engine_helpers import Logits, prompt_of
from helm import _helm
from helm.model.families import load_config

LENGTHS = [1, 7, 512, 513]
ULP = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
ROUNDING_TIERS = ("avx512bf16", "amx")  # round activations that meet bf16 weights
BEST_EXACT_TIER = [
    tier["name"]
    for tier in _helm.isa_tiers()
    if tier["available"] and tier["name"] not in ROUNDING_TIERS
][-1]


def engine_of(
    name: str, stored: str = "f32", policy: str | None = None, **options: object
) -> _helm.Engine:
    """Of weights stored so. policy: how they are held, if otherwise."""
    return engine_in(small_models.model_dir(name, stored), policy, **options)


def engine_in(folder: Path, policy: str | None = None, **options: object) -> _helm.Engine:
    arguments = {
        "threads": 2,
        "memory_bytes": 4 << 30,
        "kv_dtype": "f32",
        **options,
    }
    plan = make_plan(load_config(folder), tensors_of(folder), dtype=policy, **arguments)
    return _helm.Engine(plan.to_json(), str(folder))


@cache
def reference_model(name: str, dtype: str) -> torch.nn.Module:
    """transformers computing in f32 with the weights as stored in `dtype`."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        small_models.model_dir(name, dtype), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def reference_logits(name: str, dtype: str, length: int) -> Logits:
    """Computed in f64, as far as transformers can: its f32 is no nearer to that than ours."""
    model = reference_model(name, dtype)
    if not hasattr(model.config, "num_experts_per_tok"):  # its experts know no f64
        model = model.double()
    with torch.no_grad():
        return model(torch.tensor([prompt_of(length)])).logits[0].numpy()


def settled_rows(name: str, dtype: str, length: int, ulps: float) -> int:
    """Of the reference's logits, from the first, those that its own roundings leave where they are:
    a mixture that chooses between two experts that are as good ends them, for all tokens behind."""
    if name not in small_models.MIXTURES:
        return length
    want, settled = reference_logits(name, dtype, length), length
    bound = ulps * ULP["f32"] * np.abs(want).max(axis=-1, keepdims=True)
    for seed in range(4):
        model = copy.deepcopy(reference_model(name, dtype))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 2e-7 * torch.randn(weight.shape, generator=generator))
            found = model(torch.tensor([prompt_of(length)])).logits[0].numpy()
        moved = (np.abs(found - want) > bound).any(axis=-1)
        settled = min(settled, int(moved.argmax()) if moved.any() else length)
    return settled


def assert_close(got: Logits, want: Logits, ulps: float, what: str) -> None:
    """Every logit within `ulps` f32 roundings of its row's scale: the sums that make up a logit
    have terms of that size, and each layer adds a few roundings."""
    bound = ulps * ULP["f32"] * np.abs(want).max(axis=-1, keepdims=True)
    error = np.abs(got.astype(np.float64) - want)
    wrong = ~(error <= bound)  # NaN fails
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        pytest.fail(
            f"{what}: token {row}, logit {column} is {got[row, column]}, expected "
            f"{want[row, column]}, bound {bound[row, 0]:.3g}; {wrong.sum()} of {wrong.size} differ"
        )
