"""`chat` and `run` as a person at a terminal uses them, at 80 and 120 columns; redirected, too."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from pathlib import Path

import pytest

import helm as package
import smollm2
from command import PASTE, PROMPT, Terminal, helm
from scripted_model import scripted

WIDTHS = pytest.mark.parametrize("columns", [80, 120])
SHORT = ("--temperature", "0", "-n", "24")
PASTED = "Here is a list:\n  one\n  two\n\n/bye is no command here"
THOUGHT = "<think> Let me see. </think> It is blue."


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of these chats is not the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def thinker(tmp_path: Path) -> str:
    """Thinks before it answers, unless its template is told not to."""
    opening = "{% if enable_thinking is false %}<think> </think> {% endif %}"
    marks = ("<think>", "</think>")
    return str(scripted(tmp_path / "thinker", THOUGHT.split(), opening, marks))


def answer(*messages: str, model: str | None = None, **options: object) -> str:
    """To the last message of a conversation in turns."""
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    with package.LLM(model, context=512) as llm:
        return str(llm.chat(talk, temperature=0, max_tokens=24, **options).text)


def lines_of(terminal: Terminal, first: str) -> list[str]:
    """What the screen shows from the line that begins with `first` on, without the last prompt."""
    screen = terminal.screen()
    begin = next(i for i, line in enumerate(screen) if line.startswith(first))
    end = max(i for i, line in enumerate(screen) if line)
    return screen[begin : end + (screen[end] != ">")]


def broken(text: str, columns: int) -> list[str]:
    """Text as it is to be shown: each line as long as it can be, without its trailing spaces."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for word in re.findall(r"\s*\S+", line):
            if shown and len(shown) + len(word) > columns:
                lines.append(shown)
                shown, word = "", word.lstrip()
            shown += word
        lines.append(shown)
    return lines


# --- a real model --------------------------------------------------------------------------------


@WIDTHS
def test_a_question_to_an_instruct_model(columns: int) -> None:
    model = str(smollm2.folder())
    question = "Explain in three long sentences why the sky is blue."
    options = ("--temperature", "0", "-n", "90", "-c", "512")
    raw = helm("run", model, question, *options, "-q").stdout
    with Terminal(["run", model, question, *options, "-q"], columns=columns) as terminal:
        assert terminal.status() == 0
        shown = terminal.screen()
    assert len(raw) > 2 * columns
    expected = broken(raw.rstrip("\n"), columns)
    assert shown[: len(expected)] == expected
    assert not any(shown[len(expected) :])


@WIDTHS
def test_a_conversation_with_an_instruct_model(columns: int) -> None:
    model = str(smollm2.folder())
    base = ["chat", model, *SHORT, "-c", "512"]
    with Terminal([*base, "--verbose"], columns=columns) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type(PASTE.format(PASTED))
        terminal.wait_for("is no command here")
        terminal.type("\r")
        terminal.wait_for(rf"\[prompt.*{PROMPT}")
        first = answer(PASTED, model=model)
        shown = lines_of(terminal, "> Here is")
        assert [line.removeprefix("> ").strip() for line in shown[:5]] == [
            line.strip() for line in PASTED.split("\n")
        ]
        assert shown[5 : 5 + len(broken(first, columns))] == broken(first, columns)
        terminal.type("/set max-tokens 900\rTell me a very long story about the sea.\r")
        terminal.wait_for(r"\(max-tokens: 900\).*\?2004l.{100}")
        terminal.type("\x03")
        terminal.wait_for(rf"\(stopped\).*{PROMPT}")
        terminal.type("/set max-tokens 24\rAnd a short one?\r")
        used = terminal.wait_for(rf"\(max-tokens: 24\).*\[prompt.*\]\s.*{PROMPT}")
        prompt, reused = map(int, re.search(r"prompt (\d+) tokens \((\d+) reused", used).groups())
        assert prompt - reused < 25  # the new message with what the template puts around it
        terminal.type("\x03")
        terminal.wait_for(rf"again.*{PROMPT}")
        terminal.type("\x03")
        assert terminal.status() == 0
    piped = helm(*base, "-q", stdin='What is 2+2?\n"""\nAnd\n3+3?\n"""\n').stdout
    four = answer("What is 2+2?", model=model)
    six = answer("What is 2+2?", four, "And\n3+3?", model=model)
    assert piped == f"{four}\n{six}\n"


# --- what is typed -------------------------------------------------------------------------------


@WIDTHS
def test_what_is_pasted_is_one_message(columns: int) -> None:
    with Terminal(["chat", *SHORT, "-q"], columns=columns) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type(PASTE.format(PASTED + "\n"))
        assert not terminal.shows(r"\?2004l", timeout_s=0.5)  # nothing is sent by its line ends
        terminal.type("\r")
        terminal.wait_for(PROMPT)
        told = answer(PASTED)
        assert lines_of(terminal, "> Here is")[6:] == broken(told, columns)
        terminal.type("/bye\r")
        assert terminal.status() == 0


def test_three_quotes_and_keys() -> None:
    """A message of several lines; a line that is edited; one of an earlier run."""
    with Terminal(["chat", *SHORT, "-q"]) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type('"""\rOnce upon\ra time\r"""\r')
        terminal.wait_for(rf"\?2004l.*{PROMPT}")
        assert lines_of(terminal, '> """')[4:] == broken(answer("Once upon\na time"), 80)
        terminal.type("/clear\r")
        terminal.wait_for(rf"forgotten.*{PROMPT}")
        terminal.type("The cat\x1b[D\x1b[D\x1b[D\x7f\x1b[C\x1b[C\x1b[C!\x01So \r")
        terminal.wait_for(rf"\?2004l.*{PROMPT}")
        assert broken(answer("So Thecat!"), 80)[0] in terminal.screen()
        terminal.type("\x04")
        assert terminal.status() == 0
    (history,) = Path(os.environ["XDG_CACHE_HOME"]).glob("helm/chat-history*")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert json.loads(history.read_text())[-1] == "So Thecat!"
    with Terminal(["chat", *SHORT, "-q"]) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[A\r")
        terminal.wait_for(rf"So Thecat!.*\?2004l.*{PROMPT}")
        assert broken(answer("So Thecat!"), 80)[0] in terminal.screen()


def test_a_history_that_cannot_be_kept_stops_nothing(tmp_path: Path) -> None:
    for content in ("{", '{"a": 1}', '["a", 1]'):
        (tmp_path / "cache" / "helm").mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / "helm" / "chat-history.json").write_text(content)
        with Terminal(["chat", *SHORT, "-q"]) as terminal:
            terminal.wait_for(PROMPT)
            terminal.type("Hello\r")
            terminal.wait_for(PROMPT)
    with Terminal(["chat", *SHORT, "-q"], XDG_CACHE_HOME="/dev/null") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Hello\r")
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[A")
        terminal.wait_for("Hello")


def test_a_terminal_that_moves_no_cursor_takes_lines() -> None:
    with Terminal(["chat", *SHORT, "-q"], TERM="dumb") as terminal:
        terminal.wait_for("> ")
        terminal.type('"""Hello\n')
        terminal.wait_for("Hello.*> ")
        terminal.type('there"""\n')
        terminal.wait_for("there.*> ")
        assert "\x1b" not in "".join(terminal.screen())
        assert broken(answer("Hello\nthere"), 80)[0] in terminal.screen()
        terminal.type("\x04")
        assert terminal.status() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    with Terminal(["chat", *SHORT, "-q"]) as terminal:
        before = terminal.modes()
        terminal.wait_for(PROMPT)
        assert terminal.modes() != before
        terminal.send(number)
        assert terminal.status() == 128 + number
        assert terminal.modes() == before


# --- what is shown -------------------------------------------------------------------------------


@WIDTHS
def test_a_redirected_output_holds_answers_alone(columns: int, tmp_path: Path) -> None:
    """Typed with line editing on the same terminal; both other streams may be redirected."""
    for redirection in ("> {}/answers", "> {}/answers 2> {}/notes"):
        with Terminal(
            ["chat", *SHORT], redirection.format(tmp_path, tmp_path), columns
        ) as terminal:
            terminal.wait_for(PROMPT)
            terminal.type("Hellx\x7fo\r")
            terminal.wait_for(rf"\?2004l.*{PROMPT}")
            terminal.type("/?\r")
            terminal.wait_for(rf"\?2004l.*{PROMPT}")
            terminal.type("\x04")
            assert terminal.status() == 0
            assert "> Hello" in terminal.screen()
        assert (tmp_path / "answers").read_text() == answer("Hello") + "\n"
    assert "/regenerate" in (tmp_path / "notes").read_text()


@WIDTHS
def test_run_breaks_no_word(columns: int) -> None:
    base = ["run", "-n", "120", "--temperature", "0", "-q"]
    with Terminal(base, columns=columns) as terminal:
        assert terminal.status() == 0
        shown = terminal.screen()
    text = helm(*base).stdout
    expected = broken(text.rstrip("\n"), columns)
    assert len(expected) > 2
    assert shown[: len(expected)] == expected


@WIDTHS
def test_thinking_is_folded_on_a_terminal(columns: int, thinker: str) -> None:
    with Terminal(["run", thinker, "Hello", "-q"], columns=columns) as terminal:
        assert terminal.status() == 0
        assert [line for line in terminal.screen() if line] == ["thought for 0 s", "It is blue."]
    with Terminal(["chat", thinker, "-q"], columns=columns) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Hello\r")
        terminal.wait_for(rf"blue.*{PROMPT}")
        terminal.type("/think off\rHello\r")
        terminal.wait_for(rf"off\).*blue.*{PROMPT}")
        terminal.type("/think on\rHello\r")
        terminal.wait_for(rf"on\).*blue.*{PROMPT}")
        screen = [line for line in terminal.screen() if line and not line.startswith(">")]
    thought, told = ["thought for 0 s"], ["It is blue."]
    off, on = ["(thinking is off)"], ["(thinking is on)"]
    assert screen == [*thought, *told, *off, *told, *on, *thought, *told]


def test_thinking_is_part_of_a_redirected_answer(thinker: str) -> None:
    assert helm("run", thinker, "Hello", "-q").stdout == THOUGHT + "\n"
    assert helm("run", thinker, "Hello", "-q", "--think", "off").stdout == "It is blue.\n"
    talk = "Hello\n/think off\nHello\n/think on\nHello\n/think maybe\n/think\n"
    result = helm("chat", thinker, "-q", stdin=talk)
    assert result.stdout == f"{THOUGHT}\nIt is blue.\n{THOUGHT}\n"
    assert result.stderr.count("(/think takes on|off)") == 2


def test_a_model_that_cannot_choose_says_so() -> None:
    told = "the model's chat template cannot turn thinking off"
    assert told in helm("run", "bundled", "Hello", "--think", "off", *SHORT).stderr
    assert told in helm("chat", "--think", "off", *SHORT, stdin="").stderr
    assert told in helm("chat", *SHORT, stdin="/think off\n").stderr
    refused = helm("run", "--raw", "bundled", "Hello", "--think", "on", status=2).stderr
    assert "leave --think out" in refused
