"""What the command does with standard streams and files that are not as usual."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from command import Terminal, helm, piped, redirected
from helm.machine.profile import Profile, load_profile
from helm.measure.profile_cache import cache_path, keep

GREEDY = ("--temperature", "0", "--max-tokens", "4")


def test_python_without_assertions_runs_a_model() -> None:
    base = ["run", "bundled", "The dog", *GREEDY, "-q"]
    assert helm(*base, PYTHONOPTIMIZE="1").stdout == helm(*base).stdout


@pytest.fixture
def measured(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile stands in the cache for that of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    keep(cache_path(), load_profile("cpu-laptop-16gb").to_json())


# --- standard streams ----------------------------------------------------------------------------

PLAN = ("plan", "--profile", "cpu-laptop-16gb")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", *GREEDY),
        ("run", "--json", *GREEDY),
        (*PLAN, "--json"),
        PLAN,
        ("doctor",),
        ("--version",),
    ],
)
def test_output_that_cannot_be_written_is_one_error_line(arguments: tuple[str, ...]) -> None:
    result = redirected("> /dev/full", *arguments, status=1)
    assert result.stderr.splitlines()[-1] == (
        "error: [output] cannot write to standard output or standard error: No space left on "
        "device; make room, or send it elsewhere"
    )
    assert "Exception" not in result.stderr


def test_messages_that_cannot_be_written_are_a_failure() -> None:
    redirected("2> /dev/full", "run", *GREEDY, status=1)
    redirected("2> /dev/full", "run", "./absent", status=2)
    redirected("2> /dev/full", "run", "--absent", status=2)


def test_closed_streams_are_as_if_nobody_read_or_wrote() -> None:
    expected = helm("run", *GREEDY).stdout
    assert redirected(">&-", "run", *GREEDY).stdout == ""
    assert redirected("2>&-", "run", *GREEDY).stdout == expected
    assert redirected("2>&-", "run", "./absent", status=2).stdout == ""
    assert redirected(">&-", "--version").stdout == ""
    assert redirected("<&-", "chat", "-q").stdout == ""
    assert "is empty" in redirected("<&-", "run", "bundled", "-", status=2).stderr


SHOWN = [
    (("doctor",), r"tokenizers +\d"),
    (("profile",), r"matrix x vector +[\d.]+ +[\d.]+"),
    (("plan", "--list-profiles"), r"rtx-4060-8gb-ddr5 "),
    (PLAN, r"time to first token +[\d.]+ ms"),
    (("bench", "--rounds", "1", "--ops"), r"activation +[\d.]+ +[\d.]+%"),
]


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("arguments", "pattern"), SHOWN)
def test_a_narrow_terminal_shows_everything(
    arguments: tuple[str, ...], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with Terminal(arguments) as terminal:
        assert terminal.status() == 0
        shown = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", terminal.output)
    assert re.search(pattern, shown), shown
    assert not [row for row in shown.splitlines() if "…" in row and "measuring" not in row]
    assert len(shown.splitlines()) < 120


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("arguments", [arguments for arguments, _ in SHOWN])
def test_a_reader_that_leaves_tables_is_no_failure(arguments: tuple[str, ...]) -> None:
    with piped(*arguments) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert b"Error" not in process.stderr.read()


def test_a_reader_that_leaves_messages_is_no_failure() -> None:
    with piped("run", *GREEDY) as process:
        process.stderr.close()
        process.stdout.read()
        assert process.wait(timeout=60) == 0


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("measured")
def test_a_profile_is_written_as_by_a_redirection(tmp_path: Path) -> None:
    new, old, link = tmp_path / "new", tmp_path / "old", tmp_path / "link"
    old.write_text("before")
    old.chmod(0o640)
    link.symlink_to(old)
    for path in (new, link):
        helm("profile", "--output", str(path))
    assert link.is_symlink()
    for path in (new, old):
        assert load_profile(path).name
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(old.stat().st_mode) == 0o640

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        try:
            helm("profile", "--output", str(pipe))
            assert Profile.from_json(reader.communicate(timeout=60)[0]).name
        finally:
            reader.kill()
    assert pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "new", "old", "pipe"]


def test_a_cache_is_not_saved_over_what_is_no_file(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        for command in ("run", "chat"):
            result = helm(command, "--save-kv", str(path), status=2)
            assert "which is no regular file" in result.stderr
            assert "[plan" not in result.stderr
    assert pipe.is_fifo()
    assert link.is_symlink()
