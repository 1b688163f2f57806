"""`helm-llm serve` in a process of its own, and the options with which it plans."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from helm.base.sizes import parse_size
from helm.machine.devices import open_accelerator
from partitioned import profile_of

SLOWER_PRODUCTS = 10
_NAMES = ("context", "threads", "profile", "page_tokens")  # of options that are passed on


class Served:
    """`helm-llm serve` in a process of its own."""

    def __init__(self, model: str | None, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "helm", "serve", *([model] if model else [])]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with the process
        self._process = subprocess.Popen(
            [*command, "--port", "0", *options], stdout=self._log, stderr=subprocess.STDOUT
        )
        self.port = self._find_port()

    def _find_port(self) -> int:
        while self._process.poll() is None:
            self._log.seek(0)
            if found := re.search(r"serving \S+ at http://[^ ]*:(\d+)", self._log.read()):
                return int(found[1])
            time.sleep(0.1)
        self._log.seek(0)
        raise SystemExit(f"[bench] the server did not start:\n{self._log.read()}")

    @property
    def rss_bytes(self) -> int:
        """Resident now."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) * 1024

    def close(self) -> None:
        """Ends it; SystemExit where it does not end well."""
        self._process.terminate()
        if self._process.wait(60) != 0:
            self._log.seek(0)
            raise SystemExit(f"[bench] the server failed:\n{self._log.read()[-3000:]}")


@contextlib.contextmanager
def offloading(args: argparse.Namespace) -> Iterator[None]:
    """With --kv-vram and no profile, plans have the machine's rates of now with products on the CPU
    SLOWER_PRODUCTS times slower: all layers lie on the accelerator then, and what the CPU attends
    to keeps its price."""
    if not args.kv_vram or args.profile:
        yield
        return
    profile = profile_of(open_accelerator(args.device), args, args.threads)
    cpu = profile.cpu
    slower = dataclasses.replace(
        cpu,
        matvec_bytes_per_s={k: v / SLOWER_PRODUCTS for k, v in cpu.matvec_bytes_per_s.items()},
        matmul_flops={
            kind: {rows: v / SLOWER_PRODUCTS for rows, v in rates.items()}
            for kind, rates in cpu.matmul_flops.items()
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(dataclasses.replace(profile, cpu=slower).to_json())
        args.profile = str(path)
        yield


def plan_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those with which the server plans."""
    found: dict[str, Any] = {"device": args.device, "max_sequences": args.concurrency}
    found |= {name: getattr(args, name) for name in _NAMES if getattr(args, name)}
    if args.device != "cpu":
        found["objective"] = "serve"
    if args.kv_vram:
        size = parse_size(args.kv_vram, "--kv-vram")
        found |= {"kv_overflow": "cpu", "kv_vram_bytes": size}
    return found


def server_options(args: argparse.Namespace) -> list[str]:
    found = ["--device", args.device, "--concurrency", str(args.concurrency)]
    if args.max_waiting:
        found += ["--max-waiting", str(args.max_waiting)]
    for name in _NAMES:
        if getattr(args, name):
            found += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return found + (["--kv-overflow", "cpu", "--kv-vram", args.kv_vram] if args.kv_vram else [])
