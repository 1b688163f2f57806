"""Weight files that change while they are loaded, or while a model is mapped from them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import helm
from helm.errors import CheckpointError
from helm.model.hub import bundled_model

STORY = "Once upon a time"
NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(bundled_model(), tmp_path / "model")


@pytest.fixture
def mapped(folder: Path) -> Iterator[helm.LLM]:
    with helm.LLM(folder, context=256, weights="mapped", threads=2) as llm:
        yield llm


def tokens(llm: helm.LLM) -> list[int]:
    return llm.generate(STORY, max_tokens=8, temperature=0).tokens


def cut(file: Path) -> None:
    os.truncate(file, 4096)


def write(file: Path) -> None:
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(status.st_size // 2)
        stream.write(b"\x3c" * 4096)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # within a tick of the clock


def replace(file: Path) -> None:
    other = file.with_name("other")
    shutil.copyfile(file, other)
    other.replace(file)


CHANGES = [
    (cut, r"has 4096 bytes, not \d+"),
    (write, "was written to"),
    (replace, "was replaced by another file"),
    (Path.unlink, "is gone: No such file or directory"),
]


def refused(call: Callable[[], object], file: Path, how: str) -> None:
    expected = (
        rf"\[weights\] {re.escape(str(file))} {how} since it was mapped; restore it and load the "
        r"model anew, or load with copied weights$"
    )
    with pytest.raises(CheckpointError, match=expected):
        call()


@pytest.mark.parametrize(("change", "how"), CHANGES)
def test_a_change_under_a_stream_ends_it_and_leaves_other_models_alone(
    folder: Path, mapped: helm.LLM, change: Callable[[Path], None], how: str
) -> None:
    file = folder / NAME
    with helm.LLM(context=256, weights="mapped", threads=2) as other:
        expected = tokens(other)
        assert tokens(mapped) == expected
        stream = mapped.stream(STORY, max_tokens=200, ignore_eos=True)
        next(stream)
        change(file)
        refused(lambda: list(stream), file, how)
        refused(lambda: tokens(mapped), file, how)
        refused(lambda: mapped.logits([1, 2, 3]), file, how)
        assert tokens(other) == expected


def test_a_cut_while_it_is_read_is_an_error(folder: Path) -> None:
    file, content = folder / NAME, (folder / NAME).read_bytes()
    ids = list(range(3, 253))
    for delay_ms in (0.5, 1, 2, 4, 8, 16):
        file.write_bytes(content)
        with helm.LLM(folder, context=256, weights="mapped", prefix_cache=False, threads=2) as llm:
            expected = llm.logits(ids)

            def repeat(llm: helm.LLM = llm, expected: Any = expected) -> None:
                while True:
                    assert (llm.logits(ids) == expected).all()

            cutting = threading.Timer(delay_ms / 1000, cut, (file,))
            cutting.start()
            with pytest.raises(CheckpointError, match="has 4096 bytes"):
                repeat()
            cutting.join()


def test_a_file_that_comes_back_is_as_good_as_ever(folder: Path, mapped: helm.LLM) -> None:
    file, aside = folder / NAME, folder / "aside"
    expected = tokens(mapped)
    file.rename(aside)
    refused(lambda: tokens(mapped), file, "is gone: No such file or directory")
    aside.rename(file)
    assert tokens(mapped) == expected


def test_a_program_may_change_its_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with helm.LLM(folder.name, weights="mapped", progress=lambda *_: os.chdir("/")) as llm:
        assert len(tokens(llm)) == 8


def test_copied_weights_do_not_mind(folder: Path) -> None:
    with helm.LLM(folder, context=256, weights="copied") as llm:
        expected = tokens(llm)
        cut(folder / NAME)
        assert tokens(llm) == expected


@pytest.mark.parametrize("weights", ["copied", "mapped", "compressed"])
@pytest.mark.parametrize("change", [cut, write, replace])
def test_a_change_while_loading_is_an_error(
    folder: Path, weights: str, change: Callable[[Path], None]
) -> None:
    changed = []

    def progress(_done: int, _total: int) -> None:
        if not changed:
            changed.append(change(folder / NAME))

    with pytest.raises(CheckpointError, match=rf"\[load\] .*{NAME}.*(changed|unexpected end)"):
        helm.LLM(folder, weights=weights, progress=progress)
    assert changed


# --- the signal's handler ------------------------------------------------------------------------

FAULT = """
import ctypes, faulthandler, mmap, os, sys
import helm
if "before" in sys.argv:
    faulthandler.enable()
llm = helm.LLM(weights="mapped")
if "closed" in sys.argv:
    llm.close()
with open(sys.argv[1], "w+b") as file:
    os.truncate(file.fileno(), 1 << 16)
    other = mmap.mmap(file.fileno(), 1 << 16, prot=mmap.PROT_READ)
    os.truncate(file.fileno(), 0)
print("faults", flush=True)
other[0]
print("goes on")
"""


@pytest.mark.parametrize("when", [[], ["before"], ["closed"], ["before", "closed"]])
def test_other_faults_are_as_fatal_as_ever(tmp_path: Path, when: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAULT, str(tmp_path / "other"), *when],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGBUS
    assert ended.stdout == "faults\n"
    assert ("Fatal Python error: Bus error" in ended.stderr) == ("before" in when)


HANDLED = """
import sys
import helm
def handled():
    caught = next(line for line in open("/proc/self/status") if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (int(sys.argv[1]) - 1) & 1)
before = handled()
copied, first, second = (helm.LLM(weights=how) for how in ("copied", "mapped", "mapped"))
first.close()
during = handled()
second.close()
print(before, during, handled())
"""


def test_the_handler_is_there_while_files_are_mapped() -> None:
    program = [sys.executable, "-c", HANDLED, str(int(signal.SIGBUS))]
    assert subprocess.run(program, capture_output=True, text=True).stdout == "False True False\n"
