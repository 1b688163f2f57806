"""The measured profile: its format, its cache, and the choice of threads."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from command import helm
from helm.base.formats import KV_DTYPES
from helm.commands.profile import show
from helm.machine.profile import Profile
from helm.measure import cpu as cpu_measures
from helm.measure import profile_cache, quantity
from helm.measure.cpu import (
    DECODE_GROUPS,
    PREFILL_GROUP,
    PREFILL_QUERIES,
    TOKENS,
    WEIGHT_FORMATS,
    choose_threads,
    measure_profile,
)
from helm.measure.quantity import Quantity, Shape, rate_ratio


@pytest.fixture(scope="module")
def measured() -> Profile:
    return measure_profile(budget_s=0.2)


@pytest.fixture(scope="module")
def disturbed() -> tuple[Profile, list[float]]:
    """Measured where no number of undisturbed runs is enough, and the progress on the way."""
    seen: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantity, "_FEW", 10**9)
        return measure_profile(lambda _what, share: seen.append(share), budget_s=0.1), seen


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Counter:
    """Stands for the measurement."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self.calls = profile, 0

    def __call__(self, _progress: object) -> Profile:
        self.calls += 1
        return dataclasses.replace(self.profile, name=f"measurement {self.calls}")


def test_profile_is_complete_and_valid(measured: Profile) -> None:
    assert Profile.from_json(measured.to_json()) == measured
    assert not measured.estimated
    assert measured.accelerator is None
    assert measured.link is None
    cpu = measured.cpu
    assert cpu.threads in cpu.thread_sweep
    assert cpu.memory_bytes > 0
    for table, dtypes in (
        (cpu.matvec_bytes_per_s, WEIGHT_FORMATS), (cpu.attention_bytes_per_s, KV_DTYPES),
    ):  # fmt: skip
        assert set(table) == set(dtypes)
        assert all(1e6 < rate < 1e14 for rate in table.values())
    assert {dtype: tuple(rates) for dtype, rates in cpu.matmul_flops.items()} == dict.fromkeys(
        WEIGHT_FORMATS, TOKENS
    )
    rows = (*DECODE_GROUPS, PREFILL_QUERIES * PREFILL_GROUP)
    assert {dtype: tuple(rates) for dtype, rates in cpu.attention_flops.items()} == dict.fromkeys(
        KV_DTYPES, rows
    )
    assert 0 <= cpu.op_s < 1
    assert cpu.lone_op_s is not None
    assert 0 <= cpu.lone_op_s < 1
    assert cpu.threads == 1 or cpu.with_threads(1).op_s == cpu.lone_op_s
    assert 0 <= cpu.step_s < 1
    assert 0 <= cpu.attention_query_s < 1
    assert math.isfinite(cpu.activation_bytes_per_s)
    assert cpu.mapped_matvec_ratio is not None
    assert cpu.copy_bytes_per_s is not None
    assert 0.01 < cpu.mapped_matvec_ratio <= 1.2
    assert 1e6 < cpu.copy_bytes_per_s < 1e14
    assert cpu.compressed_ratio is not None
    assert cpu.compress_bytes_per_s is not None
    assert set(cpu.compressed_ratio) == set(cpu_measures.COMPRESSED_TOKENS)
    assert all(0.01 < ratio <= 1.6 for ratio in cpu.compressed_ratio.values())
    assert 1e6 < cpu.compress_bytes_per_s < 1e14


def test_one_token_product_is_the_matrix_vector_rate(measured: Profile) -> None:
    cpu = measured.cpu
    for dtype, size in (("f32", 4), ("f16", 2), ("bf16", 2), ("q8", 8.5 / 8), ("q4", 4.625 / 8)):
        expected = cpu.matvec_bytes_per_s[dtype] / size * 2
        assert cpu.matmul_flops[dtype][1] == pytest.approx(expected)


def test_packed_weights_are_products_of_the_formats_that_stand_for_their_classes() -> None:
    asked: list[tuple[str, int]] = []

    def matmul(_threads: int, name: str, tokens: int, _s: float) -> list[SimpleNamespace]:
        asked.append((name, tokens))
        took = 1e-6 * len(name)  # another rate for each
        return [SimpleNamespace(flops=2.0, bytes=1.0, run_s=[took], undisturbed_s=[took])]

    rates = cpu_measures._Rates(SimpleNamespace(matmul=matmul), 2)
    for kind, name in (("q8", "c8.s32"), ("q4", "c4.km32"), ("bf16", "bf16")):
        asked.clear()
        for one in rates.matmul[kind].values():
            one.visit(0.0)
        assert asked == [(name, tokens) for tokens in TOKENS]
        assert rates.matmul[kind][1].bytes_per_s == pytest.approx(1e6 / len(name))
        assert all(one in rates.all() for one in rates.matmul[kind].values())


def test_a_profile_is_that_of_its_integer_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    best = cpu_measures.identity()
    key = profile_cache.cache_key()
    monkeypatch.setenv("HELM_CPU_INT", "scalar")
    assert cpu_measures.identity() == {**best, "integer_isa": "scalar"}
    assert (profile_cache.cache_key() == key) == (best["integer_isa"] == "scalar")


def test_progress_rises_from_zero_to_one(disturbed: tuple[Profile, list[float]]) -> None:
    _, seen = disturbed
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)


def timing_of(undisturbed_s: list[float]) -> SimpleNamespace:
    return SimpleNamespace(run_s=[], undisturbed_s=undisturbed_s)


def test_undisturbed_runs_decide_when_there_are_enough() -> None:
    shape = Shape(1.0, 1.0)
    shape.run_s = [9.0] * 50 + [1.0] * 50
    assert shape.seconds == pytest.approx(1.0)  # none known to be undisturbed: the quickest
    assert not shape.trusted
    for visit in ([2.0, 2.0, 2.3], [], [8.0], [1.0]):  # the third was a slow moment
        shape.add(timing_of(visit))
    assert shape.trusted
    assert shape.seconds == pytest.approx(2.1)


def test_a_query_of_a_prompt_costs_what_its_products_do_not() -> None:
    rate, query_s, probe = 1e11, 2e-7, SimpleNamespace()

    def attention(
        _threads: int, _dtype: str, kv_heads: int, group: int, queries: int, context: int, _s: float
    ) -> list[SimpleNamespace]:
        heads = kv_heads * group
        pairs = queries * (context - queries) + queries * (queries + 1) / 2
        flops = 4.0 * heads * 128 * pairs
        took = flops / rate + heads * queries * query_s
        return [SimpleNamespace(flops=flops, bytes=1.0, run_s=[took], undisturbed_s=[took])]

    probe.attention = attention
    rates = cpu_measures._Rates(probe, 4)
    for one in (*rates.attention[cpu_measures.SWEEP_DTYPE].values(), rates.short_prefill):
        for _ in range(3):
            one.visit(0.0)
    # The long prompt's rate has a little of it too.
    assert rates._attention_query_s() == pytest.approx(query_s, rel=0.05)


def test_the_ratio_is_that_of_the_rates_timed_in_turn() -> None:
    copied = [Shape(1.0, 1.0, run_s=[s], undisturbed_s=[[s] * 3]) for s in (1.0, 3.0)]
    mapped = [Shape(1.0, 1.0, run_s=[s], undisturbed_s=[[s] * 3]) for s in (2.0, 3.0)]
    assert rate_ratio([*copied, *mapped]) == pytest.approx(0.8)
    timed = Quantity("compressed", lambda _seconds: [])
    timed.shapes = [*mapped, *copied, *mapped, *copied]
    assert cpu_measures.compressed_ratio({1: timed, 4: timed}) == {1: 1.0, 4: 1.0}
    timed.shapes = [*mapped, *copied, *copied, *copied]
    assert cpu_measures.compressed_ratio({4: timed}) == {4: pytest.approx(9 / 8)}
    timed.shapes = [*mapped, *[Shape(1.0, 1.0, [s], [[s] * 3]) for s in (1.0, 1.0)]]
    assert cpu_measures.compressed_ratio({1: timed}) == {1: 1.6}  # noise


def test_what_has_too_few_undisturbed_runs_is_named(
    measured: Profile,
    disturbed: tuple[Profile, list[float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, _ = disturbed
    assert "f16 products, 8 tokens" in " ".join(found.unsettled)
    assert len(set(found.unsettled)) == len(found.unsettled)
    show(found)
    shown = capsys.readouterr().out
    assert f"disturbed {len(found.unsettled)} measurements" in shown
    kinds = {name.partition(",")[0] for name in found.unsettled}
    assert all(kind in " ".join(shown.split()) for kind in kinds)
    show(dataclasses.replace(measured, unsettled=()))
    assert "disturbed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("matvec", "matmul", "threads"),
    [
        ({1: 10.0}, {1: 50.0}, 1),
        ({1: 10.0, 2: 19.0}, {1: 50.0, 2: 99.0}, 2),
        ({1: 10.0, 2: 9.9}, {1: 50.0, 2: 99.0}, 1),  # never slower than one
        ({1: 10.0, 2: 10.1}, {1: 50.0, 2: 50.5}, 1),  # a tie: fewer
        ({1: 10.0, 2: 20.0, 4: 20.1}, {1: 50.0, 2: 99.0, 4: 190.0}, 4),  # prefill still gains
        ({1: 10.0, 2: 20.0, 4: 20.1}, {1: 50.0, 2: 99.0, 4: 100.0}, 2),
        ({1: 10.0, 2: 20.0, 4: 15.0}, {1: 50.0, 2: 99.0, 4: 190.0}, 2),  # decode comes first
        ({1: 10.0, 2: 20.0, 4: 15.0}, {}, 2),  # nothing left to decide
    ],
)
def test_choice_of_threads(
    matvec: dict[int, float], matmul: dict[int, float], threads: int
) -> None:
    assert choose_threads(matvec, matmul) == threads


def test_cached_profile_is_not_measured_again(measured: Profile) -> None:
    measure = Counter(measured)
    first = profile_cache.machine_profile(measure=measure)
    again = profile_cache.machine_profile(measure=measure)
    assert measure.calls == 1
    assert again.name == first.name == "measurement 1"
    assert [path.name for path in profile_cache.cache_path().parent.iterdir()] == [
        profile_cache.cache_path().name
    ]


def test_what_was_disturbed_is_measured_again_after_an_hour(measured: Profile) -> None:
    for unsettled, calls in (((), 1), (("a rate",), 2)):
        measure = Counter(dataclasses.replace(measured, unsettled=unsettled))
        profile_cache.machine_profile(recalibrate=True, measure=measure)
        profile_cache.machine_profile(measure=measure)
        assert measure.calls == 1
        path = profile_cache.cache_path()
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3700))
        profile_cache.machine_profile(measure=measure)
        assert measure.calls == calls


def test_recalibrating_renews_the_cache(measured: Profile) -> None:
    measure = Counter(measured)
    profile_cache.machine_profile(measure=measure)
    assert profile_cache.machine_profile(recalibrate=True, measure=measure).name == "measurement 2"
    assert profile_cache.machine_profile(measure=measure).name == "measurement 2"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": "helm-plan"}'])
def test_damaged_cache_is_measured_anew(measured: Profile, content: bytes) -> None:
    measure = Counter(measured)
    path = profile_cache.cache_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    profile_cache.machine_profile(measure=measure)
    assert measure.calls == 1
    assert Profile.from_json(path.read_bytes()).name == "measurement 1"


def test_cache_that_cannot_be_written_does_no_harm(measured: Profile, cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    measure = Counter(measured)
    assert profile_cache.machine_profile(measure=measure).name == "measurement 1"


def test_memory_is_that_of_today(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    profile_cache.machine_profile(measure=Counter(measured))
    monkeypatch.setattr(profile_cache, "memory_available", lambda: 12345)
    found = profile_cache.machine_profile(measure=Counter(measured))
    assert found.cpu.memory_bytes == 12345


@pytest.mark.parametrize("fact", ["cpu_affinity", "cpu_quota", "memory_capacity"])
def test_another_machine_has_another_key(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = profile_cache.cache_key()
    other = {"cpu_affinity": {0, 9}, "cpu_quota": 0.5, "memory_capacity": 1}[fact]
    monkeypatch.setattr(profile_cache, fact, lambda: other)
    assert profile_cache.cache_key() != before


def test_command_prints_the_cached_profile_and_writes_it(measured: Profile, tmp_path: Path) -> None:
    profile_cache.machine_profile(measure=Counter(measured))
    out = tmp_path / "machine.json"
    table = helm("profile")
    assert "products, 512 tokens" in table.stdout
    assert "from the cache" in table.stderr
    written = helm("profile", "--json", "--output", str(out))
    assert Profile.from_json(written.stdout).name == "measurement 1"
    assert Profile.from_json(out.read_bytes()).cpu.threads == measured.cpu.threads
    refused = helm("profile", "--output", str(tmp_path / "absent" / "machine.json"), status=2)
    assert refused.stderr.startswith("error: [profile] cannot write")
