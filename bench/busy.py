"""Decode beside busy processes: fixed numbers of threads, and what HELM does where none is given.

    python bench/busy.py MODEL                        # five rounds of windows of 20 s, 17 minutes
    python bench/busy.py MODEL --rounds 1 --window 4  # a first look

A busy process is an endless loop at normal priority. In every round, for each number of these,
decode runs with each setting in turn: two seconds that do not count, then a window. Rates are
medians over the rounds; the last but one column is the default beside the better fixed number. The
last is the most CPUs that programs which are not part of this took in any window: well above zero,
the machine was not ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import helm

SETTLING_S = 2.0
TOKENS = 64  # of a call: the context stays short, and a window ends soon after its time
_SPIN = [sys.executable, "-c", "while True: pass"]
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[int]]:
    """So many processes that compute for ever, while in scope; their ids."""
    spinning = [subprocess.Popen(_SPIN) for _ in range(count)]
    try:
        yield [process.pid for process in spinning]
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def cpu_s(pid: int) -> float:
    """What a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return _TICK_S * (int(fields[11]) + int(fields[12]))


def machine_cpu_s() -> float:
    """What all programs and the kernel have used."""
    user, nice, system, _idle, _wait, irq, softirq = map(
        int, Path("/proc/stat").read_text().split()[1:8]
    )
    return _TICK_S * (user + nice + system + irq + softirq)


def decode(llm: helm.LLM, seconds: float) -> float:
    """Tokens/s of calls that begin within so many seconds."""
    tokens = 0
    begin = now = time.perf_counter()
    while now < begin + seconds:
        done = llm.generate([1], max_tokens=TOKENS, temperature=0, ignore_eos=True)
        tokens += len(done.tokens)
        now = time.perf_counter()
    return tokens / (now - begin)


def window(llm: helm.LLM, seconds: float, spinning: list[int]) -> dict[str, Any]:
    def others_s() -> float:
        return machine_cpu_s() - sum(map(cpu_s, [os.getpid(), *spinning]))

    decode(llm, SETTLING_S)
    begin, before = time.perf_counter(), others_s()
    rate = decode(llm, seconds)
    return {
        "tokens_per_s": rate,
        "active_threads": llm.stats["active_threads"],
        "others_cpus": (others_s() - before) / (time.perf_counter() - begin),
    }


def table(windows: dict[int, dict[str, list[dict[str, Any]]]]) -> Table:
    settings = list(next(iter(windows.values())))
    out = Table("busy", *(f"{name}, tokens/s" for name in settings), "of the better", "others")
    for count, by_setting in windows.items():
        rates = [statistics.median(w["tokens_per_s"] for w in ws) for ws in by_setting.values()]
        others = max(w["others_cpus"] for ws in by_setting.values() for w in ws)
        cells = [*(f"{rate:.1f}" for rate in rates), f"{rates[-1] / max(rates[:-1]):.2f}"]
        out.add_row(str(count), *cells, f"{others:.2f}")
    return out


def measure(args: argparse.Namespace, tell: Callable[[str], None]) -> Any:
    """By busy processes and setting, the default last: every round's window."""
    llms = {f"--threads {n}": helm.LLM(args.model, device="cpu", threads=n) for n in args.threads}
    llms["default"] = helm.LLM(args.model, device="cpu")
    windows: dict[int, dict[str, list[dict[str, Any]]]] = {
        count: {name: [] for name in llms} for count in args.busy
    }
    for _ in range(args.rounds):
        for count in args.busy:
            with busy(count) as spinning:
                for name, llm in llms.items():
                    found = window(llm, args.window, spinning)
                    windows[count][name].append(found)
                    tell(f"{count} busy, {name}: {found}")
    return windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder or a Hugging Face id")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=20.0, metavar="S")
    parser.add_argument("--json", type=Path, help="write every window there")
    parser.add_argument("--from", type=Path, nargs="+", help="tables of such files, no measurement")
    args = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in getattr(args, "from") or ()]
    if documents:
        windows = documents[0]
        for document in documents[1:]:
            for count, by_setting in document.items():
                for name, more in by_setting.items():
                    windows[count][name] += more
    else:
        windows = measure(args, lambda line: print(line, file=sys.stderr))
    Console().print(table(windows))
    if args.json:
        args.json.write_text(json.dumps(windows, indent=1))


if __name__ == "__main__":
    main()
