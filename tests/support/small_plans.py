"""Plans of small models."""

from __future__ import annotations

from model_tensors import tensors_of
from plans import make_plan

import small_models
from helm.model.families import load_config

GIB = 1 << 30


def plan_of(name="qwen3", dtype_stored="f32", **options):
    folder = small_models.model_dir(name, dtype_stored)
    arguments = {"threads": 1, "memory_bytes": 4 * GIB, **options}
    return make_plan(load_config(folder), tensors_of(folder), **arguments)
