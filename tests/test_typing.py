"""Programs that use HELM, read by mypy: right ones pass, mistakes are found where they are."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import helm
from helm.session.options import TorchKeywords
from helm.text.prompts import ChatKeywords
from helm.text.sampling import SamplingKeywords

RIGHT = """
import helm

llm = helm.LLM("org/model", context=4096, progress=False, kv_dtype="bf16")
one: helm.Completion = llm.generate("text", max_tokens=20, temperature=0.5, stop=["."])
ids: helm.Completion = llm.generate([1, 2, 3], seed=1)
many: list[helm.Completion] = llm.generate(["a", "b"], progress=True, max_tokens="auto")
for chunk in llm.stream("text", top_k=3):
    print(chunk.text)
talk = [{"role": "user", "content": "Hi"}]
said: str = llm.chat(talk, chat_template="default", max_tokens=5).text
llm.chat_stream(talk, continue_final_message=True, min_p=0.1)
params = helm.SamplingParams(top_p=0.5)
llm.generate("text", params, ignore_eos=True)
other: helm.LLM = helm.LLM.from_torch(object(), context=10, prefix_cache=False)
"""
# Each line is one mistake.
WRONG = """
import helm
llm = helm.LLM()
helm.LLM(contxt=4096)
helm.LLM(context="4096")
helm.LLM.from_torch(object(), revision="main")
helm.LLM.from_torch(object(), context="x")
llm.generate("text", max_token=5)
llm.generate("text", max_tokens="many")
llm.generate("text", temperature="hot")
llm.generate("text", progress=3)
llm.stream("text", stop=1)
llm.stream("text", progress=True)
llm.chat([], chat_templat="x")
llm.chat_stream([], seed="x")
helm.SamplingParams(top_k=0.5)
"""


def lines_with_errors(program: str, folder: Path) -> tuple[set[int], str]:
    path = folder / "program.py"
    path.write_text(program)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder / "cache"), str(path)],
        capture_output=True, text=True, cwd=folder, timeout=300,
    )  # fmt: skip
    return {int(n) for n in re.findall(r"program\.py:(\d+): error", result.stdout)}, result.stdout


@pytest.mark.slow
def test_mypy_finds_wrong_calls_and_no_others(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    found, said = lines_with_errors(RIGHT, tmp_path)
    assert found == set(), said
    assert "Success" in said
    found, said = lines_with_errors(WRONG, tmp_path)
    assert found == set(range(4, 4 + len(WRONG.strip().splitlines()) - 2)), said


def test_typed_keywords_are_those_that_are_taken() -> None:
    fields = {f.name: f.type for f in dataclasses.fields(helm.SamplingParams)}
    keywords = {name: ref.__forward_arg__ for name, ref in SamplingKeywords.__annotations__.items()}
    assert keywords == fields
    chat = inspect.signature(helm.LLM.chat_stream).parameters
    own = {name for name, p in chat.items() if p.kind is p.KEYWORD_ONLY}
    assert set(ChatKeywords.__annotations__) - set(keywords) == own
    options = inspect.signature(helm.LLM.__init__).parameters
    torch = typing.get_type_hints(TorchKeywords)
    about_files = {"self", "model", "revision", "tokenizer", "weights", "copies", "expected_tokens"}
    assert set(options) - set(torch) == about_files
    for name in torch:
        assert TorchKeywords.__annotations__[name].__forward_arg__ == options[name].annotation
