"""`helm-llm serve` beside llama.cpp's server on the same GGUF file, loaded in turn.

    python bench/serve_peer.py FILE.gguf --peer PATH/llama-server

Both servers stay up. In each round each has --clients clients for --seconds, which ask again once
they have their answer; all prompts differ. llama.cpp's has as many slots as there are clients, and
the context of all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serve_load import Answer, Client, Wanted, closed_loop, percentile, rates_within
from served import Served

import helm
from compare_report import spread


class PeerServed:
    """`llama-server` in a process of its own."""

    def __init__(self, server: Path, model: Path, clients: int, context: int, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        command = [server, "-m", model, "-np", clients, "-c", clients * context, "-t", threads,
                   "--host", "127.0.0.1", "--port", self.port]  # fmt: skip
        self._process = subprocess.Popen(
            [*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._await()

    def _await(self) -> None:
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health")
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        self.close()
        raise SystemExit("[bench] llama.cpp's server did not start")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def lengths(seed: int, prompt: int, output: int) -> Iterator[Wanted]:
    """Half to all of both lengths, drawn; the same for both servers."""
    draws = random.Random(seed)
    while True:
        yield Wanted(0.0, draws.randint(prompt // 2, prompt), draws.randint(output // 2, output))


async def load(port: int, vocab_size: int, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one server in one round. What began before the round's end is awaited, and does
    not count."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    wanted = lengths(seed, args.prompt, args.output)
    client = Client(port, vocab_size, seed)
    answers = await closed_loop(client, wanted, args.clients, args.seconds)
    if bad := [answer.error or answer.statuses for answer in answers if not answer.completed]:
        raise SystemExit(f"[bench] {len(bad)} of {len(answers)} requests failed: {bad[0]}")
    rates = rates_within(answers, begin, begin + args.seconds)
    return {
        "tokens/s": rates.generated,
        "tokens/s with prompts": rates.computed,
        "first token, p50, s": percentile(firsts(answers), 0.5),
        "first token, p99, s": percentile(firsts(answers), 0.99),
    }


def firsts(answers: list[Answer]) -> list[float]:
    return [answer.times_s[0] - answer.asked_s for answer in answers if answer.times_s]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--peer", type=Path, required=True, help="llama.cpp's llama-server")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write what was measured there")
    args = parser.parse_args()
    context = args.prompt + args.output + 16
    with helm.LLM(str(args.model), device="cpu", context=context) as llm:
        vocab_size = llm.vocab_size
    options = ["--device", "cpu", "--context", str(context), "--concurrency", str(args.clients),
               "--threads", str(args.threads)]  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {"HELM": [], "llama.cpp": []}
    peer = PeerServed(args.peer, args.model, args.clients, context, args.threads)
    with contextlib.closing(peer), contextlib.closing(Served(str(args.model), options)) as ours:
        ports = {"HELM": ours.port, "llama.cpp": peer.port}
        for number in range(args.rounds + 1):
            for name in sorted(ports, reverse=number % 2 == 1):
                figures = asyncio.run(load(ports[name], vocab_size, number, args))
                print(f"round {number} {name}: {figures['tokens/s']:.1f} tokens/s", file=sys.stderr)
                if figures["tokens/s"] == 0:
                    raise SystemExit(f"{name} completed no request; give more --seconds")
                if number:  # the first one warms up
                    found[name].append(figures)
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """Medians with least and most, and HELM over llama.cpp round by round."""
    table = Table("", *found, "HELM over llama.cpp")
    for name in found["HELM"][0]:
        cells = {server: [figures[name] for figures in rows] for server, rows in found.items()}
        ratios = [a / b for a, b in zip(*cells.values(), strict=True)]
        shown = (spread(values, percent=False) for values in (*cells.values(), ratios))
        table.add_row(name, *shown)
    Console().print(table)


if __name__ == "__main__":
    main()
