"""Commands where the system says no: folders that may not be entered, nothing that can be written,
names that are no text."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import helm
from command import COMMAND, environment
from helm.base.paths import kind, permitted
from helm.commands import cli
from helm.model.hub import bundled_model, resolve_config, resolve_model

GREEDY = (b"--max-tokens", b"3", b"-q")
TEXT = b", there was\n"
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


def obey_permissions() -> None:
    """From the next program on, also as root."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")


def ordinary(
    *arguments: str | bytes, status: int = 0, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """The command of a user whom permissions bind."""
    result = subprocess.run(
        [*COMMAND, *arguments], env={**environment(), **variables}, preexec_fn=obey_permissions,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == status, result.stderr
    assert b"Traceback" not in result.stderr
    return result


@pytest.fixture
def closable(tmp_path: Path) -> Iterator[Path]:
    """A folder whose folders may be closed; skips where root cannot be bound by permissions."""
    (tmp_path / "closed").mkdir(mode=0)
    probe = [sys.executable, "-c", "import os, sys; os.listdir(sys.argv[1])", tmp_path / "closed"]
    try:
        result = subprocess.run(
            probe, preexec_fn=obey_permissions, capture_output=True, check=False
        )
    except subprocess.SubprocessError:
        pytest.skip("root may not give up its privileges here")
    assert b"PermissionError" in result.stderr
    (tmp_path / "closed").chmod(0o755)
    yield tmp_path
    for folder in tmp_path.iterdir():
        folder.chmod(0o755)


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HOME", "TMPDIR"])
def test_nothing_that_can_be_written_is_needed(name: str, closable: Path) -> None:
    for mode in (0, 0o500):
        (closable / "closed").chmod(mode)
        variables = {"XDG_CACHE_HOME": "", name: str(closable / "closed")}
        assert ordinary("run", *GREEDY, **variables).stdout == TEXT


def test_folders_that_may_not_be_entered_are_not_allowed(closable: Path) -> None:
    model = closable / "closed" / "model"
    shutil.copytree(bundled_model(), model)
    shutil.copy(model / "config.json", closable / "closed" / "config.json")
    (closable / "cache").mkdir()
    (closable / "closed").chmod(0)
    (closable / "cache").chmod(0)
    closed = str(closable / "closed")
    for arguments in (
        ("run", closed), ("chat", closed), ("run", str(model)), ("plan", closed),
        ("plan", str(model)), ("plan", f"{closed}/config.json"), ("bench", str(model)),
        ("run", "--load-kv", f"{closed}/x.kv"),
    ):  # fmt: skip
        found = ordinary(*arguments, status=2).stderr.decode()
        assert re.search("not allowed to read|Permission denied", found), arguments
        assert closed in found
        assert "network" not in found
    profile = ordinary("plan", "--profile", f"{closed}/config.json", status=2).stderr
    assert b"Permission denied" in profile
    for command in ("run", "plan"):
        found = ordinary(command, "org/model", status=2, HF_HUB_CACHE=str(closable / "cache"))
        assert b"not allowed to read" in found.stderr, found.stderr


def test_files_that_may_not_be_read_are_named(closable: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        folder = closable / name
        shutil.copytree(bundled_model(), folder)
        folder.chmod(0o755)
        (folder / name).chmod(0)
        found = ordinary("run", str(folder), status=2).stderr.decode()
        assert "Permission denied" in found
        assert str(folder / name) in found


def test_what_may_not_be_looked_at_is_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: object, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    assert kind(tmp_path) == "folder"
    assert kind(tmp_path / "absent") == kind("a\0b") == kind("\ud800") == ""
    monkeypatch.setattr(os, "stat", stat)
    for find in (resolve_model, resolve_config):
        with pytest.raises(helm.CheckpointError, match=r"\[model\] this user is not allowed"):
            find(tmp_path)
    with pytest.raises(helm.CheckpointError, match="not allowed"), permitted("kv"):
        kind(tmp_path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOENT, "No usable temporary directory found"), "No usable temporary"),
        (OSError(errno.EROFS, "Read-only file system", "/x/y"), "/x/y: Read-only file system"),
        (PermissionError(errno.EACCES, "Permission denied", b"/x/\xff"), "Permission denied"),
        (OSError("no number"), "no number"),
    ],
)
def test_what_the_system_refuses_is_not_blamed_on_the_output(
    error: OSError,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from helm.commands import doctor

    def refuse(_args: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", refuse)
    assert cli.main(["doctor"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: [system]")
    assert message in line
    assert "standard output" not in line


def test_output_without_a_buffer_that_cannot_be_written(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*COMMAND, "run", *GREEDY], stdout=full, stderr=subprocess.PIPE, check=False,
            env={**environment(), "PYTHONUNBUFFERED": "1"}, timeout=120,
        )  # fmt: skip
    assert result.returncode == 1
    assert b"cannot write to standard output" in result.stderr


# --- names that are no text ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model whose folder's name is not UTF-8."""
    folder = os.fsencode(tmp_path_factory.mktemp("odd")) + b"/m\xff\xfel"
    try:
        shutil.copytree(os.fsencode(bundled_model()), folder)
    except OSError as reason:
        pytest.skip(f"this file system takes UTF-8 only: {reason}")
    return folder


def run(*arguments: bytes, **variables: str) -> subprocess.CompletedProcess[bytes]:
    result = subprocess.run(
        [*map(os.fsencode, COMMAND), *arguments], env={**environment(), **variables},
        capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=False,
    )  # fmt: skip
    assert b"Traceback" not in result.stderr
    return result


def test_a_folder_whose_name_is_no_text_is_a_model(odd: bytes) -> None:
    kv = odd + b"/\xfe.kv"
    assert run(b"run", odd, *GREEDY, b"--save-kv", kv).stdout == TEXT
    again = json.loads(run(b"run", odd, b"--load-kv", kv, b"--json", *GREEDY).stdout)
    assert again["kv_restored"] > 0
    assert "m\\udcff\\udcfel" in again["plan"]
    posix = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert run(b"run", odd, *GREEDY, **posix).stdout == TEXT
    planned = run(b"plan", odd, b"--profile", b"cpu-laptop-16gb", b"--json")
    assert json.loads(planned.stdout)["model"]["name"] == "m\\udcff\\udcfel"
    file = run(b"plan", odd + b"/config.json", b"--profile", b"cpu-laptop-16gb")
    assert file.returncode == 0
    assert rb"m\udcff\udcfel" in file.stdout
    missing = run(b"run", odd + b"/none")
    assert missing.returncode == 2
    assert rb"m\udcff\udcfel/none" in missing.stderr


def test_such_names_can_be_printed(odd: bytes) -> None:
    folder = Path(os.fsdecode(odd))
    with helm.LLM(folder) as llm:
        assert llm.name == "m\\udcff\\udcfel"
        assert llm.generate("Once", max_tokens=2).tokens
        file = folder / os.fsdecode(b"\xfd.kv")
        assert llm.save_kv(file) > 0
        assert llm.load_kv(str(file)).cached > 0
    for call in (
        lambda: helm.LLM(folder / "none"),
        lambda: helm.Tokenizer.from_directory("\udcff"),
    ):
        with pytest.raises(helm.HelmError) as caught:
            call()
        str(caught.value).encode()
