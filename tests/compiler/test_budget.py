"""What a plan says of each device's memory against what the engine takes there."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from model_tensors import tensors_of
from plans import make_plan

import search_cases
import small_models
from helm import _helm
from helm.compiler.advice import costed_graph
from helm.compiler.kv_options import KvOptions
from helm.compiler.load_cost import LoadingRequest
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import search
from helm.errors import OutOfMemoryError
from helm.machine.profile import Profile
from helm.model.families import build_graph, load_config
from helm.plan.records import Loading, Workload
from helm.plan.schema import MemoryUse, Plan
from whole import WHOLE, one_in

# The last weight on a device need not be padded; all else is exact.
PADDING = {"weights": 256, "kv": 1, "activations": 1, "staging": 1}
WORK = Workload(70, 20, 3, 100)
MOST_LAYOUTS = 5  # of one model and space; HELM_TEST_WHOLE=1 takes all
SPACES = (Space(prefill=("compute",)), Space(prefill=("visit",), visit_steps=(64, 256)))


def scaled(rates: Any, factor: float) -> Any:
    if isinstance(rates, dict):
        return {name: scaled(inner, factor) for name, inner in rates.items()}
    return rates * factor


def fast_accelerator() -> Profile:
    """A machine on which the more there is on the accelerator the better."""
    document = search_cases.random_profile(3)
    for site in ("accelerator", "link"):
        for key, value in document[site].items():
            if key.endswith(("_per_s", "_flops")):
                document[site][key] = scaled(value, 1e3)
    return Profile.from_json(json.dumps(document))


OPTIONS = {"max_sequences": 3, "page_tokens": 16, "step_tokens": 24, "memory_bytes": 1 << 30}


def plans_of(
    name: str,
    dtype: str,
    space: Space,
    kv_options: KvOptions | None = None,
    most: int = MOST_LAYOUTS,
    **more: Any,
) -> list[Plan]:
    """The best plan with as much accelerator memory as each layout takes, `most` of them."""
    folder = small_models.model_dir(name, dtype)
    config, tensors = load_config(folder), tensors_of(folder)
    options = {**OPTIONS, **more}
    alone = make_plan(config, tensors, threads=2, context=100, **options)
    graph = build_graph(config)
    limits = ResourceLimits(
        1 << 30, 1 << 40, step_tokens=24, page_tokens=options["page_tokens"], sequences=3
    )
    profile = fast_accelerator()
    ranked = search(costed_graph(alone, graph), profile, WORK, limits, space).ranked
    count = len(ranked) if WHOLE else min(most, len(ranked))
    layouts = [ranked[i * len(ranked) // count] for i in range(count)]
    return [
        make_plan(
            config, tensors, profile=profile, workload=WORK, space=space,
            accelerator_bytes=layout.total_bytes("accelerator"), kv_options=kv_options,
            **options,
        )
        for layout in layouts
    ]  # fmt: skip


def check_memory(plan: Plan, folder: str) -> None:
    """The engine takes what the plan states for it, on each of its devices."""
    devices = _helm.Engine(plan.to_json(), folder, device="sim").stats["devices"]
    assert {use["device"] for use in devices} == plan.memory.keys()
    for use in devices:
        stated = plan.memory[use["device"]]
        for item in PADDING:
            spare = getattr(stated, f"{item}_bytes") - use[f"{item}_bytes"]
            assert 0 <= spare < PADDING[item], (item, spare, use["device"], plan.schedule)
        assert use["workspace_bytes"] <= stated.workspace_bytes
        assert use["peak_bytes"] <= use["budget_bytes"]
        assert use["budget_bytes"] == stated.total_bytes + stated.reserve_bytes
        if use["device"] == "accelerator":  # the host's reserve has room for buffers of loading
            assert use["peak_bytes"] <= stated.total_bytes


MODELS = [*((name, "f32") for name in small_models.SOME), ("qwen3", "bf16")]
I8 = [
    ("qwen3", "f16", {"kv_dtype": "i8"}),
    ("llama_one_kv_head", "f32", {"kv_dtype": "i8", "page_tokens": 21}),  # padded scales
]


@pytest.mark.parametrize(
    ("name", "dtype", "more", "space"),
    [
        (*model, space)
        for place, model in enumerate([*((*model, {}) for model in MODELS), *I8])
        for space in (SPACES if WHOLE else SPACES[place % 2 :: 2])
    ],
)
def test_the_engine_takes_what_the_plan_says(
    name: str, dtype: str, more: dict[str, Any], space: Space
) -> None:
    placements, streamed = set(), []
    for plan in plans_of(name, dtype, space, **more):
        placements.add(tuple(unit.device for unit in plan.units))
        check_memory(plan, str(small_models.model_dir(name, dtype)))
        streamed.append(plan.schedule.prefill == "visit")
    if space.prefill == ("compute",):
        assert len(placements) >= 3, placements
    assert streamed == [space.prefill == ("visit",)] * len(streamed)
    assert any(len(set(devices)) == 2 for devices in placements)


TIGHT = ("llama_tied_sharded", "gemma3_pattern", "qwen3_moe_dense_layers", "glm4_moe", "opt")
EXACT = MODELS if WHOLE else [*((name, "f32") for name in TIGHT), ("qwen3", "bf16")]
MAPPED = [("qwen3", "bf16"), ("opt_350m", "f32"), ("llama_one_kv_head", "f32")]


@pytest.mark.parametrize(
    ("name", "dtype", "weights"),
    [*((*model, "copied") for model in EXACT), *((*model, "mapped") for model in MAPPED)],
)
def test_no_plan_is_refused_in_its_own_budget_and_no_byte_less_will_do(
    name: str, dtype: str, weights: Loading
) -> None:
    """Without a reserve beyond what plans need themselves."""
    folder = small_models.model_dir(name, dtype)
    asked: dict[str, Any] = {"reserve_bytes": 0, "loading": LoadingRequest(weights=weights)}
    config, tensors = load_config(folder), tensors_of(folder)
    plans = [
        make_plan(config, tensors, threads=threads, context=100, **{**OPTIONS, **asked})
        for threads in (1, 3)
    ]
    for space in SPACES:
        plans += plans_of(name, dtype, space, most=2, **asked)
        kv = plans[-1].kv
        options = KvOptions("cpu", vram_bytes=9 * kv.page_bytes * len(kv.layers))
        plans += plans_of(name, dtype, space, options, most=2, **asked)
    if not all(layer.window for layer in plans[0].kv.layers):  # of those nothing overflows
        assert any(plan.overflows for plan in plans)
    for plan in plans:
        stated = plan.memory["cpu"]
        use = host_use(plan, str(folder))
        assert use["peak_bytes"] <= use["budget_bytes"]
        assert use["budget_bytes"] == stated.total_bytes + stated.reserve_bytes
        if plan.units_accelerator == 0:
            assert stated.reserve_bytes == 0
        for bytes in (use["peak_bytes"] // 2, use["peak_bytes"] - 1):
            memory = {**plan.memory, "cpu": MemoryUse(bytes, 0, 0, 0)}
            with pytest.raises(OutOfMemoryError, match=f"the plan's budget there is {bytes} and"):
                host_use(dataclasses.replace(plan, memory=memory), str(folder))
        memory = {**plan.memory, "cpu": MemoryUse(0, use["peak_bytes"], 0, 0)}
        assert host_use(dataclasses.replace(plan, memory=memory), str(folder))["kind"] == "cpu"


def host_use(plan: Plan, folder: str) -> dict[str, Any]:
    """What a loaded engine says of the host's memory."""
    found: dict[str, Any] = _helm.Engine(plan.to_json(), folder, device="sim").stats["devices"][0]
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "site"),
    one_in(
        2,
        [
            ("llama_one_kv_head", "f32", "stream"), ("llama_one_kv_head", "f32", "cpu"),
            ("qwen2_window", "f32", "cpu"), ("qwen2_window", "f32", "stream"),
            ("qwen3", "bf16", "stream"), ("qwen3", "bf16", "cpu"),
            ("opt_350m", "f32", "cpu"), ("opt_350m", "f32", "stream"),
        ],
    ),
)  # fmt: skip
def test_and_where_kv_overflows(name: str, dtype: str, site: str) -> None:
    folder = str(small_models.model_dir(name, dtype))
    found = set()
    for space in SPACES:
        full = plans_of(name, dtype, space)[0]
        block = full.kv.page_bytes * len(full.kv.layers)  # with a window or without
        for slots in (9, 18):  # of 21; a step may need eight
            options = KvOptions(site, vram_bytes=slots * block + 7)
            for plan in plans_of(name, dtype, space, kv_options=options):
                if not plan.overflows:
                    continue
                found.add((plan.units_cpu > 1, plan.schedule.prefill))
                assert plan.schedule.overflow == site
                assert plan.memory["accelerator"].kv_bytes <= slots * block
                check_memory(plan, folder)
    assert found >= {(False, "compute"), (True, "compute")}
    windows = any(layer.window for layer in full.kv.layers)  # which make room for what overflows
    assert windows or (True, "visit") in found
