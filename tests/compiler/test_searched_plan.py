"""Plans that a search made: what they say, how they round-trip, what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from plans import make_plan

from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import search
from helm.compiler.tensors import check_model
from helm.errors import InvalidError, PlanError
from helm.machine.profile import load_profile
from helm.plan.records import Workload
from helm.plan.schema import Plan
from search_cases import GIB, config_of, model_of


def searched_plan(preset="rtx-3060ti-8gb-ddr4", name="qwen3-8b", **options):
    options = {"workload": Workload(512, 128, 1, 4096), "max_sequences": 1, **options}
    return make_plan(config_of(name), None, profile=load_profile(preset), **options)


def test_a_partitioned_plan_round_trips():
    plan = searched_plan()
    assert plan.units_cpu > 0
    assert plan.units_accelerator > 0
    assert Plan.from_json(plan.to_json()) == plan
    document = plan.to_dict()
    assert document["units_cpu"] + document["units_accelerator"] == 38
    assert document["predicted"]["ttft_s"] > 0
    assert document["predicted"]["decode_tokens_per_s"] > 0
    assert document["bottleneck"] == "CPU memory bandwidth"
    assert document["profile"]["estimated"] is True
    labels = {document["label"], *(other["label"] for other in document["alternatives"])}
    assert labels >= {"all-cpu", "all-accelerator"}
    items = {"weights", "kv", "activations", "workspace", "staging", "reserve"}
    for device in ("cpu", "accelerator"):
        assert document["memory"][device].keys() == {f"{item}_bytes" for item in items}
    assert sum(plan.schedule.pages.values()) == plan.kv.pages


def test_sequences_take_turns_where_both_devices_then_work():
    work = Workload(512, 128, 32, 700, "decode")
    model, profile = model_of("qwen3-8b"), load_profile("rtx-4060ti-16gb-ddr5")
    limits = ResourceLimits(cpu_bytes=64 * GIB, sequences=32)
    best = search(model, profile, work, limits).best
    whole = search(model, profile, work, limits, Space(decode_groups=(1,))).best
    assert (best.decode_groups, whole.decode_groups) == (2, 1)
    assert best.predicted.decode_s < 0.75 * whole.predicted.decode_s
    terms = best.predicted.decode_terms
    assert terms["overlap_s"] < 0
    assert sum(terms.values()) == pytest.approx(best.predicted.decode_s)
    assert best.predicted.decode_tokens_per_s == pytest.approx(32 / best.predicted.decode_s)
    alone = search(model, profile, dataclasses.replace(work, batch=1), limits).best
    assert alone.decode_groups == 1
    plan = searched_plan(profile.name, workload=work, max_sequences=32)
    assert plan.schedule.decode_groups == 2


def test_longer_steps_load_the_weights_less_often():
    """A longer step takes room for its activations and is chosen for prompts that fill it."""
    steps = {}
    for prompt in (500, 1500, 5000):
        work = Workload(prompt, 16, 1, 8192)
        plan = searched_plan(name="qwen3-14b", workload=work, memory_bytes=64 * GIB)
        schedule = plan.schedule
        assert schedule.prefill == "visit"
        assert 1 < schedule.visit_tokens <= 512
        assert schedule.visit_pages == 8192 // 512  # a prompt may fill the context
        steps[prompt] = plan.limits.step_tokens
        fixed = searched_plan(
            name="qwen3-14b", workload=work, memory_bytes=64 * GIB, space=Space(visit_steps=())
        )
        assert fixed.limits.step_tokens == 512
        more = plan.memory["cpu"].activations_bytes / fixed.memory["cpu"].activations_bytes
        assert more == pytest.approx(plan.limits.step_tokens / 512, rel=0.1)
        assert plan.prediction.predicted.total_s <= fixed.prediction.predicted.total_s
        assert Plan.from_json(plan.to_json()) == plan
    assert steps[500] == 512
    assert 512 < steps[1500] <= 2048
    assert 512 < steps[5000] <= 8192


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": "compute"}, "visit_tokens"),
        ({"visit_tokens": 0}, "visit_tokens"),
        ({"visit_tokens": 513}, "visit_tokens"),
        ({"visit_pages": 0}, "visit_pages"),
        ({"prefill": "stream_step"}, "prefill"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(changes, message):
    document = searched_plan(space=Space(visit_steps=())).to_dict()
    assert document["schedule"]["prefill"] == "visit"
    document["schedule"] |= changes
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(document))


def test_a_cpu_plan_says_what_it_predicts():
    plan = searched_plan("cpu-laptop-16gb", "llama-3.2-1b", max_sequences=4)
    assert (plan.units_accelerator, plan.prediction.label) == (0, "all-cpu")
    assert plan.memory.keys() == {"cpu"}
    assert plan.kv.pages == 16 * 8 * 4  # all four sequences, as without a profile
    assert Plan.from_json(plan.to_json()) == plan
    bare = make_plan(config_of("llama-3.2-1b"), None, threads=plan.threads, context=4096,
                     max_sequences=4, memory_bytes=12 * 10**9)  # fmt: skip
    assert bare.loading == plan.loading  # for reasons of its own
    own = dataclasses.replace(plan, prediction=None, loading_choice=bare.loading_choice)
    assert own == bare


def test_threads_and_memory_are_needed_without_a_profile():
    with pytest.raises(InvalidError, match="threads and memory_bytes"):
        make_plan(config_of("llama-3.2-1b"), None)


def test_the_context_shrinks_to_what_fits():
    plan = searched_plan(workload=None, memory_bytes=12 * GIB)
    assert plan.limits.context < 40960
    assert any("memory holds a context" in notice for notice in plan.notices)


def test_a_plan_for_another_model_is_refused():
    plan = searched_plan()
    check_model(plan, config_of("qwen3-8b"), None)
    with pytest.raises(PlanError, match=r"made for another model: fingerprint .* hidden_size 4096"):
        check_model(plan, config_of("qwen3-4b"), None)
