"""Measures HELM beside its peers and the machine's own ceilings, interleaved, in one run.

Every round measures the ceilings and then each engine, one process each, so that a machine that
drifts drifts for all. Prints medians with their spread and writes JSON.

    python bench/compare.py --shape qwen3-0.6b --dtype bf16 --rounds 5 --json out.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from synthetic import BYTES, SHAPES, make_checkpoint, tensor_shapes

WORKER = Path(__file__).parent / "worker.py"
PEERS = {"helm": "helm", "transformers": "transformers", "llama.cpp": "llama_cpp"}


def matrix_elements(config: dict) -> tuple[int, int]:
    """Elements of the blocks' matrices, and of the head."""
    shapes = [s for name, s in tensor_shapes(config) if name.startswith("model.layers.")]
    blocks = sum(rows * shape[0] for rows, *shape in shapes if shape)
    return blocks, config["vocab_size"] * config["hidden_size"]


def run_worker(engine: str, folder: Path, args: argparse.Namespace) -> dict:
    """One engine, one process."""
    command = [sys.executable, WORKER, engine, folder, "--threads", str(args.threads)]
    command += ["--prompt", str(args.prompt), "--decode-prompt", str(args.decode_prompt)]
    command += ["--tokens", str(args.tokens), "--weights", args.weights]
    environment = {**os.environ, "HELM_BENCH_SPAWNED": str(time.time())}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode != 0:
        raise SystemExit(f"{engine} failed:\n{run.stderr[-4000:]}")
    result: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return result


def derive(result: dict, ceiling: dict, config: dict, args: argparse.Namespace) -> dict[str, float]:
    """The figures of one engine in one round, as shares of that round's ceilings."""
    blocks, head = matrix_elements(config)
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    context = args.decode_prompt + args.tokens / 2
    step_bytes = (blocks + head + kv * context) * BYTES[args.dtype]
    decode = result["decode_tokens"] / result["decode_s"]
    # Products of the prompt with every block matrix; the head sees the last token only.
    flops = 2 * (blocks * args.prompt + head) / result["prefill_s"]
    return {
        "decode tok/s": decode,
        "decode GB/s": decode * step_bytes / 1e9,
        "share of read ceiling": decode * step_bytes / ceiling["read_bytes_per_s"],
        "prefill tok/s": args.prompt / result["prefill_s"],
        "prefill GFLOP/s": flops / 1e9,
        "share of f32 peak": flops / ceiling["fma_flops"],
        "start to loaded s": result["load_s"],
        "start to first token s": result["first_token_s"],
        "peak RSS / weights": result["peak_rss_bytes"] / ((blocks + head) * BYTES[args.dtype]),
    }


def measure(args: argparse.Namespace, console: Console) -> dict:
    """All rounds; figures by engine, then by name, one value per round."""
    config = SHAPES[args.shape]
    folder = make_checkpoint(args.shape, args.dtype, args.root)
    engines = [e for e in args.engines if importlib.util.find_spec(PEERS[e]) is not None]
    for missing in sorted(set(args.engines) - set(engines)):
        console.print(f"{missing} is not installed and is left out", style="yellow")
    if "llama.cpp" in engines:
        from gguf_file import write_gguf

        write_gguf(folder)
    figures: dict[str, dict[str, list[float]]] = {engine: {} for engine in engines}
    ceilings: list[dict] = []
    for round_number in range(args.rounds):
        # Alternate the order, so that no engine always follows the same one.
        order = engines if round_number % 2 == 0 else engines[::-1]
        for engine in order:
            ceiling = run_worker("ceiling", folder, args)
            result = run_worker(engine, folder, args)
            after = run_worker("ceiling", folder, args)
            around = {k: (ceiling[k] + after[k]) / 2 for k in ("read_bytes_per_s", "fma_flops")}
            ceilings.append(around)
            for name, value in derive(result, around, config, args).items():
                figures[engine].setdefault(name, []).append(value)
            console.print(
                f"round {round_number + 1}/{args.rounds} {engine}: "
                f"decode {figures[engine]['decode tok/s'][-1]:.1f} tok/s, "
                f"prefill {figures[engine]['prefill tok/s'][-1]:.0f} tok/s",
                style="dim",
            )
    return {"figures": figures, "ceilings": ceilings}


def spread(values: list[float], percent: bool) -> str:
    """Median [least, most]."""
    scale, form = (100, "{:.0f}%") if percent else (1, "{:.3g}")
    cells = [form.format(scale * v) for v in (statistics.median(values), min(values), max(values))]
    return f"{cells[0]} [{cells[1]}, {cells[2]}]"


def show(results: dict, args: argparse.Namespace, console: Console) -> None:
    """The table: a row per figure, a column per engine."""
    read = statistics.median(c["read_bytes_per_s"] for c in results["ceilings"]) / 1e9
    peak = statistics.median(c["fma_flops"] for c in results["ceilings"]) / 1e9
    title = (
        f"{args.shape} {args.dtype}, {args.threads} threads, prefill {args.prompt}, "
        f"decode {args.tokens} after {args.decode_prompt}; ceilings {read:.1f} GB/s read, "
        f"{peak:.0f} GFLOP/s f32"
    )
    table = Table(title=title)
    table.add_column("median \\[min, max]")
    for engine in results["figures"]:
        table.add_column(engine, justify="right")
    for name in next(iter(results["figures"].values())):
        percent = name.startswith("share") or name.startswith("peak RSS")
        row = [spread(figures[name], percent) for figures in results["figures"].values()]
        table.add_row(name, *row)
    console.print(table)


def machine(args: argparse.Namespace) -> dict[str, object]:
    """What the figures were measured on."""
    from helm import __version__, _helm

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=WORKER.parent
    ).stdout.strip()
    return {
        "cpu": model,
        "isa": _helm.isa_choice()[0],
        "threads": args.threads,
        "helm": __version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=sorted(BYTES), default="bf16")
    parser.add_argument("--engines", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--decode-prompt", type=int, default=128, help="context before decode")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the decode")
    parser.add_argument("--weights", choices=("copied", "mapped"), default="copied")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    results = measure(args, console)
    show(results, args, console)
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        document = {"machine": machine(args), "settings": settings, **results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
