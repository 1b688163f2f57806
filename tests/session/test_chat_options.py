"""What chat takes beside messages, in Python and on the command line, on the bundled model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import helm
from command import helm as command
from helm.model.hub import bundled_model

MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
OPTIONS = ("--max-tokens", "8", "--temperature", "0")


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM(kv_dtype="f32") as loaded:
        yield loaded


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """The bundled model with two templates and no default; one shows what it is given."""
    folder = shutil.copytree(bundled_model(), tmp_path / "named")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    loud = "{{ raise_exception(mood ~ tools | tojson ~ messages[-1].content) }}"
    entries = {"usual": config["chat_template"], "loud": loud}
    config["chat_template"] = [{"name": n, "template": t} for n, t in entries.items()]
    path.write_text(json.dumps(config))
    return folder


def test_a_template_is_chosen_by_its_name(named: Path, llm: helm.LLM) -> None:
    with helm.LLM(named, kv_dtype="f32") as other:
        with pytest.raises(helm.TokenizerError, match="it has: loud, usual"):
            other.chat(MESSAGES, **GREEDY)
        expected = llm.chat(MESSAGES, **GREEDY).tokens
        assert other.chat(MESSAGES, chat_template="usual", **GREEDY).tokens == expected
        with pytest.raises(helm.TokenizerError, match=r'sad\[{"name": "f"}\]Hello'):
            other.chat(
                MESSAGES, chat_template="loud", tools=[{"name": "f"}],
                template_variables={"mood": "sad"},
            )  # fmt: skip
    result = command("chat", str(named), *OPTIONS, status=2)
    assert "it has: loud, usual); name one of them with --chat-template" in result.stderr
    shown = command("chat", str(named), "--chat-template", "usual", *OPTIONS, stdin="Hello\n")
    assert shown.stdout == command("chat", *OPTIONS, stdin="Hello\n").stdout


def test_tools_and_variables_from_the_command_line(named: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "f"}]')
    result = command(
        "chat", str(named), "--chat-template", "loud", "--tools", str(tools),
        "--template-variable", 'mood={"a": 1}', status=2,
    )  # fmt: skip
    assert """{'a': 1}[{"name": "f"}]Hello""" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--template-variable", "mood"], "must be NAME=JSON"),
        (["--template-variable", "mood=happy"], "--template-variable mood.*not valid JSON"),
        (["--template-variable", "messages=1"], "cannot set 'messages'"),
        (["--tools", "/absent.json"], "cannot read /absent.json: No such file"),
        (["--tools", "{object}"], "expected an array"),
        (["--tools", "{numbers}"], r"\[0\]: expected an object"),
        (["--continue-final-message"], "add --load-kv FILE"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_loading(
    tmp_path: Path, options: list[str], message: str
) -> None:
    files = {"object": "{}", "numbers": "[1]"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = {f"{{{name}}}": str(tmp_path / name) for name in files}
    result = command("chat", *(paths.get(option, option) for option in options), status=2)
    assert re.search(message, result.stderr)
    assert "[plan" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": 5}, "chat_template must be"),
        ({"tools": "x"}, "tools must be a list"),
        ({"continue_final_message": 1}, "continue_final_message must be True or False"),
        ({"continue_final_message": True, "template_variables": {"add_generation_prompt": True}},
         "give one of them"),
        ({"template_variables": {"template": "x"}}, "cannot set 'template'"),
    ],
)  # fmt: skip
def test_arguments_of_a_wrong_kind_are_refused(
    llm: helm.LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(helm.InvalidError, match=message):
        llm.chat(MESSAGES, **options)


def test_the_final_message_is_continued(llm: helm.LLM) -> None:
    whole = llm.chat(MESSAGES, **{**GREEDY, "max_tokens": 16}, ignore_eos=True)
    half = llm.chat(MESSAGES, **GREEDY, ignore_eos=True)
    assert llm.tokenizer is not None
    messages = [*MESSAGES, {"role": "assistant", "content": half.text}]
    rest = llm.chat(messages, continue_final_message=True, **GREEDY, ignore_eos=True)
    assert half.tokens + rest.tokens == whole.tokens
    assert half.text + rest.text == whole.text  # with the space between them
    chunks = llm.chat_stream(messages, continue_final_message=True, **GREEDY, ignore_eos=True)
    assert "".join(chunk.text for chunk in chunks) == rest.text


def test_contents_of_text_parts_mean_their_text(llm: helm.LLM) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    given = [{"role": "user", "content": parts}]
    assert llm.chat(given, **GREEDY).tokens == llm.chat(MESSAGES, **GREEDY).tokens
    with pytest.raises(helm.TokenizerError, match="of type 'image_url'"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_a_chat_goes_on_with_its_last_answer(tmp_path: Path) -> None:
    file = str(tmp_path / "talk.kv")
    whole = command("chat", "--max-tokens", "16", "--temperature", "0", stdin="Hello\n").stdout
    lines = command("chat", *OPTIONS, "--save-kv", file, stdin="Hello\n").stdout
    assert whole.startswith(lines.rstrip("\n"))
    rest = command("chat", *OPTIONS, stdin="Hello\n/continue\n").stdout.split("\n")[1]
    assert lines.rstrip("\n") + rest == whole.rstrip("\n")
    loaded = command(
        "chat", *OPTIONS, "--verbose", "--load-kv", file, "--continue-final-message", stdin=""
    )
    assert loaded.stdout.rstrip("\n") == rest
    assert "reused of" in loaded.stderr
    assert "nothing to go on with" in command("chat", stdin="/continue\n", status=2).stderr


def test_a_stop_string_may_be_a_special_token(llm: helm.LLM) -> None:
    free = llm.chat(MESSAGES, max_tokens=200, temperature=0)
    assert free.finish_reason == "stop"
    assert llm.tokenizer is not None
    end = "<|end|>"
    assert free.tokens[-1] == llm.tokenizer.token_id(end)
    options: dict[str, Any] = {"max_tokens": 250, "temperature": 0, "ignore_eos": True}
    found = llm.chat(MESSAGES, stop=end, **options)
    assert (found.tokens, found.text) == (free.tokens, free.text)
    before = free.text[-5:]
    cut = llm.chat(MESSAGES, stop=before + end, **options)
    assert (cut.tokens, cut.text, cut.finish_reason) == (free.tokens, free.text[:-5], "stop")
    chunks = list(llm.chat_stream(MESSAGES, stop=before + end, **options))
    assert "".join(chunk.text for chunk in chunks) == cut.text
