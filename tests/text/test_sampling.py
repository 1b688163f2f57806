"""SamplingParams: ranges, names and the model's own defaults."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helm.errors import InvalidError
from helm.text.sampling import SamplingParams, sampling_params

GOOD = {
    "max_tokens": [1, 10**9, None, "auto", np.int64(3)],
    "temperature": [0, 0.0, 0.7, 100, None, np.float32(0.5)],
    "top_p": [1, 1e-6, 0.9, None],
    "top_k": [0, -1, 40, None],
    "min_p": [0, 1, 0.05, None],
    "repetition_penalty": [1, 0.5, 1.3, None],
    "stop": ["x", ["x", "y"], (), None],
    "seed": [0, 2**64 - 1, None],
    "logprobs": [0, 5, None],
    "stop_token_ids": [[1, 2], (), None],
    "ignore_eos": [True],
    "presence_penalty": [-2, 0, 2.0, None, np.float32(0.5)],
    "frequency_penalty": [-2, 0, 2.0, None],
    "logit_bias": [{}, {0: -100, np.int64(7): 99.5}, None],
    "json_schema": [{}, {"type": "object"}, "true", True, None],
    "regex": ["a+", None],
    "grammar": ['start: "a"', None],
    "priority": [0, 1, 2, None, np.int64(2)],
}
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
BAD = {
    "max_tokens": [0, -1, 1.5, "8", True],
    "temperature": [-0.1, "hot", True, 1e39, *NOT_FINITE],
    "top_p": [0, -0.1, 1.01, "1", *NOT_FINITE],
    "top_k": [-2, 1.0, 2**31, "40"],
    "min_p": [-0.1, 1.1, *NOT_FINITE],
    "repetition_penalty": [0, -1, *NOT_FINITE],
    "stop": ["", ["a", ""], [1], 5],
    "seed": [-1, 2**64, 1.0],
    "logprobs": [-1, 2.0, True],
    "stop_token_ids": ["1", [-1], [1.0], 7],
    "ignore_eos": [1, None],
    "presence_penalty": [-2.1, 2.1, "1", True, *NOT_FINITE],
    "frequency_penalty": [-2.1, 2.1, "1", True, *NOT_FINITE],
    "logit_bias": [
        [1], {-1: 1.0}, {1: 100.5}, {1: -101}, {1: True}, {"1": 1.0}, {2**31: 1.0},
        *({1: x} for x in NOT_FINITE),
    ],
    "json_schema": [5, ["a"], b"{}"],
    "regex": ["", 5],
    "grammar": ["", 5],
    "priority": [-1, 3, 1.0, True, "high"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in GOOD.items() for v in vs])
def test_values_in_range_are_taken(name: str, value: object) -> None:
    SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_values_out_of_range_name_the_parameter(name: str, value: object) -> None:
    with pytest.raises(InvalidError, match=f"{name} must be"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_every_field_has_good_and_bad_cases() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(GOOD) == set(BAD) == fields


def test_unknown_names_are_refused_with_a_hint() -> None:
    with pytest.raises(InvalidError, match="'temprature'; did you mean temperature"):
        sampling_params(None, {"temprature": 1})
    with pytest.raises(InvalidError, match="unknown parameter 'beams'; known: max_tokens"):
        sampling_params(None, {"beams": 4})


def test_keywords_win_over_the_object() -> None:
    base = SamplingParams(temperature=0.5, top_k=3)
    assert sampling_params(base, {"top_k": 7}) == SamplingParams(temperature=0.5, top_k=7)
    with pytest.raises(InvalidError, match=r"expected helm\.SamplingParams, got dict"):
        sampling_params({"top_k": 3}, {})  # type: ignore[arg-type]


def test_without_a_model_default_decoding_is_greedy() -> None:
    for config in ({}, {"do_sample": False, "temperature": 0.6, "top_k": 20}):
        resolved = SamplingParams().resolve(config)
        assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.0, 1.0, 0)
        assert (resolved.min_p, resolved.repetition_penalty) == (0.0, 1.0)


def test_a_sampling_model_gives_the_defaults() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    resolved = SamplingParams(top_k=5).resolve(config)
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.6, 5, 0.95)
    assert SamplingParams().resolve({"do_sample": True}).temperature == 1.0
    assert SamplingParams(temperature=0).resolve(config).temperature == 0.0


def test_bad_values_in_the_models_file_are_refused() -> None:
    with pytest.raises(InvalidError, match=r"generation_config\.json.*top_p"):
        SamplingParams().resolve({"do_sample": True, "top_p": 7})


def test_a_seed_is_chosen_once_and_kept() -> None:
    seeds = {SamplingParams().resolve({}).seed for _ in range(8)}
    assert len(seeds) == 8
    assert SamplingParams(seed=11).resolve({}).seed == 11


def test_a_text_obeys_one_grammar() -> None:
    with pytest.raises(InvalidError, match="json_schema and regex were given"):
        SamplingParams(json_schema={}, regex="a")
