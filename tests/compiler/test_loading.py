"""Copied, mapped or compressed weights: what the plan says of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
from plans import make_plan, study

import small_models
from helm import _helm
from helm.base.formats import tensor_bytes
from helm.compiler.advice import cpu_decode_rate
from helm.compiler.explain import loading_text, to_dict
from helm.compiler.load_cost import LoadingRequest
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import search
from helm.compiler.tensors import mappable
from helm.errors import InvalidError, OutOfMemoryError, PlanError
from helm.machine.profile import Profile, load_profile
from helm.machine.rates import LinkProfile
from helm.machine.resources import read_machine
from helm.measure import profile_cache
from helm.model.checkpoint import TensorInfo
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import build_graph, load_config
from helm.model.hub import bundled_model
from helm.model.source import Extent
from helm.plan.records import Workload
from helm.plan.schema import Plan
from helm.session.here import Target, plan_here
from helm.session.options import LoadOptions
from search_cases import GIB, config_of, model_of

PRESET = "cpu-laptop-16gb"


def known_profile(name: str = PRESET, copy: float = 2e9) -> Profile:
    profile = load_profile(name)
    cpu = dataclasses.replace(profile.cpu, mapped_matvec_ratio=0.8, copy_bytes_per_s=copy)
    return dataclasses.replace(profile, cpu=cpu)


def searched(request: LoadingRequest, profile: Profile, **options) -> Plan:
    arguments = {"workload": Workload(512, 128, 1, 4096), "max_sequences": 1, **options}
    return make_plan(config_of("llama-3.2-1b"), None, profile=profile, loading=request, **arguments)


def small_plan(dtype_stored: str = "f32", **options) -> Plan:
    folder = small_models.model_dir("llama", dtype_stored)
    arguments = {"threads": 1, "memory_bytes": 4 * GIB, **options}
    return make_plan(load_config(folder), read_checkpoint(folder), **arguments)


def test_predictions_are_those_of_the_way_chosen() -> None:
    profile = known_profile()
    copied = searched(LoadingRequest("copied"), profile)
    mapped = searched(LoadingRequest("mapped"), profile)
    assert (copied.loading, mapped.loading) == ("copied", "mapped")
    assert copied.prediction is not None
    assert mapped.prediction is not None
    assert mapped.prediction.profile == copied.prediction.profile
    fast, slow = copied.prediction.predicted, mapped.prediction.predicted
    assert slow.decode_terms["cpu_memory_s"] == pytest.approx(
        fast.decode_terms["cpu_memory_s"] / 0.8
    )
    assert slow.ttft_s >= fast.ttft_s
    assert copied.loading_choice is not None
    assert fast.decode_s / slow.decode_s == pytest.approx(copied.loading_choice.mapped_decode_ratio)
    cpu = profile.cpu.with_mapped_weights()
    best = search(
        model_of("llama-3.2-1b"), dataclasses.replace(profile, cpu=cpu),
        Workload(512, 128, 1, 4096), ResourceLimits(),
    ).best  # fmt: skip
    assert best is not None
    assert best.predicted == slow
    auto = [searched(LoadingRequest("auto", tokens), profile) for tokens in (1, 10**6)]
    assert auto[0].prediction == mapped.prediction
    assert auto[1].prediction == copied.prediction
    assert searched(LoadingRequest("mapped"), load_profile(PRESET)).prediction is not None


def test_an_accelerator_s_plan_counts_the_cpu_s_weights_alone() -> None:
    profile = known_profile("rtx-3060ti-8gb-ddr4")
    plan = make_plan(
        config_of("qwen3-8b"), None, profile=profile, max_sequences=1,
        workload=Workload(512, 128, 1, 4096), loading=LoadingRequest("copied"),
    )  # fmt: skip
    assert 0 < plan.units_cpu < len(plan.places)
    assert plan.loading_choice is not None
    units = [unit for unit in plan.units if unit.device == "cpu"]
    names = {name for unit in units for op in unit.ops for name in op.weight_names()}
    held = [t for t in plan.tensors if t.name in names and len(t.shape) == 2]
    # Vectors are stored in 16 bit and held in f32.
    assert plan.loading_choice.copy_bytes == sum(2 * math.prod(t.shape) for t in held)


def test_weights_that_visit_an_accelerator_are_copied() -> None:
    work, name = Workload(5000, 16, 1, 8192), "rtx-3060ti-8gb-ddr4"
    for profile in (load_profile(name), known_profile(name)):
        plan = make_plan(
            config_of("qwen3-14b"), None, profile=profile, max_sequences=1, workload=work,
            memory_bytes=64 * GIB, loading=LoadingRequest("auto", 1),
        )  # fmt: skip
        assert plan.schedule.prefill == "visit"
        assert plan.loading == "copied"
        assert plan.loading_choice is not None
        assert "full speed of its link" in plan.loading_choice.reason


COMPRESSING = {"compressed_ratio": {1: 1.25}, "compress_bytes_per_s": 1e9}


def compressing(name: str = PRESET) -> Profile:
    profile = known_profile(name)
    return dataclasses.replace(profile, cpu=dataclasses.replace(profile.cpu, **COMPRESSING))


def test_compressed_weights_are_priced_and_counted() -> None:
    copied, compressed = (
        searched(LoadingRequest(way), compressing()) for way in ("copied", "compressed")
    )
    assert searched(LoadingRequest("auto", 10**6), compressing()).prediction == (
        compressed.prediction
    )
    assert compressed.loading == "compressed"
    assert compressed.prediction is not None
    assert copied.prediction is not None
    terms = [p.prediction.predicted.decode_terms["cpu_memory_s"] for p in (copied, compressed)]
    assert terms[1] < terms[0] * 0.85
    choice = compressed.loading_choice
    assert choice is not None
    fewer = copied.memory["cpu"].weights_bytes - compressed.memory["cpu"].weights_bytes
    assert fewer == choice.compress_bytes - choice.compressed_bytes
    assert choice.compressed_bytes == pytest.approx(0.765 * choice.compress_bytes, rel=0.01)
    found = study("a model", config_of("llama-3.2-1b"), None, compressing(), weights="compressed")
    assert found.best.predicted == found.plan.prediction.predicted
    assert found.best.memory["cpu"]["weights"] == found.plan.memory["cpu"].weights_bytes
    with pytest.raises(InvalidError, match="no bf16 matrix that would become"):
        searched(LoadingRequest("compressed"), compressing(), dtype="f16")


def test_sequences_that_run_in_waves_are_loaded_for_as_many_as_run_at_once() -> None:
    profile = compressing()
    ratios = {1: 1.25, 4: 1.05, 8: 0.9, 512: 1.0}
    cpu = dataclasses.replace(profile.cpu, compressed_ratio=ratios)
    work = Workload(512, 128, 8, 4096, "throughput")
    plan = searched(
        LoadingRequest("copied"), dataclasses.replace(profile, cpu=cpu), workload=work,
        memory_bytes=int(3.5 * GIB),
    )  # fmt: skip
    assert plan.prediction is not None
    assert plan.loading_choice is not None
    predicted, choice = plan.prediction.predicted, plan.loading_choice
    assert predicted.sequences == 4
    waits = predicted.decode_terms["cpu_memory_s"]
    products = waits + predicted.decode_terms["cpu_compute_s"]
    saved = products * (1 - 1 / 1.05)
    assert choice.compressed_decode_ratio == pytest.approx(
        predicted.decode_s / (predicted.decode_s - saved), rel=1e-3
    )
    answer_s = 2 * (predicted.prefill_terms["cpu_memory_s"] + 127 * waits) * (1 / 0.8 - 1)
    assert choice.pays_after_tokens == pytest.approx(choice.copy_s * 8 * 128 / answer_s, rel=1e-3)


def test_weights_that_visit_from_their_files_come_at_the_rate_of_memory_that_is_not_locked() -> (
    None
):
    """Unless the device can page-lock them, as it does those of a module in memory."""
    work, profile = Workload(5000, 16, 1, 8192), load_profile("thesis-4060")
    assert profile.link is not None
    slow = dataclasses.replace(
        profile.link, to_accelerator_bytes_per_s=profile.link.pageable_to_accelerator_bytes_per_s
    )

    def stream_s(loading: str, link: LinkProfile, infos: dict[str, TensorInfo] | None) -> float:
        plan = make_plan(
            config_of("qwen3-8b"), infos, profile=dataclasses.replace(profile, link=link),
            max_sequences=1, workload=work, memory_bytes=64 * GIB, loading=LoadingRequest(loading),
            space=Space(prefill=("visit",), decode_groups=(1,), kv="device"),
        )  # fmt: skip
        assert plan.prediction is not None
        return plan.prediction.predicted.prefill_terms["stream_s"]

    graph = build_graph(config_of("qwen3-8b"))
    module = {n: TensorInfo.in_memory(n, "bf16", shape) for n, shape in graph.tensors.items()}
    locked = stream_s("copied", profile.link, None)
    pageable = stream_s("copied", slow, None)
    assert pageable > 1.05 * locked  # what copying hides is hidden from both
    assert stream_s("mapped", profile.link, None) == pytest.approx(pageable, rel=0.02)
    locks_mapped = dataclasses.replace(profile.link, locks_mapped=True)
    assert stream_s("mapped", locks_mapped, None) == pytest.approx(locked, rel=0.02)
    assert stream_s("copied", profile.link, module) == pytest.approx(locked, rel=0.02)


def test_an_accelerator_s_weights_are_never_compressed() -> None:
    profile = compressing("rtx-3060ti-8gb-ddr4")
    options = {
        "max_sequences": 1, "workload": Workload(5000, 16, 1, 8192), "memory_bytes": 64 * GIB,
    }  # fmt: skip
    copied, compressed = (
        make_plan(
            config_of("qwen3-14b"), None, profile=profile, loading=LoadingRequest(way), **options
        )
        for way in ("copied", "compressed")
    )
    assert copied.schedule.prefill == "visit"
    assert compressed.schedule.prefill == "compute"  # those that visit are not compressed either
    assert 0 < compressed.units_cpu < len(compressed.places)
    held = {n for u in compressed.units if u.device == "cpu" for op in u.ops
            for n in op.weight_names()}  # fmt: skip
    there = {s.tensor: s.format for s in compressed.slices if s.device == "cpu"}
    assert there.keys() == held
    assert "bf16c" in there.values()
    assert "bf16c" not in {s.format for s in compressed.slices if s.device == "accelerator"}
    assert compressed.memory["cpu"].weights_bytes == sum(
        tensor_bytes(there[t.name], t.shape) for t in compressed.tensors if t.name in held
    )


def test_weights_that_fit_only_compressed_are() -> None:
    for profile in (None, compressing(), load_profile(PRESET)):
        options = {
            "profile": profile, "context": 4096, "max_sequences": 1,
            **({"threads": 4} if profile is None else {}),
        }  # fmt: skip

        def plan(memory_bytes: int, weights: str = "auto", options: dict = options) -> Plan:
            request = LoadingRequest(weights, 1)
            config = config_of("llama-3.2-1b")
            return make_plan(config, None, memory_bytes=memory_bytes, loading=request, **options)

        use = plan(64 * GIB, "copied").memory["cpu"]
        needed = use.total_bytes + use.reserve_bytes
        tight = plan(needed - (64 << 20))
        assert tight.loading == "compressed"
        assert "do not fit" in tight.loading_choice.reason
        ample = plan(64 * GIB, "compressed")
        assert tight.loading_choice == dataclasses.replace(
            ample.loading_choice, reason=tight.loading_choice.reason
        )
        if profile is not None:
            assert tight.prediction.profile.digest == profile.digest
        with pytest.raises(OutOfMemoryError):
            plan(needed - (64 << 20), "copied")
        with pytest.raises(OutOfMemoryError):
            plan(needed - (2 << 30))


def test_a_module_in_memory_is_not_compressed() -> None:
    folder = bundled_model()
    bound = {
        name: TensorInfo.in_memory(name, "bf16", info.shape)
        for name, info in read_checkpoint(folder).items()
    }
    options = {"threads": 1, "memory_bytes": 4 * GIB}
    plan = make_plan(
        load_config(folder), bound, loading=LoadingRequest(compressed_ratio={1: 1.3}), **options
    )
    assert (plan.loading, plan.loading_choice.compress_bytes) == ("copied", 0)
    with pytest.raises(InvalidError, match="a module's in memory"):
        make_plan(load_config(folder), bound, loading=LoadingRequest("compressed"), **options)


def test_what_cannot_be_mapped_is_not_counted() -> None:
    auto = LoadingRequest("auto", 1)
    whole = small_plan(loading=auto)
    assert whole.loading == "mapped"
    assert whole.loading_choice.copy_bytes == sum(4 * math.prod(t.shape) for t in whole.tensors)
    converted = small_plan(dtype="f16", loading=auto)
    vectors = sum(4 * t.shape[0] for t in whole.tensors if len(t.shape) == 1)
    assert converted.loading_choice.copy_bytes == vectors
    assert converted.loading_choice.mapped_decode_ratio == 1.0
    assert converted.loading == "copied"
    source = whole.tensors[0].source
    extents = (dataclasses.replace(source.extents[0], offset=13),)
    odd = dataclasses.replace(whole.tensors[0], source=dataclasses.replace(source, extents=extents))
    assert mappable(whole.tensors[0], "f32", None)
    assert not mappable(odd, "f32", None)
    assert not mappable(whole.tensors[0], "f16", None)
    asked = small_plan(dtype="f16", loading=LoadingRequest("mapped"))  # vectors stay as they are
    matrices = {t.name for t in asked.tensors if len(t.shape) == 2}
    assert {s.tensor in matrices for s in asked.slices if s.access == "mapped"} == {False}
    folder = small_models.model_dir("llama")
    bound = {
        name: TensorInfo.in_memory(name, "f32", info.shape)
        for name, info in read_checkpoint(folder).items()
    }
    plan = make_plan(load_config(folder), bound, threads=1, memory_bytes=4 * GIB, loading=auto)
    assert (plan.loading, plan.loading_choice.copy_bytes) == ("copied", 0)


def test_a_copy_that_does_not_fit_beside_the_file_stays_mapped() -> None:
    many = LoadingRequest("auto", 10**6)
    plan = small_plan(loading=many, context=16, max_sequences=1)
    assert plan.loading == "copied"
    use = plan.memory["cpu"]
    needed = use.total_bytes + use.reserve_bytes
    for spare, loading in ((0, "copied"), (-1, "mapped")):
        room = needed + plan.loading_choice.copy_bytes + spare
        tight = small_plan(loading=many, context=16, max_sequences=1, memory_bytes=room)
        assert tight.loading == loading


def test_a_profile_that_is_cached_decides_for_the_cpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = bundled_model()
    target = Target(read_machine(), None, None)
    plan = functools.partial(plan_here, load_config(folder), read_checkpoint(folder))
    for profile, assumed in ((None, True), (known_profile(copy=1e3), False)):
        monkeypatch.setattr(profile_cache, "cached_profile", lambda found=profile: found)
        got = plan(LoadOptions(threads=1), target)
        assert got.loading == ("copied" if assumed else "mapped")
        assert got.loading_choice.assumed == assumed
    one = plan(LoadOptions(threads=1, expected_tokens=10**12), target)
    assert one.loading == "copied"


def test_rates_of_a_loaded_plan_know_its_weights() -> None:
    config = config_of("llama-3.2-1b")
    tensors = {
        name: TensorInfo(name, shape, "bf16", (Extent("model.safetensors", 4096, shape[0]),))
        for name, shape in build_graph(config).tensors.items()
    }
    rates = [
        cpu_decode_rate(
            config,
            make_plan(
                config, tensors, threads=4, memory_bytes=64 * GIB, context=4096,
                loading=LoadingRequest(loading),
            ),
            known_profile(),
        )
        for loading in ("copied", "mapped")
    ]  # fmt: skip
    assert 0.8 < rates[1] / rates[0] < 0.95


def test_the_plan_says_it_in_json() -> None:
    plan = small_plan()
    assert Plan.from_json(plan.to_json()) == plan
    document = plan.to_dict()
    assert document["loading"] == plan.loading
    assert document["loading_choice"] == dataclasses.asdict(plan.loading_choice)
    for path, value, message in (
        ("loading", "lazily", "loading: expected one of copied, mapped, compressed, found"),
        ("loading", None, "loading: expected one of"),
        ("loading_choice", "because", "loading_choice: expected an object"),
        ("loading_choice", {"reason": 1}, "loading_choice"),
    ):
        with pytest.raises(PlanError, match=message):
            Plan.from_json(json.dumps({**document, path: value}))
    del document["loading"]
    with pytest.raises(PlanError, match="'loading' is missing"):
        Plan.from_json(json.dumps(document))
    document = plan.to_dict()
    del document["slices"]  # which the engine executes, as "loading" is for people
    with pytest.raises(InvalidError, match="slices"):
        _helm.Engine(json.dumps(document), str(small_models.model_dir("llama")))


def test_the_explanation_says_it_too() -> None:
    found = study("a model", config_of("llama-3.2-1b"), None, known_profile(), weights="mapped")
    assert found.best.predicted == found.plan.prediction.predicted
    text = loading_text(found)
    assert text == f"weights mapped: {found.plan.loading_choice.reason}"
    told = to_dict(found)["loading"]
    assert told == {"weights": "mapped", **dataclasses.asdict(found.plan.loading_choice)}
