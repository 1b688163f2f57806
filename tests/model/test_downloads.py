"""Downloads from a hub on this machine: they go on after a break, and say why they cannot."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import huggingface_hub
import pytest

from command import helm
from fake_hub import serving
from helm.base.sizes import size_text
from helm.errors import CheckpointError
from helm.model import hub

ONE_LINE = r"error: \[hub\] [^\n]+\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands' hub cache lies."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path / "HF_HUB_CACHE"


def run(address: str, status: int = 0) -> str:
    shown = helm(
        "run", "org/model", "-n", "2", "-q", status=status,
        HF_ENDPOINT=address, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_PROGRESS_BARS="1",
    )  # fmt: skip
    return shown.stderr if status else shown.stdout


def test_a_connection_that_breaks_is_taken_up_where_it_broke(home: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    chunk = huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE
    folder, data = tmp_path / "hub", os.urandom(chunk + 5000)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(data)
    with serving("org/model", folder, cut={"model.safetensors": chunk + 1}, asked=asked) as address:
        program = "from helm.model.hub import resolve_model; print(resolve_model('org/model'))"
        shown = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
            env={**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"},
        )  # fmt: skip
    assert asked == ["model.safetensors from 0", f"model.safetensors from {chunk}"]
    assert Path(shown.stdout.strip(), "model.safetensors").read_bytes() == data


def test_files_that_arrived_are_kept_when_a_download_fails(home: Path, tmp_path: Path) -> None:
    """The second run asks for the file alone that the first one did not get."""
    part = tmp_path / "part"
    shutil.copytree(hub.bundled_model(), part)
    (part / "model.safetensors").unlink()
    first: list[str] = []
    second: list[str] = []
    with serving("org/model", part, asked=first) as address:
        assert "has no *.safetensors" in run(address, 2)
    with serving("org/model", hub.bundled_model(), asked=second) as address:
        run(address)
    assert "config.json from 0" in first
    assert second == ["model.safetensors from 0"]


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            (403, "GatedRepo"),
            "is gated: accept its licence at https://huggingface.co/org/model, th",
        ),
        ((401, "GatedRepo"), "log in with `hf auth login` or set HF_TOKEN"),
        ((403, ""), r"does not give org/model to this user \(403\); see https://hugging.*HF_TOKEN"),
    ],
)
def test_a_refusal_says_where_to_accept_and_how_to_log_in(
    refusal: tuple[int, str], said: str, home: Path
) -> None:
    with serving("org/model", hub.bundled_model(), refusal=refusal) as address:
        shown = run(address, 2)
    assert re.fullmatch(ONE_LINE, shown), shown
    assert re.search(said, shown), shown


def test_a_cache_without_the_card_is_whole(home: Path) -> None:
    with serving("org/model", hub.bundled_model()) as address:
        run(address)
    (card,) = home.glob("models--org--model/snapshots/*/README.md")
    card.unlink()
    assert run("http://127.0.0.1:1") == helm("run", "-n", "2", "-q").stdout


def test_no_network_is_one_line(home: Path) -> None:
    shown = run("http://127.0.0.1:1", 2)
    assert re.fullmatch(ONE_LINE, shown), shown
    assert "cannot be reached; check the network" in shown


def test_a_disk_without_room_is_refused_with_numbers_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    wanted = sum(f.stat().st_size for f in hub.bundled_model().iterdir())
    usage = shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: os.stat(path) and usage)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with serving("org/model", hub.bundled_model(), asked=asked) as address:
        ask = huggingface_hub.HfApi(endpoint=address).model_info
        monkeypatch.setattr(
            huggingface_hub.HfApi, "model_info", lambda _self, *a, **b: ask(*a, **b)
        )
        with pytest.raises(CheckpointError, match=r"org/model takes .* more on the disk") as caught:
            hub.resolve_model("org/model")
    assert f"takes {size_text(wanted)} more" in str(caught.value)
    assert f"{tmp_path} has 1.0 MiB free; remove models" in str(caught.value)
    assert asked == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left on device")],
)
def test_a_disk_that_fills_up_is_the_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        CheckpointError, match=r"disk is full: .* free in .*finished files are kept"
    ):
        hub.resolve_model("org/model")
