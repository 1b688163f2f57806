"""Keys with a large constant bias in an i8 cache: held without it, the bias costs no digits."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_tensors import tensors_of
from plans import make_plan
from safetensors.numpy import load_file, save_file

import helm
import small_models
from engine_helpers import Logits, greedy, logits_of, partitioned, prompt_of
from helm import _helm
from helm.model.families import load_config
from helm.plan.schema import Plan
from kv_file import checksums, replaced

SIZE = 60.0  # of a bias's elements, many times what the rest of a key has
CONTEXT = 520
MODELS = ("qwen2", "qwen2_window", "llama_biases", "opt")
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@functools.lru_cache
def folder_of(name: str, yarn: bool = False) -> Path:
    """A small model whose keys have large biases."""
    folder = Path(tempfile.mkdtemp(prefix="helm-key-bias-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(small_models.model_dir(name, "f32"), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    found = [key for key in tensors if key.endswith("k_proj.bias")]
    assert found
    for key in found:
        tensors[key] = tensors[key] / tensors[key].std() * np.float32(SIZE)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if yarn:
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = YARN
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_of(name: str, yarn: bool = False, **options: Any) -> Plan:
    folder = folder_of(name, yarn)
    arguments = {
        "threads": 2, "memory_bytes": 4 << 30, "kv_dtype": "i8", "page_tokens": 200,
        "step_tokens": 64, "max_sequences": 4, "context": CONTEXT, **options,
    }  # fmt: skip
    return make_plan(load_config(folder), tensors_of(folder), **arguments)


def engine_of(plan: Plan, name: str, yarn: bool = False, **options: Any) -> _helm.Engine:
    return _helm.Engine(plan.to_json(), str(folder_of(name, yarn)), **options)


def logits(name: str, yarn: bool = False, **options: Any) -> Logits:
    return logits_of(engine_of(plan_of(name, yarn, **options), name, yarn), prompt_of(500))


def agreement(exact: Logits, other: Logits) -> float:
    return float((exact.argmax(-1) == other.argmax(-1)).mean())


@pytest.mark.parametrize(
    ("name", "yarn"), [*((name, False) for name in MODELS), ("llama_biases", True)]
)
def test_the_bias_costs_no_digits(name: str, yarn: bool) -> None:
    exact = logits(name, yarn, kv_dtype="f32")
    for page_tokens in (16, 200):
        got = logits(name, yarn, page_tokens=page_tokens)
        assert agreement(exact, got) >= 0.9, page_tokens


def test_logits_have_the_same_bits_however_they_are_computed() -> None:
    want = logits("qwen2")
    for options in ({"threads": 1}, {"threads": 3}, {"step_tokens": 5}, {"step_tokens": 500}):
        np.testing.assert_array_equal(logits("qwen2", **options), want)
    cut = partitioned(plan_of("qwen2"), ["cpu", "accelerator", "cpu", "accelerator"])
    engine = engine_of(cut, "qwen2", device="sim")
    np.testing.assert_array_equal(logits_of(engine, prompt_of(500)), want)


def test_tokens_are_those_of_an_exact_cache_wherever_pages_lie() -> None:
    prompts = [prompt_of(n) for n in (90, 5, 61)]
    options: dict[str, Any] = {"context": 140, "page_tokens": 16, "step_tokens": 24}
    plan = plan_of("qwen2", **options)
    want = greedy(engine_of(plan, "qwen2"), prompts, 12)
    cut = partitioned(plan, ["cpu", "accelerator", "accelerator", "cpu"])
    pages = dict(cut.schedule.pages)
    kept = 12 * 2  # blocks of the two layers there
    pages = {"cpu": pages["cpu"] + pages["accelerator"] - kept, "accelerator": kept}
    for overflow in ("stream", "cpu"):
        schedule = dataclasses.replace(cut.schedule, pages=pages, overflow=overflow)
        engine = engine_of(dataclasses.replace(cut, schedule=schedule), "qwen2", device="sim")
        assert greedy(engine, prompts, 12) == want, overflow
        assert engine.stats["evicted_blocks"] > 0
        assert (engine.stats["cpu_attentions"] > 0) == (overflow == "cpu")


def test_kept_and_saved_keys_lack_the_bias_too(tmp_path: Path) -> None:
    prompt = prompt_of(300)
    engine = engine_of(plan_of("qwen2"), "qwen2")
    prefixes = _helm.PrefixCache(engine)
    want = greedy(engine, [prompt], 10, prefixes)
    assert greedy(engine, [prompt], 10, prefixes) == want
    prefixes.save(prompt, str(tmp_path / "a.kv"), "", None)
    checksums((tmp_path / "a.kv").read_bytes())
    for page_tokens in (16, 200, 512):
        other = engine_of(plan_of("qwen2", page_tokens=page_tokens), "qwen2")
        loaded = _helm.PrefixCache(other)
        loaded.load(str(tmp_path / "a.kv"), None)
        assert greedy(other, [prompt], 10, loaded) == want, page_tokens
    # A file of keys as they are, as they once were saved, is another cache.
    file = (tmp_path / "a.kv").read_bytes()
    (tmp_path / "a.kv").write_bytes(replaced(file, b"i8 without key biases", b"i8"))
    with pytest.raises(helm.InvalidError, match="another dtype: i8 there, i8 without key biases"):
        prefixes.load(str(tmp_path / "a.kv"), None)


def test_other_caches_and_models_are_as_before(tmp_path: Path) -> None:
    """What a file says it holds tells who leaves a bias out."""
    for name, dtype in (("qwen2", "f16"), ("qwen2", "f32")):
        engine = engine_of(plan_of(name, kv_dtype=dtype), name)
        prefixes = _helm.PrefixCache(engine)
        greedy(engine, [prompt_of(30)], 2, prefixes)
        prefixes.save(prompt_of(30), str(tmp_path / "a.kv"), "", None)
        assert b"without" not in (tmp_path / "a.kv").read_bytes()[:400]


def test_workspace_is_what_was_planned() -> None:
    for options in ({"page_tokens": 16}, {"page_tokens": 200}, {"threads": 1}):
        plan = plan_of("qwen2", **options)
        stats = engine_of(plan, "qwen2").stats
        assert stats["workspace_bytes"] <= plan.memory["cpu"].workspace_bytes
