"""Programs that plans are lowered to: the text is the runtime's."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator

import pytest
from cut_plans import cut_plan, graph_of, random_cut
from plans import make_plan

import small_models
from engine_helpers import partitioned
from helm import _helm
from helm.compiler.cut.units import Cut, LayerCut
from helm.compiler.program import lower
from helm.errors import InvalidError, PlanError
from helm.machine.profile import load_profile, preset_names
from helm.model.families import parse_config
from helm.model.graph import whole_layers
from helm.plan.records import Workload
from helm.plan.schema import Plan
from search_cases import THESIS
from small_plans import plan_of
from whole import WHOLE, one_in

CPU, OWN = "cpu", "accelerator"


def four_layers() -> Plan:
    """Of a model with two, whose second layer is there three times: only to be lowered."""
    plan = plan_of("qwen3", context=64, page_tokens=16)
    first, *units, last = plan.units
    again = [
        dataclasses.replace(
            unit, layer=layer, name=f"layer.{layer}.{unit.kind}",
            ops=tuple(
                dataclasses.replace(op, layer=layer) if hasattr(op, "layer") else op
                for op in unit.ops
            ),
        )
        for layer in range(4) for unit in (units[-2:] if layer == 3 else units[:2])
    ]  # fmt: skip
    kv = dataclasses.replace(plan.kv, layers=whole_layers(4, plan.kv.kv_heads), window_blocks=0)
    return dataclasses.replace(plan, units=(first, *again, last), kv=kv)


def scheduled(
    plan: Plan, devices: tuple[str, ...], visits: bool = False, overflow: str | None = None
) -> Plan:
    """On those devices; overflow: all but four pages of each layer there are in host memory."""
    cut = partitioned(plan, devices)
    changes = {"prefill": "visit", "visit_tokens": 2, "visit_pages": 8} if visits else {}
    pages = cut.schedule.pages
    if overflow is not None:
        layers = devices[1:-1].count(OWN)
        changes["overflow"] = overflow
        pages = {CPU: cut.kv.pages - 3 * layers, OWN: 3 * layers}
    return dataclasses.replace(
        cut, schedule=dataclasses.replace(cut.schedule, pages=pages, **changes)
    )


TWO_AND_TWO = (CPU, CPU, CPU, OWN, OWN, CPU)


def test_a_step_rests_where_the_cpu_waits_for_a_device() -> None:
    plan = scheduled(four_layers(), TWO_AND_TWO, overflow="cpu")
    assert [program.rest for program in lower(plan)] == [4, 13, 15, 19]  # not within a layer


def layouts(units: int) -> Iterator[tuple[str, ...]]:
    for k in range(units - 1):
        for first, last in itertools.product((CPU, OWN), repeat=2):
            yield (first, *[CPU] * k, *[OWN] * (units - 2 - k), last)
    yield from itertools.islice(itertools.product((CPU, OWN), repeat=units), 5, 40, 7)


def compare(plan: Plan) -> list[str]:
    """The first lines of its programs, which are equal as text; none if both sides refuse it."""
    try:
        native_texts = _helm.program(plan.to_json())
    except InvalidError:
        with pytest.raises(PlanError):
            lower(plan)
        return []
    assert [program.text() for program in lower(plan)] == native_texts
    return [text.split("\n")[0] for text in native_texts]


def test_a_plan_of_all_kinds_of_steps_has_the_runtime_s_programs() -> None:
    """Which texts these are stands in tests/native/program/lower_test.cc."""
    plan = scheduled(four_layers(), TWO_AND_TWO, visits=True, overflow="cpu")
    assert compare(plan) == [
        "program rest",
        "program visit",
        "program rest, far pages visit",
        "program visit, far pages visit",
        "program rest, far pages on cpu",
        "program visit, far pages on cpu",
        "program rest, far pages visit and on cpu",
        "program visit, far pages visit and on cpu",
    ]


@pytest.mark.parametrize("name", small_models.CASES)
def test_the_runtime_lowers_small_models_alike(name: str) -> None:
    plan = plan_of(name, context=64, page_tokens=16)
    found = set(compare(plan))
    places = len(plan.places)
    for devices in one_in(3 if name in small_models.UNLIKE else 9, layouts(places), name):
        layers = devices[1:-1]
        for visits in (False, True) if CPU in layers and OWN in devices else (False,):
            for overflow in (None, "stream", "cpu") if OWN in layers else (None,):
                found.update(compare(scheduled(plan, devices, visits, overflow)))
    assert found  # not refused one and all
    assert len(found) >= 5 or name not in small_models.SOME, found


@pytest.mark.parametrize("split", range(16))
def test_the_runtime_lowers_layers_on_two_devices_alike(split: int) -> None:
    plan = plan_of("qwen3", context=64, page_tokens=16)
    sites = [OWN if split >> i & 1 else CPU for i in range(4)]
    for ends in itertools.product((CPU, OWN), repeat=2):
        devices = (ends[0], *sites, ends[1])
        for overflow in (None, "stream", "cpu") if OWN in sites[::2] else (None,):
            cut = partitioned(plan, devices)
            layers = sites[::2].count(OWN)
            pages = cut.schedule.pages
            if overflow is not None:
                pages = {CPU: cut.kv.pages - layers, OWN: layers}
            schedule = dataclasses.replace(cut.schedule, pages=pages, overflow=overflow or "stream")
            compare(dataclasses.replace(cut, schedule=schedule))


@pytest.mark.parametrize("preset", preset_names())
def test_the_runtime_lowers_searched_plans_alike(preset: str) -> None:
    works = (
        Workload(512, 128, 1, 4096),
        Workload(8192, 256, 1, 32768),
        Workload(512, 128, 8, 4096, "throughput"),
    )
    for work in one_in(3, works, preset):
        config = parse_config(THESIS["models"]["qwen3-8b"])
        profile = load_profile(preset)
        if profile.accelerator is not None:
            plan = make_plan(
                config, None, profile=profile, workload=work, max_sequences=work.batch,
                memory_bytes=64 << 30,
            )  # fmt: skip
            assert compare(plan)


def test_values_pass_from_any_stage_to_any_other() -> None:
    """Right behind the stage that wrote them, once to each device."""
    plan = plan_of("qwen3")
    document = partitioned(plan, (CPU, OWN, CPU, OWN, CPU, CPU)).to_dict()
    later = next(op for op in document["units"][3]["ops"] if op["op"] == "linear")
    other = {**document["values"][0], "name": "other"}
    document["values"].append(other)
    document["units"][0]["ops"].append({**document["units"][0]["ops"][0], "out": "other"})
    later["in"] = "other"
    [text, *_] = _helm.program(json.dumps(document))
    assert compare(Plan.from_json(json.dumps(document)))
    lines = text.split("\n")
    assert lines[1:4] == [
        "0 cpu run embedding", "1 up copy x cpu>accelerator after 0",
        "2 up copy other cpu>accelerator after 0",
    ]  # fmt: skip
    assert sum("copy other" in line for line in lines) == 1
    assert next(line for line in lines if "run layer.1.attention" in line).split()[5] == "2"


@pytest.mark.parametrize("name", [*small_models.CASES, *small_models.WIDE])
def test_the_runtime_lowers_cut_plans_alike(name: str) -> None:
    plan, graph = plan_of(name, context=64, page_tokens=16), graph_of(small_models.model_dir(name))
    rng, found = random.Random(name), set[str]()
    for _ in range(12 if WHOLE else 4 if name in small_models.UNLIKE else 1):
        cut = random_cut(graph, plan, rng)
        for visits in (0, 4):
            own = cut_plan(plan, graph, cut, visits=visits)
            found.update(compare(own))
            assert all(program.rest == len(program.tasks) for program in lower(own) if program.cut)
        assert compare(cut_plan(plan, graph, cut, alone=True)) == ["program rest"]
    assert found == {"program rest", "program visit"}


@pytest.mark.parametrize("home", [CPU, OWN])
def test_what_the_host_hands_over_comes_before_what_it_computes(home: str) -> None:
    plan, graph = plan_of("llama", context=64), graph_of(small_models.model_dir("llama"))
    cut = Cut(CPU, (LayerCut(1, 32, home), LayerCut(1, 32, home)), 131)
    [program] = lower(cut_plan(plan, graph, cut))
    assert program.cut
    named = [program.subject(task) for task in program.tasks]
    guest = named.index("layer.0.attention.guest")
    own = named.index("layer.0.attention.home")
    assert (guest < own) == (home == CPU)
    assert named[guest - 1 if home == CPU else own - 1].startswith("h ")


def test_a_layer_with_its_halves_on_two_devices_visits_as_a_whole() -> None:
    plan = plan_of("qwen3", context=64, page_tokens=16)
    split = partitioned(plan, (CPU, CPU, OWN, OWN, CPU, CPU))
    schedule = dataclasses.replace(split.schedule, prefill="visit", visit_tokens=2, visit_pages=4)
    texts = _helm.program(dataclasses.replace(split, schedule=schedule).to_json())
    assert compare(dataclasses.replace(split, schedule=schedule)) == [
        "program rest", "program visit",
    ]  # fmt: skip
    assert "run layer.0.attention..layer.0.mlp after" in texts[1]
    assert "run layer.1.attention..layer.1.mlp after" in texts[1]
