"""The default number of threads: measured once, kept, and overruled by a profile or by the user."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helm.commands import doctor
from helm.errors import OutOfMemoryError
from helm.machine.profile import load_profile
from helm.measure import threads
from helm.measure.profile_cache import cache_path, cached_file, save_profile
from helm.measure.quantity import Quantity
from helm.measure.threads import Measured, Rates, ThreadChoice, choose_here, measure_rates
from helm.session import here

SLOWER_TOGETHER = {1: Rates(10e9, None), 2: Rates(8e9, None), 4: Rates(6e9, None)}
BEST_AT_TWO = {1: Rates(10e9, None), 2: Rates(20e9, 99e9), 4: Rates(20e9, 100e9)}


class Counter:
    """Stands for the measurement."""

    def __init__(self, rates: dict[int, Rates], settled: bool = True) -> None:
        self.rates, self.settled = rates, settled
        self.counts: list[list[int]] = []

    def __call__(self, counts: Sequence[int], _affinity: Collection[int]) -> Measured:
        self.counts.append(list(counts))
        return self.rates, self.settled


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This machine has these counts to choose from."""

    def have(*counts: int) -> None:
        monkeypatch.setattr(threads, "thread_candidates", lambda _affinity: list(counts))

    have(1, 2, 4)
    return have


@pytest.mark.parametrize(("rates", "threads"), [(SLOWER_TOGETHER, 1), (BEST_AT_TWO, 2)])
def test_the_measurement_decides_and_is_made_once(
    candidates: object, rates: dict[int, Rates], threads: int
) -> None:
    measure = Counter(rates)
    first, again = choose_here(measure), choose_here(measure)
    assert measure.counts == [[1, 2, 4]]
    assert first == again
    assert first.threads == threads
    assert "1 thread 10.0 GB/s, 2 threads" in first.reason
    assert ("and 99 GFLOP/s" in first.reason) == (threads == 2)


def test_one_candidate_is_not_measured(candidates: Callable[..., None]) -> None:
    candidates(1)
    measure = Counter({})
    assert choose_here(measure).threads == 1
    assert measure.counts == []
    assert not cached_file("threads").exists()


def test_other_candidates_are_measured_anew(candidates: Callable[..., None]) -> None:
    measure = Counter(BEST_AT_TWO)
    choose_here(measure)
    candidates(1, 4)
    measure.rates = {n: BEST_AT_TWO[n] for n in (1, 4)}
    assert choose_here(measure).threads == 4
    assert measure.counts == [[1, 2, 4], [1, 4]]


def test_what_other_programs_disturbed_does_not_stay(candidates: object) -> None:
    measure = Counter(BEST_AT_TWO, settled=False)

    def a_day_later() -> ThreadChoice:
        written_at = cached_file("threads").stat().st_mtime
        os.utime(cached_file("threads"), times=(written_at - 86400,) * 2)
        return choose_here(measure)

    assert choose_here(measure).threads == choose_here(measure).threads == 2
    assert len(measure.counts) == 1
    measure.settled, measure.rates = True, SLOWER_TOGETHER
    assert a_day_later().threads == a_day_later().threads == 1
    assert len(measure.counts) == 2


def written(**changes: Any) -> bytes:
    rates = {str(n): vars(rate) for n, rate in BEST_AT_TWO.items()}
    return json.dumps(
        {"format": "helm-threads", "version": 4, "settled": True, "rates": rates, **changes}
    ).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        written(format="helm-profile"),
        written(version=3),
        written(settled=1),
        written(rates={"two": vars(Rates(1.0, 1.0))}),
        written(rates={"1": {"matvec_bytes_per_s": 1e9}}),
        written(rates={str(n): vars(Rates(float(n), 0.0)) for n in (1, 2, 4)}),
        written(rates={str(n): vars(Rates(9.0, None)) for n in (1, 2, 4)}),
        written(rates={}),
        written(rates={str(n): vars(Rates(9.0, 9.0, {})) for n in (1, 2, 4)}),
        written(rates={str(n): vars(Rates(9.0, 9.0, {0: 1.0})) for n in (1, 2, 4)}),
    ],
)
def test_a_damaged_cache_is_measured_anew(candidates: object, content: bytes) -> None:
    path = cached_file("threads")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    measure = Counter(BEST_AT_TWO)
    assert choose_here(measure).threads == choose_here(measure).threads == 2
    assert len(measure.counts) == 1
    assert json.loads(path.read_bytes()) == json.loads(written())


def test_a_profile_of_this_machine_decides(candidates: object) -> None:
    profile = load_profile("thesis-4060")
    cpu = dataclasses.replace(profile.cpu, compressed_ratio={1: 1.2})
    profile = dataclasses.replace(profile, cpu=cpu)
    cache_path().parent.mkdir(parents=True)
    save_profile(dataclasses.replace(profile, cpu=profile.cpu.with_threads(4)), cache_path())
    measure = Counter(BEST_AT_TWO)
    chosen = choose_here(measure)
    assert (chosen.threads, measure.counts) == (4, [])
    assert chosen.compressed_ratio == {1: 1.2}
    assert "profile" in chosen.reason
    save_profile(profile, cache_path())  # 14 threads, which are no choice here
    assert choose_here(measure).threads == 2


def test_without_memory_to_measure_all_cores_are_used(
    candidates: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "memory_available", lambda: 512 << 20)
    with pytest.raises(OutOfMemoryError, match="measuring takes"):
        measure_rates([1, 2], {0})
    assert choose_here().threads == 4
    assert not cached_file("threads").exists()


@pytest.mark.parametrize(("spread", "near"), [(1e-9, [1, 2]), (10.0, [2])])
def test_prefill_is_measured_where_decode_does_not_decide(
    spread: float, near: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(_probe: object, counts: Sequence[int]) -> tuple[Any, Any]:
        def products(n: int, name: str) -> Quantity:
            run_s = [1.0 / (1 + spread * n)] * 3
            timing = SimpleNamespace(flops=1e9, bytes=1e9, run_s=run_s, undisturbed_s=run_s)
            return Quantity(name, lambda _seconds: [timing])

        return {n: products(n, "decode") for n in counts}, {n: products(n, "pre") for n in counts}

    def compressed(_probe: object, threads: int, counts: Sequence[int]) -> dict[int, Quantity]:
        def quantity(tokens: int) -> Quantity:
            timings = [
                SimpleNamespace(flops=0, bytes=1e9, run_s=[s] * 3, undisturbed_s=[s] * 3)
                for s in (1.0 + threads, float(tokens))
            ]
            return Quantity("compressed", lambda _seconds: timings)

        return {tokens: quantity(tokens) for tokens in counts}

    monkeypatch.setattr(threads, "sweep_quantities", sweep)
    monkeypatch.setattr(threads, "compressed_quantities", compressed)
    rates, settled = measure_rates([1, 2], {0})
    assert settled
    assert [n for n, rate in rates.items() if rate.matmul_flops is not None] == (
        near if len(near) > 1 else []
    )
    known = [n for n, rate in rates.items() if rate.compressed_ratio is not None]
    assert known == near
    chosen = choose_here(lambda _counts, _affinity: (rates, True))
    assert chosen.threads == near[0]
    assert chosen.compressed_ratio is not None
    assert chosen.compressed_ratio[1] == 1.6  # twice as fast or more is not believed
    assert chosen.compressed_ratio[4] == pytest.approx((1 + chosen.threads) / 4)
    assert choose_here(None) == chosen  # from the cache


def test_every_count_is_measured() -> None:
    affinity = threads.cpu_affinity()
    rates, _ = measure_rates([1, 2], affinity)
    assert set(rates) == {1, 2}
    assert all(1e6 < rate.matvec_bytes_per_s < 1e14 for rate in rates.values())


def test_this_machine_s_choice_is_one_of_its_candidates() -> None:
    chosen = choose_here()
    assert chosen.threads in threads.thread_candidates(threads.cpu_affinity())
    assert len(chosen.cpus) in (0, chosen.threads)


# --- who goes by it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights_mib", "chosen", "expected"),
    [(1 << 10, 3, 3), (1 << 10, 6, 6), (9, 6, 2), (9, 1, 1)],
)
def test_models_run_on_the_choice_or_fewer(
    weights_mib: int, chosen: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = dataclasses.replace(here.read_machine(), threads=6)
    monkeypatch.setattr(threads, "choose_here", lambda: ThreadChoice(chosen, (), ""))
    assert here._threads_for(weights_mib << 20, machine).threads == expected


def test_a_tiny_model_and_a_given_number_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import helm

    def refuse() -> ThreadChoice:
        raise AssertionError("measured")

    monkeypatch.setattr(threads, "choose_here", refuse)
    with helm.LLM(device="cpu") as llm:
        assert llm.plan.threads == 1
    with helm.LLM(device="cpu", threads=3) as llm:
        assert llm.stats["threads"] == 3


def test_the_engine_gets_the_cpus_to_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import helm

    asked = []

    def pin(affinity: Collection[int], threads: int) -> list[int]:
        asked.append(threads)
        return [max(affinity)] * threads

    monkeypatch.setattr(here, "cpus_to_pin", pin)
    affinity = threads.cpu_affinity()
    with helm.LLM(device="cpu", threads=2) as llm:
        assert llm.stats["cpus"] == [max(affinity)] * 2
        assert llm.generate("Once", max_tokens=4, temperature=0).tokens
    assert asked == [2]
    assert threads.cpu_affinity() == affinity


def test_doctor_says_how_many_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.gather()
    assert report["threads"]["threads"] == choose_here().threads
    rows = dict(doctor._rows(report))
    assert report["threads"]["reason"] in rows["threads"]
    assert "whichever CPUs" in rows["threads"] or "one each" in rows["threads"]
    report["threads"] = dataclasses.asdict(ThreadChoice(2, (4, 6), "told so"))
    assert dict(doctor._rows(report))["threads"] == "2, on CPUs 4, 6, one each (told so)"
