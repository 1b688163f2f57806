"""What a call takes beyond the plan is counted before it starts, and given back if it fails."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import helm
from cgroup import memory_cgroup, needs_cgroup
from helm.errors import OutOfMemoryError
from helm.text.sampling import SamplingParams

MIB = 1 << 20
IDS = [1 + i % 250 for i in range(500)]


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM(threads=1) as loaded:
        yield loaded


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how much memory is free, and has calls of any size ask."""
    monkeypatch.setattr("helm.session.host_memory.SMALL_BYTES", 0)
    monkeypatch.setattr("helm.session.host_memory.memory_granted", lambda: 0)
    return lambda size: monkeypatch.setattr(
        "helm.session.host_memory.memory_available", lambda: size
    )


def nothing_is_open(llm: helm.LLM) -> bool:
    """Whether as many whole contexts can be opened as the plan has sequences."""
    opened = [llm._service.open(llm.context)[0] for _ in range(llm.plan.limits.sequences)]
    for sequence in opened:
        llm._service.close(sequence)
    return True


def test_logits_that_memory_does_not_hold_are_refused(llm: helm.LLM, free: Any) -> None:
    needed = 2 * 4 * len(IDS) * llm.vocab_size  # a step's stand beside them
    free(needed - 1)
    with pytest.raises(OutOfMemoryError, match=r"logits of 500 tokens may take .* MiB of memory,"):
        llm.logits(IDS)
    assert nothing_is_open(llm)
    free(needed)
    assert llm.logits(IDS).shape == (len(IDS), llm.vocab_size)


def test_logits_that_the_system_refuses_leave_nothing_open(
    llm: helm.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    for _ in range(llm.plan.limits.sequences + 1):
        with pytest.raises(MemoryError):
            llm.logits(IDS)
    monkeypatch.undo()
    assert nothing_is_open(llm)


@pytest.mark.parametrize("many", [False, True])
def test_results_that_memory_does_not_hold_are_refused(
    llm: helm.LLM, free: Any, many: bool
) -> None:
    sampling = SamplingParams(max_tokens=400, logprobs=20, ignore_eos=True)
    free(2 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"results may take .* 2\.00? MiB are free; give"):
        llm.generate([[1, 2]] * 100 if many else [1, 2], sampling)
    with pytest.raises(OutOfMemoryError, match="lower max_tokens or logprobs"):
        llm.stream([1, 2], sampling)
    assert nothing_is_open(llm)
    assert len(llm.generate([1, 2], sampling, logprobs=0, max_tokens=8).tokens) == 8


@pytest.mark.parametrize("logprobs", [None, 0, 20])
def test_results_take_no_more_than_is_counted(
    llm: helm.LLM, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(
        "helm.session.host_memory.check_call", lambda _what, needed, _remedy: counted.append(needed)
    )
    options = {"max_tokens": 60, "ignore_eos": True, "logprobs": logprobs}
    llm.generate([[1, 2]] * 2, **options)
    gc.collect()
    tracemalloc.start()
    try:
        results = llm.generate([[1 + i, 2] for i in range(40)], **options)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(len(result.tokens) for result in results) == 40 * 60
    assert 0 < taken <= counted[-1] <= 40 * taken


def wide_model(folder: Path, vocab: int = 50_000, width: int = 16) -> Path:
    """A tiny model with many tokens, in f16."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": width,
        "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "torch_dtype": "float16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,),
        layer + "input_layernorm.weight": (width,),
        layer + "post_attention_layernorm.weight": (width,),
    }  # fmt: skip
    for name in (*(f"self_attn.{n}" for n in "qkvo"), "mlp.gate", "mlp.up", "mlp.down"):
        shapes[f"{layer}{name}_proj.weight"] = (width, width)
    random = np.random.default_rng(1)
    tensors = {name: random.standard_normal(s).astype(np.float16) for name, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


_LOGITS = """
import sys, helm
llm = helm.LLM(sys.argv[1], max_sequences=1, threads=1)
print(llm.logits([1] * 100).shape)
try:
    llm.logits([1] * 1500)
except helm.OutOfMemoryError as error:
    print(error)
print(len(llm.generate([1, 2], max_tokens=4, ignore_eos=True).tokens))
"""


@needs_cgroup
def test_logits_are_refused_in_a_container_not_killed(tmp_path: Path) -> None:
    with memory_cgroup(300 << 20) as group:
        result = group.run([sys.executable, "-c", _LOGITS, wide_model(tmp_path)])
    assert result.returncode == 0, result.stderr
    shape, refusal, count = result.stdout.splitlines()
    assert (shape, count) == ("(100, 50000)", "4")
    assert "[logits] logits of 1500 tokens may take 383.8 MiB of memory" in refusal


_LOAD = """
import pathlib, re, sys, helm
def status(name):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\\s+(\\d+)", text)[1]) * 1024
helm.LLM(max_sequences=1, threads=1).close()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
llm = helm.LLM(sys.argv[1], dtype="bf16", weights="copied", max_sequences=1, threads=8)
print(status("VmHWM") - before - llm.plan.memory["cpu"].weights_bytes)
"""


def test_loading_takes_little_beside_the_weights(tmp_path: Path) -> None:
    folder = wide_model(tmp_path, 200_000, 80)
    result = subprocess.run(
        [sys.executable, "-c", _LOAD, folder], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 24 * MIB
