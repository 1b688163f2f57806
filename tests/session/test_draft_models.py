"""A second model that guesses: the same tokens, compared with the first before it is loaded, and
counted in memory."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import helm
import small_models
import small_tokenizers
from command import helm as command
from helm.machine.resources import memory_granted
from helm.session.draft import differing_ids
from helm.session.speculation import draft_named

PROMPT = small_models.PROMPT * 3
OPTIONS: dict[str, Any] = {"context": 256, "threads": 1, "device": "cpu"}
CALLS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.8, "seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]  # fmt: skip


def folder(name: str) -> str:
    return str(small_models.model_dir(name))


@pytest.mark.parametrize("other", ["llama", "qwen3", "gemma3_pattern"])
def test_models_of_any_family_guess_for_one_another(other: str) -> None:
    with helm.LLM(folder("llama"), speculate="off", **OPTIONS) as off:
        want = [off.generate([PROMPT, PROMPT[:7]], max_tokens=40, **call) for call in CALLS]
    with helm.LLM(folder("llama"), speculate=Path(folder(other)), **OPTIONS) as llm:
        told = llm.stats["speculation"]
        assert (told["by"], told["draft"]["name"]) == ("model", folder(other))
        assert told["draft"]["context"] == 256
        for call, expected in zip(CALLS, want, strict=True):
            found = llm.generate([PROMPT, PROMPT[:7]], max_tokens=40, **call)
            assert [each.tokens for each in found] == [each.tokens for each in expected]


def test_what_a_draft_holds_is_counted_and_given_back() -> None:
    gc.collect()
    before = memory_granted()
    with helm.LLM(speculate="bundled", **OPTIONS) as llm:
        draft = llm.stats["speculation"]["draft"]
        assert draft["memory_bytes"] > 1 << 20
        assert memory_granted() > before
        stream = llm.stream("Once upon a time", max_tokens=200, ignore_eos=True)
        first = next(iter(stream))
        assert first.tokens
    rest = [token for chunk in stream for token in chunk.tokens]  # the draft is at work until then
    assert len(first.tokens) + len(rest) == 200
    del llm, stream
    gc.collect()
    assert memory_granted() <= before  # what others left may have gone meanwhile


def test_both_keep_to_the_memory_that_is_granted() -> None:
    with helm.LLM(speculate="bundled", **OPTIONS) as llm:
        own = llm.plan.memory["cpu"]
        draft = llm.stats["speculation"]["draft"]["memory_bytes"]
    both = own.total_bytes + own.reserve_bytes + draft
    with helm.LLM(speculate="bundled", memory_bytes=both + (1 << 20), **OPTIONS) as llm:
        use = llm.plan.memory["cpu"]
        held = llm.stats["speculation"]["draft"]["memory_bytes"]
        assert held + use.total_bytes + use.reserve_bytes <= both + (1 << 20)
    with pytest.raises(helm.OutOfMemoryError, match=r"the draft bundled takes .* of host memory"):
        helm.LLM(speculate="bundled", memory_bytes=draft + (66 << 20), **OPTIONS)
    with pytest.raises(helm.OutOfMemoryError, match=r"the draft bundled: \[plan\].*weights"):
        helm.LLM(speculate="bundled", memory_bytes=1 << 20, **OPTIONS)


def test_another_vocabulary_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder("llama"), other)
    (other / "model.safetensors").unlink()
    with pytest.raises(helm.InvalidError, match="vocabulary of 131 tokens, the model one of"):
        helm.LLM(speculate=other, **OPTIONS)
    backend = small_tokenizers.byte_level()
    backend.save(str(other / "tokenizer.json"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 400}))
    message = r"draft .*other: it has another vocabulary, [\d,]+ token ids differ: \d+ is .* there"
    with pytest.raises(helm.InvalidError, match=message):
        helm.LLM(speculate=other, **OPTIONS)
    with pytest.raises(helm.CheckpointError, match="the draft /nowhere"):
        helm.LLM(speculate="/nowhere", **OPTIONS)


def test_the_ids_that_differ_are_told() -> None:
    own, other = {0: "a", 1: "b", 3: "d"}, {0: "a", 1: "c", 2: "x"}
    assert differing_ids(own, other, missing=False) == {1: ("b", "c")}
    assert differing_ids(own, other, missing=True) == {
        1: ("b", "c"), 2: (None, "x"), 3: ("d", None),
    }  # fmt: skip


def test_words_are_no_models() -> None:
    for word in ("auto", "off", "ngram"):
        assert draft_named(word) is None
    assert draft_named("owner/name:Q4_K_M") == "owner/name:Q4_K_M"
    assert draft_named("bundled") == "bundled"
    for wrong in ("ngrams", "a\0/b", 7, None, True, ["x/y"]):
        with pytest.raises(helm.InvalidError, match="must be auto, off, ngram or a model"):
            draft_named(wrong)


def test_threads_share_a_model_and_its_draft() -> None:
    with helm.LLM(folder("llama"), speculate="off", **OPTIONS) as off:
        want = [off.generate(PROMPT[i:], max_tokens=30, seed=i, temperature=0.7) for i in range(4)]
    with helm.LLM(folder("llama"), speculate=folder("llama"), **OPTIONS) as llm:
        found: dict[int, list[int]] = {}

        def work(i: int) -> None:
            for _ in range(3):
                found[i] = llm.generate(PROMPT[i:], max_tokens=30, seed=i, temperature=0.7).tokens

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        stream = llm.stream(PROMPT, max_tokens=100)
        next(iter(stream))
        stream.close()  # cancelled while the others are at work
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(4)] == [each.tokens for each in want]


def test_modules_in_memory_take_a_draft() -> None:
    module = small_models.make_model("llama")
    with helm.LLM.from_torch(module, speculate=folder("llama"), **OPTIONS) as llm:
        assert llm.stats["speculation"]["by"] == "model"
        with_draft = llm.generate(PROMPT, max_tokens=20).tokens
    with helm.LLM.from_torch(module, speculate="off", **OPTIONS) as llm:
        assert llm.generate(PROMPT, max_tokens=20).tokens == with_draft


def test_the_command_says_who_guesses() -> None:
    given = ("run", "bundled", "Once upon a time", "--raw", "-n", "40", "--temperature", "0")
    on = command(*given, "--speculate", "bundled", "-t", "1")
    off = command(*given, "--speculate", "off", "-t", "1")
    assert on.stdout == off.stdout
    assert "bundled guesses, " in on.stderr
    refused = command(*given, "--speculate", "maybe", status=2)
    assert "must be auto, off, ngram or a model" in refused.stderr
