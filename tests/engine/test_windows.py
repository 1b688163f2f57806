"""Layers with a window keep its positions alone: the bytes that plans state, the bits of logits,
and what can be gone on from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from model_tensors import tensors_of
from plans import make_plan

import small_models
from engine_helpers import greedy, logits_in_chunks, logits_of, partitioned, prompt_of
from helm import _helm
from helm.errors import InvalidError
from helm.model.families import load_config, parse_config
from helm.plan.schema import Plan

PLACES = {
    "cpu": ("cpu",) * 5,
    "halves": ("cpu", "cpu", "accelerator", "accelerator", "cpu"),
    "accelerator": ("accelerator",) * 5,
}
# A window of 5 in layers 0 and 2 of 3, one of 4 in both of 2.
NAMES = ["gemma3", "mistral_window"]


def plan_of(name: str, page_tokens: int = 4, **options: object) -> Plan:
    folder = small_models.model_dir(name, "f32")
    arguments = {
        "threads": 2, "memory_bytes": 4 << 30, "kv_dtype": "f32", "page_tokens": page_tokens,
        "step_tokens": 24, "max_sequences": 4, "context": 400, **options,
    }  # fmt: skip
    return make_plan(load_config(folder), tensors_of(folder), **arguments)


def keeping_all(plan: Plan) -> Plan:
    """The same plan without windows of the cache."""
    kv = dataclasses.replace(plan.kv, window_blocks=0)
    use = dataclasses.replace(plan.memory["cpu"], kv_bytes=kv.total_bytes)
    pages = {"cpu": kv.pages}
    schedule = dataclasses.replace(plan.schedule, pages=pages)
    return dataclasses.replace(plan, kv=kv, memory={"cpu": use}, schedule=schedule)


def engine_of(plan: Plan, name: str) -> _helm.Engine:
    text = Plan.from_json(plan.to_json()).to_json()
    return _helm.Engine(text, str(small_models.model_dir(name, "f32")), device="sim")


def placed(plan: Plan, place: str) -> Plan:
    if place == "cpu":
        return plan
    devices = PLACES[place]
    layers = len(plan.kv.layers)
    return partitioned(plan, (devices[0], *devices[1 : 1 + layers], devices[-1]))


def found(prefixes: _helm.PrefixCache, prompt: list[int]) -> int:
    """How many leading tokens of a prompt are there."""
    sequence, cached = prefixes.open(prompt, 400)
    prefixes.keep(sequence, prompt[:cached])
    return int(cached)


def held_bytes(engine: _helm.Engine) -> int:
    return sum(use["kv_bytes"] for use in engine.stats["devices"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("page_tokens", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_a_cache_of_all_positions(
    name: str, page_tokens: int, place: str
) -> None:
    plan = plan_of(name, page_tokens)
    assert plan.kv.window_blocks > 0
    engine = engine_of(placed(plan, place), name)
    whole = engine_of(placed(keeping_all(plan), place), name)
    tokens = prompt_of(150)
    for chunk in (1, 7, 24):
        want = logits_in_chunks(whole, tokens, chunk)
        assert np.array_equal(logits_in_chunks(engine, tokens, chunk), want), chunk
    prompts = [prompt_of(n) for n in (90, 3, 31, 64)]
    assert greedy(engine, prompts, 40) == greedy(whole, prompts, 40)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_the_plan_states_and_what_windows_need(name: str) -> None:
    for page_tokens in (1, 4, 16, 64):
        plan = plan_of(name, page_tokens, max_sequences=1)
        kv, engine = plan.kv, engine_of(plan, name)
        assert held_bytes(engine) == plan.memory["cpu"].kv_bytes == kv.total_bytes
        for entry in kv.layers:
            needed = min(400, entry.window - 1 + 24) if entry.window else 400
            assert 0 <= kv.entry_pages(entry) * page_tokens - needed < 2 * page_tokens
        split = placed(plan, "halves")
        assert held_bytes(engine_of(split, name)) == kv.total_bytes


def test_a_window_that_is_nearly_the_context_keeps_all_positions() -> None:
    plan = plan_of("gemma3", context=28)
    assert plan.kv.window_blocks == 0
    assert plan.kv.pages == 3 * plan.kv.blocks


def test_a_sequence_goes_on_from_where_its_windows_are() -> None:
    """Cut back by guesses that were wrong, or anew from the start; from nowhere else."""
    plan = plan_of("gemma3")
    engine, tokens = engine_of(plan, "gemma3"), np.array(prompt_of(200), np.int32)
    want = logits_of(engine_of(keeping_all(plan), "gemma3"), tokens.tolist())
    sequence = engine.open(200)
    engine.forward(sequence, tokens[:92], True)
    engine.forward(sequence, tokens[92:100], True)
    engine.truncate(sequence, 93)  # 92 positions were there before the last step
    got = engine.forward(sequence, tokens[93:100], True)
    assert np.array_equal(got, want[93:100])
    with pytest.raises(InvalidError, match=r"first 40 positions: layers with a window of 5 hold"):
        engine.truncate(sequence, 40)
    assert np.array_equal(engine.forward(sequence, tokens[100:120], True), want[100:120])
    for position in range(120, 150):  # what a step of 24 would write is left to go back by
        assert np.array_equal(
            engine.forward(sequence, tokens[position : position + 1], True),
            want[position : position + 1],
        )
    for back in (8, 23, 22):
        length = engine.length(sequence) - back
        engine.truncate(sequence, length)
        for position in range(length, length + 24):
            got = engine.forward(sequence, tokens[position : position + 1], True)
            assert np.array_equal(got, want[position : position + 1]), (back, position)
    with pytest.raises(InvalidError, match="layers with a window of 5 hold"):
        engine.truncate(sequence, engine.length(sequence) - 30)
    engine.truncate(sequence, 0)
    assert np.array_equal(engine.forward(sequence, tokens[:20], True), want[:20])


def test_a_conversation_goes_on_and_a_beginning_long_gone_is_computed_anew() -> None:
    plan = plan_of("gemma3")
    engine = engine_of(plan, "gemma3")
    fresh = engine_of(keeping_all(plan), "gemma3")
    prefixes = _helm.PrefixCache(engine)
    first = prompt_of(90)
    answer = greedy(engine, [first], 30, prefixes)[0]
    assert answer == greedy(fresh, [first], 30)[0]
    second = [*first, *answer, 5, 6, 7]
    assert found(prefixes, second) >= len(first) + len(answer) - 1
    assert greedy(engine, [second], 30, prefixes) == greedy(fresh, [second], 30)
    other = [*first[:60], 1, 2, 3]  # the windows there are given up
    assert found(prefixes, other) == 0
    assert greedy(engine, [other, first], 30, prefixes) == greedy(fresh, [other, first], 30)


def test_a_saved_sequence_goes_on_where_it_ended(tmp_path: Path) -> None:
    """In pages of another size, and in a cache that keeps all positions."""
    plan, tokens = plan_of("gemma3"), prompt_of(150)
    engine = engine_of(plan, "gemma3")
    want = greedy(engine_of(keeping_all(plan), "gemma3"), [tokens], 20)
    prefixes = _helm.PrefixCache(engine)
    greedy(engine, [tokens], 1, prefixes)
    held = prefixes.save(tokens, str(tmp_path / "x.kv"))
    assert held >= len(tokens) - 1
    for other in (plan, plan_of("gemma3", 7), keeping_all(plan), keeping_all(plan_of("gemma3", 7))):
        loading = engine_of(other, "gemma3")
        kept = _helm.PrefixCache(loading)
        kept.load(str(tmp_path / "x.kv"))
        assert found(kept, tokens) == len(tokens) - 1
        assert found(kept, [*tokens[:80], 1, 2]) == 0
        got = greedy(loading, [tokens], 20, kept)
        if other.kv.page_tokens == 4:  # pages of another size sum in another order
            assert got == want


def test_a_long_context_of_gemma_takes_its_windows_and_its_global_layers() -> None:
    config = parse_config(
        {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
            "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "sliding_window": 1024, "max_position_embeddings": 131072,
            "dtype": "bfloat16",
        }
    )  # fmt: skip
    plan = make_plan(
        config, None, threads=2, memory_bytes=64 << 30, context=32768, max_sequences=1,
        step_tokens=512,
    )  # fmt: skip
    position = 2 * 4 * 256 * 2  # bytes of a layer
    windows = sum(entry.window > 0 for entry in plan.kv.layers)
    assert windows == 29
    needed = (5 * 32768 + 29 * (1024 + 512)) * position
    page = plan.kv.page_tokens * position
    assert needed <= plan.memory["cpu"].kv_bytes <= needed + 29 * page
    assert plan.memory["cpu"].kv_bytes < 0.21 * 34 * 32768 * position
