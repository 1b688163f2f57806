"""Programs that end while daemon threads of theirs are in native code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import random, sys, threading, time
from pathlib import Path
import helm

STORY = "Once upon a time"
LONG = {"max_tokens": 200, "ignore_eos": True}
llm = helm.LLM(context=256, max_sequences=3)
llm.generate(STORY, **LONG)
stream = llm.stream(STORY, **LONG)  # left open
next(stream)

def generate():
    llm.generate(STORY, **LONG)

def streaming():
    for chunk in llm.stream(STORY, **LONG):
        pass

def logits():
    llm.logits(list(range(3, 203)))

def load(pause_s=0.0):
    helm.LLM(context=64, progress=lambda done, total: time.sleep(pause_s)).close()

def save(pause_s=0.0):
    path = Path(sys.argv[2], "a.kv")
    llm.save_kv(path, progress=lambda done, total: time.sleep(pause_s))

def slow_load():
    load(5.0)

def slow_save():
    save(5.0)

def repeat(work):
    while True:
        started.set()
        work()

started = threading.Event()
threading.Thread(target=repeat, args=(globals()[sys.argv[1]],), daemon=True).start()
started.wait()
time.sleep(random.uniform(0, 0.05))
"""

WAYS = ("generate", "streaming", "logits", "load", "save", "slow_load", "slow_save")


@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_thread_at_work_does_not_disturb_the_end(way: str, tmp_path: Path) -> None:
    for _ in range(int(os.environ.get("HELM_TEST_ENDS", "1"))):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, way, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_bindings_let_go_of_the_gil_and_take_it_by_gil_h_alone() -> None:
    for source in (Path(__file__).parents[2] / "python").glob("*.[ch]*"):
        text = source.read_text()
        assert "gil_scoped_" not in text, source
        assert "nanobind/stl/function.h" not in text, source  # its functions take it, too
