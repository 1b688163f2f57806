"""Saving in HELM's own formats leaves nothing half done, whatever comes between."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import command
import helm
import small_models
from helm.errors import CheckpointError, InvalidError

# Stops where it is told to while it quantises, so that a signal meets it there.
SLOW = """
import sys, time
import helm
def pause(done, total):
    print("going", flush=True)
    time.sleep(60)
helm.quantize(None, sys.argv[1], to="q8", progress=pause)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_who_is_stopped_leaves_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    target = tmp_path / "x"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(target)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout.readline() == b"going\n"
        with pytest.raises(InvalidError, match="another process is making"):
            helm.quantize(None, target, to="q8")
        process.send_signal(number)
        assert process.wait(60) != 0
    assert not target.exists()
    left = list(tmp_path.iterdir())
    if number == signal.SIGINT:
        assert left == []
    for folder in left:
        with pytest.raises(helm.HelmError):
            helm.LLM(folder)
    helm.quantize(None, target, to="q8", progress=False)  # and nothing is in the way
    assert list(tmp_path.iterdir()) == [target]


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    """As a limit of the size of files has it, which the system tells alike."""
    target = tmp_path / "x"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    result = subprocess.run(
        [*command.COMMAND, "quantize", "--to", "q8", "-o", str(target)], env=command.environment(),
        capture_output=True, text=True, timeout=120, preexec_fn=limit,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "the disk of" in result.stderr
    assert "is full" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_models.model_dir("llama"), folder)

    def touch(done: int, total: int) -> None:
        os.utime(folder / "model.safetensors", (time.time(), time.time()))

    with pytest.raises(CheckpointError, match="changed while it was read"):
        helm.quantize(folder, tmp_path / "x", to="q8", progress=touch)
    assert list(tmp_path.iterdir()) == [folder]
