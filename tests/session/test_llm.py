"""The Python API on real engines: golden texts, batching, streaming, chat, errors, from_torch."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import helm
from helm.model.hub import bundled_model

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
needs_stories = pytest.mark.skipif(
    not (STORIES / "golden.json").is_file(), reason=f"no stories260K checkpoint in {STORIES}"
)
PROMPT = "Once upon a time"
LONG = "about a dog, a cat, a boat and a little girl who lived by the sea with her friend Ben"


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM(kv_dtype="f32") as loaded:
        yield loaded


def free_positions(llm: helm.LLM) -> int:
    """Largest capacity that can be opened now: everything, when nothing leaks."""
    llm._service.close(llm._service.open(llm.context)[0])
    return llm.context


# --- text ----------------------------------------------------------------------------------------


@needs_stories
@pytest.mark.parametrize("dtype", ["auto", "f32"])
def test_golden_texts_are_exact_in_f32(dtype: str) -> None:
    cases = json.loads((STORIES / "golden.json").read_text())["cases"]
    with helm.LLM(STORIES, dtype=dtype, kv_dtype="f32") as llm:
        assert llm.tokenizer is not None
        # The reference counts positions; the last sampled token needs none.
        wanted = [c["max_positions"] + 1 - len(llm.tokenizer.encode(c["prompt"])) for c in cases]
        for case, max_tokens in zip(cases, wanted, strict=True):
            result = llm.generate(case["prompt"], max_tokens=max_tokens)
            assert case["prompt"] + result.text == case["text"]
            assert result.finish_reason == "length"
            chunks = list(llm.stream(case["prompt"], max_tokens=max_tokens))
            assert "".join(chunk.text for chunk in chunks) == result.text
            assert [t for chunk in chunks for t in chunk.tokens] == result.tokens
        results = llm.generate([c["prompt"] for c in cases], max_tokens=max(wanted))
        for case, result in zip(cases, results, strict=True):
            assert (case["prompt"] + result.text).startswith(case["text"])


def test_greedy_agrees_with_transformers() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_model(), dtype=torch.float32
    ).eval()
    with helm.LLM(dtype="f32", kv_dtype="f32") as llm:
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode(PROMPT)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=100, do_sample=False)
        assert llm.generate(prompt, max_tokens=100).tokens == expected[0, len(prompt) :].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].numpy()
        ours = llm.logits(prompt)
    assert ours.shape == logits.shape
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, logits, rtol=1e-4, atol=1e-4)


def test_results_carry_what_was_measured(llm: helm.LLM) -> None:
    result = llm.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert llm.tokenizer is not None
    assert result.prompt_tokens == len(llm.tokenizer.encode(PROMPT))
    assert len(result.tokens) == 8
    t = result.timings
    assert (t.prefill_tokens, t.decode_tokens) == (result.prompt_tokens, 7)
    assert 0 < t.prefill_s <= t.ttft_s
    assert t.prefill_tokens_per_s > 0
    assert t.decode_tokens_per_s > 0
    assert t.decode_bytes_per_s > 7 * llm.stats["decode_bytes"] / (t.decode_s + 1)
    assert json.loads(json.dumps(result.to_dict()))["text"] == result.text


def test_many_prompts_give_what_each_gives_alone(llm: helm.LLM) -> None:
    prompts = [PROMPT, "The dog", "A", "One day a little cat", "He", "She said", "In", "Ben", "It"]
    alone = [llm.generate(p, max_tokens=20).tokens for p in prompts]
    together = llm.generate(prompts, max_tokens=20)
    assert [r.tokens for r in together] == alone
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(p) for p in prompts[:2]]
    assert [r.tokens for r in llm.generate(ids, max_tokens=20)] == alone[:2]
    assert llm.generate(np.array(ids[0]), max_tokens=20).tokens == alone[0]


def test_seeds_repeat_and_differ(llm: helm.LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.5}
    first = llm.generate(PROMPT, **options)
    assert llm.generate(PROMPT, seed=first.seed, **options).tokens == first.tokens
    assert len({tuple(llm.generate(PROMPT, seed=s, **options).tokens) for s in range(4)}) > 1
    pair = llm.generate([PROMPT, PROMPT], **options)
    assert pair[0].seed != pair[1].seed


def test_stop_strings_cut_text_and_stream_alike(llm: helm.LLM) -> None:
    whole = llm.generate(PROMPT, max_tokens=60).text
    for stop in (whole[10:13], whole[20:31], whole[:4], whole[5:6]):
        cut = llm.generate(PROMPT, max_tokens=60, stop=[stop, "\x00never"])
        assert cut.text == whole[: whole.find(stop)]
        assert cut.finish_reason == "stop"
        chunks = list(llm.stream(PROMPT, max_tokens=60, stop=stop))
        assert "".join(chunk.text for chunk in chunks) == cut.text
        assert chunks[-1].completion is not None
        assert chunks[-1].completion.tokens == cut.tokens


def test_stop_tokens_and_the_end_of_the_model(llm: helm.LLM) -> None:
    free = llm.generate(PROMPT, max_tokens=20)
    third = free.tokens[2]
    stopped = llm.generate(PROMPT, max_tokens=20, stop_token_ids=[third])
    end = free.tokens.index(third) + 1
    assert (stopped.tokens, stopped.finish_reason) == (free.tokens[:end], "stop")


def test_logprobs(llm: helm.LLM) -> None:
    result = llm.generate(PROMPT, max_tokens=5, logprobs=3)
    assert result.logprobs is not None
    assert llm.tokenizer is not None
    logits = llm.logits([*llm.tokenizer.encode(PROMPT), *result.tokens])[-6:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))[:, None]
    expected -= logits.max(-1, keepdims=True)
    for row, record, token in zip(expected, result.logprobs, result.tokens, strict=True):
        assert record["token_id"] == token
        assert record["logprob"] == pytest.approx(row[token], abs=1e-3)
        top = record["top_logprobs"]
        assert [entry["token_id"] for entry in top] == np.argsort(-row)[:3].tolist()
        assert [e["logprob"] for e in top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-3)
    text = "".join(record["token"] for record in result.logprobs)
    assert text == result.text
    assert llm.generate(PROMPT, max_tokens=1).logprobs is None


# --- limits and bad input ------------------------------------------------------------------------


def test_generation_ends_at_the_context_limit() -> None:
    with helm.LLM(context=32) as llm:
        assert llm.context == 32
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode(PROMPT)
        result = llm.generate(prompt, max_tokens=None, ignore_eos=True)
        assert result.finish_reason == "length"
        # The last token is sampled from the last position and needs none of its own.
        assert len(prompt) + len(result.tokens) == 33
        full = (prompt * 32)[:32]
        assert len(llm.generate(full, max_tokens=5).tokens) == 1
        with pytest.raises(helm.CapacityError, match=r"33 tokens, the context holds 32.*context="):
            llm.generate([*full, 1])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        (["a", ""], "prompt 1 is empty"),
        ([[1], []], "prompt 1 has no tokens"),
        ([1, -1], "token 1 is -1, outside"),
        ([10**6], "token 0 is 1000000, outside"),
        ([1, 2.5], "prompt 0 must be text or a list of token ids, got int"),
        ([1, True], "True is not a token id"),
        (5, "got int"),
        (None, "got NoneType"),
        (b"bytes", "got bytes"),
        ({"prompt": 1}, "got dict"),
        ("a\ud800", "surrogate"),
    ],
)
def test_bad_prompts_are_refused(llm: helm.LLM, prompt: Any, message: str) -> None:
    with pytest.raises(helm.InvalidError, match=message):
        llm.generate(prompt)
    assert free_positions(llm) == llm.context


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"max_tokens": 0},
        {"min_p": -1},
        {"repetition_penalty": 0},
        {"temprature": 1},
    ],
)
def test_bad_sampling_parameters_are_refused(llm: helm.LLM, options: dict[str, Any]) -> None:
    with pytest.raises(helm.InvalidError, match=next(iter(options))):
        llm.generate(PROMPT, **options)


@pytest.mark.parametrize(
    "options",
    [{"context": 0}, {"context": 10**9}, {"dtype": "int3"}, {"kv_dtype": "x"}, {"threads": 0},
     {"threads": -1}, {"max_sequences": 0}, {"page_tokens": 0}],
)  # fmt: skip
def test_bad_load_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        helm.LLM(**options)


def test_a_closed_llm_says_so() -> None:
    llm = helm.LLM()
    llm.close()
    llm.close()
    for call in (llm.generate, llm.stream, llm.logits):
        with pytest.raises(helm.InvalidError, match="closed"):
            call("a")  # type: ignore[operator]


# --- streams, interruption, threads --------------------------------------------------------------


def test_closing_a_stream_frees_its_sequence(llm: helm.LLM) -> None:
    options: dict[str, Any] = {"max_tokens": None, "ignore_eos": True}
    with llm.stream(PROMPT, **options) as stream:
        next(stream)
    assert stream.completion.finish_reason == "cancelled"
    assert list(stream) == []
    assert free_positions(llm) == llm.context
    for _ in llm.stream(PROMPT, **options):
        break
    gc.collect()
    assert free_positions(llm) == llm.context


def test_ctrl_c_ends_a_generation_and_leaves_the_llm_usable(llm: helm.LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=10).tokens
    main = threading.main_thread().ident
    assert main is not None
    for prompts in (PROMPT, [PROMPT] * 40):
        timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            _generate_for_ever(llm, prompts)
        timer.join()
        assert free_positions(llm) == llm.context
        assert llm.generate(PROMPT, max_tokens=10).tokens == expected


def _generate_for_ever(llm: helm.LLM, prompts: Any) -> None:
    while True:
        llm.generate(prompts, max_tokens=None, ignore_eos=True)


def test_other_threads_run_while_native_code_does(llm: helm.LLM) -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.perf_counter()
        llm.generate([PROMPT] * 4, max_tokens=200, ignore_eos=True)
        end = time.perf_counter()
    finally:
        done.set()
        thread.join()
    during = [t for t in ticks if begin < t < end]
    assert len(during) > (end - begin) / 0.05


def test_threads_share_one_llm(llm: helm.LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=30).tokens
    results: list[list[int]] = []

    def work() -> None:
        for _ in range(3):
            results.append(llm.generate(PROMPT, max_tokens=30).tokens)
            results.append([t for c in llm.stream(PROMPT, max_tokens=30) for t in c.tokens])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 18


def test_two_llms_in_one_process(llm: helm.LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=20).tokens
    with helm.LLM(kv_dtype="f32", threads=1) as other, other.stream(PROMPT, max_tokens=20) as one:
        tokens: list[int] = []
        for chunk in one:
            tokens += chunk.tokens
            assert llm.generate(PROMPT, max_tokens=20).tokens == expected
    assert tokens == expected
    assert llm.generate(PROMPT, max_tokens=20).tokens == expected


def test_loading_reports_progress_and_can_be_cancelled() -> None:
    calls: list[tuple[int, int]] = []
    with helm.LLM(progress=lambda done, total: calls.append((done, total))) as llm:
        assert calls[-1][0] == calls[-1][1] > 0
        assert llm.stats["weights_bytes"] > 0

    def refuse(done: int, total: int) -> None:
        raise RuntimeError("not now")

    with pytest.raises(RuntimeError, match="not now"):
        helm.LLM(progress=refuse)


# --- chat ----------------------------------------------------------------------------------------


def test_chat_reuses_the_kv_of_earlier_turns() -> None:
    with helm.LLM(kv_dtype="f32") as llm, helm.LLM(kv_dtype="f32") as fresh:
        messages = [{"role": "user", "content": "Hello"}]
        for turn in range(3):
            result = llm.chat(messages, max_tokens=12, temperature=0)
            assert result.tokens == fresh.chat(messages, max_tokens=12, temperature=0).tokens
            fresh._service.clear()
            computed = result.timings.prefill_tokens
            if turn:
                assert computed < result.prompt_tokens
            messages += [
                {"role": "assistant", "content": result.text},
                {"role": "user", "content": "And then?"},
            ]
        # Another conversation starts over, the first one's prefix is still right.
        other = [{"role": "user", "content": "Tell me a story"}]
        assert llm.chat(other, max_tokens=12).tokens == fresh.chat(other, max_tokens=12).tokens


def test_the_same_question_twice_and_a_shorter_one() -> None:
    with helm.LLM(kv_dtype="f32") as llm:
        messages = [{"role": "user", "content": "Tell me a story " + LONG}]
        first = llm.chat(messages, max_tokens=12, temperature=0)
        again = llm.chat(messages, max_tokens=12, temperature=0)
        assert again.tokens == first.tokens
        assert again.timings.prefill_tokens == 1


def test_a_kept_chat_gives_way_to_other_work() -> None:
    with helm.LLM(max_sequences=1) as llm:
        messages = [{"role": "user", "content": LONG}]
        llm.chat(messages, max_tokens=4)
        assert len(llm.generate(PROMPT, max_tokens=4).tokens) == 4
        llm.chat(messages, max_tokens=4)
        assert len(llm.logits([1, 2, 3])) == 3
        with llm.chat_stream(messages, max_tokens=4) as stream:
            next(stream)
        assert llm.chat(messages, max_tokens=4).timings.prefill_tokens == 1


def test_a_long_chat_reports_the_context_limit() -> None:
    with helm.LLM(context=32) as llm:
        long = [{"role": "user", "content": "dog " * 50}]
        with pytest.raises(helm.CapacityError, match="the conversation has"):
            llm.chat(long)
        assert llm.chat([{"role": "user", "content": "Hi"}], max_tokens=None).tokens


@needs_stories
def test_chat_without_a_template_is_refused() -> None:
    with helm.LLM(STORIES) as llm, pytest.raises(helm.TokenizerError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])
