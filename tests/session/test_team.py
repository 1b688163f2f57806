"""Beside busy programs fewer threads decode, with the same tokens; a given number stays."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import transformers

import helm
from helm.commands.common import summary_line
from helm.machine.resources import cpu_affinity, read_machine
from helm.measure import threads
from helm.measure.threads import ThreadChoice

_LONG_S = 30.0  # others may have the CPUs for a while
_DECODE = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def module() -> transformers.LlamaForCausalLM:
    """Of a size that several threads share."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if read_machine().threads < 2:
        pytest.skip("one thread is all that this machine has by default")
    monkeypatch.setattr(threads, "choose_here", lambda: ThreadChoice(2, (), "told so"))


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Every CPU has another program."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cpu_affinity()]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_the_team_shrinks_beside_busy_programs(
    two_threads: object, module: transformers.LlamaForCausalLM
) -> None:
    with (
        helm.LLM.from_torch(module, device="cpu") as llm,
        helm.LLM.from_torch(module, device="cpu", threads=2) as fixed,
    ):
        assert llm.stats["threads"] == llm.stats["active_threads"] == 2
        wanted = fixed.generate([1, 2], **_DECODE)
        with busy():
            end = time.monotonic() + _LONG_S
            seen = [llm.generate([1, 2], **_DECODE)]
            while llm.stats["active_threads"] == 2 and time.monotonic() < end:
                seen.append(llm.generate([1, 2], **_DECODE))
            fixed.generate([1, 2], **_DECODE)
        assert llm.stats["threads"] == 2
        assert llm.stats["active_threads"] == 1
        assert "1 of 2 threads" in summary_line(llm, seen[-1])
        assert fixed.stats["active_threads"] == 2
        assert "threads" not in summary_line(fixed, wanted)
    assert {tuple(completion.tokens) for completion in seen} == {tuple(wanted.tokens)}
