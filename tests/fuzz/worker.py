"""The process that takes inputs: `python -m fuzz.worker SEED FOLDER`, one line "KIND INDEX" each.

Answers each with a line of JSON on the descriptor that was its standard output. What HELM and its
libraries write there, or to standard error, goes to FOLDER/log.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

_PR_SET_PDEATHSIG = 1
MOST_ADDRESSES = 4 << 30  # of address space beyond what HELM itself takes


def resident_bytes(field: str) -> int:
    """VmRSS, or VmHWM: the most there was since it was forgotten."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def forget_peak() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def kind_of(name: str) -> Any:
    """A kind by its name, or by that of its module and class: "module.Class"."""
    from fuzz.kinds import KINDS

    if name in KINDS:
        return KINDS[name]
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


class Worker:
    """Kinds that are made when first asked for, and one input after the other."""

    def __init__(self, seed: str, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._kinds: dict[str, Any] = {}

    def prepare(self, name: str) -> None:
        """Makes a kind; its memory is no input's."""
        if name not in self._kinds:
            own = self._folder / name
            own.mkdir()
            self._kinds[name] = kind_of(name)(own)
            gc.collect()

    def outcome(self, name: str, index: int, keep: bool) -> dict[str, Any]:
        """Runs an input: "accepted" or "refused", or "finding" with what happened."""
        kind = self._kinds[name]
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-{index}-", dir=self._folder))
        before, start, cpu = resident_bytes("VmRSS"), time.monotonic(), time.process_time()
        forget_peak()
        outcome = _run(kind, Random(f"{self._seed} {name} {index}"), folder)
        outcome["seconds"] = time.monotonic() - start
        outcome["cpu_s"] = time.process_time() - cpu
        for what, field in (("took", "VmHWM"), ("left behind", "VmRSS")):
            grown = resident_bytes(field) - before
            if grown > kind.most_bytes and outcome["outcome"] != "finding":
                what = f"memory: {grown >> 20} MiB {what}"
                outcome.update(outcome="finding", what=what, detail="")
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome


def _run(kind: Any, random: Random, folder: Path) -> dict[str, Any]:
    from fuzz.kind import NonsenseError

    try:
        kind.run(random, folder)
    except NonsenseError as error:
        return {"outcome": "finding", "what": f"nonsense: {error}", "detail": _trace(error)}
    except BaseException as error:  # a panic of a Rust library is one
        text = f"{type(error).__name__}: {_shown(error)}"
        if kind.refused(error):
            return {"outcome": "refused", "what": text, "detail": ""}
        return {"outcome": "finding", "what": f"foreign {text}", "detail": _trace(error)}
    return {"outcome": "accepted", "what": "", "detail": ""}


def _shown(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= 300 else text[:300] + "..."


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


def main() -> None:
    """Serves until standard input ends, or whoever started this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    seed, folder, keep = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "keep"
    answers = os.fdopen(os.dup(1), "w")
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    requests = os.fdopen(os.dup(0), "r")
    for descriptor, stream in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(stream, descriptor)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    import fuzz.kinds  # noqa: F401 - before memory is limited

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_ADDRESSES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = Worker(seed, folder)
    for line in requests:
        name, index = line.split()
        worker.prepare(name)
        answer({"ready": True})
        answer(worker.outcome(name, int(index), keep))


if __name__ == "__main__":
    main()
