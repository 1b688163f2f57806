"""GGUF files through every door: LLM, the commands and C++ say the same. A small random model, and
published files where they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

import gguf_models
import helm
from command import helm as command

FILES = ("small", "SmolLM2-135M-Instruct.Q4_1.gguf", "Qwen2.5-Coder-1.5B-Q4_K_M.gguf")
ASKED = ("the a", "he the")
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
OPTIONS = ("-n", "12", "--temperature", "0", "-c", "256", "--device", "cpu", "-q")


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "small":
        return gguf_models.talking(tmp_path_factory.mktemp("models") / "one")
    return gguf_models.real(request.param)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[helm.LLM]:
    with helm.LLM(model, context=256, device="cpu") as loaded:
        yield loaded


def answers(llm: helm.LLM) -> list[str]:
    """Of a conversation with these questions."""
    messages, found = [], []
    for text in ASKED:
        messages.append({"role": "user", "content": text})
        answer = llm.chat(messages, **GREEDY)
        found.append(answer.text)
        own = {"content": answer.text, "tokens": answer.tokens}
        messages.append({"role": "assistant", **own})
    return found


def test_a_stream_is_what_is_generated(llm: helm.LLM) -> None:
    for prompt in ASKED:
        whole = llm.generate(prompt, **GREEDY)
        with llm.stream(prompt, **GREEDY) as stream:
            chunks = list(stream)
        assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert chunks[-1].finish_reason == whole.finish_reason
    together = llm.generate(list(ASKED), **GREEDY)
    assert [one.tokens for one in together] == [
        llm.generate(prompt, **GREEDY).tokens for prompt in ASKED
    ]


def test_a_chat_s_stream_is_its_answer(llm: helm.LLM) -> None:
    messages = [{"role": "user", "content": ASKED[0]}]
    whole = llm.chat(messages, **GREEDY)
    assert whole.tokens
    with llm.chat_stream(messages, **GREEDY) as stream:
        assert "".join(chunk.text for chunk in stream) == whole.text


def test_the_commands_say_what_the_api_says(model: Path, llm: helm.LLM) -> None:
    first, second = answers(llm)
    ran = command("run", str(model), ASKED[0], *OPTIONS)
    assert ran.stdout == f"{first}\n"
    talked = command("chat", str(model), *OPTIONS, stdin="".join(f"{text}\n" for text in ASKED))
    assert talked.stdout == f"{first}\n{second}\n"


def tensor_bytes(model: Path) -> dict[str, int]:
    return {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(model).tensors}


def test_bench_counts_the_bytes_that_a_step_reads(model: Path) -> None:
    load = ("--prompt-tokens", "16", "--output-tokens", "8", "--rounds", "1")
    found = json.loads(
        command("bench", str(model), *load, "-c", "64", "--device", "cpu", "--json").stdout
    )
    assert all(rate > 0 for rate in found["decode_tokens_per_s"])
    assert all(rate > 0 for rate in found["prefill_tokens_per_s"])
    read = tensor_bytes(model)
    if "output.weight" in read:
        del read["token_embd.weight"]  # of which a step reads a row
    (kv,) = (op["bytes"] for op in found["decode"]["ops"] if op["op"] == "attention")
    assert found["step_bytes"] - kv == pytest.approx(sum(read.values()), rel=0.04)


def test_a_plan_has_the_weights_of_the_file(model: Path) -> None:
    plan = ("plan", str(model), "--profile", "cpu-laptop-16gb", "-c", "128", "--json")
    found = json.loads(command(*plan).stdout)["model"]
    assert found["weights_bytes"] == pytest.approx(sum(tensor_bytes(model).values()), rel=0.04)
    sizes = {
        dtype: json.loads(command(*plan, "--dtype", dtype).stdout)["model"]["weights_bytes"]
        for dtype in ("f32", "bf16", "q8", "q4")
    }
    assert sizes["f32"] == pytest.approx(2 * sizes["bf16"], rel=0.1)
    # The small model's matrices have fewer weights than four bits are for, and some stay in f32.
    small = model.name == "x.gguf"
    assert sizes["f32" if small else "bf16"] > sizes["q8"] >= sizes["q4"]
    assert sizes["q8"] > sizes["q4"] or small


def test_the_plan_line_names_the_formats(model: Path, llm: helm.LLM) -> None:
    ran = command("run", str(model), "the", "-n", "1", "-c", "256", "--device", "cpu")
    said = re.findall(r"weights [\d.]+ \w+ (\S+),", " ".join(ran.stderr.split()))
    matrices = {t.name for t in llm.plan.tensors if len(t.shape) == 2}
    formats = {held.format for held in llm.plan.slices if held.tensor in matrices}
    assert [set(names.split("+")) for names in said] == [formats]
