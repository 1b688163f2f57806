"""What serving costs, and what a server does under more load than it can take.

    python bench/serve.py qwen3-0.6b --what streams      # about 6 minutes; a shape, or a MODEL
    python bench/serve.py qwen3-0.6b --layers 8 --what load --context 512      # about 12 minutes
    python bench/serve.py qwen3-0.6b --layers 2 --what load --context 512 --seconds 20   # a look

streams: tokens per second of eight streams of `helm-llm serve`, read by a client in this process
that only reads, beside LLM.generate of the same eight prompts; one stream beside LLM.stream; two
threads with an LLM.stream each, and four that call LLM.generate, beside one. Rounds are interleaved
and what is compared stands next to each other.

load: a closed loop of as many clients as requests share steps, then, for each kind of arrivals,
twice as many requests per second as it completed, for --seconds. Clients that are refused try again
when they are told to, five times in all. A model whose steps take less than HTTP, as the bundled
one, shows what two cores refuse. --traces: a folder with Azure's traces of 2023
(azure_llm_2023_code.csv and _conv.csv; Patel et al. 2024), in whose rhythm and lengths requests
come; without it lengths are drawn. With --kv-vram an accelerator has all layers and room for the KV
of a few requests, so that they move between the memories, and the machine is measured unless a
--profile is given:

    python bench/serve.py qwen3-0.6b --layers 8 --what load --device sim:threads=1 --threads 1 \
        --kv-vram 28MiB --page-tokens 16 --context 1024 --arrivals poisson gamma

long: the longest gap between tokens of four streams while a long prompt arrives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serve_load import (
    Client,
    Wanted,
    bursts,
    closed_loop,
    figures_of,
    from_trace,
    full_step_s,
    lengths_of,
    metrics_of,
    open_arrivals,
    percentile,
    rates_within,
)
from served import Served, offloading, plan_options, server_options

import helm
from compare_report import spread
from synthetic import SHAPES, make_checkpoint

BURSTS = {"poisson": 1.0, "gamma": 0.25}
PROMPT = 16  # tokens of a stream's
TRACES = {"code": "azure_llm_2023_code.csv", "conv": "azure_llm_2023_conv.csv"}
# Of /metrics, by what the report calls them.
COUNTED = {
    "moved_to_host": "helm_engine_moves_far_total",
    "moved_back": "helm_engine_moves_near_total",
    "gave_way": "helm_engine_preemptions_total",
    **{f"{mode}_steps": f'helm_engine_mode_steps_total{{mode="{mode}"}}'
       for mode in ("near", "joint", "split")},
}  # fmt: skip


# --- streams


def one_each(prompts: int, vocab_size: int, length: int = PROMPT) -> list[list[int]]:
    """Prompts that share no beginning."""
    return [
        [(7 + 131 * i + 17 * place) % (vocab_size - 2) + 2 for place in range(length)]
        for i in range(prompts)
    ]


def read_streams(port: int, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens per second of all, from the first byte that was sent to the last that came. A process
    of its own, which reads and does not look."""
    bodies = [
        json.dumps(
            {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True,
             "temperature": 0}
        )
        for prompt in prompts
    ]  # fmt: skip
    reader = Path(__file__).with_name("serve_reader.py")
    command = [sys.executable, "-S", str(reader), str(port)]
    found = subprocess.run(
        command, input=json.dumps(bodies), capture_output=True, text=True, check=True
    )
    answer = json.loads(found.stdout)
    if answer["finished"] != len(prompts):
        raise SystemExit(f"[bench] {answer['finished']} of {len(prompts)} streams ended well")
    return float(len(prompts) * tokens / answer["seconds"])


def in_threads(llm: helm.LLM, prompts: Sequence[list[int]], tokens: int, streams: bool) -> float:
    """Tokens per second of as many threads, each of which makes one call."""

    def work(prompt: list[int]) -> None:
        if streams:
            for _ in llm.stream(prompt, max_tokens=tokens, ignore_eos=True, temperature=0):
                pass
        else:
            llm.generate(prompt, max_tokens=tokens, ignore_eos=True, temperature=0)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(prompts) * tokens / (time.perf_counter() - begin)


def generate(llm: helm.LLM, prompts: Sequence[list[int]], tokens: int) -> float:
    begin = time.perf_counter()
    llm.generate(prompts, max_tokens=tokens, ignore_eos=True, temperature=0)
    return len(prompts) * tokens / (time.perf_counter() - begin)


def streams(args: argparse.Namespace, model: str | None, options: list[str]) -> dict[str, Any]:
    """Ratios of each round, by what they say."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> float:
        found.setdefault(name, []).append(value)
        print(f"{name}: {value:.3g}", file=sys.stderr)
        return value

    llm = helm.LLM(model, **plan_options(args))
    with contextlib.closing(Served(model, options)) as served:
        eight = one_each(8, llm.vocab_size)
        one = eight[:1]
        for number in range(args.rounds + 1):
            if number == 1:
                found.clear()  # the first one warms up
            pairs = [
                lambda: note("8 streams, tokens/s", read_streams(served.port, eight, args.tokens)),
                lambda: note("8 of generate, tokens/s", generate(llm, eight, args.tokens)),
            ]
            ones = [
                lambda: note("1 stream, tokens/s", read_streams(served.port, one, args.tokens)),
                lambda: note("1 of LLM.stream, tokens/s", in_threads(llm, one, args.tokens, True)),
            ]
            for pair in (pairs, ones):
                for measure in pair if number % 2 else reversed(pair):
                    measure()
            note("2 threads of LLM.stream, tokens/s", in_threads(llm, eight[:2], args.tokens, True))
            note(
                "4 threads of LLM.generate, tokens/s",
                in_threads(llm, eight[:4], args.tokens, False),
            )
    llm.close()

    def over(name: str, rates: str, base: str) -> None:
        found[name] = [a / b for a, b in zip(found[rates], found[base], strict=True)]

    over("8 streams over generate (must 0.92)", "8 streams, tokens/s", "8 of generate, tokens/s")
    over("1 stream over LLM.stream (must 0.97)", "1 stream, tokens/s", "1 of LLM.stream, tokens/s")
    over("2 threads over 1 (must 1.5)", "2 threads of LLM.stream, tokens/s",
         "1 of LLM.stream, tokens/s")  # fmt: skip
    over("4 threads of generate over 1 stream", "4 threads of LLM.generate, tokens/s",
         "1 of LLM.stream, tokens/s")  # fmt: skip
    table = Table("streams", "median [least, most]")
    for name, values in found.items():
        table.add_row(name, spread(values, percent=False))
    Console().print(table)
    return found


# --- load


def endless(rows: Sequence[tuple[float, int, int]]) -> Iterator[Wanted]:
    """The lengths of a trace, again and again."""
    return (Wanted(0.0, prompt, output) for _, prompt, output in itertools.cycle(rows))


def drawn_lengths(context: int) -> list[tuple[float, int, int]]:
    """Lengths between those of code and conversations, a quarter of the context at most."""
    return [
        (float(i), 4 + (37 * i) % (context // 4), 4 + (53 * i) % (context // 8)) for i in range(997)
    ]


async def under_load(
    args: argparse.Namespace, served: Served, llm: helm.LLM
) -> list[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    context = llm.context
    kinds: dict[str, list[tuple[float, int, int]]] = {}
    for kind in args.arrivals:
        path = args.traces / TRACES[kind] if kind in TRACES and args.traces else None
        if kind in TRACES and (path is None or not path.is_file()):
            print(f"{kind} is skipped: give --traces FOLDER", file=sys.stderr)
            continue
        kinds[kind] = lengths_of(path, context, args.scale) if path else drawn_lengths(context)
    found = []
    for number, (kind, rows) in enumerate(kinds.items()):
        client = Client(served.port, llm.vocab_size, number)
        places = int(llm.plan.limits.sequences)
        if not number:  # memory that is planned for KV becomes resident as it is used
            longest = Wanted(0.0, max(r[1] for r in rows), max(r[2] for r in rows))
            await asyncio.gather(*(client.ask(longest) for _ in range(places)))
        prompt = round(statistics.mean(row[1] for row in rows))
        mean = Wanted(0.0, prompt, context - prompt)
        steps_s = [await full_step_s(client, places, mean)]
        before = await metrics_of(served.port)
        begin = loop.time()
        closed = await closed_loop(client, endless(rows), places + 2, args.closed_seconds)
        end = begin + args.closed_seconds
        alone = rates_within(closed, begin + min(2.0, args.closed_seconds / 4), end)
        completed = sum(a.completed and (a.ended_s or end) < end for a in closed)
        rate = args.factor * completed / args.closed_seconds
        wanted = (
            from_trace(rows, rate, args.seconds)
            if kind in TRACES
            else bursts(rows, rate, args.seconds, BURSTS[kind], number)
        )
        print(f"{kind}: closed loop {alone.generated:.0f} tokens/s, {len(wanted)} requests come at "
              f"{rate:.1f}/s", file=sys.stderr)  # fmt: skip
        memory: list[int] = []
        watching = asyncio.create_task(_watch(served, memory))
        begin = loop.time()
        answers = await open_arrivals(client, wanted, _progress(len(wanted)))
        watching.cancel()
        figures = figures_of(answers, begin, args.seconds, alone, memory)
        after = await metrics_of(served.port)
        steps_s.append(await full_step_s(client, places, mean))  # machines drift
        step_s = statistics.mean(steps_s)
        found.append(
            {
                "arrivals": kind,
                "closed_tokens_per_s": alone.generated,
                **figures,
                "step_at_full_s": step_s,
                "p99_over_step": figures["between_tokens_p99_s"] / step_s,
                **{name: int(after[key] - before[key]) for name, key in COUNTED.items()
                   if key in after},
            }
        )  # fmt: skip
    return found


async def _watch(served: Served, memory: list[int]) -> None:
    while True:
        memory.append(served.rss_bytes)
        await asyncio.sleep(1)


def _progress(total: int) -> Any:
    return lambda count: count % 100 or print(f"{count} of {total} have come", file=sys.stderr)


def load(args: argparse.Namespace, model: str | None, options: list[str]) -> list[dict[str, Any]]:
    llm = helm.LLM(model, **plan_options(args))
    if args.kv_vram and llm.plan.units_accelerator == 0:
        raise SystemExit("[bench] the plan leaves the accelerator empty, so no KV moves")
    with contextlib.closing(Served(model, options)) as served:
        found = asyncio.run(under_load(args, served, llm))
    llm.close()
    table = Table("twice the load", *(row["arrivals"] for row in found))
    bars = {
        "of_closed_loop": ">= 0.9", "ended_once": "1", "answered": ">= 0.95",
        "rss_growth_bytes": "<= allowed", "p99_over_step": "<= 2.5",
    }  # fmt: skip
    for name in found[0] if found else ():
        if name != "arrivals":
            shown = f"{name} ({bars[name]})" if name in bars else name
            cells = (row[name] for row in found)
            table.add_row(shown, *(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))
    Console().print(table)
    return found


# --- a long prompt beside streams


async def beside_long(args: argparse.Namespace, served: Served, llm: helm.LLM) -> dict[str, Any]:
    """The four streams decode for a while alone (calm), then beside the long prompt. Neither time
    holds the streams' own prompts; once the long prompt has its answer the streams are left."""
    client = Client(served.port, llm.vocab_size, 0)
    loop = asyncio.get_running_loop()
    long = Wanted(0.0, args.long_prompt, 2)
    await client.ask(long)
    begin = loop.time()
    alone = await client.ask(long)
    alone_s = loop.time() - begin
    endless = Wanted(0.0, 16, args.context - 32)
    streams = [client.begin(endless) for _ in range(4)]
    answers = [answer for answer, _ in streams]

    async def until(tokens: int) -> float:
        while min(len(answer.times_s) for answer in answers) < tokens:
            if any(task.done() for _, task in streams):
                raise SystemExit(f"[bench] a stream ended early: {[a.error for a in answers]}")
            await asyncio.sleep(0.01)
        return loop.time()

    calm_from = await until(2)
    begin = await until(2 + args.tokens)
    beside = await client.ask(long)
    end = loop.time()
    await until(2 + args.tokens)
    for _, task in streams:
        task.cancel()
    await asyncio.gather(*(task for _, task in streams), return_exceptions=True)
    if not (alone.completed and beside.completed):
        raise SystemExit(f"[bench] the long prompt: {[alone.error, beside.error]}")
    calm = [gap for answer in answers for gap in answer.gaps_s(calm_from, begin)]
    meanwhile = [gap for answer in answers for gap in answer.gaps_s(begin, end)]
    return {
        "prompt_tokens": args.long_prompt,
        "alone_tokens_per_s": args.long_prompt / alone_s,
        "rate_kept (aim 0.5)": alone_s / (end - begin),
        "tokens_beside": len(meanwhile),
        "between_tokens_median_calm_s": percentile(calm, 0.5),
        "between_tokens_median_beside_s": percentile(meanwhile, 0.5),
        "between_tokens_p99_calm_s": percentile(calm, 0.99),
        "between_tokens_p99_beside_s": percentile(meanwhile, 0.99),
        "longest_gap_s": max(meanwhile),
    }


def long(args: argparse.Namespace, model: str | None, options: list[str]) -> dict[str, Any]:
    llm = helm.LLM(model, **plan_options(args))
    with contextlib.closing(Served(model, options)) as served:
        found = asyncio.run(beside_long(args, served, llm))
    llm.close()
    calm, beside = found["between_tokens_p99_calm_s"], found["between_tokens_p99_beside_s"]
    found["p99_over_calm (aim 2.5)"] = beside / calm
    table = Table("a long prompt beside four streams", "")
    for name, value in found.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model, a shape of shapes.json, or bundled")
    parser.add_argument("--what", choices=("streams", "load", "long"), default="streams")
    parser.add_argument("--dtype", default="bf16", help="of a shape's random weights")
    parser.add_argument("--layers", type=int, help="cut the shape to so many blocks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--context",
        type=int,
        help="positions of one request; of streams by default what they take, as two models share "
        "the memory and the second would find room for few",
    )
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-waiting", type=int, help="requests that wait at most (default: 256)")
    parser.add_argument("--threads", type=int, help="of the CPU (default: all)")
    parser.add_argument("--profile", help="of the machine (default: measured)")
    parser.add_argument("--kv-vram", metavar="SIZE", help="for KV on the accelerator, as 64MiB")
    parser.add_argument("--page-tokens", type=int, help="positions of a KV page")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument(
        "--arrivals", nargs="+", choices=(*BURSTS, *TRACES), default=[*BURSTS, *TRACES]
    )
    parser.add_argument("--traces", type=Path, help="the folder with Azure's traces")
    parser.add_argument("--scale", type=float, default=1 / 16, help="of a trace's lengths")
    parser.add_argument("--seconds", type=float, default=90.0, help="of open arrivals")
    parser.add_argument("--closed-seconds", type=float, default=30.0)
    parser.add_argument("--factor", type=float, default=2.0, help="of the closed loop's requests/s")
    parser.add_argument("--long-prompt", type=int, default=4000)
    parser.add_argument("--json", type=Path, help="write what was measured there")
    args = parser.parse_args()
    model = None if args.model == "bundled" else args.model
    if args.model in SHAPES:
        model = str(make_checkpoint(args.model, args.dtype, Path("bench/out"), args.layers))
    if args.what == "streams" and not args.context:
        args.context = PROMPT + args.tokens
    measure = {"streams": streams, "load": load, "long": long}[args.what]
    with offloading(args):
        found = measure(args, model, server_options(args))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
