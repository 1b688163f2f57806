"""The KV cache of 8-bit integers: the error it brings, and that nothing else changes with it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from model_tensors import tensors_of
from plans import make_plan

import helm
import small_models
from engine_helpers import greedy, logits_of, partitioned, prompt_of
from helm import _helm
from helm.errors import InvalidError, ProfileError
from helm.machine.profile import load_profile
from helm.model.families import load_config
from helm.plan.schema import Plan

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from story_grammar.corpus import documents  # noqa: E402

F64 = npt.NDArray[np.float64]
PROMPTS = [prompt_of(n) for n in (37, 5, 61, 18)]
NEW = 12


def plan_of(name: str = "qwen3", **options: Any) -> Plan:
    folder = small_models.model_dir(name, "f32")
    arguments = {
        "threads": 2, "memory_bytes": 4 << 30, "kv_dtype": "i8", "page_tokens": 16,
        "step_tokens": 24, "max_sequences": 4, "context": 100, **options,
    }  # fmt: skip
    return make_plan(load_config(folder), tensors_of(folder), **arguments)


def engine_of(plan: Plan, name: str = "qwen3", **options: Any) -> _helm.Engine:
    folder = small_models.model_dir(name, "f32")
    return _helm.Engine(plan.to_json(), str(folder), **options)


def log_softmax(logits: F64) -> F64:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


class Comparison:
    """Logits [tokens, vocab] of texts with an exact cache beside those of another."""

    def __init__(self, pairs: list[tuple[F64, F64, list[int]]]) -> None:
        exact, other = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
        known, found = log_softmax(exact), log_softmax(other)
        self.worst = float((np.abs(other - exact).max(-1) / exact.std(-1)).max())
        self.agreement = float((exact.argmax(-1) == other.argmax(-1)).mean())
        self.kl = float((np.exp(known) * (known - found)).sum(-1).mean())
        losses = [
            [-log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]] for logits in pair]
            for *pair, ids in ((a[:-1], b[:-1], ids) for a, b, ids in pairs)
        ]
        self.perplexity, self.exact_perplexity = (
            float(np.exp(np.concatenate([row[i] for row in losses]).mean())) for i in (1, 0)
        )

    def report(self, what: str, record: Callable[[str, object], None]) -> None:
        figures = {
            "largest logit error over deviation": self.worst,
            "same greedy token": self.agreement,
            "mean KL divergence": self.kl,
            "perplexity": self.perplexity,
            "perplexity with f32": self.exact_perplexity,
        }
        print(f"\n{what}: " + ", ".join(f"{name} {value:.6g}" for name, value in figures.items()))
        for name, value in figures.items():
            record(f"{what}: {name}", value)


def bundled(kv_dtype: str, texts: list[list[int]]) -> list[F64]:
    with helm.LLM(kv_dtype=kv_dtype, dtype="f32") as llm:
        return [np.asarray(llm.logits(ids), np.float64) for ids in texts]


def test_the_bundled_model_hardly_notices(
    record_property: Callable[[str, object], None],
) -> None:
    with helm.LLM() as llm:
        texts = [llm.tokenizer.encode(text)[:500] for text in itertools.islice(documents(7), 8)]
    exact = bundled("f32", texts)
    found = {}
    for dtype in ("f16", "i8"):
        pairs = list(zip(exact, bundled(dtype, texts), texts, strict=True))
        found[dtype] = Comparison(pairs)
        found[dtype].report(f"bundled model, {dtype}", record_property)
    i8 = found["i8"]
    assert i8.worst > found["f16"].worst, "f16 keeps more digits"
    assert i8.worst <= 0.25  # twice what was measured
    assert i8.agreement >= 0.99
    assert i8.kl <= 3e-5
    assert abs(i8.perplexity / i8.exact_perplexity - 1) <= 0.001


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2_window"])
def test_a_random_model_neither(name: str, record_property: Callable[[str, object], None]) -> None:
    ids = prompt_of(500)
    options = {"context": 512, "step_tokens": 512}
    exact, other = (
        np.asarray(logits_of(engine_of(plan_of(name, kv_dtype=dtype, **options), name), ids))
        for dtype in ("f32", "i8")
    )
    found = Comparison([(exact.astype(np.float64), other.astype(np.float64), ids)])
    found.report(f"random {name}, i8", record_property)
    assert 0 < found.worst <= 0.4  # twice what was measured of the worst
    assert found.agreement >= 0.93  # nearly equal logits swap places
    assert found.kl <= 1e-3


def test_a_damaged_cache_would_be_noticed() -> None:
    """The bounds above tell a wrong row and NaN from a right one."""
    ids = prompt_of(60)
    exact = np.asarray(logits_of(engine_of(plan_of(kv_dtype="f32")), ids), np.float64)
    swapped = exact.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert Comparison([(exact, swapped, ids)]).worst > 0.5
    broken = exact.copy()
    broken[5, 7] = np.nan
    assert not Comparison([(exact, broken, ids)]).worst <= 0.5


def test_logits_have_the_same_bits_however_they_are_computed() -> None:
    ids = prompt_of(90)
    want = logits_of(engine_of(plan_of()), ids)
    for options in ({"threads": 1}, {"threads": 3}, {"step_tokens": 5}, {"step_tokens": 90}):
        np.testing.assert_array_equal(logits_of(engine_of(plan_of(**options)), ids), want)
    cut = partitioned(plan_of(), ["cpu", "accelerator", "cpu", "accelerator"])
    np.testing.assert_array_equal(logits_of(engine_of(cut, device="sim"), ids), want)


def test_tokens_do_not_depend_on_pages_batch_threads_or_placement() -> None:
    want = greedy(engine_of(plan_of()), PROMPTS, NEW)
    for prompt, tokens in zip(PROMPTS, want, strict=True):
        assert greedy(engine_of(plan_of()), [prompt], NEW) == [tokens]
    for options in ({"page_tokens": 1}, {"page_tokens": 7}, {"page_tokens": 100}, {"threads": 1}):
        assert greedy(engine_of(plan_of(**options)), PROMPTS, NEW) == want, options
    plan = plan_of()
    for devices in itertools.product(("cpu", "accelerator"), repeat=len(plan.units)):
        cut = Plan.from_json(partitioned(plan, devices).to_json())
        assert greedy(engine_of(cut, device="sim"), PROMPTS, NEW) == want, devices


def test_a_cache_takes_half_of_16_bit_and_the_scales() -> None:
    for name in ("qwen3", "llama_one_kv_head"):
        i8, f16 = (plan_of(name, kv_dtype=dtype).kv for dtype in ("i8", "f16"))
        rows = 2 * i8.page_tokens * i8.kv_heads
        assert f16.page_bytes == rows * 2 * i8.head_dim
        assert i8.page_bytes == rows * (i8.head_dim + 4)
    padded = plan_of("llama_one_kv_head", page_tokens=5).kv  # 50 integers, then scales
    assert padded.page_bytes == 2 * (52 + 5 * 4)
    assert Plan.from_json(plan_of().to_json()).kv == plan_of().kv


def test_other_dtypes_are_refused_with_the_choices() -> None:
    document = plan_of().to_json()
    for changed in ('"dtype": "i4"', '"dtype": 8'):
        with pytest.raises(helm.PlanError, match=r"kv\.dtype.*i8"):
            Plan.from_json(document.replace('"dtype": "i8"', changed))
    with pytest.raises(InvalidError, match=r"unknown KV dtype.*f32, f16, bf16, i8"):
        engine_of_text(document.replace('"dtype": "i8"', '"dtype": "i4"'))
    with pytest.raises(InvalidError, match=r"no format has the name \"i8\""):
        engine_of_text(document.replace('"format": "f32"', '"format": "i8"'))  # of weights


def engine_of_text(text: str) -> _helm.Engine:
    return _helm.Engine(text, str(small_models.model_dir("qwen3", "f32")))


def test_an_accelerator_without_such_attention_is_named() -> None:
    folder = small_models.model_dir("qwen3", "f32")
    with pytest.raises(ProfileError, match=r"no rate for i8.*kv_dtype="):
        make_plan(
            load_config(folder), tensors_of(folder), kv_dtype="i8",
            profile=load_profile("rtx-4090-24gb-ddr5"), max_sequences=4,
        )  # fmt: skip
    plan = make_plan(
        load_config(folder), tensors_of(folder), kv_dtype="i8",
        profile=load_profile("cpu-laptop-16gb"), max_sequences=4,
    )  # fmt: skip
    assert plan.kv.dtype == "i8"
    assert plan.prediction is not None
