"""What `run` and `chat` make of a prompt: question or text, argument, file or piped input."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import helm as package
import smollm2
from command import COMMAND, PROMPT, Terminal, environment, helm, redirected
from helm.commands import prompt_input
from helm.model.hub import bundled_model

GREEDY = ("--temperature", "0", "-q")
SHORT = (*GREEDY, "-n", "12")


def answer(*messages: tuple[str, str]) -> str:
    with package.LLM(context=512) as llm:
        talk = [{"role": role, "content": text} for role, text in messages]
        return llm.chat(talk, temperature=0, max_tokens=12).text + "\n"


def continued(prompt: str) -> str:
    with package.LLM(context=512) as llm:
        return llm.generate(prompt, temperature=0, max_tokens=12).text + "\n"


# --- the chat template ---------------------------------------------------------------------------


def test_an_instruct_model_answers() -> None:
    model = str(smollm2.folder())
    question = "What is the capital of France?"
    assert "Paris" in helm("run", model, question, "-q", "-c", "512").stdout
    raw = helm("run", model, "--raw", question, *SHORT, "-c", "512").stdout
    with package.LLM(model, context=512) as llm:
        assert raw == llm.generate(question, temperature=0, max_tokens=12).text + "\n"
        talk = [{"role": "system", "content": "You are a pirate."}]
        talk.append({"role": "user", "content": question})
        expected = llm.chat(talk, temperature=0, max_tokens=12).text
    found = helm(
        "run", model, question, "--system", "You are a pirate.", "--json", *SHORT, "-c", "512"
    )
    assert json.loads(found.stdout)["text"] == expected


def test_a_template_is_used_where_there_is_one(tmp_path: Path) -> None:
    told = answer(("user", "The dog"))
    text = continued("The dog")
    assert told != text
    assert helm("run", "bundled", "The dog", *SHORT).stdout == told
    assert helm("run", "bundled", "The dog", "--raw", *SHORT).stdout == text
    assert helm("run", *SHORT).stdout == continued("Once upon a time")
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in bundled_model().iterdir():
        (bare / path.name).write_bytes(path.read_bytes())
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    assert helm("run", str(bare), "The dog", *SHORT).stdout == text
    refused = helm("run", str(bare), "The dog", "--system", "Be brief.", *SHORT, status=2)
    assert "the model has no chat template" in refused.stderr


def test_an_answer_that_was_saved_is_a_conversation(tmp_path: Path) -> None:
    file = str(tmp_path / "talk.kv")
    question = "Once upon a time there was a little dog who lived by the sea."
    first = helm("run", "bundled", question, *SHORT, "--save-kv", file).stdout
    second = helm("chat", "bundled", *SHORT, "--load-kv", file, stdin="And then?\n").stdout
    talk = (("user", question), ("assistant", first.removesuffix("\n")), ("user", "And then?"))
    assert second == answer(*talk)
    again = json.loads(helm("run", "bundled", question, *SHORT, "--load-kv", file, "--json").stdout)
    assert again["timings"]["prefill_tokens"] < again["prompt_tokens"] / 2
    assert again["text"] + "\n" == first


def test_chat_takes_a_first_message() -> None:
    turns = "The dog\nAnd then?\n"
    expected = helm("chat", "bundled", *SHORT, stdin=turns).stdout
    for words in (("bundled", "The dog"), ("-m", "bundled", "-p", "The dog"), ("-p", "The dog")):
        assert helm("chat", *words, *SHORT, stdin="And then?\n").stdout == expected
    assert "prompt is empty" in helm("chat", "bundled", "", status=2).stderr
    with Terminal(["chat", "bundled", "The dog", *SHORT]) as terminal:
        terminal.wait_for(expected.splitlines()[0][:20])
        terminal.wait_for(PROMPT)
        terminal.type("/exit\n")
        assert terminal.status() == 0


# --- standard input ------------------------------------------------------------------------------


def test_what_is_piped_in_is_the_prompt_or_comes_before_it(tmp_path: Path) -> None:
    file = tmp_path / "question.txt"
    file.write_text("Why?\n")
    alone, joined = answer(("user", "The dog")), answer(("user", "The dog\n\nWhy?"))
    base = ("run", "bundled")
    assert helm(*base, *SHORT, stdin="The dog\n").stdout == alone
    assert helm(*base, "-", *SHORT, stdin="The dog\n").stdout == alone
    assert helm(*base, "Why?", *SHORT, stdin="The dog\n").stdout == joined
    assert helm(*base, "-", "-p", "Why?", *SHORT, stdin="The dog\n").stdout == joined
    assert helm(*base, "--file", str(file), *SHORT, stdin="The dog\n").stdout == joined
    dog = tmp_path / "dog.txt"
    dog.write_text("The dog\n")
    assert redirected(f"< {dog}", *base, "Why?", *SHORT).stdout == joined


@pytest.mark.parametrize("redirection", ["< /dev/null", "<&-"])
def test_input_that_holds_nothing_is_as_if_there_were_none(redirection: str) -> None:
    story = continued("Once upon a time")
    assert redirected(redirection, "run", *SHORT).stdout == story
    assert redirected(redirection, "run", "bundled", "Why?", *SHORT).stdout == answer(
        ("user", "Why?")
    )
    assert helm("run", *SHORT, stdin="").stdout == story
    assert helm("run", *SHORT, stdin=" \n").stdout == story


def test_a_pipe_that_stays_silent_is_left_aside(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    with open(reading) as stream, open(writing, "w") as ours:
        monkeypatch.setattr("sys.stdin", stream)
        assert prompt_input.piped_input(patience_s=0.05) == b""
        assert "note: standard input gave nothing" in capfd.readouterr().err
        ours.write("late")
        ours.close()
        assert prompt_input.piped_input(patience_s=0.05) == b"late"


def test_input_may_take_its_time() -> None:
    """What comes in parts is read to its end."""
    command = [*COMMAND, "run", "bundled", *SHORT]
    with subprocess.Popen(
        ["sh", "-c", '(printf "The "; sleep 3; echo dog) | "$@"', "sh", *command],
        env=environment(), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.communicate(timeout=60)[0] == answer(("user", "The dog"))


def test_on_a_terminal_nothing_is_read() -> None:
    with Terminal(["run", "bundled", "The dog", *SHORT]) as terminal:
        assert terminal.status() == 0
        assert answer(("user", "The dog")).strip()[:20] in terminal.output


def test_the_text_of_a_regular_expression_or_a_grammar(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    grammar = tmp_path / "x.lark"
    grammar.write_text('start: "(" ("yes" | "no") ")"\n')
    for options, form in (
        (("--regex", "[ab]{3}x?"), "[ab]{3}x?"),
        (("--grammar", str(grammar)), r"\((yes|no)\)"),
    ):
        result = helm("run", "bundled", "Once", "--raw", "-n", "20", "-q", *options)
        assert re.fullmatch(form, result.stdout.strip()), result.stdout
    both = helm("run", "bundled", "x", "--regex", "a", "--grammar", str(grammar), status=2)
    assert "regex and grammar were given; a text obeys one of them" in both.stderr
    wrong = helm("run", "bundled", "x", "--regex", "(", status=2)
    assert "[grammar] this regex cannot be used" in wrong.stderr
    absent = helm("run", "bundled", "x", "--grammar", str(tmp_path / "absent"), status=2)
    assert "absent" in absent.stderr
