"""What a chat does with commands, with a full context and with the tokens of its answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import helm as package
import smollm2
from command import helm
from helm.commands.ending import Ending
from helm.commands.session import Session
from helm.text.prompts import Template
from helm.text.sampling import SamplingParams
from scripted_model import scripted

OPTIONS = ("--temperature", "0", "-n", "8")
SYSTEM = "You are a dog."


@pytest.fixture(scope="module")
def llm() -> Iterator[package.LLM]:
    with package.LLM(kv_dtype="f32") as loaded:
        yield loaded


def chat(*lines: str, options: tuple[str, ...] = OPTIONS, status: int = 0) -> tuple[list[str], str]:
    """Answers, and what was said beside them."""
    result = helm("chat", "bundled", *options, stdin="\n".join(lines) + "\n", status=status)
    return result.stdout.splitlines(), result.stderr


# --- commands ------------------------------------------------------------------------------------


def test_commands_under_all_their_names() -> None:
    (first, second, third), said = chat("Hello", "/reset", "Hello", "/clear", "Hello", "/bye", "No")
    assert first == second == third
    assert said.count("(conversation forgotten)") == 2
    for leave in ("/bye", "/exit", "/quit"):
        assert len(chat("Hello", leave, "Hello")[0]) == 1
    for ask in ("/?", "/help"):
        assert re.search(r"/regenerate +answer .*\n.*/continue", chat(ask)[1])


WRONG = (
    ("/sytem Be brief.", "(no command /sytem; did you mean /system?"),
    ("/regnerate", "(no command /regnerate; did you mean /regenerate?"),
    ("/xyz", "(no command /xyz; /? lists them"),
    ("/reset now", "(/clear takes nothing else)"),
    ("/save", "(/save takes FILE)"),
    ("/think", "(/think takes on|off)"),
    ("/think perhaps", "(/think takes on|off)"),
    ("/set heat 3", "(/set knows no heat; known: temperature, top-p,"),
    ("/set topp 0.5", "(/set knows no topp; did you mean top-p?)"),
    ("/set mirostat 1", "HELM has no --mirostat: --temperature, --top-p, --top-k and --min-p"),
    ("/set presence_penalty 3", "presence_penalty must be a number in [-2, 2]"),
    ("/set temperature hot", "(/set temperature takes a number, or default; got hot)"),
    ("/set max-tokens 2.5", "(/set max-tokens takes a whole number, or default; got 2.5)"),
    ("/set top_p 2", "top_p must be a number in (0, 1]"),
    ("/regenerate", "(nothing to answer again, the conversation has not begun)"),
    ("/continue", "(nothing to go on with, the conversation has not begun)"),
)


def test_a_wrong_command_is_one_line() -> None:
    answers, said = chat(*(line for line, _ in WRONG), options=("-q",), status=2)
    assert answers == []
    for (line, told), found in zip(WRONG, said.splitlines(), strict=True):
        assert told in found, line


def test_a_path_and_several_lines_are_no_command() -> None:
    assert len(chat("/etc/passwd is what?", '"""/bye', 'now"""', '"""', "/bye", '"""')[0]) == 3


def test_set_changes_the_next_answers() -> None:
    lines = ("/set num_predict 3", "Hello", "/clear", "/set max-tokens default", "Hello", "/set")
    (short, whole), said = chat(*lines)
    assert whole.startswith(short)
    assert len(short) < len(whole)
    assert "(max-tokens: 3)" in said
    assert "(the answer stops at 3 tokens; /continue goes on)" in said
    assert "(temperature: 0.0)\n(top-p: the model's)" in said
    parameters = ("/set temperature 1.5", "/set seed 7", "/set parameter top_k 40", "Hello")
    options = ("-n", "8", "--temperature", "1.5", "--seed", "7", "--top-k", "40")
    assert chat(*parameters)[0] == chat("Hello", options=options)[0]
    word = whole.split()[1]
    stopped = chat(f"/set stop {word}", "Hello")[0]
    assert stopped == [whole[: whole.index(word)]]


def test_regenerate_answers_again() -> None:
    (first, again, more), said = chat("Hello", "/regenerate", "Go on")
    assert first == again
    assert "the likeliest answer is the same" in said
    assert chat("Hello", "Go on")[0] == [first, more]
    sampled = ("-n", "8", "--temperature", "2", "--seed", "3")
    (first, again), said = chat("Hello", "/regenerate", options=sampled)
    assert first != again
    assert "likeliest" not in said
    assert chat("Hello", "/regenerate", options=sampled)[0] == [first, again]
    assert chat("Hello", options=(*sampled[:-1], "4"))[0] == [again]


def test_system_is_changed_and_shown(tmp_path: Path) -> None:
    model = str(scripted(tmp_path / "model", ["Yes."]))
    lines = [
        "/system",
        "/system Hello Hello Hello",
        "Hello",
        "/system",
        "/clear",
        "/system",
        "Hello",
    ]
    result = helm("chat", model, "--verbose", stdin="\n".join(lines))
    assert "(the system prompt is the template's)" in result.stderr
    assert result.stderr.count("(system prompt: Hello Hello Hello)") == 2
    assert result.stderr.count("[prompt 9 tokens") == 2  # of which the system prompt has 5
    assert "[prompt 4 tokens" in helm("chat", model, "--verbose", stdin="Hello").stderr


def test_statistics_come_when_asked_for() -> None:
    answers, said = chat("Hello", "Go on")
    assert len(answers) == 2
    assert "tokens/s" not in said.split("\n", 1)[1]
    lines = chat("Hello", "Go on", options=(*OPTIONS, "--verbose", "-c", "300"))[1].splitlines()
    first, second = (line for line in lines if line.startswith("[prompt"))
    number = r"[\d.,]+"
    assert "reused" not in first
    assert re.fullmatch(
        rf"\[prompt \d+ tokens \(\d+ reused\), {number} tokens/s .* output \d+ tokens, {number} "
        rf"tokens/s .*context \d+ of 300 \| \w+\]",
        second,
    )


# --- a full context ------------------------------------------------------------------------------


def session(llm: package.LLM, **options: object) -> Session:
    sampling = SamplingParams(temperature=0, max_tokens=8)
    return Session(llm, SYSTEM, sampling, Template(), Ending(), **options)  # type: ignore[arg-type]


def test_a_full_context_drops_the_oldest_turns() -> None:
    turns = [f"{word} dog went to the sea with a cat." for word in ("One", "My", "The", "A") * 4]
    options = (*OPTIONS, "-c", "128", "--system", SYSTEM)
    answers, said = chat(*turns, options=options)
    assert len(answers) == len(turns)
    assert "error" not in said
    told = re.findall(r"\(the context is full: the (?:(\d+) )?oldest turns? (?:is|are) left", said)
    assert 1 < len(told) < len(turns) / 2  # several are dropped, so that several turns go by
    assert all(int(count or 1) >= 1 for count in told)


def test_whole_turns_leave_and_the_system_prompt_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = scripted(tmp_path / "model", ["Yes."])
    with package.LLM(model, context=64) as llm:
        talk = session(llm, quiet=True)
        for turn in range(20):
            assert talk.answer(" ".join(["Hello"] * (turn % 3 + 1)))
            assert talk._turns[0]["role"] == "user"
            assert [m["role"] for m in talk._turns] == ["user", "assistant"] * (
                len(talk._turns) // 2
            )
            assert talk.system == SYSTEM
        out, err = capfd.readouterr()
        assert out == "Yes.\n" * 20
        assert "left out" in err
        before = list(talk._turns)
        assert not talk.answer("Hello " * 90)  # more than the context: nothing gives way to it
        assert "the context holds 64" in capfd.readouterr().err
        assert talk._turns == before
        assert talk.answer("Hello")


def test_a_message_that_is_too_long_fails_alone() -> None:
    answers, said = chat("dog " * 300, "Hi", options=("-c", "64", "-n", "4"), status=2)
    assert "the conversation has" in said
    assert "shorten the prompt or raise --context" in said
    assert len(answers) == 1


# --- an answer's own tokens ----------------------------------------------------------------------


def held(talk: Session) -> list[int]:
    """Prompt and output of the last answer."""
    return list(talk.llm._last)


def check_reuse(talk: Session, turns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt begins with all tokens of the turn before it, and none is computed again but
    the last one, which was never in the cache."""
    completions: list[package.Completion] = []
    monkeypatch.setattr(talk, "_sum_up", completions.append)
    before: list[int] = []
    for turn in turns:
        assert talk.answer(turn)
        now = held(talk)
        assert now[: len(before)] == before
        if before:
            reused = completions[-1].prompt_tokens - completions[-1].timings.prefill_tokens
            assert reused >= len(before) - 1
        before = now


TURNS = ("Hello there!", "Tell me a story about a dog.", "And then? 你好 😀", "Why?")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_turn_reuses_the_answers_own_tokens(
    llm: package.LLM, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = session(llm)
    for seed in range(3):
        talk.clear()
        talk.sampling = SamplingParams(temperature=temperature, max_tokens=40, seed=seed)
        check_reuse(talk, TURNS, monkeypatch)


def test_a_real_models_turn_reuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this temperature the tokenizer would cut some of the words in another way."""
    with package.LLM(str(smollm2.folder()), context=1024) as llm:
        assert llm.tokenizer is not None
        talk = session(llm)
        other = 0
        for seed in range(4):
            talk.clear()
            talk.sampling = SamplingParams(temperature=1.4, max_tokens=40, seed=seed)
            check_reuse(talk, TURNS[:3], monkeypatch)
            for message in talk._turns[1::2]:
                again = llm.tokenizer.encode(message["content"], add_special_tokens=False)
                other += again != message["tokens"][: len(again)]
        assert other > 0
