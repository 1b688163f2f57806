"""Profiles: presets, the JSON round trip, hostile files, and rates between measured counts."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest

from helm.base.formats import FORMATS, KV_ELEMENT_BYTES
from helm.errors import InvalidError, ProfileError
from helm.machine.profile import Profile, load_profile, preset_names
from helm.machine.rates import compressed_rate, rate_class

PRESET = "rtx-4060ti-16gb-ddr5"


def document():
    return load_profile(PRESET).to_dict()


def test_presets_are_estimates_with_a_source():
    names = preset_names()
    assert {"thesis-4060", "thesis-3090", "thesis-l40s", PRESET} <= set(names)
    for name in names:
        profile = load_profile(name)
        assert profile.name == name
        assert profile.estimated
        assert profile.identity["source"]
        assert (profile.accelerator is None) == name.startswith("cpu-")


def test_published_numbers_are_in_the_thesis_preset():
    profile = load_profile("thesis-4060")
    assert profile.cpu.matvec_bytes_per_s["f16"] == 45e9
    assert profile.accelerator.matvec_bytes_per_s["f16"] == 218e9
    assert profile.link.to_accelerator_bytes_per_s == 16e9
    assert profile.link.latency_s == 5e-6


@pytest.mark.parametrize("name", preset_names())
def test_round_trip(name):
    profile = load_profile(name)
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.digest == profile.digest


def test_a_file_is_loaded_by_path(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**document(), "name": "mine"}))
    assert load_profile(path).name == "mine"
    assert load_profile(path).digest != load_profile(PRESET).digest


def test_neither_preset_nor_file(tmp_path):
    with pytest.raises(
        ProfileError, match=r"neither a preset nor a file; presets are .*thesis-l40s"
    ):
        load_profile("rtx-9999")
    with pytest.raises(ProfileError, match="not a regular file"):
        load_profile(tmp_path)
    with pytest.raises(ProfileError, match=r"cannot read|neither"):
        load_profile("a\0b")
    (tmp_path / "big").write_bytes(b" " * (5 << 20))
    with pytest.raises(ProfileError, match="over 4 MiB"):
        load_profile(tmp_path / "big")


CPU_RATE = ("cpu", "matvec_bytes_per_s", "bf16")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "helm-plan", "format: expected 'helm-profile'"),
        (("version",), 1, "version: expected 2, found 1"),
        (("version",), None, "version: expected an integer"),
        (("extra",), 1, "unknown key 'extra'"),
        (("unsettled",), "ops", "unsettled: expected"),
        (("unsettled",), [1], r"unsettled\[0\]: expected"),
        (
            ("cpu", "attention_flops", "f32"),
            {},
            r"cpu\.attention_flops\.f32: expected at least one",
        ),
        (("cpu", "attention_flops", "f32"), True, r"cpu\.attention_flops\.f32: expected a"),
        (("estimated",), 1, "estimated: expected true or false"),
        (("identity", "cpu"), [], r"identity\.cpu"),
        (CPU_RATE, 0, r"cpu\.matvec_bytes_per_s\.bf16: expected a rate of at least 1, found 0"),
        (CPU_RATE, -1.0, r"cpu\.matvec_bytes_per_s\.bf16"),
        (CPU_RATE, 1e-300, r"cpu\.matvec_bytes_per_s\.bf16"),
        (CPU_RATE, 1e31, r"cpu\.matvec_bytes_per_s\.bf16"),
        (CPU_RATE, True, r"cpu\.matvec_bytes_per_s\.bf16"),
        (CPU_RATE, "fast", r"cpu\.matvec_bytes_per_s\.bf16"),
        (("cpu", "matvec_bytes_per_s", "int4"), 1.0, r"unknown key 'int4'"),
        (("cpu", "matvec_bytes_per_s"), {}, "at least one dtype"),
        (("cpu", "matmul_flops", "f32"), {}, r"cpu\.matmul_flops\.f32: expected at least one"),
        (("cpu", "matmul_flops", "f32", "0"), 1.0, "expected counts from 1"),
        (("cpu", "matmul_flops", "f32", "1.5"), 1.0, "expected counts from 1"),
        (("cpu", "matmul_flops", "f32", "9" * 5000), 1.0, "expected counts from 1"),
        (("cpu", "matmul_flops", "f32", "8"), -2, r"cpu\.matmul_flops\.f32\.8"),
        (("cpu", "attention_query_s"), -1e-9, r"cpu\.attention_query_s"),
        (("cpu", "op_s"), -1e-9, r"cpu\.op_s"),
        (("cpu", "memory_bytes"), -1, r"cpu\.memory_bytes"),
        (("cpu", "memory_bytes"), 1.5, r"cpu\.memory_bytes"),
        (("cpu", "threads"), 0, r"cpu\.threads"),
        (("cpu", "threads"), 3, r"thread_sweep: has no entry for the chosen 3 threads"),
        (("cpu", "name"), "x", "unknown key 'name'"),
        (
            ("cpu", "mapped_matvec_ratio"),
            0,
            r"cpu\.mapped_matvec_ratio: expected a rate of at least 1e-06",
        ),
        (("cpu", "mapped_matvec_ratio"), 1.3, r"mapped_matvec_ratio: expected at most 1.2, found"),
        (("cpu", "mapped_matvec_ratio"), "most", r"cpu\.mapped_matvec_ratio"),
        (("cpu", "compressed_ratio"), {"1": 1.7}, r"compressed_ratio\.1: expected at most 1.6, fo"),
        (("cpu", "compressed_ratio"), {"0": 1.0}, r"compressed_ratio: expected counts from 1"),
        (("cpu", "compressed_ratio"), {}, r"compressed_ratio: expected at least one entry"),
        (("cpu", "compressed_ratio"), 1.2, r"cpu\.compressed_ratio"),
        (("cpu", "compressed_matvec_ratio"), 1.7, r"compressed_matvec_ratio: expected at most 1.6"),
        (("cpu", "copy_bytes_per_s"), -1.0, r"cpu\.copy_bytes_per_s"),
        (("cpu", "copy_bytes_per_s"), 1e31, r"cpu\.copy_bytes_per_s"),
        (("accelerator", "copy_bytes_per_s"), 1e9, "unknown key 'copy_bytes_per_s'"),
        (("cpu", "lone_op_s"), -1e-9, r"cpu\.lone_op_s"),
        (("accelerator", "name"), 5, r"accelerator\.name"),
        (("accelerator",), None, "accelerator: accelerator and link must be given together"),
        (("link",), None, "link: accelerator and link must be given together"),
        (("link", "latency_s"), -1, r"link\.latency_s"),
        (("link", "cpu_rate_while_copying"), 1.5, r"cpu_rate_while_copying: expected a share"),
        (("link", "rate_while_both_compute"), 1.5, r"both_compute: expected a share of 0.5 to 1"),
        (("link", "cpu_rate_while_copying"), 0, r"cpu_rate_while_copying: expected a rate of at"),
        (("link", "to_host_bytes_per_s"), 0, r"link\.to_host_bytes_per_s"),
        (("link", "locks_mapped"), 1, r"link\.locks_mapped: expected true or false"),
    ],
)
def test_malformed_profiles_name_the_field(path, value, message):
    changed = copy.deepcopy(document())
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ProfileError, match=message):
        Profile.from_json(json.dumps(changed))
    assert issubclass(ProfileError, InvalidError)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_no_rate_is_nan_or_infinite(constant):
    text = json.dumps(document()).replace('"op_s": ' + repr(document()["cpu"]["op_s"]),
                                          f'"op_s": {constant}', 1)  # fmt: skip
    assert constant in text
    with pytest.raises(ProfileError, match=r"JSON number|op_s"):
        Profile.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"format": "helm-profile"}', b"\xff\xfe"])
def test_not_a_profile(text):
    with pytest.raises(ProfileError):
        Profile.from_json(text)


def test_missing_keys_are_named():
    for key in document().keys() - {"unsettled"}:
        changed = {k: v for k, v in document().items() if k != key}
        with pytest.raises(ProfileError, match=f"'{key}' is missing|given together"):
            Profile.from_json(json.dumps(changed))


def test_matrix_rate_is_interpolated_on_logarithmic_axes():
    changed = document()
    changed["cpu"]["matmul_flops"]["f32"] = {"1": 1e9, "4": 4e9, "64": 8e9}
    cpu = Profile.from_json(json.dumps(changed)).cpu
    for tokens, want in ((1, 1e9), (2, 2e9), (4, 4e9), (16, math.sqrt(32) * 1e9), (64, 8e9)):
        assert float(cpu.matmul_rate("f32", tokens)) == pytest.approx(want, rel=1e-12)
    assert float(cpu.matmul_rate("f32", 4096)) == pytest.approx(8e9)
    assert list(cpu.matmul_rate("f32", [1, 4])) == pytest.approx([1e9, 4e9])


def test_attention_rate_is_one_or_one_per_row_count():
    changed = document()
    changed["cpu"]["attention_flops"] = {"f32": 3e9, "f16": {"1": 1e9, "4": 4e9}}
    cpu = Profile.from_json(json.dumps(changed)).cpu
    assert list(cpu.attention_rate("f32", [1, 512])) == pytest.approx([3e9, 3e9])
    assert list(cpu.attention_rate("f16", [1, 2, 512])) == pytest.approx([1e9, 2e9, 4e9])


def test_unsettled_quantities_are_kept_and_may_be_absent():
    assert load_profile(PRESET).unsettled == ()
    changed = {**document(), "unsettled": ["ops", "bare steps"]}
    profile = Profile.from_json(json.dumps(changed))
    assert profile.unsettled == ("ops", "bare steps")
    assert Profile.from_json(profile.to_json()) == profile
    del changed["unsettled"]
    assert Profile.from_json(json.dumps(changed)).unsettled == ()


def test_rates_of_loading_are_kept_and_may_be_absent():
    plain = load_profile(PRESET)
    assert (plain.cpu.mapped_matvec_ratio, plain.cpu.copy_bytes_per_s) == (None, None)
    assert plain.to_dict()["cpu"].keys().isdisjoint({"mapped_matvec_ratio", "copy_bytes_per_s"})
    assert plain.cpu.with_mapped_weights() is plain.cpu
    changed = document()
    changed["cpu"].update(mapped_matvec_ratio=0.8, copy_bytes_per_s=4e9)
    profile = Profile.from_json(json.dumps(changed))
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.digest != plain.digest
    rate = profile.cpu.matvec_bytes_per_s["f16"]
    assert profile.cpu.with_mapped_weights().matvec_bytes_per_s["f16"] == pytest.approx(0.8 * rate)
    half = profile.cpu.with_mapped_weights(0.5).matvec_bytes_per_s["f16"]
    assert 1 / half == pytest.approx(0.5 / rate + 0.5 / (0.8 * rate))
    assert profile.cpu.with_mapped_weights(0.0).matvec_bytes_per_s["f16"] == rate
    changed["cpu"].update(mapped_matvec_ratio=1.1)  # noise: no faster than copied ones
    noisy = Profile.from_json(json.dumps(changed)).cpu
    assert noisy.with_mapped_weights().matvec_bytes_per_s["f16"] == rate
    changed["cpu"].update(mapped_matvec_ratio=None, copy_bytes_per_s=None)
    assert Profile.from_json(json.dumps(changed)) == plain


def test_packed_weights_have_rates_of_their_own_or_those_of_bf16():
    document_ = document()
    cpu = document_["cpu"]
    cpu["matvec_bytes_per_s"] = {"bf16": 1e10, "f32": 1e10}
    cpu["matmul_flops"] = {
        "bf16": {"1": 1e10, "2": 2e10, "4": 2.6e10, "64": 3e10},
        "f32": {"1": 5e9, "64": 3e10},
    }
    profile = Profile.from_json(json.dumps(document_))
    rates = profile.cpu.complete
    assert rates.complete.matvec_bytes_per_s == rates.matvec_bytes_per_s
    assert rates.matvec_bytes_per_s["q4"] == rates.matvec_bytes_per_s["q8"] == 1e10
    # Reading limits one token and two, by bytes of 8.5 and 4.625 bits; the machine computes 3e10.
    assert rates.matmul_flops["q8"] == pytest.approx(
        {1: 1e10 * 16 / 8.5, 2: 3e10, 4: 2.6e10, 64: 3e10}
    )
    assert rates.matmul_flops["q4"] == pytest.approx({1: 3e10, 2: 3e10, 4: 2.6e10, 64: 3e10})
    assert rates.matmul_flops["bf16"] == profile.cpu.matmul_flops["bf16"]
    cpu["matvec_bytes_per_s"]["q4"] = 7e9
    cpu["matmul_flops"]["q4"] = {"1": 2e10, "8": 9e10}
    measured = Profile.from_json(json.dumps(document_))
    assert Profile.from_json(measured.to_json()) == measured
    assert measured.cpu.complete.matvec_bytes_per_s["q4"] == 7e9
    assert measured.cpu.complete.matmul_flops["q4"] == {1: 2e10, 8: 9e10}
    assert measured.cpu.complete.matmul_flops["q8"] == rates.matmul_flops["q8"]
    cpu["matvec_bytes_per_s"]["q3"] = 7e9
    with pytest.raises(ProfileError, match="matvec_bytes_per_s: unknown key 'q3'"):
        Profile.from_json(json.dumps(document_))


def test_whoever_plans_with_rates_that_were_not_measured_is_told():
    document_ = document()
    document_["estimated"] = False
    measured = Profile.from_json(json.dumps(document_))
    assert measured.notices_of(["bf16", "f32", "bf16c"]) == []
    for packed in ("c8.s32", "c4.km32", "c6.k16"):
        (said,) = measured.notices_of(["f32", packed])
        assert said.startswith(f"{measured.name} has no rates for weights in 8 and 4 bits")
    document_["cpu"]["matvec_bytes_per_s"]["q8"] = 7e9
    document_["cpu"]["matmul_flops"]["q8"] = {"1": 2e10}
    half = Profile.from_json(json.dumps(document_))
    assert half.notices_of(["c8.s32"]) == []
    assert len(half.notices_of(["c8.s32", "c4.km32"])) == 1
    document_["estimated"] = True  # no figure of it was measured
    assert Profile.from_json(json.dumps(document_)).notices_of(["c4.km32"]) == []


def test_an_accelerator_expands_packed_weights_for_products_of_many_tokens():
    plain = load_profile("thesis-4060").accelerator
    rates, bandwidth = plain.complete, plain.matvec_bytes_per_s["bf16"]
    assert rates.complete == rates
    assert rates.matmul_flops["bf16"] == plain.matmul_flops["bf16"]
    for tokens in (1, 2, 8, 9, 16, 512):
        flops, expected = 2 * tokens, 2 * tokens / plain.matmul_rate("bf16", tokens)
        if tokens > 8:
            expected += 4 / bandwidth
        assert flops / rates.matmul_rate("q4", tokens) == pytest.approx(expected)
    measured = dataclasses.replace(
        plain,
        matmul_flops={**plain.matmul_flops, "q4": {1: 1e12, 512: 2e13}},
        matvec_bytes_per_s={**plain.matvec_bytes_per_s, "q4": 1e11},
    )
    assert measured.complete.matmul_flops["q4"] == {1: 1e12, 512: 2e13}


@pytest.mark.parametrize(
    ("format", "kind"),
    [("f32", "f32"), ("bf16c", "bf16c"), ("c8.r", "q8"), ("c6.k16", "q8"), ("c5.m32", "q4"),
     ("c4.z128b", "q4"), ("nl4.k32", "q4"), ("mx4.e32", "q4")],
)  # fmt: skip
def test_every_format_has_a_rate_class(format, kind):
    assert rate_class(format) == kind
    assert {rate_class(name) for name in FORMATS} == {"f32", "f16", "bf16", "bf16c", "q8", "q4"}


def test_compressed_weights_have_a_rate_for_each_number_of_tokens():
    plain = load_profile(PRESET)
    assert plain.cpu.complete.matmul_flops["bf16c"] == plain.cpu.matmul_flops["bf16"]
    changed = document()
    changed["cpu"]["matmul_flops"]["bf16"] = {"1": 1e10, "4": 4e10, "512": 1e11}
    changed["cpu"]["compressed_ratio"] = {"1": 1.2, "4": 0.9, "128": 0.96}
    profile = Profile.from_json(json.dumps(changed))
    assert Profile.from_json(profile.to_json()) == profile
    cpu = profile.cpu.complete
    for name in ("matvec_bytes_per_s", "matmul_flops"):
        for dtype in ("f32", "f16", "bf16"):
            assert getattr(cpu, name)[dtype] == getattr(profile.cpu, name)[dtype]
    assert cpu.matvec_bytes_per_s["bf16c"] == 1.2 * profile.cpu.matvec_bytes_per_s["bf16"]
    assert cpu.matmul_flops["bf16c"] == pytest.approx({1: 1.2e10, 4: 3.6e10, 512: 0.96e11})
    ratios = profile.cpu.compressed_ratio
    assert compressed_rate(ratios, 2) == pytest.approx((1.2 * 0.9) ** 0.5)
    # Profiles of before say nothing of several tokens: no gain is taken for granted, a loss is.
    del changed["cpu"]["compressed_ratio"]
    for ratio in (1.2, 0.9):
        changed["cpu"]["compressed_matvec_ratio"] = ratio
        old = Profile.from_json(json.dumps(changed))
        assert old.cpu.compressed_ratio == {1: ratio}
        assert compressed_rate(old.cpu.compressed_ratio, 8) == min(1.0, ratio)
        assert Profile.from_json(old.to_json()) == old


def test_a_missing_dtype_is_named():
    changed = document()
    del changed["cpu"]["matmul_flops"]["f16"]
    cpu = Profile.from_json(json.dumps(changed)).cpu
    with pytest.raises(ProfileError, match=r"matmul_flops has no rate for f16, only for bf16, f32"):
        cpu.matmul_rate("f16", 1)
    del changed["cpu"]["attention_flops"]["i8"]
    cpu = Profile.from_json(json.dumps(changed)).cpu
    with pytest.raises(ProfileError, match=r"no rate for i8.*kv_dtype="):
        cpu.attention_rate("i8", 1)
    changed["cpu"]["matmul_flops"]["i8"] = {"1": 1e9}  # no dtype of weights
    with pytest.raises(ProfileError, match="i8"):
        Profile.from_json(json.dumps(changed))


def test_every_preset_prices_every_cache_on_the_cpu():
    for name in preset_names():
        cpu = load_profile(name).cpu
        assert set(cpu.attention_bytes_per_s) == set(cpu.attention_flops) == set(KV_ELEMENT_BYTES)


def test_threads_follow_the_sweep():
    changed = document()
    sweep = {"2": 5e9, "4": 1e10, "8": 2e10}
    changed["cpu"].update(threads=4, thread_sweep=sweep, attention_query_s=1e-7)
    changed["cpu"]["attention_flops"]["f16"] = {"1": 1e9, "8": 4e9}
    cpu = Profile.from_json(json.dumps(changed)).cpu
    half, twice = cpu.with_threads(2), cpu.with_threads(8)
    assert half.matvec_bytes_per_s["f16"] == cpu.matvec_bytes_per_s["f16"] / 2
    assert twice.matvec_bytes_per_s["f16"] == cpu.matvec_bytes_per_s["f16"] * 2
    assert half.attention_flops["f16"][8] == cpu.attention_flops["f16"][8] / 2
    assert half.attention_flops["f16"][1] == cpu.attention_flops["f16"][1] / 2
    assert twice.attention_flops["f16"][8] == cpu.attention_flops["f16"][8]
    assert twice.attention_flops["f16"][1] == cpu.attention_flops["f16"][1] * 2
    known = dataclasses.replace(cpu, copy_bytes_per_s=4e9)
    assert [known.with_threads(n).copy_bytes_per_s for n in (2, 4, 8)] == [2e9, 4e9, 4e9]
    assert half.op_s == twice.op_s == cpu.op_s
    assert half.attention_query_s == cpu.attention_query_s * 2
    assert twice.attention_query_s == cpu.attention_query_s > 0
    # Four heads that read each key once, at its rate of reading; eight that compute.
    reading = cpu.attention_bytes_per_s["f16"]
    bound = dataclasses.replace(
        cpu, attention_flops={"f16": {1: reading, 4: 4 * reading, 8: 5 * reading}},
        thread_sweep={2: 1e10, 4: 1e10, 8: 1e10},
    ).with_threads(2)  # fmt: skip
    assert bound.attention_flops["f16"] == {1: reading, 4: 4 * reading, 8: 2.5 * reading}
    with pytest.raises(ProfileError, match="no entry for 3 threads, only for 2, 4, 8"):
        cpu.with_threads(3)


def test_one_thread_hands_over_nothing():
    changed = document()
    changed["cpu"].update(threads=2, thread_sweep={"1": 5e9, "2": 1e10}, op_s=2e-6)
    older = Profile.from_json(json.dumps(changed))
    assert older.cpu.with_threads(1).op_s == 2e-6
    changed["cpu"]["lone_op_s"] = 2e-7
    profile = Profile.from_json(json.dumps(changed))
    assert (profile.cpu.op_s, profile.cpu.with_threads(1).op_s) == (2e-6, 2e-7)
    assert Profile.from_json(json.dumps(profile.to_dict())) == profile
