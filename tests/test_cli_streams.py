"""What the command does with standard streams and files that are not as usual."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from command import helm, redirected
from helm.profile import Profile, load_profile

GREEDY = ("--temperature", "0", "--max-tokens", "4")


def test_python_without_assertions_runs_a_model() -> None:
    base = ["run", "bundled", "The dog", *GREEDY, "-q"]
    assert helm(*base, PYTHONOPTIMIZE="1").stdout == helm(*base).stdout


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


def test_closed_streams_are_as_if_nobody_read_or_wrote() -> None:
    expected = helm("run", *GREEDY).stdout
    assert redirected(">&-", "run", *GREEDY).stdout == ""
    assert redirected("2>&-", "run", *GREEDY).stdout == expected
    assert redirected("2>&-", "run", "./absent", status=2).stdout == ""
    assert redirected(">&-", "--version").stdout == ""
    assert redirected("<&-", "chat", "-q").stdout == ""
    assert "is empty" in redirected("<&-", "run", "bundled", "-", status=2).stderr


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> None:
    """The profile of this machine is in the cache."""
    helm("profile")


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
