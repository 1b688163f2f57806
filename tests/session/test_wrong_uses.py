"""Twenty wrong uses of the Python API: each one gets one clear line of HELM's own errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import helm

USES: list[tuple[str, Callable[[helm.LLM, Path], Any], str]] = [
    ("no such folder", lambda _llm, tmp: helm.LLM(tmp / "none"), "none"),
    ("a folder without a model", lambda _llm, tmp: helm.LLM(tmp), "config.json"),
    ("a model that is a number", lambda _llm, _tmp: helm.LLM(7), "got int"),  # type: ignore[arg-type]
    ("an unknown dtype", lambda _llm, _tmp: helm.LLM(dtype="int3"), "dtype"),
    ("an unknown device", lambda _llm, _tmp: helm.LLM(device="tpu"), "tpu"),
    ("an unknown option", lambda _llm, _tmp: helm.LLM(n_gpu_layers=3), "n_gpu_layers"),
    ("a negative context", lambda _llm, _tmp: helm.LLM(context=-5), "context"),
    ("a context beyond the model's", lambda _llm, _tmp: helm.LLM(context=10**9), "context"),
    ("threads as text", lambda _llm, _tmp: helm.LLM(threads="two"), "threads"),
    ("too little memory", lambda _llm, _tmp: helm.LLM(memory_bytes=1 << 21), "[plan]"),
    ("an unknown way of loading", lambda _llm, _tmp: helm.LLM(weights="zip"), "weights"),
    ("an unknown profile", lambda _llm, _tmp: helm.LLM(profile="rtx-9999"), "rtx-9999"),
    ("an empty prompt", lambda llm, _tmp: llm.generate(""), "prompt is empty"),
    ("a prompt of bytes", lambda llm, _tmp: llm.generate(b"x"), "prompt"),
    ("an unknown token", lambda llm, _tmp: llm.generate([10**9]), "1000000000"),
    ("a prompt that is too long", lambda llm, _tmp: llm.generate([1] * 4000), "context"),
    ("a negative temperature", lambda llm, _tmp: llm.generate("a", temperature=-1), "temperature"),
    ("top_p beyond one", lambda llm, _tmp: llm.generate("a", top_p=1.5), "top_p"),
    ("max_tokens as text", lambda llm, _tmp: llm.generate("a", max_tokens="9"), "max_tokens"),
    ("a misspelt option", lambda llm, _tmp: llm.generate("a", temprature=1), "temperature"),
    ("a stop that is a number", lambda llm, _tmp: llm.generate("a", stop=5), "stop"),
    ("messages as text", lambda llm, _tmp: llm.chat("hello"), "messages"),
    ("a saved cache that is none", lambda llm, tmp: llm.load_kv(tmp), "kv"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM() as loaded:
        yield loaded


@pytest.mark.parametrize(("use", "message"), [u[1:] for u in USES], ids=[u[0] for u in USES])
def test_a_wrong_use_gets_one_clear_line(
    use: Callable[[helm.LLM, Path], Any], message: str, llm: helm.LLM, tmp_path: Path
) -> None:
    with pytest.raises((helm.HelmError, TypeError, ValueError)) as error:
        use(llm, tmp_path)
    told = str(error.value)
    assert message in told
    assert "\n" not in told
    assert 10 < len(told) < 600
    assert len(llm.generate("Once", max_tokens=1).tokens) == 1, "nothing is lost"


def test_a_closed_model_says_so() -> None:
    closed = helm.LLM()
    closed.close()
    with pytest.raises(helm.HelmError, match="closed"):
        closed.generate("a")
