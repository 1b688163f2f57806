"""Measures a model that memory does not hold: weights read from disk in every step.

The model runs in processes of its own: with all weights in memory, then within a share of what it
takes there, and, where a control group can be made, with mapped weights within the same memory.
Rounds take turns; the disk, or all drives with copies, is measured beside each. Tokens must be
equal, bytes the planned ones.

    python bench/disk.py --shape qwen3-0.6b --dtype f16 --share 0.5 --tokens 12 --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm
from helm.machine.profile import Profile
from helm.measure.disk import measure_drives
from resident import peak_rss_bytes, resident_bytes
from synthetic import make_checkpoint

LEFT_BYTES = 192 << 20  # of a control group beside a plan: interpreter, libraries, page tables
PROMPT = [int(i * 37 % 251) for i in range(24)]


def run_child(args: Any) -> None:
    """One model in one process; prints what it found."""
    options: dict[str, Any] = {"context": args.context, "max_sequences": 1, "speculate": "off"}
    options |= {"threads": args.threads, "prefix_cache": False, "weights": args.weights}
    if args.profile:
        options["profile"] = Profile.from_json(Path(args.profile).read_text())
    options["copies"] = args.copy
    if args.memory:
        options["memory_bytes"] = args.memory
    with helm.LLM(device="cpu", context=64) as warm:  # what any model takes of libraries
        warm.generate(PROMPT, max_tokens=1)
    before = resident_bytes()
    with helm.LLM(args.folder, device="cpu", **options) as llm:
        if args.lower:
            Path(args.lower).write_text(str(args.limit))
        times, tokens = [], list[int]()
        begin = time.perf_counter()
        sampling = {"max_tokens": args.tokens, "temperature": 0, "ignore_eos": True}
        for chunk in llm.stream(PROMPT, **sampling):
            tokens += chunk.tokens
            times.append(time.perf_counter())
        use, stats = llm.plan.memory["cpu"], llm.stats
        prediction = llm.plan.prediction
        steps = [b - a for a, b in itertools.pairwise(times)][1:]
        print(
            json.dumps(
                {
                    "tokens": tokens,
                    "ttft_s": times[0] - begin,
                    "step_s": statistics.median(steps),
                    "steps_s": (times[-1] - times[1]) / max(1, len(times) - 2),
                    "grown_bytes": peak_rss_bytes() - before,
                    "plan_bytes": use.total_bytes,
                    "reserve_bytes": use.reserve_bytes,
                    "step_bytes": stats["disk_step_bytes"],
                    "used_bytes": stats["disk_used_bytes"],
                    "read_bytes": stats["disk_read_bytes"],
                    "ring_bytes": llm.plan.schedule.disk_ring_bytes,
                    "direct": stats["disk_direct"],
                    "predicted_s": None if prediction is None else prediction.predicted.decode_s,
                }
            )
        )


@contextlib.contextmanager
def limited(memory_bytes: int) -> Iterator[tuple[list[str], Path] | None]:
    """The beginning of a command that runs within so much memory, page cache included, and the file
    that holds the limit; None where no control group can be made."""
    root = Path("/sys/fs/cgroup")
    own = root / "memory" if (root / "memory").is_dir() else root
    unified = own == root
    group = own / f"helm-bench-{uuid.uuid4().hex[:8]}"
    try:
        if unified:
            (root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        name = "memory.max" if unified else "memory.limit_in_bytes"
        limit = group / name
        limit.write_text(str(memory_bytes))
    except OSError:
        yield None
        return
    try:
        yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)], limit
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def drop_cached(file: Path) -> None:
    """Takes a file out of the page cache. Pages count for the group that read them, so what others
    left there would be memory beyond a limit."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(args: Any, weights: str, memory: int, limit: int = 0) -> dict[str, Any] | None:
    """None where a limit cannot be had. Mapped weights are refused within one that does not hold
    them, so theirs is lowered once they are loaded."""
    command = [sys.executable, __file__, "--child", "--folder", str(args.folder)]
    for name in ("context", "tokens", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    for copy in args.copy:
        command += ["--copy", copy]
    command += ["--weights", weights, "--memory", str(memory), "--profile", str(args.profile or "")]
    with contextlib.ExitStack() as stack:
        if limit:
            mapped = weights == "mapped"
            found = stack.enter_context(limited(2 * memory if mapped else limit))
            if found is None:
                return None
            command = [*found[0], *command]
            if mapped:
                command += ["--lower", str(found[1]), "--limit", str(limit)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"[bench] {weights} weights failed: {done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(args: Any) -> dict[str, Any]:
    files = [Path(folder, "model.safetensors") for folder in (args.folder, *args.copy)]
    whole = child(args, "copied", 0)
    assert whole is not None
    needed = whole["plan_bytes"] + whole["reserve_bytes"]
    memory = int(needed * args.share)
    limit = memory + LEFT_BYTES if args.mapped else 0
    rounds = []
    for _ in range(args.rounds):
        rates = measure_drives([[file] for file in files], most_s=args.seconds)
        for file in files:
            drop_cached(file)
        disk = child(args, "auto", memory, limit) or child(args, "auto", memory)
        drop_cached(files[0])
        mapped = child(args, "mapped", 2 * needed, limit) if args.mapped else None
        assert disk is not None
        assert rates is not None
        rounds.append({"disk": disk, "mapped": mapped, "disk_bytes_per_s": sum(rates)})
    return {"whole": whole, "needed_bytes": needed, "memory_bytes": memory, "rounds": rounds}


def report(found: dict[str, Any]) -> dict[str, Any]:
    """The figures that count, of all rounds."""
    whole, rounds = found["whole"], found["rounds"]
    disks = [each["disk"] for each in rounds]
    last = disks[-1]
    rates = [each["step_bytes"] / each["steps_s"] for each in disks]
    shares = [rate / each["disk_bytes_per_s"] for rate, each in zip(rates, rounds, strict=True)]
    mappeds = [each["mapped"] for each in rounds if each["mapped"]]
    mapped = [each["steps_s"] for each in mappeds]
    step_s = statistics.median(each["steps_s"] for each in disks)
    predicted = [each["predicted_s"] for each in disks if each["predicted_s"]]
    steps = len(last["tokens"])  # the prompt takes one, the first token comes with it
    return {
        "memory_share": found["memory_bytes"] / found["needed_bytes"],
        "tokens_equal": all(each["tokens"] == whole["tokens"] for each in [*disks, *mappeds]),
        "bytes_planned": all(each["used_bytes"] == steps * each["step_bytes"] for each in disks),
        "read_ahead": all(
            0 <= each["read_bytes"] - each["used_bytes"] <= each["ring_bytes"] for each in disks
        ),
        "within_plan": all(
            each["grown_bytes"] <= each["plan_bytes"] + each["reserve_bytes"] for each in disks
        ),
        "grown_bytes": max(each["grown_bytes"] for each in disks),
        "plan_bytes": last["plan_bytes"],
        "step_bytes": last["step_bytes"],
        "step_s": step_s,
        "in_memory_s": whole["steps_s"],
        "of_disk": statistics.median(shares),
        "disk_bytes_per_s": statistics.median(each["disk_bytes_per_s"] for each in rounds),
        "predicted_s": statistics.median(predicted) if predicted else None,
        "predicted_ratio": statistics.median(
            each["predicted_s"] / each["steps_s"] for each in disks if each["predicted_s"]
        )
        if predicted
        else None,
        "mapped_s": statistics.median(mapped) if mapped else None,
        "over_mapped": statistics.median(mapped) / step_s if mapped else None,
        "direct": last["direct"],
    }


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="f16")
    parser.add_argument("--share", type=float, default=0.5, help="of the memory that it needs")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="to measure the disk")
    parser.add_argument("--mapped", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", help="a profile's file; this machine's where left out")
    parser.add_argument(
        "--copy", action="append", default=[], help="a copy of the model's folder on another drive"
    )
    parser.add_argument("--root", type=Path, default=Path("bench/out"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--lower", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.child:
        run_child(args)
        return {}
    args.folder = make_checkpoint(args.shape, args.dtype, args.root).resolve()
    found = measure(args)
    summary = report(found)
    if args.json:
        args.json.write_text(json.dumps({**found, "summary": summary}, indent=1))
    print(json.dumps(summary, indent=1))
    return summary


if __name__ == "__main__":
    main()
