"""The measured profile of an accelerator and its link, and its place in the cache."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import time
from pathlib import Path

import pytest

import command
from helm.base.formats import KV_DTYPES
from helm.errors import DeviceError
from helm.machine.devices import Accelerator, open_accelerator
from helm.machine.profile import Profile, load_profile
from helm.machine.rates import AcceleratorProfile, CpuProfile, LinkProfile
from helm.measure import profile_cache
from helm.measure.accelerator import TOKENS, _Meanwhile, measure_accelerator
from helm.measure.cpu import DECODE_GROUPS, PREFILL_GROUP, PREFILL_QUERIES, WEIGHT_FORMATS

SIM = "sim:vram=100MiB,link=2GB/s,latency=1ms"  # too little memory for the probe itself
Measured = tuple[AcceleratorProfile, LinkProfile, tuple[str, ...]]
ATTENTION_ROWS = (*DECODE_GROUPS, PREFILL_QUERIES * PREFILL_GROUP)
SPEED = {"link": 2e9, "latency": 1e-3}


@pytest.fixture(scope="module")
def preset() -> Profile:
    """Stands for the CPU's part of this machine."""
    profile = load_profile("cpu-laptop-16gb")
    cpu = dataclasses.replace(profile.cpu.with_threads(1), thread_sweep={1: 1e10})
    return dataclasses.replace(profile, cpu=cpu)


@pytest.fixture(scope="module")
def seen() -> list[float]:
    return []


@pytest.fixture(scope="module")
def measured(preset: Profile, seen: list[float]) -> Measured:
    return measure_accelerator(
        open_accelerator(SIM), preset.cpu, lambda _what, share: seen.append(share), budget_s=0.1
    )


def test_a_device_that_is_lost_beside_other_work_is_no_silence() -> None:
    def lose() -> None:
        raise DeviceError("[device] lost")

    with pytest.raises(DeviceError, match="lost"), _Meanwhile(lose):
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_profile_is_complete_and_valid(measured: Measured, preset: Profile) -> None:
    own, link, _ = measured
    profile = dataclasses.replace(preset, accelerator=own, link=link)
    assert Profile.from_json(profile.to_json()) == profile
    assert own.memory_bytes == 100 << 20
    for table, dtypes in (
        (own.matvec_bytes_per_s, WEIGHT_FORMATS), (own.attention_bytes_per_s, KV_DTYPES),
    ):  # fmt: skip
        assert set(table) == set(dtypes)
        assert all(1e6 < rate < 1e14 for rate in table.values())
    for flops, dtypes, rows in (
        (own.matmul_flops, WEIGHT_FORMATS, TOKENS),
        (own.attention_flops, KV_DTYPES, ATTENTION_ROWS),
    ):  # fmt: skip
        assert {dtype: tuple(rates) for dtype, rates in flops.items()} == dict.fromkeys(
            dtypes, rows
        )
    assert 0 <= own.op_s < 1
    assert 0 < own.step_s < 1
    assert math.isfinite(own.activation_bytes_per_s)


def test_link_is_the_simulated_one(measured: Measured) -> None:
    _, link, _ = measured
    for rate in (
        link.to_accelerator_bytes_per_s, link.to_host_bytes_per_s,
        link.pageable_to_accelerator_bytes_per_s, link.pageable_to_host_bytes_per_s,
    ):  # fmt: skip
        assert SPEED["link"] / 20 < rate <= SPEED["link"]
    assert 0 <= link.latency_s < 20 * SPEED["latency"]  # a difference of two noisy times
    assert link.queued_copy_s is not None
    assert SPEED["latency"] <= link.queued_copy_s < 20 * SPEED["latency"]
    assert 0 < link.cpu_rate_while_copying <= 1
    assert 0 < link.rate_while_both_compute <= 1
    assert link.locks_mapped


def test_progress_rises_from_zero_to_one(measured: Measured, seen: list[float]) -> None:
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)


class Counters:
    """Stand for the measurements."""

    def __init__(self, preset: Profile, measured: Measured) -> None:
        self.preset, self.measured = preset, measured
        self.cpu = self.devices = 0

    def measure(self, progress: object) -> Profile:
        self.cpu += 1
        if callable(progress):
            progress("the CPU", 1.0)
        return self.preset

    def measure_device(self, _device: Accelerator, _cpu: CpuProfile, progress: object) -> Measured:
        self.devices += 1
        if callable(progress):
            progress("the accelerator", 1.0)
        return self.measured

    def profile(self, specification: str | None, **options: object) -> Profile:
        device = None if specification is None else open_accelerator(specification)
        return profile_cache.machine_profile(
            device,
            measure=self.measure,
            measure_device=self.measure_device,
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture
def counters(preset: Profile, measured: Measured) -> Counters:
    return Counters(preset, measured)


def test_each_device_is_measured_once(counters: Counters) -> None:
    assert counters.profile(None).accelerator is None
    first = counters.profile("sim:link=1GB/s,threads=1")
    assert (counters.cpu, counters.devices) == (1, 1)
    assert first.accelerator is not None
    assert first.link == counters.measured[1]
    again = counters.profile("sim:threads=1,link=1GB/s")  # in another order
    assert again.link == first.link
    assert (counters.cpu, counters.devices) == (1, 1)
    counters.profile("sim:threads=1,link=2GB/s")
    counters.profile("sim")
    assert (counters.cpu, counters.devices) == (1, 3)
    assert counters.profile(None).accelerator is None


def test_what_is_unsettled_is_kept(counters: Counters) -> None:
    counters.preset = dataclasses.replace(counters.preset, unsettled=("a CPU rate",))
    counters.measured = (*counters.measured[:2], ("a device rate",))
    for _ in range(2):
        assert counters.profile("sim").unsettled == ("a CPU rate", "a device rate")
        assert counters.profile(None).unsettled == ("a CPU rate",)


def test_memory_is_that_of_the_device_and_of_today(counters: Counters) -> None:
    for size in (1, 2):
        found = counters.profile(f"sim:vram={size}GiB")
        assert found.accelerator is not None
        assert found.accelerator.memory_bytes == size << 30
    assert counters.devices == 1, "speed does not depend on the size"


def test_recalibrating_measures_both(counters: Counters) -> None:
    shares: list[float] = []
    for _ in range(2):
        counters.profile(
            "sim", recalibrate=True, progress=lambda _what, share: shares.append(share)
        )
    assert (counters.cpu, counters.devices) == (2, 2)
    assert shares == [0.6, 1.0] * 2


def test_a_damaged_cache_is_measured_anew(counters: Counters) -> None:
    counters.profile("sim")
    path = profile_cache.cache_path(open_accelerator("sim"))
    path.write_text("{")
    counters.profile("sim")
    path.write_text(counters.preset.to_json())  # a profile without an accelerator
    counters.profile("sim")
    assert (counters.cpu, counters.devices) == (1, 3)


@pytest.mark.parametrize(
    ("specification", "rates"),
    [
        ("sim", "sim"),
        ("sim:vram=2GiB", "sim"),
        ("sim:vram=2GiB,threads=2,link=1GB/s", "sim:link=1GB/s,threads=2"),
        ("cuda:1", "cuda:1"),
    ],
)
def test_what_a_speed_depends_on(specification: str, rates: str) -> None:
    device = Accelerator(specification, "", "", 1, 1)
    assert device.rates_specification == rates


def test_commands_use_the_cached_profile_of_the_device(counters: Counters) -> None:
    counters.profile("sim:link=1GB/s")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        result = command.helm(*arguments)
        assert "measuring" not in result.stderr
        return result

    device = ("--device", "sim:vram=3GiB,link=1GB/s")
    table = run("profile", *device).stdout
    assert re.search(r"accelerator +simulated accelerator", table)
    assert re.search(r"link .* GB/s to the GPU, .* back", table)
    written = Profile.from_json(run("profile", *device, "--json").stdout)
    assert written.accelerator is not None
    assert written.accelerator.memory_bytes == 3 << 30
    planned = json.loads(run("plan", *device, "--vram", "2GiB", "--json").stdout)
    assert planned["limits"].get("accelerator", 2 << 30) == 2 << 30
    assert planned["profile"]["name"] == counters.preset.name
    assert "simulated accelerator with 3.00 GiB" in " ".join(run("plan", *device).stdout.split())
    shown = run("run", *device, "--max-tokens", "2").stderr
    assert "| predicted " in shown
