"""What nobody should give as an argument: every public function takes it, or says what is wrong."""

from __future__ import annotations

import dataclasses
import decimal
import fractions
import functools
import inspect
from collections import UserList
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import helm
from helm.base.arguments import shown
from helm.machine.profile import Profile, load_profile
from helm.measure.benchmark import Load


class Evil:
    """Has nothing to show."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class EvilIndex:
    def __index__(self) -> int:
        raise RuntimeError("no index")


@functools.cache  # the garbage collector walks down each new one
def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400), "10**5000": lambda: 10**5000, "2**31": lambda: 2**31,
    "2**63": lambda: 2**63, "2**64": lambda: 2**64, "-1": lambda: -1, "0": lambda: 0,
    "nan": lambda: float("nan"), "inf": lambda: float("inf"), "1.5": lambda: 1.5,
    "complex": lambda: 1j, "bytes": lambda: b"ab", "bytearray": lambda: bytearray(b"ab"),
    "surrogate": lambda: "a\ud800", "zero": lambda: "a\0b", "empty": lambda: "",
    "long": lambda: "x" * 300_000, "list": list, "deep": deep, "nested": lambda: [[1, [2]]],
    "mixed": lambda: ["a", 1], "dict": dict, "object": object, "evil": Evil,
    "evil index": EvilIndex, "evil list": lambda: [Evil()], "generator": lambda: iter([1, 2]),
    "int64": lambda: np.int64(3), "float32": lambda: np.float32("nan"),
    "uint64": lambda: np.uint64(2**64 - 1), "array 0": lambda: np.array(3),
    "array 1": lambda: np.array([1, 2]), "array 2": lambda: np.array([[1, 2], [3, 4]]),
    "array of floats": lambda: np.array([1.5]), "array of nothing": lambda: np.array([]),
    "array of objects": lambda: np.array([None]), "tensor": lambda: torch.tensor([1, 2]),
    "tensor 0": lambda: torch.tensor(3), "tensor of floats": lambda: torch.tensor([1.5]),
    "fraction": lambda: fractions.Fraction(10**400), "decimal": lambda: decimal.Decimal("NaN"),
    "type": lambda: int, "UserList": lambda: UserList([1, 2]), "set": lambda: {1},
    "range": lambda: range(3), "large ids": lambda: [10**400], "negative ids": lambda: [-1],
    "truths": lambda: [True], "floats": lambda: [1.0], "surrogates": lambda: ["a\ud800"],
    "empty strings": lambda: [""], "Nones": lambda: [None],
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM() as loaded:
        yield loaded


def calls(llm: helm.LLM, folder: Path) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Every public function with one argument left open."""
    few: dict[str, Any] = {"max_tokens": 2}
    hello = [{"role": "user", "content": "Hi"}]
    tokenizer, path = llm.tokenizer, folder / "saved.kv"
    assert tokenizer is not None
    for name in list(inspect.signature(helm.LLM).parameters)[1:]:
        yield f"LLM({name})", lambda v, name=name: helm.LLM(**{name: v})
    for field in dataclasses.fields(helm.SamplingParams):
        name = field.name
        yield f"SamplingParams({name})", lambda v, name=name: helm.SamplingParams(**{name: v})
        yield f"generate({name})", lambda v, name=name: llm.generate("Hi", **{**few, name: v})
    yield "LLM(model)", lambda v: helm.LLM(v, context=0)
    yield "from_torch", helm.LLM.from_torch
    yield "generate", lambda v: llm.generate(v, **few)
    yield "generate a list", lambda v: llm.generate([v], **few)
    yield "generate a mixed list", lambda v: llm.generate(["Hi", v], **few)
    yield "generate(sampling)", lambda v: llm.generate("Hi", v)
    yield "stream", lambda v: list(llm.stream(v, **few))
    yield "logits", llm.logits
    yield "chat", lambda v: llm.chat(v, **few)
    yield "chat a message", lambda v: llm.chat([v], **few)
    yield "chat(role)", lambda v: llm.chat([{"role": v, "content": "x"}], **few)
    yield "chat(content)", lambda v: llm.chat([{"role": "user", "content": v}], **few)
    said = {"role": "assistant", "content": "x"}
    yield "chat(tokens)", lambda v: llm.chat([*hello, {**said, "tokens": v}, *hello], **few)
    yield "chat(tools)", lambda v: llm.chat(hello, tools=v, **few)
    yield "chat(variables)", lambda v: llm.chat(hello, template_variables=v, **few)
    yield "chat(variable)", lambda v: llm.chat(hello, template_variables={"x": v}, **few)
    yield "load_kv", llm.load_kv
    yield "save_kv(messages)", lambda v: llm.save_kv(path, messages=v)
    yield "save_kv(content)", lambda v: llm.save_kv(path, messages=[{**hello[0], "content": v}])
    yield "save_kv(progress)", lambda v: llm.save_kv(path, progress=v)
    yield "load_kv(progress)", lambda v: llm.load_kv(path, progress=v)
    yield "benchmark", lambda v: llm.benchmark(v, 1)
    yield "benchmark(prompt)", lambda v: llm.benchmark(Load(v, 2, 1), 1)
    yield "benchmark(rounds)", lambda v: llm.benchmark(Load(4, 2, 1), v)
    yield "encode", tokenizer.encode
    yield "decode", tokenizer.decode
    yield "token_text", tokenizer.token_text
    yield "token_id", tokenizer.token_id
    yield "detokenizer", tokenizer.detokenizer
    yield "render_chat", tokenizer.render_chat
    yield "from_directory", helm.Tokenizer.from_directory
    yield "Plan.from_json", helm.Plan.from_json
    yield "Profile.from_json", Profile.from_json
    yield "load_profile", load_profile


@pytest.mark.parametrize("name", VALUES)
def test_every_function_takes_it_or_says_what_is_wrong(
    name: str, llm: helm.LLM, tmp_path: Path
) -> None:
    llm.generate("Hi", max_tokens=2)
    llm.save_kv(tmp_path / "saved.kv")
    for what, call in calls(llm, tmp_path):
        if name == "type" and "progress" in what:
            continue  # can be called, and raises what it likes
        try:
            result = call(VALUES[name]())
        except helm.HelmError as error:
            message = str(error)
            assert message.startswith("["), (what, message)
            assert "\n" not in message, (what, message)
            assert len(message) < 1500, (what, message)
            message.encode()
        except (TypeError, ValueError) as error:
            if not str(error):
                pytest.fail(f"{what}: a {type(error).__name__} that says nothing")
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        else:
            if hasattr(result, "close"):
                result.close()


def test_integers_of_numpy_and_tensors_are_integers(llm: helm.LLM) -> None:
    ids = [1, 2, 3]
    expected = llm.generate(ids, max_tokens=4).tokens
    for prompt in (
        np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids], tuple(ids), range(1, 4)
    ):  # fmt: skip
        assert llm.generate(prompt, max_tokens=np.int32(4), seed=np.uint64(1)).tokens == expected
        assert llm.tokenizer.decode(prompt) == llm.tokenizer.decode(ids)
        assert llm.logits(prompt).shape[0] == 3
    stops = torch.tensor([expected[0]])
    assert len(llm.generate(ids, max_tokens=4, stop_token_ids=stops).tokens) == 1
    with helm.LLM(context=np.int64(64), batch=np.int32(1), memory_bytes=np.int64(8 << 30)) as small:
        assert small.context == 64


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), memoryview(b"ab"), iter([1]), {}])
def test_what_only_looks_like_a_prompt_is_refused(prompt: Any, llm: helm.LLM) -> None:
    with pytest.raises(helm.InvalidError, match="a prompt is text or a list of token ids"):
        llm.generate(prompt)


def test_what_messages_quote_is_one_short_line() -> None:
    for value in VALUES.values():
        text = shown(value())
        assert 0 < len(text) <= 60
        assert text.isprintable()
    assert shown("it's") == repr("it's")
    assert shown(12) == "12"
