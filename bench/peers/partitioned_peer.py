"""Hugging Face Accelerate beside what partitioned.py measured: run, then compared."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from helm.base.sizes import size_text
from synthetic import TORCH_DTYPE

PEER = Path(__file__).parent / "accelerate_peer.py"
SKIPPED = 77  # exit status where nothing could be measured


def run_peer(raw: dict, cap: int, args: Any) -> dict[str, Any]:
    """Accelerate with the same memory, or {"skipped": reason}."""
    if args.no_peer:
        return {"skipped": "--no-peer"}
    if args.device.partition(":")[0] != "cuda":
        return {"skipped": f"Accelerate does not run on {args.device.partition(':')[0]}"}
    for name in ("torch", "transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            return {"skipped": f"{name} is not installed"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(raw, file)
        file.flush()
        command = [sys.executable, PEER, file.name, "--bytes", str(cap)]
        command += ["--dtype", TORCH_DTYPE[args.dtype], "--context", str(args.context)]
        command += ["--prefill", *map(str, args.prefill), "--rounds", str(args.rounds)]
        command += ["--seconds", str(args.seconds)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=args.peer_seconds)
        except subprocess.TimeoutExpired:
            return {"skipped": f"took more than {args.peer_seconds:g} s"}
    if run.returncode == SKIPPED:
        return {"skipped": run.stdout.strip()}
    if run.returncode != 0:
        return {"skipped": "failed: " + " | ".join(run.stderr.strip().splitlines()[-3:])}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def peer_ratio(peer: dict[str, Any], decode_s: list[float]) -> float | None:
    """The peer's time of a decode step over ours, where it ran."""
    if "decode_s" not in peer:
        return None
    return statistics.median(peer["decode_s"]) / statistics.median(decode_s)


def write(path: Path, document: dict[str, Any]) -> None:
    """The whole of it or nothing, whenever the run is ended."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def add_peer(cases: list[tuple[str, dict[str, Any], int]], args: Any, console: Console) -> None:
    """Gives each result in --json, measured without it, its peer. cases: (shape, its config, bytes
    of accelerator memory) of each. Exits with SKIPPED where the peer ran for none."""
    document = json.loads(args.json.read_text())
    found = [(result["shape"], result["vram_bytes"]) for result in document["results"]]
    if found != [(shape, cap) for shape, _, cap in cases]:
        raise SystemExit(f"[bench] {args.json} has results of {found}; measure these cases first")
    measured = [
        (result, raw, cap)
        for result, (_, raw, cap) in zip(document["results"], cases, strict=True)
        if not result["skipped"]
    ]
    reason = "no case was measured"
    for result, raw, cap in measured:
        result["peer"] = run_peer(raw, cap, args)
        ratio = peer_ratio(result["peer"], [r["decode_s"] for r in result["rounds"]])
        result["figures"]["over_peer"] = ratio
        write(args.json, document)
        reason = result["peer"].get("skipped", "")
        said = reason or f"{ratio:.2f} times Accelerate's time of a decode step over HELM's"
        console.print(f"{result['shape']}, {size_text(cap)}: {said}", markup=False)
    if all("skipped" in result["peer"] for result, _, _ in measured):
        print(reason)
        raise SystemExit(SKIPPED)
