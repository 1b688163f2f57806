"""Answers in JSON of models that think first: the thought is free, what follows is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from grammar_draws import allowed
from helm.errors import InvalidError
from helm.session.requests import EngineRequest
from helm.text.generation_defaults import GenerationDefaults
from helm.text.prompts import Prompts
from helm.text.structured import json_after_thought
from helm.text.thinking import thinking_marks
from helm.text.tokenizer import Tokenizer
from scripted_backend import BUNDLED, ScriptedBackend, served

pytest.importorskip("llguidance", reason="llguidance is not installed")

END = 1
SCHEMA = {
    "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
    "additionalProperties": False, "$defs": {"n": {"type": "integer"}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TEMPLATE = (
    "{{% for m in messages %}}{{{{ '<|' + m['role'] + '|>' }}}}"
    "{{{{ m['content'].split('</think>')[-1] }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|assistant|>' }}}}{opening}{{% endif %}}"
)
OPEN = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def model(folder: Path, opening: str, special: bool) -> Tokenizer:
    """The bundled tokenizer with a template that knows thoughts; special: whether their marks are
    special tokens, else text."""
    shutil.copytree(BUNDLED, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE.format(opening=opening)
    if special:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        marks = ("<think>", "</think>")
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
        backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(folder)


class Checked(ScriptedBackend):
    """Answers with a text, each of whose tokens the request's grammar must allow."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(self._checked, tokenizer=tokenizer)
        self.vocab_size = tokenizer.vocab_size
        defaults = GenerationDefaults(eos_token_ids=(END,))
        self.prompts = Prompts(tokenizer, defaults, 512, 512, self.vocab_size)
        self.tokens = [*tokenizer.backend.encode(text, add_special_tokens=False).ids, END]
        self.refused: int | None = None  # place of the first token that it does not allow

    def _checked(self, request: EngineRequest) -> list[int]:
        constraint: Any = request.constraint
        if constraint is not None:
            walk = constraint.start()
            for place, token in enumerate(self.tokens):
                if token not in allowed(walk, self.vocab_size):
                    self.refused = place
                    break
                walk.commit(token)
        return self.tokens


Ask = Callable[..., tuple[dict[str, Any], Checked]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    def asked(
        text: str, opening: str = "", special: bool = False, **body: Any
    ) -> tuple[dict[str, Any], Checked]:
        """The message of the answer `text`."""
        backend = Checked(
            model(tmp_path / f"x{len(list(tmp_path.iterdir()))}", opening, special), text
        )
        with served(backend) as (url, _):
            messages = [{"role": "user", "content": "Hello"}]
            found = httpx.post(
                f"{url}/v1/chat/completions", timeout=60,
                json={"messages": messages, "response_format": FORMAT, **body},
            )  # fmt: skip
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]["message"], backend

    return asked


@pytest.mark.parametrize("special", [False, True])
def test_a_thought_that_the_prompt_opens(special: bool, ask: Ask) -> None:
    text = 'Well, {"a": "b"}?</think>\n\n{"a":12}'
    message, backend = ask(text, "<think>\n", special)
    assert backend.refused is None
    assert message["reasoning_content"] == 'Well, {"a": "b"}?'
    assert message["content"] == '{"a":12}'
    message, backend = ask('{"a":12}', "<think>\n", special)
    assert backend.refused == len(backend.tokens) - 1  # it may not end within the thought


@pytest.mark.parametrize("special", [False, True])
def test_a_thought_that_the_model_may_open(special: bool, ask: Ask) -> None:
    message, backend = ask('<think>\nHm.\n</think>\n\n{"a":12}', OPEN, special)
    assert backend.refused is None
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a":12}')
    message, backend = ask('{"a":12}', OPEN, special)
    assert backend.refused is None
    assert message["content"] == '{"a":12}'
    assert "reasoning_content" not in message
    _, backend = ask("Hm.", OPEN, special)
    assert backend.refused == 0


@pytest.mark.parametrize("special", [False, True])
def test_what_follows_a_thought_is_bound(special: bool, ask: Ask) -> None:
    for text in ('ok</think>\n{"a":"b"}', 'ok</think>{"a":1} and', "ok</think> or", "ok</think>"):
        _, backend = ask(text, "<think>", special)
        assert backend.refused is not None
        thought = backend.tokenizer.backend.encode("ok</think>", add_special_tokens=False).ids
        assert backend.refused >= len(thought)


def test_thinking_that_is_turned_off(ask: Ask) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message, backend = ask('{"a":12}', OPEN, **off)
    assert backend.refused is None
    assert message["content"] == '{"a":12}'
    _, backend = ask('<think>x</think>{"a":12}', OPEN, **off)
    assert backend.refused == 0


def test_a_call_that_must_be_made(ask: Ask) -> None:
    forced: dict[str, Any] = {"response_format": None, "tools": [TOOL], "tool_choice": "required"}
    call = '{"name":"look","arguments":{"a":3}}'
    message, backend = ask(f"Hm.</think>[{call},{call}]", "<think>", **forced)
    assert backend.refused is None
    assert message["reasoning_content"] == "Hm."
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [{"a": 3}] * 2
    forced["parallel_tool_calls"] = False
    message, backend = ask(f"Hm.</think>{call}", "<think>", **forced)
    assert backend.refused is None
    assert len(message["tool_calls"]) == 1


def test_a_schema_that_is_none_is_refused_as_without_a_thought(tmp_path: Path) -> None:
    tokenizer = model(tmp_path / "x", "<think>", False)
    marks = thinking_marks(tokenizer)
    assert marks is not None
    with pytest.raises(InvalidError, match=r"\[grammar\] this json_schema cannot be used"):
        json_after_thought({"type": "objekt"}, marks, True, tokenizer, None, (END,))
