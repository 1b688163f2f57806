"""Plans over two devices against the CPU alone: every family, every placement, every schedule."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from model_tensors import tensors_of
from plans import make_plan

import small_models
from engine_helpers import greedy, logits_of, partitioned, prompt_of
from helm import _helm
from helm.compiler.load_cost import LoadingRequest
from helm.errors import DeviceError, InvalidError, OutOfMemoryError
from helm.model.families import load_config
from helm.model.hub import bundled_model
from helm.plan.schema import Plan
from helm.plan.units import DeviceSpec
from whole import WHOLE, one_in

DEVICE = os.environ.get("HELM_TEST_DEVICE", "sim")  # "cuda" on a machine with a GPU
PROMPTS = [prompt_of(n) for n in (37, 5, 61, 18)]
NEW = 12


def plan_of(name: str, dtype: str = "f32", **options: object) -> Plan:
    folder = small_models.model_dir(name, dtype)
    arguments = {
        "threads": 2, "memory_bytes": 4 << 30, "kv_dtype": "f32", "page_tokens": 16,
        "step_tokens": 24, "max_sequences": 4, "context": 100, **options,
    }  # fmt: skip
    return make_plan(load_config(folder), tensors_of(folder), **arguments)


def engine_of(plan: Plan, name: str, dtype: str = "f32", device: str = DEVICE) -> _helm.Engine:
    folder = small_models.model_dir(name, dtype)
    return _helm.Engine(plan.to_json(), str(folder), device=device)


MODES = ((False, 1), (True, 2))  # whether steps overlap, groups of requests


def cuts(units: int) -> list[tuple[str, ...]]:
    """The first k units on the CPU, the rest on the accelerator, for every k."""
    return [("cpu",) * k + ("accelerator",) * (units - k) for k in range(units + 1)]


@pytest.mark.parametrize("name", small_models.CASES)
def test_every_cut_gives_the_tokens_of_the_cpu(name: str) -> None:
    plan = plan_of(name)
    alone = engine_of(plan, name)
    one, four = greedy(alone, PROMPTS[:1], NEW), greedy(alone, PROMPTS, NEW)
    some = one_in(3 if name in small_models.UNLIKE else 6, enumerate(cuts(len(plan.units))), name)
    for place, devices in some:
        for overlap, groups in MODES if WHOLE else MODES[place % 2 :: 2]:
            cut = partitioned(plan, devices, overlap=overlap, decode_groups=groups)
            engine = engine_of(Plan.from_json(cut.to_json()), name)
            assert greedy(engine, PROMPTS[:1], NEW) == one, devices
            assert greedy(engine, PROMPTS, NEW) == four, devices


def test_a_second_accelerator_is_refused_by_name_before_anything_is_loaded() -> None:
    plan = plan_of("qwen3")
    cut = partitioned(plan, ("cpu", "cpu", "accelerator", "cpu"))
    devices = (*cut.devices, DeviceSpec("accelerator1", "accelerator"))
    text = Plan.from_json(dataclasses.replace(cut, devices=devices).to_json()).to_json()
    with pytest.raises(InvalidError, match='a second accelerator, "accelerator1" beside "accel'):
        _helm.Engine(text, "/nowhere", device="nothing")


@pytest.mark.parametrize("name", ["qwen3", "opt_350m", "qwen3_moe"])
def test_any_placement_gives_the_tokens_of_the_cpu(name: str) -> None:
    """A tied head apart from the embedding has the shared matrix on both devices."""
    plan = plan_of(name)
    want = greedy(engine_of(plan, name), PROMPTS, NEW)
    places = itertools.product(("cpu", "accelerator"), repeat=len(plan.units))
    for devices in one_in(3, places, name):
        cut = partitioned(plan, devices)
        assert greedy(engine_of(cut, name), PROMPTS, NEW) == want, devices


@pytest.mark.parametrize("name", small_models.SOME)
def test_shared_prefixes_on_any_device(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    prompts = [prompt_of(40) + tail for tail in ([1], [2, 3], prompt_of(9), [4], [5, 6], [7])]
    want = greedy(engine_of(plan, name), prompts, NEW)
    for place, devices in one_in(3, enumerate(cuts(len(plan.units))), name):
        for overlap, groups in MODES if WHOLE else MODES[place % 2 :: 2]:
            cut = partitioned(plan, devices, overlap=overlap, decode_groups=groups)
            engine = engine_of(cut, name)
            prefixes = _helm.PrefixCache(engine)
            assert greedy(engine, prompts, NEW, prefixes) == want, devices
            assert greedy(engine, prompts, NEW, prefixes) == want, devices
            held = prefixes.save(prompts[2] + want[2], str(tmp_path / "x.kv"))
            other = engine_of(plan, name)
            loaded = _helm.PrefixCache(other)
            tokens, _ = loaded.load(str(tmp_path / "x.kv"))
            assert tokens == (prompts[2] + want[2])[:held]
            assert loaded.open(tokens, 100)[1] == held - 1


@pytest.mark.parametrize("site", ["stream", "cpu"])
def test_shared_prefixes_where_kv_pages_overflow(site: str) -> None:
    plan = plan_of("qwen3")
    prompts = [prompt_of(40) + tail for tail in ([1], [2, 3], prompt_of(9), [4], [5, 6], [7])]
    want = greedy(engine_of(plan, "qwen3"), prompts, NEW)
    cut = partitioned(plan, ("cpu", "cpu", *("accelerator",) * (len(plan.units) - 2)))
    layers = cut.schedule.pages["accelerator"] // plan.kv.blocks
    pages = {"cpu": plan.kv.pages - 10 * layers, "accelerator": 10 * layers}
    schedule = dataclasses.replace(cut.schedule, pages=pages, overflow=site)
    engine = engine_of(dataclasses.replace(cut, schedule=schedule), "qwen3")
    prefixes = _helm.PrefixCache(engine)
    for _ in range(3):
        assert greedy(engine, prompts, NEW, prefixes) == want
    assert engine.stats["evicted_blocks"] > 0


@pytest.mark.parametrize("head", ["cpu", "accelerator"])
def test_a_tied_matrix_has_a_format_on_each_device(head: str) -> None:
    """Compressed weights of the CPU lie as bf16 on the accelerator, in one plan."""
    folder = bundled_model()
    config, infos = load_config(folder), tensors_of(folder)
    assert config.tie_word_embeddings
    options = {"threads": 2, "memory_bytes": 4 << 30, "context": 100, "max_sequences": 1}
    plain, small = (
        make_plan(config, infos, loading=LoadingRequest(weights), **options)
        for weights in ("copied", "compressed")
    )
    devices = ("cpu", "cpu", *("accelerator",) * (len(plain.units) - 3), head)
    cut = Plan.from_json(partitioned(small, devices).to_json())
    name = next(t.name for t in cut.tensors if "embed_tokens" in t.name)
    held = {s.device: s.format for s in cut.slices if s.tensor == name}
    assert held == {"cpu": "bf16c", **({"accelerator": "bf16"} if head == "accelerator" else {})}
    assert {s.format for s in cut.slices if s.device == "accelerator"} == {"f32", "bf16"}
    want = logits_of(_helm.Engine(plain.to_json(), str(folder)), PROMPTS[2])
    got = logits_of(_helm.Engine(cut.to_json(), str(folder), device=DEVICE), PROMPTS[2])
    if DEVICE.startswith("sim"):
        np.testing.assert_array_equal(got, want)
    else:
        bound = 32 * 2.0**-8 * np.abs(want).max(axis=-1, keepdims=True)
        assert (np.abs(got - want) <= bound).all()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sixteen_bit_weights_and_cache(dtype: str) -> None:
    plan = plan_of("qwen3", dtype, kv_dtype=dtype)
    devices = ("cpu", "cpu", *("accelerator",) * (len(plan.units) - 2))
    want = logits_of(engine_of(plan, "qwen3", dtype), PROMPTS[2])
    got = logits_of(engine_of(partitioned(plan, devices), "qwen3", dtype), PROMPTS[2])
    if DEVICE.startswith("sim"):
        np.testing.assert_array_equal(got, want)
    else:  # activations are rounded to the weights' dtype in products of many rows
        rounding = {"f16": 2.0**-11, "bf16": 2.0**-8}[dtype]
        bound = 32 * rounding * np.abs(want).max(axis=-1, keepdims=True)
        assert (np.abs(got - want) <= bound).all()


def test_weights_of_each_device_lie_there_alone() -> None:
    plan = plan_of("llama")
    total = sum(4 * math.prod(tensor.shape) for tensor in plan.tensors)
    devices = ("cpu", "cpu", "accelerator", "accelerator")
    cpu, own = engine_of(partitioned(plan, devices), "llama").stats["devices"]
    assert (cpu["kind"], own["kind"]) == ("cpu", DEVICE.split(":")[0])
    padding = 256 * len(plan.tensors)
    assert total <= cpu["weights_bytes"] + own["weights_bytes"] <= total + padding
    assert cpu["weights_bytes"] > 0
    assert own["peak_bytes"] <= own["budget_bytes"]


def test_a_device_that_cannot_be_had_is_an_error() -> None:
    plan = plan_of("llama")
    cut = partitioned(plan, ("accelerator",) * len(plan.units))
    with pytest.raises(OutOfMemoryError, match="simulated accelerator"):
        engine_of(cut, "llama", device="sim:vram=100KiB")
    with pytest.raises(InvalidError, match="unknown device"):
        engine_of(cut, "llama", device="tpu")
    try:
        _helm.accelerator_info("cuda")
    except DeviceError:
        with pytest.raises(DeviceError):
            engine_of(cut, "llama", device="cuda")


def test_progress_counts_the_bytes_of_both_devices() -> None:
    plan = plan_of("llama")
    cut = partitioned(plan, ("cpu", "cpu", "accelerator", "accelerator"))
    seen: list[tuple[int, int]] = []
    folder = small_models.model_dir("llama")
    _helm.Engine(
        cut.to_json(), str(folder), device=DEVICE, progress=lambda *counts: seen.append(counts)
    )
    total = sum(4 * math.prod(tensor.shape) for tensor in plan.tensors)
    assert seen[-1] == (total, total)


def test_a_plan_that_lacks_what_an_accelerator_needs_is_refused() -> None:
    plan = plan_of("llama")
    cut = partitioned(plan, ("cpu", "cpu", "accelerator", "accelerator")).to_dict()
    for change, message in (
        (lambda p: p["memory"].pop("accelerator"), "accelerator"),
        (lambda p: p["schedule"]["pages"].update(accelerator=1), "add up"),
        (lambda p: p["schedule"].update(decode_groups=3), "decode_groups"),
        (lambda p: p["units"][1].update(device="gpu"), "device"),
    ):
        broken = copy.deepcopy(cut)
        change(broken)
        with pytest.raises(InvalidError, match=message):
            _helm.Engine(json.dumps(broken), "", device="sim")
        with pytest.raises(InvalidError, match=message):
            Plan.from_json(json.dumps(broken))
