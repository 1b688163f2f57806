"""Models on a simulated accelerator through the public API: same tokens, true reports, errors."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import helm
from device_profiles import fast_accelerator, half_of_it
from helm.machine.devices import (
    Accelerator,
    cublas_directories,
    device_report,
    find_accelerator,
    open_accelerator,
)
from helm.machine.profile import load_profile
from helm.session import here
from helm.session.here import LoadOptions, load_engine, with_thread_counts

PROMPTS = ["Once upon a time", "The dog", "A"]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
HAS_CUDA = find_accelerator(None) is not None


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with helm.LLM(device="cpu") as llm:
        return [result.tokens for result in llm.generate(PROMPTS, **OPTIONS)]


@pytest.fixture(scope="module")
def whole() -> Iterator[helm.LLM]:
    """All units on the accelerator."""
    with helm.LLM(device="sim", profile=fast_accelerator()) as llm:
        yield llm


@pytest.fixture(scope="module")
def half(whole: helm.LLM) -> Iterator[helm.LLM]:
    """Some units on either device, for lack of memory."""
    device = f"sim:vram={half_of_it(whole)}"
    with helm.LLM(device=device, profile=fast_accelerator()) as llm:
        yield llm


def tokens_of(llm: helm.LLM) -> list[list[int]]:
    return [result.tokens for result in llm.generate(PROMPTS, **OPTIONS)]


def test_tokens_are_the_cpu_s_wherever_units_lie(
    whole: helm.LLM, half: helm.LLM, expected: list[list[int]]
) -> None:
    assert whole.plan.units_cpu == 0
    assert min(half.plan.units_cpu, half.plan.units_accelerator) > 0
    assert tokens_of(whole) == tokens_of(half) == expected
    assert [half.generate(prompt, **OPTIONS).tokens for prompt in PROMPTS] == expected


def test_a_chat_goes_on_from_pages_on_both_devices(half: helm.LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with helm.LLM(device="cpu") as llm:
        for _ in range(2):
            answer = half.chat(messages, max_tokens=8, temperature=0)
            assert answer.tokens == llm.chat(messages, max_tokens=8, temperature=0).tokens
            messages += [{"role": "assistant", "content": answer.text}]
            messages += [{"role": "user", "content": "And then?"}]


def test_stats_say_what_lies_where(half: helm.LLM) -> None:
    cpu, own = half.stats["devices"]
    assert (cpu["kind"], own["kind"]) == ("cpu", "sim")
    for names in (cpu["units"], own["units"]):
        assert len(names) == len(set(names))
    both = set(cpu["units"]) & set(own["units"])
    assert (len(both) > 0) == (half.plan.units_cut > 0)
    assert "head" in {*cpu["units"], *own["units"]}
    assert cpu["weights_bytes"] > 0
    planned = half.plan.memory["accelerator"]
    assert own["weights_bytes"] == planned.weights_bytes
    assert own["kv_bytes"] == planned.kv_bytes
    assert own["peak_bytes"] <= own["budget_bytes"] == planned.total_bytes + planned.reserve_bytes
    assert half.plan.prediction is not None
    assert half.stats["predicted"] == half.plan.prediction.predicted.decode_tokens_per_s


def test_the_memory_of_the_accelerator_is_a_limit(whole: helm.LLM, half: helm.LLM) -> None:
    options: dict[str, Any] = {"device": "sim", "profile": fast_accelerator()}
    with helm.LLM(vram_bytes=half_of_it(whole), **options) as llm:
        assert llm.plan.units == half.plan.units
    with helm.LLM(vram_bytes=1 << 20, **options) as llm:
        assert llm.plan.units_accelerator == 0
        assert len(llm.stats["devices"]) == 1


def test_objective_and_work_reach_the_plan() -> None:
    with helm.LLM(
        device="sim", profile=fast_accelerator(), objective="ttft", prompt_tokens=100,
        output_tokens=20, batch=2, context=200, threads=1,
    ) as llm:  # fmt: skip
        assert llm.plan.prediction is not None
        work = llm.plan.prediction.workload
        assert (work.prompt, work.output, work.batch, work.context) == (100, 20, 2, 200)
        assert work.objective == "ttft"
        assert llm.plan.threads == 1


def test_a_service_is_planned_for_beside_an_accelerator_alone() -> None:
    with helm.LLM(
        device="sim", profile=fast_accelerator(), objective="serve", max_sequences=3, threads=1
    ) as llm:
        assert llm.plan.prediction is not None
        work = llm.plan.prediction.workload
        assert (work.objective, work.batch) == ("serve", 3)
    cpu: dict[str, Any] = {"device": "cpu", "threads": 1, "max_sequences": 3, "output_tokens": 9}
    with helm.LLM(**cpu) as one, helm.LLM(**cpu, objective="serve") as other:
        assert one.plan == other.plan


def test_a_profile_alone_plans_for_the_cpu(expected: list[list[int]]) -> None:
    with helm.LLM(device="cpu", profile=fast_accelerator(), threads=3) as llm:
        assert llm.plan.units_accelerator == 0
        assert llm.plan.threads == 3
        assert llm.plan.prediction is not None
        assert tokens_of(llm) == expected


def test_without_a_device_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    if HAS_CUDA:
        pytest.skip("a CUDA device can be opened")
    with helm.LLM() as llm:
        assert [use["kind"] for use in llm.stats["devices"]] == ["cpu"]
        assert llm.plan.notices == ()
        assert llm.plan.prediction is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (helm.NoDeviceError("[cuda] there is no NVIDIA driver here"), ()),
        (
            helm.DeviceError("[cuda] cuBLAS 13 was not found; install it. Tried:\n  /a: b"),
            ("no CUDA device is used: cuBLAS 13 was not found; install it. (helm-llm "
             "doctor says more)",),
        ),
        (
            helm.OutOfMemoryError("[cuda] creating a handle: none left"),
            ("no CUDA device is used: creating a handle: none left (helm-llm doctor says "
             "more)",),
        ),
    ],
)  # fmt: skip
def test_only_a_machine_without_a_gpu_falls_back_silently(
    error: Exception, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from helm.machine import devices
    from helm.session.options import load_options
    from helm.session.study import machine_of

    def fail(_specification: str) -> None:
        raise error

    monkeypatch.setattr(devices, "open_accelerator", fail)
    with helm.LLM() as llm:
        assert [use["kind"] for use in llm.stats["devices"]] == ["cpu"]
        assert llm.plan.notices == said
    with helm.LLM(device="cpu") as llm:
        assert llm.plan.notices == ()
    with pytest.raises(type(error)):
        helm.LLM(device="cuda")
    notices: list[str] = []
    monkeypatch.setattr("helm.measure.profile_cache.machine_profile", lambda *_, **__: None)
    machine_of(load_options({}), notices)
    assert tuple(notices) == said


def test_a_device_that_is_left_unused_is_said_to_be_so(expected: list[list[int]]) -> None:
    def notices(**options: Any) -> list[str]:
        with helm.LLM(device="sim", **options) as llm:
            assert llm.plan.units_accelerator == 0
            assert tokens_of(llm) == expected
            return [notice for notice in llm.plan.notices if "is left unused" in notice]

    (short,) = notices(profile=fast_accelerator(), vram_bytes=1 << 20)
    assert re.fullmatch(
        r".* is left unused: not even the least of the model fits there, it lacks \S+ MiB of "
        "VRAM", short
    )  # fmt: skip
    fast = fast_accelerator()
    link = dataclasses.replace(fast.link, latency_s=1.0)
    own = dataclasses.replace(fast.accelerator, op_s=1.0, step_s=1.0)
    (slow,) = notices(profile=dataclasses.replace(fast, accelerator=own, link=link))
    assert re.search(r"the best placement that uses it would be [\d.,]+ % slower", slow)


# --- less memory than planned --------------------------------------------------------------------


def claim(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """Planning finds `free_bytes`; when the model is loaded, another process has taken them."""

    def find(device: str | None, _notices: list[str]) -> Accelerator:
        assert device is not None
        return dataclasses.replace(open_accelerator(device), free_bytes=free_bytes)

    monkeypatch.setattr(here, "find_accelerator", find)


def test_memory_that_is_gone_at_load_time_is_planned_without(
    whole: helm.LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(monkeypatch, 8 << 30)
    left = whole.stats["devices"][1]["peak_bytes"] // 2
    with helm.LLM(device=f"sim:vram={left}", profile=fast_accelerator()) as llm:
        (notice,) = (n for n in llm.plan.notices if "placed again" in n)
        assert "not 8.00 GiB" in notice
        assert llm.plan.units_accelerator == 0  # the reserve alone is more
        assert tokens_of(llm) == expected


def test_it_gives_up_after_a_few_attempts(whole: helm.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = whole.plan.memory["accelerator"].total_bytes
    budgets = []

    def plan(_config: object, _infos: object, _options: object, target: Any) -> helm.Plan:
        budgets.append(target.accelerator.free_bytes)
        return whole.plan

    def refuse(*_: object) -> None:
        raise helm.OutOfMemoryError("[memory] none left")

    def shrink(specification: str) -> Accelerator:
        return Accelerator(specification, "sim", "a device", taken, taken - len(budgets))

    claim(monkeypatch, 8 << 30)
    monkeypatch.setattr(here, "plan_here", plan)
    monkeypatch.setattr(here, "_engine", refuse)
    monkeypatch.setattr(here, "open_accelerator", shrink)
    with pytest.raises(helm.OutOfMemoryError, match="none left"):
        helm.LLM(device="sim", profile=fast_accelerator())
    assert budgets == [8 << 30, taken - 1, taken - 2]


def test_weights_that_do_not_compress_are_copied_at_the_last_attempt_too(
    whole: helm.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = whole.plan.memory["accelerator"].total_bytes
    tried: list[str] = []
    engine = SimpleNamespace(stats={"pageable_bytes": 3 << 30, "disk_step_bytes": 0})

    def plan(_config: object, _infos: object, options: Any, _target: object) -> helm.Plan:
        tried.append(options.weights)
        return whole.plan

    def load(*_: object) -> SimpleNamespace:
        if len(tried) < 3:
            raise helm.OutOfMemoryError("[memory] none left")
        if len(tried) == 3:
            raise helm.CompressionError("[weights] do not compress")
        return engine

    def shrink(specification: str) -> Accelerator:
        return Accelerator(specification, "sim", "a device", taken, taken - 1)

    claim(monkeypatch, 8 << 30)
    monkeypatch.setattr(here, "plan_here", plan)
    monkeypatch.setattr(here, "_engine", load)
    monkeypatch.setattr(here, "open_accelerator", shrink)
    options = LoadOptions(device="sim", profile=fast_accelerator())
    plan_made, loaded = load_engine(whole.config, {}, "", {}, options)
    assert loaded is engine
    assert plan_made.notices[-1].startswith("3.00 GiB of weights and KV pages that visit")
    assert tried == ["auto", "auto", "auto", "copied"]


def test_too_little_host_memory_is_not_the_accelerator_s(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(plan: helm.Plan, *_: object) -> None:
        calls.append(plan)
        raise helm.OutOfMemoryError("[memory] the host has none left")

    monkeypatch.setattr(here, "_engine", refuse)
    with pytest.raises(helm.OutOfMemoryError, match="the host has none"):
        helm.LLM(device="sim", profile=fast_accelerator())
    assert len(calls) == 1


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "tpu"}, helm.InvalidError, 'unknown device "tpu"'),
        ({"device": "sim:vram=lots"}, helm.InvalidError, 'vram is "lots"'),
        ({"device": "sim:link=1GB/s,vram=8"}, helm.InvalidError, "1 MiB; did you mean 8GiB"),
        ({"device": 5}, helm.InvalidError, "expected cpu, cuda"),
        ({"device": "cpu", "vram_bytes": 1 << 30}, helm.InvalidError, "on the CPU alone"),
        ({"device": "sim", "vram_bytes": 0}, helm.InvalidError, "vram_bytes must be"),
        ({"objective": "speed"}, helm.InvalidError, "objective must be"),
        ({"batch": 0}, helm.InvalidError, "batch must be"),
        (
            {"device": "sim", "profile": load_profile("cpu-laptop-16gb")},
            helm.InvalidError,
            "has no accelerator.*helm-llm profile --device sim",
        ),
    ],
)
def test_wrong_options_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        helm.LLM(**options)


def test_a_device_that_is_asked_for_and_cannot_be_had_is_an_error() -> None:
    if HAS_CUDA:
        pytest.skip("a CUDA device can be opened")
    with pytest.raises(helm.DeviceError, match=r"(?i)cuda"):
        helm.LLM(device="cuda")
    cuda = next(device for device in device_report() if device["name"] == "cuda")
    assert not cuda["available"]
    assert re.fullmatch(r"[^\[\n].*", cuda["text"]), "one line, without the operation"


def test_thread_counts_of_another_machine_become_this_one_s() -> None:
    cpu = load_profile("thesis-4060").cpu
    assert cpu.threads == 14
    fitted = with_thread_counts(cpu, [1, 2])
    assert fitted.threads == 2
    assert dict(fitted.thread_sweep) == {n: cpu.thread_sweep[n] for n in (1, 2)}
    assert fitted.matvec_bytes_per_s == cpu.with_threads(2).matvec_bytes_per_s
    odd = with_thread_counts(cpu, [3])  # as two, the nearest that was measured
    assert (odd.threads, dict(odd.thread_sweep)) == (3, {3: cpu.thread_sweep[2]})
    assert odd.matvec_bytes_per_s == fitted.matvec_bytes_per_s
    assert with_thread_counts(cpu, cpu.thread_sweep) is cpu


def test_the_devices_of_the_documents_can_be_had() -> None:
    document = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    named = set(re.findall(r"sim:[a-z]+=[^\s\"`)]+", document))
    assert len(named) >= 2
    for specification in named:
        assert open_accelerator(specification).memory_bytes == 2 << 30


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no CUDA compiler: the plugin is not built"
)
def test_the_package_has_the_plugin_where_it_could_be_built() -> None:
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    if int(re.search(r"release (\d+)", version)[1]) < 13:
        pytest.skip("the CUDA compiler is older than 13: the plugin is not built")
    assert (Path(helm.__file__).parent / "lib" / "libhelm_cuda.so").is_file()


def test_cublas_is_looked_for_wherever_python_imports_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name / "nvidia" / "cu13" / "lib" for name in ("without", "one", "m\udcfe")]
    for place in places:
        place.mkdir(parents=True)
    for place in places[1:]:
        (place / "libcublas.so.13").touch()
    folders = [str(place.parents[2]) for place in places]
    monkeypatch.setattr(sys, "path", [*folders, tmp_path, None, "/no/such/folder"])
    assert cublas_directories() == [os.fsencode(place) for place in places[1:]]
    assert open_accelerator("sim").kind == "sim"  # the native side takes any such path
