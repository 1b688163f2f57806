"""--load-kv and --save-kv as users run them: texts and conversations that go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from command import COMMAND, PROMPT, Terminal, environment, helm
from helm import LLM

STORY = "Once upon a time there was a little dog who lived by the sea with a girl named Lily. "
GREEDY = ("--temperature", "0", "--max-tokens", "8")


def test_run_goes_on_where_a_saved_text_ended(tmp_path: Path) -> None:
    file = str(tmp_path / "story.kv")
    first = helm("run", "bundled", STORY, "--save-kv", file, *GREEDY)
    saved = re.search(r"\[kv: (\d+) tokens saved to .*story\.kv, [\d.]+ [KMG]iB\]", first.stderr)
    assert saved
    whole = helm("run", "bundled", STORY, "--temperature", "0", "--max-tokens", "16").stdout
    rest = helm("run", "bundled", "--load-kv", file, *GREEDY)
    assert first.stdout.rstrip("\n") + rest.stdout == whole
    assert f"[kv: {saved[1]} tokens restored from {file}]" in rest.stderr
    assert f"({saved[1]} reused of {saved[1]} restored)" in rest.stderr
    # With a prompt, what both share is not computed; the file may be written again.
    other = helm("run", "bundled", STORY + "One day", "--load-kv", file, "--save-kv", file, *GREEDY)
    assert re.search(rf"\([1-9]\d* reused of {saved[1]} restored\)", other.stderr)
    report = json.loads(helm("run", "bundled", "--load-kv", file, "--json", *GREEDY).stdout)
    assert report["kv_restored"] == report["prompt_tokens"] - 1
    assert report["timings"]["prefill_tokens"] == 1
    assert os.listdir(tmp_path) == ["story.kv"]


def test_chat_goes_on_with_a_saved_conversation(tmp_path: Path) -> None:
    file, other = str(tmp_path / "talk.kv"), str(tmp_path / "other.kv")
    turns = ["Hello! " + STORY, "Tell me more", "Why?"]
    system = ("--system", "You tell stories.")
    whole = helm("chat", "bundled", *system, *GREEDY, stdin="\n".join(turns)).stdout.splitlines()
    first = helm(
        "chat", "bundled", *system, *GREEDY, "--save-kv", file,
        stdin=f"/save {other}\n{turns[0]}\n{turns[1]}\n/save {other}\n/save /absent/x.kv\n",
        status=2,  # for the file that cannot be written
    )  # fmt: skip
    assert first.stdout.splitlines() == whole[:2]
    assert "nothing to save" in first.stderr
    assert "error: [kv] cannot write /absent/x.kv: No such file" in first.stderr
    for path in (file, other):
        talk = f"{turns[2]}\nAnd?\n"
        rest = helm("chat", "bundled", *GREEDY, "--verbose", "--load-kv", path, stdin=talk)
        assert rest.stdout.splitlines()[0] == whole[2]
        restored = re.search(r"\[kv: (\d+) tokens restored", rest.stderr)
        assert restored
        lines = [line for line in rest.stderr.splitlines() if line.startswith("[prompt")]
        reused = re.search(rf"\((\d+) reused of {restored[1]} restored\)", lines[0])
        assert reused
        assert int(reused[1]) > 30
        assert "restored" not in lines[1]


def test_what_cannot_be_loaded_or_saved_is_said_at_once(tmp_path: Path) -> None:
    text = str(tmp_path / "text.kv")
    helm("run", "bundled", "--raw", STORY, "--save-kv", text, "--quiet", *GREEDY)
    (tmp_path / "no.kv").write_text("not a cache")
    os.mkfifo(tmp_path / "pipe")
    for arguments, message in (
        (["run", "--load-kv", str(tmp_path / "absent")], "there is no file"),
        (["run", "--load-kv", str(tmp_path / "no.kv")], "is no saved KV cache"),
        (["run", "--load-kv", text, "--kv-dtype", "f32"], "another dtype"),
        (["run", "--save-kv", str(tmp_path)], "cannot write"),
        (["run", "--save-kv", str(tmp_path / "pipe")], "cannot write"),
        (["run", "--save-kv", str(tmp_path / "absent" / "x.kv")], "cannot write"),
        (["chat", "--load-kv", text], "holds no conversation"),
        (["chat", "--load-kv", text, "--system", "Be brief."], "leave --system out"),
    ):
        result = helm(*arguments, status=2)
        assert message in result.stderr, arguments
        assert result.stdout == ""


def test_a_file_in_the_home_folder_is_saved_there(tmp_path: Path) -> None:
    base = ("chat", "bundled", *GREEDY)
    helm(*base, stdin="Hello\n/save ~/talk.kv\n", HOME=str(tmp_path))
    assert os.listdir(tmp_path) == ["talk.kv"]


LONG = ("--max-tokens", "400", "--temperature", "1.5", "--seed", "3")


@pytest.fixture(autouse=True)
def _hears_sighup() -> Iterator[None]:
    """Also where the tests run under nohup, whose children ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The command with pipes, and what it writes; it does not outlive the block."""
    with subprocess.Popen(
        [*COMMAND, *arguments], env=environment(), stdout=subprocess.PIPE,
        **{"stdin": subprocess.PIPE, **options},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process, process.stdout
        finally:
            process.kill()


def say(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def saved_answer(file: Path) -> str:
    """The last message of a saved conversation."""
    with LLM() as llm:
        saved = llm.load_kv(file)
    assert saved.cached > 0
    assert saved.messages is not None
    assert [message["role"] for message in saved.messages] == ["user", "assistant"]
    return str(saved.messages[-1]["content"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_a_piped_conversation(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "talk.kv"
    with started("chat", "bundled", *GREEDY, "--save-kv", str(file)) as (process, output):
        say(process, b"Hello")
        answer = output.readline().decode()
        time.sleep(0.5)  # the answer is summed up, the next line awaited
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert output.read() == b""
    assert saved_answer(file) == answer.rstrip("\n")
    assert os.listdir(tmp_path) == ["talk.kv"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_an_answer_and_saves_it(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "talk.kv"
    with started("chat", "bundled", *LONG, "--save-kv", str(file)) as (process, output):
        say(process, b"Hello")
        answer = output.read(1)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        answer += output.read()
    saved, shown = saved_answer(file), answer.decode().removesuffix("\n")
    assert saved.startswith(shown)
    assert len(saved.removeprefix(shown).split()) <= 1, "of the step that the signal came in"


def test_a_signal_saves_a_text(tmp_path: Path) -> None:
    file = tmp_path / "story.kv"
    command = ("run", "bundled", STORY, *LONG, "--save-kv", str(file))
    with started(*command, stdin=subprocess.DEVNULL) as (process, output):
        text = output.read(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        text += output.read()
    with LLM() as llm:
        tokens = llm.load_kv(file).tokens
        assert llm.tokenizer is not None
        saved = llm.tokenizer.decode(tokens)
    assert saved.startswith(STORY)
    shown, answer = text.decode().strip(), saved[len(STORY) :].strip()
    assert answer.startswith(shown)
    assert len(answer.removeprefix(shown).split()) <= 1, "of the step that the signal came in"


@pytest.mark.parametrize("answered", [False, True])
def test_a_terminal_that_is_closed_saves_the_conversation(tmp_path: Path, answered: bool) -> None:
    file = tmp_path / "talk.kv"
    arguments = ("chat", "bundled", *(GREEDY if answered else LONG), "--save-kv", str(file))
    with Terminal(arguments) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Hello\n")
        terminal.wait_for(r"\?2004l.")
        if answered:
            terminal.wait_for(PROMPT)
        assert terminal.hang_up() == 128 + signal.SIGHUP
    assert saved_answer(file)
    assert os.listdir(tmp_path) == ["talk.kv"]


SLOW = """
import sys, time
from helm.commands import cli
from helm.commands import kv_files
save = kv_files.save
def slow(*arguments):
    print("saving", flush=True)
    time.sleep(float(sys.argv.pop()))
    return save(*arguments)
kv_files.save = slow
sys.exit(cli.main(sys.argv[1:-1]))
"""


# Another thread takes the signal while the main one waits for a line. That wait goes on, as it does
# where a signal comes just before it.
ELSEWHERE = """
import signal, sys, threading
from helm.commands import chat_input, cli
line = chat_input.Lines._line
def waiting(lines):
    if waiting.done:
        taker = threading.Thread(target=threading.Event().wait, daemon=True)
        taker.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        threading.Timer(0.5, signal.pthread_kill, (taker.ident, signal.SIGTERM)).start()
    waiting.done = True
    return line(lines)
waiting.done = False
chat_input.Lines._line = waiting
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.timeout(120)
def test_a_signal_that_another_thread_takes_ends_the_wait(tmp_path: Path) -> None:
    file = tmp_path / "talk.kv"
    command = [sys.executable, "-c", ELSEWHERE, "chat", "bundled", *GREEDY, "--save-kv", str(file)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            say(process, b"Hello")
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert saved_answer(file)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("second", "seconds", "status"),
    [(signal.SIGTERM, 60, -signal.SIGTERM), (signal.SIGHUP, 1, 128 + signal.SIGTERM)],
)
def test_a_second_signal(tmp_path: Path, second: signal.Signals, seconds: int, status: int) -> None:
    """Another SIGTERM ends the command at once; SIGHUP, which closing a terminal sends twice, does
    not."""
    file = tmp_path / "talk.kv"
    file.write_text("before")
    command = [sys.executable, "-c", SLOW, "chat", "bundled", *GREEDY, "--save-kv", str(file)]
    with subprocess.Popen(
        [*command, str(seconds)], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            say(process, b"Hello")
            assert process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == b"saving\n"
            process.send_signal(second)
            assert process.wait(30) == status
        finally:
            process.kill()
    assert (file.read_bytes() == b"before") == (status < 0)
    assert os.listdir(tmp_path) == ["talk.kv"]


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "talk.kv"
    arguments = ("chat", "bundled", *GREEDY, "--save-kv", str(file))
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731 - as nohup does
    with started(*arguments, preexec_fn=ignore) as (process, output):
        say(process, b"Hello")
        assert output.readline()
        process.send_signal(signal.SIGHUP)
        say(process, b"Go on")
        assert output.readline()
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_a_line_that_is_no_text_fails_alone(tmp_path: Path) -> None:
    file = tmp_path / "talk.kv"
    for variables in ({"PYTHONIOENCODING": "utf-8:strict"}, {"LC_ALL": "C.UTF-8"}):
        result = subprocess.run(
            [*COMMAND, "chat", "bundled", *GREEDY, "--save-kv", str(file)],
            env={**environment(), **variables}, input=b"Hello\na\xffb\nGo on\n",
            capture_output=True, timeout=120,
        )  # fmt: skip
        assert result.returncode == 2
        assert len(result.stdout.splitlines()) == 2
        errors = [line for line in result.stderr.splitlines() if line.startswith(b"error: ")]
        assert len(errors) == 1
        assert b"give text in UTF-8" in errors[0]
        assert file.exists()
        file.unlink()
