"""Memory limits of a control group, from far too small to enough."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import cgroup
from fuzz import models
from fuzz.kind import Kind, sensible
from fuzz.programs import REFUSED
from helm.errors import OutOfMemoryError

_MODEL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "vocab_size": 16_384,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "max_position_embeddings": 16_384, "tie_word_embeddings": False,
}  # fmt: skip
_LEAST_BYTES = 160 << 20  # Python with its libraries takes about half of that
_MOST_BYTES = 3 << 30


class Container(Kind):
    """A process in a group with a memory limit: it runs, or HELM refuses with numbers; the system
    never ends it."""

    name = "container"
    limit_s = 120.0
    inputs = 40

    def __init__(self, folder: Path) -> None:
        self._model = folder / "model"
        self._model.mkdir()
        config = {**models.config_of("LlamaForCausalLM"), **_MODEL, "dtype": "bfloat16"}
        (self._model / "config.json").write_text(json.dumps(config))
        header, data = models.safetensors(models.weights_of(config), "BF16")
        path = self._model / "model.safetensors"
        path.write_bytes(models.file_of(json.dumps(header).encode(), data))

    @staticmethod
    def unavailable() -> str:
        """Why containers cannot be had here; empty where they can."""
        return cgroup.unavailable()

    def run(self, random: Random, folder: Path) -> None:
        limit = int(_LEAST_BYTES * (_MOST_BYTES / _LEAST_BYTES) ** random.random())
        work = random.choice(("logits", "logits", "batch", "logprobs", "generate"))
        options = [f"context={random.choice((256, 2048, 8192))}"]
        options.append(f"weights={random.choice(('auto', 'copied', 'mapped', 'compressed'))}")
        options.append(f"kv_dtype={random.choice(('auto', 'f32', 'i8'))}")
        program = [sys.executable, "-m", "fuzz.programs", "contained", str(self._model)]
        with cgroup.memory_cgroup(limit) as group:
            result = group.run([*program, work, ",".join(options)], env=dict(os.environ))
        told = f"{work} with {', '.join(options)} in {limit >> 20} MiB"
        sensible(not group.was_killed(result), f"{told} was killed")
        sensible(result.returncode in (0, REFUSED), f"{told}: {_last(result.stderr)}")
        if result.returncode == REFUSED:
            sensible("MiB" in result.stderr or "GiB" in result.stderr, f"{told}: {result.stderr}")
            raise OutOfMemoryError(result.stderr.strip())
        sensible("done" in result.stdout, f"{told}: {_last(result.stderr)}")


def _last(text: str) -> str:
    """The last line, which says what an exception was."""
    return text.strip().rpartition("\n")[2]
