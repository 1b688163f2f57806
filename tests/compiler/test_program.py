"""Programs that plans are lowered to: as the specification writes them, and as the runtime does."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from plans import make_plan

import small_models
from engine_helpers import partitioned
from helm import _helm
from helm.compiler.program import lower
from helm.errors import InvalidError, PlanError
from helm.machine.profile import load_profile, preset_names
from helm.model.families import parse_config
from helm.plan.records import Workload
from helm.plan.schema import Plan
from search_cases import THESIS
from small_plans import plan_of

CPU, OWN = "cpu", "accelerator"
native = pytest.mark.skipif(not hasattr(_helm, "program"), reason="a build without programs")


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
    kv = dataclasses.replace(plan.kv, layers=4, pages=2 * plan.kv.pages)
    return dataclasses.replace(plan, units=(first, *again, last), kv=kv)


def scheduled(
    plan: Plan, devices: tuple[str, ...], visits: bool = False, overflow: str | None = None
) -> Plan:
    """On those devices; overflow: all but four pages of each layer there are in host memory."""
    cut = partitioned(plan, devices)
    changes = {"prefill": "stream", "stream_tokens": 2, "stream_pages": 8} if visits else {}
    pages = cut.schedule.pages
    if overflow is not None:
        layers = devices[1:-1].count(OWN)
        changes["overflow"] = overflow
        pages = {CPU: cut.kv.pages - 3 * layers, OWN: 3 * layers}
    return dataclasses.replace(
        cut, schedule=dataclasses.replace(cut.schedule, pages=pages, **changes)
    )


TWO_AND_TWO = (CPU, CPU, CPU, OWN, OWN, CPU)
REST = """program rest
0 cpu run embedding..layer.1.mlp
1 up copy x cpu>accelerator after 0
2 accelerator run layer.2.attention..layer.3.mlp after 1
3 down copy {last} accelerator>cpu after 2
4 cpu run head after 3"""
VISIT = """program visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 up visit layer.0 aside
3 up page layer.0 cached
4 accelerator run layer.0.attention..layer.0.mlp after 1 2 3
5 up visit layer.1 aside
6 down page layer.0 written after 4
7 up page layer.1 cached
8 accelerator run layer.1.attention..layer.1.mlp after 5 7
9 down page layer.1 written after 8
10 accelerator run layer.2.attention..layer.3.mlp
11 down copy {last} accelerator>cpu after 10
12 cpu run head after 11"""
FAR_VISIT = """program rest, far pages visit
0 cpu run embedding..layer.1.mlp
1 up copy x cpu>accelerator after 0
2 accelerator run layer.2 before after 1
3 up page layer.2 far, each aside
4 accelerator run layer.2 far, each after 3
5 accelerator run layer.2 near
6 accelerator run layer.2 after
7 accelerator run layer.3 before
8 up page layer.3 far, each aside
9 accelerator run layer.3 far, each after 8
10 accelerator run layer.3 near
11 accelerator run layer.3 after
12 down copy {last} accelerator>cpu after 11
13 cpu run head after 12"""
FAR_CPU = """program rest, far pages on cpu
0 cpu run embedding..layer.1.mlp
1 up copy x cpu>accelerator after 0
2 accelerator run layer.2 before after 1
3 down copy {query} accelerator>cpu aside after 2
4 accelerator run layer.2 near
5 cpu run layer.2 far after 3
6 up copy attention over far pages cpu>accelerator after 5
7 accelerator run layer.2 after after 6
8 accelerator run layer.3 before
9 down copy {query} accelerator>cpu aside after 8
10 accelerator run layer.3 near
11 cpu run layer.3 far after 9
12 up copy attention over far pages cpu>accelerator after 11
13 accelerator run layer.3 after after 12
14 down copy {last} accelerator>cpu after 13
15 cpu run head after 14"""


def test_programs_are_as_specified() -> None:
    plan = scheduled(four_layers(), TWO_AND_TWO, visits=True, overflow="cpu")
    found = [program.text() for program in lower(plan)]
    query = next(op.input for op in plan.units[1].ops if op.op == "attention")
    last = next(op.input for op in plan.units[-1].ops)
    names = {"query": query, "last": last}
    assert [text.format(**names) for text in (REST, VISIT, FAR_VISIT, FAR_CPU)] == found[:4]
    # A step of two tokens may be one of two sequences, which have the CPU attend.
    more = [text.split("\n")[0] for text in found[4:]]
    wanted = ["program visit, far pages visit", "program visit, far pages on cpu"]
    assert more == wanted[: 1 + (plan.limits.sequences >= 2)]


def test_a_step_rests_where_the_cpu_waits_for_a_device() -> None:
    plan = scheduled(four_layers(), TWO_AND_TWO, overflow="cpu")
    assert [program.rest for program in lower(plan)] == [4, 13, 15]  # not within a layer


def layouts(units: int) -> Iterator[tuple[str, ...]]:
    for k in range(units - 1):
        for first, last in itertools.product((CPU, OWN), repeat=2):
            yield (first, *[CPU] * k, *[OWN] * (units - 2 - k), last)
    yield from itertools.islice(itertools.product((CPU, OWN), repeat=units), 5, 40, 7)


def compare(plan: Plan) -> None:
    """As text, or refused by both."""
    try:
        native_texts = _helm.program(plan.to_json())
    except InvalidError:
        with pytest.raises(PlanError):
            lower(plan)
        return
    assert [program.text() for program in lower(plan)] == native_texts


@native
@pytest.mark.parametrize("name", small_models.CASES)
def test_the_runtime_lowers_small_models_alike(name: str) -> None:
    plan = plan_of(name, context=64, page_tokens=16)
    compare(plan)
    places = len(plan.places)
    for devices in layouts(places):
        layers = devices[1:-1]
        for visits in (False, True) if CPU in layers and OWN in devices else (False,):
            for overflow in (None, "stream", "cpu") if OWN in layers else (None,):
                compare(scheduled(plan, devices, visits, overflow))


@native
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


@native
@pytest.mark.parametrize("preset", preset_names())
def test_the_runtime_lowers_searched_plans_alike(preset: str) -> None:
    for name, work in (
        ("qwen3-8b", Workload(512, 128, 1, 4096)),
        ("qwen3-8b", Workload(8192, 256, 1, 32768)),
        ("qwen3-8b", Workload(512, 128, 8, 4096, "throughput")),
    ):
        config = parse_config(THESIS["models"][name])
        profile = load_profile(preset)
        if profile.accelerator is not None:
            plan = make_plan(
                config, None, profile=profile, workload=work, max_sequences=work.batch,
                memory_bytes=64 << 30,
            )  # fmt: skip
            compare(plan)


def test_values_pass_between_neighbouring_stages_alone() -> None:
    plan = plan_of("qwen3")
    document = partitioned(plan, (CPU, OWN, CPU, OWN)).to_dict()
    head = document["units"][-1]["ops"][0]
    assert "in" in head
    written = document["units"][0]["ops"][0]["out"]
    other = {**document["values"][0], "name": "other"}
    document["values"].append(other)
    document["units"][0]["ops"].append({**document["units"][0]["ops"][0], "out": "other"})
    head["in"] = "other"
    assert written != "other"
    with pytest.raises(PlanError, match="only neighbouring stages hand values over"):
        lower(Plan.from_json(json.dumps(document)))


def test_searched_plans_can_be_lowered() -> None:
    file = Path(__file__).parents[1] / "data" / "configs" / "qwen3-8b.json"
    config = parse_config(json.loads(file.read_text()), "qwen3-8b")
    plan = make_plan(
        config, None, profile=load_profile("thesis-4060"), workload=Workload(512, 128),
        max_sequences=1,
    )  # fmt: skip
    rest, *others = lower(plan)
    assert rest.text().startswith("program rest\n0 cpu run embedding..layer.")
    assert {(p.visits, p.far) for p in others} <= {
        (True, "none"),
        (False, "visit"),
        (False, "cpu"),
        (True, "visit"),
    }
