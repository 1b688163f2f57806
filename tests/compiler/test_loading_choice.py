"""The choice of copied, mapped or compressed weights against plain sums."""

from __future__ import annotations

import dataclasses
import random

import pytest
from plans import make_plan

from helm.compiler.load_cost import ANSWERS, LoadingRequest, Situation, Waiting, choose
from helm.errors import InvalidError
from helm.machine.profile import load_profile
from helm.machine.rates import CpuProfile
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import load_config
from helm.model.hub import bundled_model
from helm.session.here import LoadOptions
from search_cases import GIB

CPU = load_profile("cpu-laptop-16gb").cpu
WAITING = Waiting(
    prefill_s=0.01, decode_s=0.1, prefill_products_s=0.01, decode_products_s=0.1, step_s=0.12,
    prompt_tokens=100, decode_tokens=1, waves=1, batch=1, output=100, objective="total",
)  # fmt: skip
PLENTY = Situation(10**9, 1.0, 10**12, False, WAITING)


def measured(ratio: float = 0.8, copy: float = 2e9) -> CpuProfile:
    return dataclasses.replace(CPU, mapped_matvec_ratio=ratio, copy_bytes_per_s=copy)


def total_s(at: Situation, cpu: CpuProfile, way: str, answers: int) -> float:
    """From the start of loading to the end, as far as the ways differ."""
    assert cpu.mapped_matvec_ratio is not None
    assert cpu.copy_bytes_per_s is not None
    assert cpu.compressed_ratio is not None
    assert cpu.compress_bytes_per_s is not None
    w = at.waiting
    seconds = 0.0 if way == "mapped" else at.copy_bytes / cpu.copy_bytes_per_s
    share, prompt, token = at.share, 1.0, 1.0
    parts = [w.prefill_s, *([w.decode_s] * (w.output - 1))]
    if way == "mapped":
        prompt = token = cpu.mapped_matvec_ratio
    if way == "compressed":
        share = at.compress_share
        prompt, token = cpu.compressed_ratio[w.prompt_tokens], cpu.compressed_ratio[w.decode_tokens]
        parts = [w.prefill_products_s, *([w.decode_products_s] * (w.output - 1))]
        slower = at.compress_bytes / cpu.compress_bytes_per_s
        seconds += max(0.0, slower - at.compress_bytes / cpu.copy_bytes_per_s)
    for _ in range(answers * w.waves):
        for part, ratio in zip(parts, (prompt, *([token] * (w.output - 1))), strict=True):
            own = part * share
            seconds += own / ratio - own
    return seconds


@pytest.mark.parametrize("seed", range(200))
def test_what_takes_less_time_in_all_is_chosen(seed: int) -> None:
    rng = random.Random(seed)
    prefill_s, decode_s = rng.uniform(0, 2), 10 ** rng.uniform(-4, 0)
    waiting = Waiting(
        prefill_s=prefill_s,
        decode_s=decode_s,
        prefill_products_s=prefill_s + rng.choice((0, rng.uniform(0, 2))),
        decode_products_s=decode_s + rng.choice((0, 0.1)),
        step_s=2.0,
        prompt_tokens=50,
        decode_tokens=rng.choice((1, 3)),
        waves=rng.choice((1, 4)),
        batch=rng.choice((1, 3, 12)),
        output=rng.randint(1, 50),
        objective="total",
    )
    share = rng.choice((1.0, rng.uniform(0.1, 1)))
    compressible = rng.choice((0, 10**9, 2 * 10**9))
    at = Situation(
        10**9, share, 10**12, False, waiting, compressible, compressible // 4 * 3,
        share if compressible else 0.0,
    )  # fmt: skip
    cpu = dataclasses.replace(
        measured(rng.uniform(0.3, 1.0), 10 ** rng.uniform(8, 10)),
        compressed_ratio={n: rng.uniform(0.8, 1.4) for n in (1, 3, 50)},
        compress_bytes_per_s=10 ** rng.uniform(8, 10),
    )
    answers = rng.randint(1, 20)
    request = LoadingRequest("auto", answers * waiting.output * waiting.batch)
    loading, choice = choose(request, at, cpu)
    ways = ("mapped", "copied", *(["compressed"] if compressible else []))
    seconds = {way: total_s(at, cpu, way, answers) for way in ways}
    assert seconds[loading] == pytest.approx(min(seconds.values()), rel=1e-9)
    assert choice.pays_after_tokens is not None
    # Between whole answers the totals are straight lines, which meet there.
    each = waiting.output * waiting.batch
    assert seconds["copied"] - seconds["mapped"] == pytest.approx(
        (1 - answers * each / choice.pays_after_tokens) * choice.copy_s, rel=1e-6, abs=1e-9
    )
    if compressible and choice.compressing_pays_after_tokens:
        further = choice.compressing_pays_after_tokens
        assert seconds["compressed"] - seconds["copied"] == pytest.approx(
            (1 - answers * each / further) * choice.compress_s, rel=1e-6, abs=1e-9
        )


def test_decode_and_first_tokens_count_for_their_objectives() -> None:
    def chosen(objective: str, tokens: int, ratio: float = 0.8) -> str:
        waiting = dataclasses.replace(WAITING, objective=objective)
        at = dataclasses.replace(PLENTY, waiting=waiting)
        return choose(LoadingRequest("auto", tokens), at, measured(ratio))[0]

    assert chosen("decode", 1) == "copied"  # loading is not part of it
    assert chosen("decode", 10**6, ratio=1.0) == "mapped"  # nothing to win
    assert chosen("total", 1) == "mapped"
    assert chosen("total", 10_000) == "copied"
    assert chosen("ttft", 10_000) == "mapped"  # 100 answers wait a quarter of 10 ms each
    assert chosen("ttft", 10**6) == "copied"


def test_what_rules_a_way_out() -> None:
    many, few = LoadingRequest("auto", 10**6), LoadingRequest("auto", 1)
    short = dataclasses.replace(PLENTY, spare_bytes=10**9 - (64 << 20))
    loading, choice = choose(many, short, measured())
    assert loading == "mapped"
    assert choice.reason == "a copy beside the files in the page cache lacks 64.0 MiB of memory"
    loading, choice = choose(few, dataclasses.replace(short, visits=True), measured())
    assert loading == "copied"
    assert "only copied weights reach the GPU" in choice.reason
    loading, choice = choose(few, dataclasses.replace(PLENTY, copy_bytes=0), measured())
    assert loading == "copied"
    assert "could stay in their files" in choice.reason
    for weights in ("copied", "mapped", "compressed"):
        for at in (PLENTY, short):
            loading, choice = choose(LoadingRequest(weights, 1), at, measured())
            assert loading == weights
            assert choice.reason.startswith("as asked for; copying 953.7 MiB takes 0.5 s")


def test_compressing_is_chosen_where_it_is_known_to_pay() -> None:
    at = dataclasses.replace(
        PLENTY, compress_bytes=10**9, compressed_bytes=77 * 10**7, compress_share=1.0
    )
    known = dataclasses.replace(
        measured(), compressed_ratio={1: 1.25, 4: 0.8, 100: 0.5}, compress_bytes_per_s=1e9
    )
    many, few = LoadingRequest("auto", 10**6), LoadingRequest("auto", 1)
    loading, choice = choose(many, at, known)
    assert loading == "compressed"
    assert choice.compress_s == pytest.approx(0.5)
    assert choice.compressed_decode_ratio == pytest.approx(0.12 / 0.1)
    # Of 100 tokens, 99 take 0.1 s, a fifth less, and the first the prompt's 0.01 s, twice as much.
    assert choice.compressing_pays_after_tokens == pytest.approx(0.5 / 0.0197)
    assert "compressing 953.7 MiB to 734.3 MiB, exactly, takes 0.5 s more" in choice.reason
    assert "decode is 20 % faster then: it pays after 26 output tokens" in choice.reason
    assert choose(few, at, known)[0] == "mapped"
    loading, choice = choose(many, at, measured())
    assert loading == "copied"  # what compressing brings is not known
    assert "0.5 s more, for a rate that helm-llm profile measures" in choice.reason
    measured_shortly = dataclasses.replace(many, compressed_ratio={1: 1.3})
    assert choose(measured_shortly, at, None)[0] == "compressed"
    assert choose(measured_shortly, at, CPU)[0] == "compressed"
    slower = dataclasses.replace(known, compressed_ratio={1: 0.95})
    assert choose(many, at, slower)[0] == "copied"  # where bandwidth is plenty
    assert choose(many, dataclasses.replace(at, visits=True), known)[0] == "copied"
    # What it saves makes room for the file's pages.
    tight = dataclasses.replace(at, spare_bytes=10**9 - 2 * 10**8)
    assert choose(many, tight, known)[0] == "compressed"
    assert choose(many, tight, measured())[0] == "mapped"
    decode = dataclasses.replace(at, waiting=dataclasses.replace(WAITING, objective="decode"))
    assert choose(few, decode, known)[0] == "compressed"


def test_several_sequences_may_be_slower_with_compressed_weights() -> None:
    at = dataclasses.replace(
        PLENTY, compress_bytes=10**9, compressed_bytes=77 * 10**7, compress_share=1.0
    )
    ratios = {1: 1.25, 4: 0.8, 16: 0.8}
    known = dataclasses.replace(measured(), compressed_ratio=ratios, compress_bytes_per_s=1e9)
    for batch, way in {1: "compressed", 2: "copied", 8: "copied"}.items():
        waiting = dataclasses.replace(
            WAITING, batch=batch, decode_tokens=batch, prefill_products_s=0.0
        )
        situation = dataclasses.replace(at, waiting=waiting)
        loading, choice = choose(LoadingRequest("auto", 10**6), situation, known)
        assert loading == way, batch
    assert "takes 0.5 s more, and decode is 17 % slower then" in choice.reason
    assert choice.compressed_decode_ratio == pytest.approx(0.12 / (0.02 + 0.1 / 0.8))


def test_a_plan_for_several_sequences_is_loaded_for_them() -> None:
    """One token waits for memory. Eight do so too, as far as nothing says how fast the CPU
    computes; where it is known, they wait for nothing that a copy would bring sooner."""
    folder, ratios = bundled_model(), {1: 1.3, 8: 0.7}
    known = dataclasses.replace(measured(), compressed_ratio=ratios)
    for cpu, several in ((None, "copied"), (known, "mapped")):
        for batch, loading in ((1, "compressed"), (8, several)):
            request = LoadingRequest("auto", 10**9, batch=batch, cpu=cpu, compressed_ratio=ratios)
            plan = make_plan(
                load_config(folder), read_checkpoint(folder), threads=1, memory_bytes=4 * GIB,
                max_sequences=batch, loading=request,
            )  # fmt: skip
            assert plan.loading == loading
            assert plan.loading_choice is not None
            assert ("slower then" in plan.loading_choice.reason) == (batch == 8)


def test_rates_that_are_not_known_are_said_to_be_assumed() -> None:
    loading, choice = choose(LoadingRequest("auto"), PLENTY, CPU)
    assert choice.assumed
    assert loading == "copied"
    assert "helm-llm profile measures this one" in choice.reason
    assert choice.copy_s == pytest.approx(10**9 / (0.2 * max(CPU.matvec_bytes_per_s.values())))
    assert choose(LoadingRequest("auto"), PLENTY, None)[1].copy_s == pytest.approx(0.2)
    assert not choose(LoadingRequest("auto"), PLENTY, measured())[1].assumed
    assert f"{ANSWERS * 100:,} are expected" in choice.reason


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(InvalidError, match="weights must be auto, copied, mapped, compressed, got"):
        LoadingRequest("lazy")
    with pytest.raises(InvalidError, match=r"\[load\] weights must be auto, copied, mapped"):
        LoadOptions(weights="lazy")
    with pytest.raises(InvalidError, match="expected_tokens must be an integer of at least 1"):
        LoadOptions(expected_tokens=0)
