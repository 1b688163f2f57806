"""Devices that read the same memory: what is bound by it is slower while both work, arithmetic is
not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helm.compiler.beside import slowdown, slower_s
from helm.compiler.counts import Step
from helm.compiler.cut.price import CutPrices
from helm.compiler.cut.ways import cut_model
from helm.compiler.problem import ResourceLimits
from helm.compiler.setting import Setting, make_setting
from helm.compiler.times import unit_s
from helm.machine.profile import load_profile
from helm.machine.rates import beside_another
from helm.plan.records import Workload
from search_cases import model_of

SHARE = 0.6
READS = 20e9


def setting_of(batch: int, share: float, flops: float = 1e15) -> Setting:
    """Two equal devices whose arithmetic takes `flops` a second, however many tokens."""
    profile = load_profile("thesis-4060")
    assert profile.accelerator is not None
    assert profile.link is not None
    rates = {
        "matvec_bytes_per_s": dict.fromkeys(("f32", "f16", "bf16"), READS),
        "attention_bytes_per_s": dict.fromkeys(("f32", "f16", "bf16"), READS),
        "matmul_flops": {kind: {1: flops} for kind in ("f32", "f16", "bf16")},
        "attention_flops": {kind: {1: 1e15} for kind in ("f32", "f16", "bf16")},
        "op_s": 0.0, "step_s": 0.0, "activation_bytes_per_s": 1e15,
    }  # fmt: skip
    profile = dataclasses.replace(
        profile,
        cpu=dataclasses.replace(profile.cpu, **rates),
        accelerator=dataclasses.replace(profile.accelerator, **rates, stage_s=0.0),
        link=dataclasses.replace(
            profile.link, latency_s=1e-12, to_accelerator_bytes_per_s=1e18,
            to_host_bytes_per_s=1e18, cpu_rate_while_copying=1.0, rate_while_both_compute=share,
        ),
    )  # fmt: skip
    work = Workload(64, 64, batch, 1024, "decode")
    limits = ResourceLimits(sequences=batch)
    return make_setting(model_of("qwen3-8b"), profile, work, limits, profile.cpu.threads, batch)


def test_both_are_disturbed_until_the_first_has_ended() -> None:
    one, other = slower_s(2.0, 3.0, 10.0, 20.0)
    assert (one, other) == (1.0, 1.5)  # 3 s of the other's 20, in which it does 1.5 s
    assert slower_s(2.0, 2.0, 10.0, 20.0) == (0.0, 1.0)
    assert slower_s(0.0, 0.0, 10.0, 20.0) == (0.0, 0.0)
    assert slowdown(np.array([0.0, 2.0]), np.array([0.0, 3.0])).tolist() == [1.0, 1.5]


def test_nothing_is_read_faster_than_the_limit() -> None:
    cpu = load_profile("cpu-desktop-64gb-ddr5").cpu
    assert beside_another(cpu, 1.0) is cpu
    reads = {"f32": 40e9, "f16": 38e9, "bf16": 20e9, "q4": 10e9}
    cpu = dataclasses.replace(
        cpu, matvec_bytes_per_s=reads, attention_bytes_per_s={"f16": 30e9, "i8": 15e9}
    )
    beside = beside_another(cpu, SHARE)
    found = {kind: rate / 1e9 for kind, rate in beside.matvec_bytes_per_s.items()}
    assert found == pytest.approx({"f32": 24, "f16": 24, "bf16": 20, "q4": 10})
    assert beside.attention_bytes_per_s == pytest.approx({"f16": 24e9, "i8": 15e9})
    assert beside.matmul_flops == cpu.matmul_flops
    packed = dataclasses.replace(cpu, matvec_bytes_per_s={"q8": 18e9, "q4": 10e9})
    found = beside_another(packed, SHARE).matvec_bytes_per_s
    assert found == pytest.approx({"q8": 10.8e9, "q4": 10e9})


def test_products_that_compute_keep_their_time() -> None:
    step = Step(8, 1, 8)
    for flops, slower in ((1e15, 1 / SHARE), (1e10, 1.0)):
        setting = setting_of(8, SHARE, flops)
        layer = setting.classes.units[0]
        times = [
            unit_s(setting.model, layer, step, at.cpu).sum() for at in (setting, setting.beside)
        ]
        assert times[1] / times[0] == pytest.approx(slower, rel=1e-3)
    assert setting.beside.beside is setting.beside


@pytest.mark.parametrize(("flops", "slower"), [(1e15, 1 / SHARE), (1e10, 1.0)])
def test_units_that_are_cut_in_halves_are_slower_where_they_read(
    flops: float, slower: float
) -> None:
    """An mlp, half of which is on each of two equal devices."""

    def halves_s(share: float) -> float:
        setting = setting_of(8, share, flops)
        cuts = cut_model(setting.model, setting.classes, 32)
        mlp = CutPrices(setting, cuts).decode(128).layers.mlp_s[0, 0]
        return float(mlp[len(mlp) // 2])

    assert halves_s(SHARE) / halves_s(1.0) == pytest.approx(slower, rel=1e-2)


def test_devices_that_share_no_memory_are_priced_once() -> None:
    setting = setting_of(8, SHARE)
    own = setting_of(8, 1.0)  # each device with memory of its own
    assert own.beside is own
    alone = dataclasses.replace(setting, accelerator=None, link=None)
    assert alone.beside is alone
