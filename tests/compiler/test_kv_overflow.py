"""KV that an accelerator has no room for: when the search chooses that, and what a user may ask."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan, study

import command
import helm
from device_profiles import fast_accelerator
from helm.compiler.advice import largest_context, require
from helm.compiler.candidate import Candidate
from helm.compiler.explain import kv_lines, to_dict
from helm.compiler.kv_options import KvOptions
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import Search, search
from helm.compiler.solve import Study
from helm.errors import InvalidError, PlanError
from helm.machine.profile import Profile, load_profile
from helm.model.families import read_config
from helm.plan.records import Workload
from helm.plan.schema import Plan
from search_cases import GIB, config_of, model_of

QWEN = Path(__file__).parents[1] / "data" / "configs" / "qwen3-8b.json"
LONG = Workload(8192, 256, 1, 32768)
PAGE = 2 * 512 * 8 * 128 * 2  # bytes of one page of Qwen3-8B: K and V, 16 bit


def best_of(preset: str = "rtx-3060ti-8gb-ddr4", **options: Any) -> Candidate:
    work, space = options.pop("work", LONG), options.pop("space", Space())
    profile = options.pop("profile", load_profile(preset))
    limits = ResourceLimits(cpu_bytes=64 * GIB, **options)
    best = require(Search(model_of("qwen3-8b"), profile, work, limits, space))
    assert best is not None
    return best


def test_what_overflows_is_faster_than_what_does_not() -> None:
    anywhere, device = best_of(), best_of(space=Space(kv="device"))
    assert anywhere.kv is not None
    assert anywhere.objective_s < device.objective_s
    assert anywhere.accelerator_blocks > device.accelerator_blocks
    assert device.kv is None
    assert device.accelerator_kv_blocks == device.kv_blocks


def test_nothing_overflows_that_has_room() -> None:
    best = best_of("rtx-4090-24gb-ddr5", work=Workload(512, 128, 1, 4096))
    assert best.accelerator_blocks > 0
    assert best.kv is None
    assert best.accelerator_kv_blocks == best.kv_blocks


def with_rates(factor: float, **places: tuple[str, ...]) -> Profile:
    """The preset with some rates multiplied, by part of the machine."""
    document = load_profile("rtx-3060ti-8gb-ddr4").to_dict()
    for part, names in places.items():
        for name in names:
            value = document[part][name]
            many = isinstance(value, dict)
            document[part][name] = (
                {key: rate * factor for key, rate in value.items()} if many else value * factor
            )
    return Profile.from_json(json.dumps(document))


def test_the_site_is_where_attention_is_faster() -> None:
    slow_link = with_rates(0.1, link=("to_accelerator_bytes_per_s",))
    slow_cpu = with_rates(0.1, cpu=("attention_bytes_per_s",))
    for profile, site in ((slow_link, "cpu"), (slow_cpu, "stream")):
        best = best_of(profile=profile, accelerator_kv_bytes=GIB // 4, work=LONG)
        assert best.kv is not None
        assert best.overflow == site
        times = {price.site: price.decode_s for price in best.kv.sites}
        assert times[site] == min(times.values()) == best.predicted.decode_s
        assert max(times.values()) > times[site]


@pytest.mark.parametrize("sequences", [1, 8])
def test_a_pool_without_room_for_a_step_does_not_exist(sequences: int) -> None:
    model, profile = model_of("qwen3-8b"), load_profile("rtx-3060ti-8gb-ddr4")
    limits = ResourceLimits(cpu_bytes=64 * GIB, sequences=sequences, step_tokens=1024)
    least = 2 + 2 * sequences
    for slots, fits in ((least, True), (least - 1, False)):
        capped = dataclasses.replace(limits, accelerator_kv_bytes=slots * PAGE)
        result = search(model, profile, LONG, capped, Space(visit_steps=()))
        for candidate in result.by_layout:
            if candidate.accelerator_blocks:
                assert candidate.accelerator_kv_blocks >= least
        alone = [c for c in result.ranked if c.accelerator_blocks == 1]
        assert (alone != []) == fits
        assert all(c.memory["accelerator"]["kv"] <= slots * PAGE for c in result.ranked)


def test_memory_for_kv_is_a_limit_of_its_own() -> None:
    free = best_of()
    assert free.memory["accelerator"]["kv"] > GIB // 4
    bound = best_of(accelerator_kv_bytes=GIB // 4)
    assert bound.kv is not None
    assert 0 < bound.memory["accelerator"]["kv"] <= GIB // 4
    assert bound.objective_s >= free.objective_s


def test_the_largest_context_is_the_host_s() -> None:
    """However little the accelerator has, a byte of host memory is a byte of KV."""
    model, profile = model_of("qwen3-8b"), load_profile("rtx-3060-12gb-ddr4")
    work = Workload(512, 128, 8, 40960)
    one = 36 * PAGE * 8 / 512  # bytes of a position of all sequences

    def most(host: int, vram: int, space: Space) -> int:
        limits = ResourceLimits(cpu_bytes=host * GIB, accelerator_bytes=vram * GIB)
        return largest_context(model, profile, work, limits, space)

    for vram in (2, 12):
        found = [most(host, vram, Space()) for host in (24, 26, 28)]
        for less, more in itertools.pairwise(found):
            assert more - less == pytest.approx(2 * GIB / one, abs=513)
        assert found[0] >= most(24, vram, Space(kv="device"))


# --- plans ---------------------------------------------------------------------------------------


def plan_of(kv: KvOptions | None = None, **options: Any) -> Plan:
    return make_plan(
        config_of("qwen3-8b"), None, profile=load_profile("rtx-3060ti-8gb-ddr4"), workload=LONG,
        memory_bytes=64 * GIB, max_sequences=1, kv_options=kv, **options,
    )  # fmt: skip


def test_a_plan_says_where_pages_lie() -> None:
    plan = plan_of(KvOptions("cpu", watermark=0.5))
    assert plan.overflows
    assert (plan.schedule.overflow, plan.schedule.watermark) == ("cpu", 0.5)
    assert Plan.from_json(plan.to_json()) == plan
    assert sum(plan.schedule.pages.values()) == plan.kv.pages
    assert plan.memory["accelerator"].kv_bytes == plan.schedule.pages["accelerator"] * PAGE
    assert plan.memory["cpu"].kv_bytes == plan.schedule.pages["cpu"] * PAGE
    document = plan.to_dict()
    document["schedule"]["watermark"] = 1.5
    with pytest.raises(PlanError, match=r"schedule\.watermark"):
        Plan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overflow": "gpu"}, "kv_overflow is 'gpu'; expected auto, stream, cpu"),
        ({"vram_bytes": 0}, "kv_vram_bytes must be an integer of at least 1, got 0"),
        ({"watermark": -0.1}, r"watermark is -0\.1; expected a share from 0 to 1"),
        ({"watermark": float("nan")}, "watermark is nan"),
        ({"watermark": True}, "watermark is True"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        KvOptions(**options)


def test_an_option_without_effect_is_said() -> None:
    short = Workload(512, 128, 1, 4096)
    whole = make_plan(
        config_of("llama-3.2-1b"), None, profile=load_profile("rtx-4090-24gb-ddr5"),
        workload=short, max_sequences=1, kv_options=KvOptions("cpu"),
    )  # fmt: skip
    assert not whole.overflows
    assert any("kv_overflow= without effect" in notice for notice in whole.notices)
    none = plan_of(KvOptions(vram_bytes=PAGE))
    assert not any(unit.device == "accelerator" for unit in none.units[1:-1])
    (notice,) = (n for n in none.notices if "no layer lies on the accelerator" in n)
    assert "may take 2.0 MiB" in notice
    assert "one layer take 6.0 MiB" in notice
    assert plan_of(KvOptions("cpu")).notices == plan_of().notices
    with pytest.raises(InvalidError, match="cpu-laptop-16gb has no accelerator"):
        make_plan(
            config_of("llama-3.2-1b"), None, profile=load_profile("cpu-laptop-16gb"),
            kv_options=KvOptions(vram_bytes=GIB),
        )  # fmt: skip


# --- explanations --------------------------------------------------------------------------------


def explained(**request: Any) -> Study:
    request = {"prompt": 8192, "context": 32768, "cpu_bytes": 64 * GIB, **request}
    request.setdefault("policy", "layer-partition")
    profile = load_profile("thesis-4060")
    return study("qwen3-8b", read_config(QWEN), None, profile, **request)


def test_an_explanation_names_pages_sites_and_what_overflows() -> None:
    one = explained()
    found = to_dict(one)["kv"]
    assert found.keys() == {"page_tokens", "blocks", "accelerator_blocks", "overflow"}
    assert (found["page_tokens"], found["blocks"]) == (512, 64)
    own = found["overflow"]
    assert own.keys() == {"site", "watermark", "near_positions", "far_blocks", "sites"}
    near = int(0.8 * found["accelerator_blocks"])
    assert own["near_positions"] == near * 512
    assert own["far_blocks"] == 64 - near
    rates = {price["site"]: price["decode_tokens_per_s"] for price in own["sites"]}
    assert rates.keys() == {"stream", "cpu"}
    assert rates[own["site"]] == max(rates.values())
    assert rates[own["site"]] == pytest.approx(one.best.predicted.decode_tokens_per_s)
    assert own["site"] == to_dict(one)["schedule"]["overflow"]
    text = "\n".join(kv_lines(one))
    for part in (
        f"{found['accelerator_blocks']} of the 64 pages",
        f"{own['far_blocks']} of the 64",
    ):
        assert part in text


def test_one_site_is_priced_where_one_was_asked_for() -> None:
    forced = to_dict(explained(kv_overflow="stream", page_tokens=256))["kv"]
    assert forced["page_tokens"] == 256
    assert [price["site"] for price in forced["overflow"]["sites"]] == ["stream"]
    short = to_dict(explained(prompt=512, context=1024))["kv"]
    assert short == {
        "page_tokens": 512, "blocks": 2, "accelerator_blocks": 2, "overflow": None,
    }  # fmt: skip


def test_the_least_pages_are_chosen_unless_larger_ones_are_faster() -> None:
    """A page that visits has a copy and an op of its own. Where none does, only room counts."""
    profile = load_profile("thesis-4060")
    assert profile.link is not None

    def planned(page_tokens: int | None, latency_s: float, **more: Any) -> Study:
        assert profile.link is not None
        link = dataclasses.replace(profile.link, latency_s=latency_s)
        given: dict[str, Any] = {
            "prompt": 2048, "context": 4096, "cpu_bytes": 64 * GIB, "policy": "layer-partition",
            "page_tokens": page_tokens, **more,
        }  # fmt: skip
        own = dataclasses.replace(profile, link=link)
        return study("llama", config_of("llama-3.2-1b"), None, own, **given)

    usual = profile.link.latency_s
    fits = planned(None, usual)
    assert (fits.plan.kv.page_tokens, fits.placed.overflows) == (128, False)
    few = {"kv_overflow": "stream", "kv_vram_bytes": 48 << 20}
    for latency_s, tokens in ((usual, 512), (1e-3, 128)):  # the latter has few layers there
        least, most = (planned(n, latency_s, **few).best.objective_s for n in (128, 512))
        assert (least < most * 1.01) == (tokens == 128)
        chosen = planned(None, latency_s, **few)
        assert chosen.placed.overflows
        assert chosen.plan.kv.page_tokens == tokens
        assert chosen.best.objective_s == min(least, most)


def test_the_command_line_reaches_the_plan() -> None:
    planned = [
        "plan", str(QWEN), "--profile", "thesis-4060",
        "--ram", "64GiB", "--context", "32768", "--kv-overflow", "stream", "--kv-vram", "256MiB",
        "--watermark", "0.6", "--page-tokens", "128",
    ]  # fmt: skip
    found = json.loads(command.helm(*planned, "--json").stdout)
    assert found["memory"]["accelerator"]["kv_bytes"] <= 256 << 20
    assert (found["schedule"]["overflow"], found["schedule"]["watermark"]) == ("stream", 0.6)
    assert found["kv"]["page_tokens"] == 128
    shown = command.helm(*planned).stdout
    assert "KV of the GPU's layers" in shown
    assert "the pages in RAM are copied to the GPU in each step" in " ".join(shown.split())
    for changes, message in (
        (("--watermark", "1.2"), "watermark is 1.2"),
        (("--page-tokens", "8"), "--page-tokens is 8; expected 16 to"),
        (("--kv-vram", "much"), "--kv-vram is 'much'"),
    ):
        assert message in command.helm(*planned, *changes, status=2).stderr


# --- on a simulated accelerator ------------------------------------------------------------------

# None begins like another: they share no pages.
PROMPTS = [
    f"{who} little dog ran over the hill. " * n for who, n in (("The", 30), ("A", 6), ("His", 21))
]
GENERATE: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


# f32: where bf16 weights round activations, roundings of merged pages may tip a token.
OPTIONS: dict[str, Any] = {
    "dtype": "f32", "batch": 3, "max_sequences": 3, "page_tokens": 16, "prompt_tokens": 300,
    "output_tokens": 24,
}  # fmt: skip


def slow_cpu() -> Profile:
    """A machine whose CPU is good for attention alone."""
    profile = fast_accelerator()
    cpu = profile.cpu
    return dataclasses.replace(
        profile,
        cpu=dataclasses.replace(
            cpu,
            matvec_bytes_per_s={k: rate / 1e3 for k, rate in cpu.matvec_bytes_per_s.items()},
            op_s=0.0,
            step_s=0.0,
        ),
    )


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with helm.LLM(device="cpu", dtype="f32") as llm:
        return [result.tokens for result in llm.generate(PROMPTS, **GENERATE)]


@pytest.fixture(scope="module")
def whole() -> Plan:
    """All on the accelerator."""
    with helm.LLM(device="sim", profile=slow_cpu(), **OPTIONS) as llm:
        assert llm.plan.units_cpu == 0
        assert not llm.plan.overflows
        return llm.plan


def check_overflow(llm: helm.LLM, expected: list[list[int]]) -> None:
    """The CPU's tokens, with memories that take what was planned."""
    assert llm.plan.overflows
    assert [result.tokens for result in llm.generate(PROMPTS, **GENERATE)] == expected
    stats = llm.stats
    assert stats["speculation"]["by"] == "off"
    assert "overflow to host memory" in stats["speculation"]["reason"]
    if llm.plan.schedule.overflow == "stream":  # else where it pays: others may wait instead
        assert stats["cpu_attentions"] == 0
    for use in stats["devices"]:
        stated = llm.plan.memory[use["device"]]
        assert use["kv_bytes"] == stated.kv_bytes
        assert use["peak_bytes"] <= stated.total_bytes


@pytest.mark.parametrize("site", ["stream", "cpu"])
def test_a_context_beyond_the_memory_for_kv_gives_the_cpu_s_tokens(
    site: str, whole: Plan, expected: list[list[int]]
) -> None:
    most = 40 * whole.kv.block_bytes  # of 96 blocks; a step may need 38
    with helm.LLM(
        device="sim", profile=slow_cpu(), kv_vram_bytes=most, kv_overflow=site, **OPTIONS
    ) as llm:
        assert llm.plan.schedule.overflow == site
        assert llm.plan.memory["accelerator"].kv_bytes <= most
        check_overflow(llm, expected)
        assert llm.stats["evicted_blocks"] > 0


def test_an_accelerator_too_small_for_the_context_takes_a_part(
    whole: Plan, expected: list[list[int]]
) -> None:
    use = whole.memory["accelerator"]
    size = use.total_bytes + use.reserve_bytes - use.kv_bytes * 7 // 10
    device = f"sim:vram={size}"
    with helm.LLM(device=device, profile=slow_cpu(), policy="layer-partition", **OPTIONS) as llm:
        assert 0 < llm.plan.schedule.pages["accelerator"] < llm.plan.kv.pages
        check_overflow(llm, expected)  # where that pays, a request waits instead
    for asked in ("ngram", "bundled"):
        with pytest.raises(InvalidError, match=f"speculate is '{asked}', but KV pages of the acc"):
            helm.LLM(
                device=device,
                profile=slow_cpu(),
                policy="layer-partition",
                speculate=asked,
                **OPTIONS,
            )


def test_without_an_accelerator() -> None:
    with pytest.raises(InvalidError, match="limited with kv_vram_bytes=, but the model runs on"):
        helm.LLM(device="cpu", kv_vram_bytes=1 << 20)
    with helm.LLM(device="cpu", kv_overflow="cpu", watermark=0.5) as llm:
        (notice,) = llm.plan.notices
        assert "kv_overflow= and watermark= without effect" in notice
