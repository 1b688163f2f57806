"""What guesses bring: decode with them and without, interleaved, on a code edit, on code that is
copied (for models too small to edit), on a summary with quotes, on text that repeats little, and on
eight streams. The tokens must be the same. Beside the gain stand what measured acceptance and
measured steps predict, and what the engine says itself. With --threads 1 times are those on the
CPU, which other programs disturb less. With --draft a second model guesses.

    python bench/speculation.py MODEL [--draft MODEL] [--rounds 3] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

import helm
from helm import _helm
from helm.session.draft import load_draft
from helm.session.options import load_options
from helm.text.prompts import Template

EDITED = Path(__file__).parent / "busy.py"
EDIT = (
    "Rename the function `busy` to `spinning_processes` in this file, and change nothing "
    "else. Answer with the whole file as one block of code, without an explanation.\n\n```python\n"
)
ARTICLE = Path(__file__).parents[1] / "docs" / "threads.md"
QUOTES = (
    "Summarise the text below in six points. Begin every point with the most telling sentence of "
    "the text, quoted word for word in quotation marks, and explain it in one short sentence of "
    "your own.\n\n"
)
TOPICS = (
    "a lighthouse", "how glaciers move", "the history of paper", "a day in a bakery",
    "why cats purr", "building a wooden boat", "the smell of rain", "a train across Siberia",
)  # fmt: skip
ROWS = (1, 2, 3, 5, 8)
# One thread's time on a CPU tells what it takes on a machine that others use, too.
CLOCKS = {"one thread": time.process_time, "several": time.perf_counter}


@dataclass
class Result:
    """One workload. tokens: of the output of all streams. per_step: tokens of a stream in a step
    with guesses, on average. guessed, accepted: tokens. copied: share of the output's tokens that
    stand in runs of four or more of the prompt's. off, on: tokens/s of decode, medians. gain: the
    median of on / off within a round. step_share: how many times as long a step with guesses takes,
    by steps of as many rows that were measured apart, with the second model's steps. predicted:
    per_step / step_share. told: the gain by the engine's own account. The last three of one stream
    alone, else 0."""

    name: str
    streams: int
    tokens: int
    copied: float
    guessed: int
    accepted: int
    per_step: float
    off: float
    on: float
    gain: float
    step_share: float
    predicted: float
    told: float
    rounds: list[tuple[float, float]]


def copied(prompt: list[int], output: list[int]) -> float:
    """See Result."""
    blocks = SequenceMatcher(None, prompt, output, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= 4) / max(len(output), 1)


def generate(
    llm: helm.LLM, kept: Any, requests: list[dict[str, Any]], drafter: Any
) -> tuple[list[list[int]], list[dict[str, Any]], float]:
    """Outputs, timings, and seconds from when all decode until the first ends."""
    native = [_helm.Request(**request) for request in requests]
    generation = _helm.Generation(llm._engine, native, kept, drafter=drafter)
    outputs: list[list[int]] = [[] for _ in requests]
    begin, before, end, between = 0.0, 0, 0.0, 0
    clock = CLOCKS["one thread" if llm.stats["threads"] == 1 else "several"]
    while not generation.done:
        for token in generation.advance(0.0):
            outputs[token.request].append(token.id)
            if token.finish and not end:
                end = clock()
                between = sum(map(len, outputs)) - before
        if not begin and all(outputs):
            begin, before = clock(), sum(map(len, outputs))
    timings = [generation.timings(i) for i in range(len(requests))]
    return outputs, timings, between / (end - begin) if end > begin else 0.0


def workload(
    llm: helm.LLM, draft: Any, name: str, requests: list[dict[str, Any]], rounds: int
) -> Result:
    """Measures one; the first round warms up and fills the prefix cache. draft: a second model's
    engine, or None."""
    kept = _helm.PrefixCache(llm._engine)
    rates: list[tuple[float, float]] = []
    want, _, _ = generate(llm, kept, requests, None)
    for number in range(rounds):
        found: dict[bool, float] = {}
        for guess in (False, True) if number % 2 == 0 else (True, False):
            drafter = drafter_of(draft) if guess else None
            outputs, timings, rate = generate(llm, kept, requests, drafter)
            if outputs != want:
                sys.exit(f"{name}: guesses changed tokens")
            found[guess] = rate
            if guess:
                told = timings
        rates.append((found[False], found[True]))
        print(f"{name}: {found[False]:.2f} without, {found[True]:.2f} with guesses", flush=True)
    tokens = sum(t["decode_tokens"] for t in told)
    accepted = sum(t["accepted_tokens"] for t in told)
    guessed = sum(t["guessed_tokens"] for t in told)
    steps, share, predicted, said = tokens - accepted, 0.0, 0.0, 0.0
    if len(requests) == 1:
        share = step_share(llm, draft, len(requests[0]["prompt"]) + tokens // 2, guessed / steps)
        predicted = tokens / steps / share
        said = 1 + told[0]["saved_s"] / told[0]["decode_s"]
    return Result(
        name=name,
        streams=len(requests),
        tokens=tokens,
        copied=statistics.mean(
            copied(request["prompt"], output)
            for request, output in zip(requests, want, strict=True)
        ),
        guessed=guessed,
        accepted=accepted,
        per_step=tokens / steps,
        step_share=share,
        predicted=predicted,
        told=said,
        off=statistics.median(off for off, _ in rates),
        on=statistics.median(on for _, on in rates),
        gain=statistics.median(on / off for off, on in rates),
        rounds=rates,
    )


def drafter_of(draft: Any) -> Any:
    """A new one, of n-grams without a second model's engine."""
    return _helm.ngram_drafter() if draft is None else _helm.model_drafter(draft)


def step_share(llm: helm.LLM, draft: Any, positions: int, guesses: float) -> float:
    """Of a step with so many guesses on average, in steps without: in a line between those that
    were measured, after so many positions."""
    threads = llm.stats["threads"]
    seconds = step_times(llm._engine, threads, positions)
    steps_s = float(np.interp(1 + guesses, list(seconds), list(seconds.values())))
    if draft is not None:
        steps_s += guesses * step_times(draft, threads, positions, (1,))[1]
    return steps_s / seconds[1]


def step_times(
    engine: Any, threads: int, positions: int = 128, counts: tuple[int, ...] = ROWS
) -> dict[int, float]:
    """Seconds of a step that gives logits of so many rows, after so many positions; medians."""
    clock = CLOCKS["one thread" if threads == 1 else "several"]
    sequence = engine.open(positions + max(counts))
    engine.forward(sequence, np.arange(positions, dtype=np.int32) % 100, False)
    seconds: dict[int, list[float]] = {rows: [] for rows in counts}
    for _ in range(9):
        for rows in counts:
            begin = clock()
            engine.forward(sequence, np.arange(rows, dtype=np.int32), True)
            seconds[rows].append(clock() - begin)
            engine.truncate(sequence, positions)
    engine.close(sequence)
    return {rows: statistics.median(found) for rows, found in seconds.items()}


def requests_of(llm: helm.LLM, streams: int, tokens: int) -> list[dict[str, Any]]:
    """Texts that repeat little: drawn, not greedy."""
    return [
        {
            "prompt": chat(llm, f"Write a long, vivid text about {topic}."),
            "max_tokens": tokens, "temperature": 1.0, "seed": seed,
        }
        for seed, topic in enumerate(TOPICS[:streams])
    ]  # fmt: skip


def chat(llm: helm.LLM, text: str) -> list[int]:
    """Tokens of a question."""
    messages = [{"role": "user", "content": text}]
    return list(llm._prompts.chat_job(messages, helm.SamplingParams(), Template()).tokens)


def copy_of(llm: helm.LLM, code: str) -> list[int]:
    """Code twice, and its first line once more."""
    assert llm.tokenizer is not None
    return list(llm.tokenizer.encode(code + code + code.splitlines(keepends=True)[0]))


def stops_of(llm: helm.LLM) -> list[int]:
    """Tokens that end an answer."""
    messages = [{"role": "user", "content": "Hello"}]
    return list(llm._prompts.chat_job(messages, helm.SamplingParams(), Template()).stop_tokens)


SCENARIOS = ("edit", "copy", "quotes", "text", "streams")


def scenario(llm: helm.LLM, name: str, lines: int, tokens: int) -> list[dict[str, Any]]:
    """The requests of one of SCENARIOS."""
    code = "".join(EDITED.read_text().splitlines(keepends=True)[:lines])
    if name == "edit":
        prompt = chat(llm, f"{EDIT}{code}```")
        return [{"prompt": prompt, "max_tokens": 16 * lines, "stop_tokens": stops_of(llm)}]
    if name == "copy":
        return [{"prompt": copy_of(llm, code), "max_tokens": tokens}]
    if name == "quotes":
        prompt = chat(llm, QUOTES + ARTICLE.read_text())
        return [{"prompt": prompt, "max_tokens": tokens, "stop_tokens": stops_of(llm)}]
    return requests_of(llm, 1, tokens) if name == "text" else requests_of(llm, 8, tokens // 2)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--lines", type=int, default=38, help="of the file that is edited")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--draft", help="a second model, which guesses (default: n-grams)")
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {"context": args.context, "threads": args.threads, "device": "cpu"}
    with helm.LLM(args.model, speculate="off", progress=False, **options) as llm:
        llm._service = None  # the engine is stepped here
        results: list[Result] = []
        seconds = step_times(llm._engine, llm.stats["threads"])
        shares = {rows: found / seconds[1] for rows, found in seconds.items()}
        print("a step of rows, beside one of 1:", {r: round(s, 2) for r, s in shares.items()})
        draft = None
        if args.draft is not None:
            draft = load_draft(args.draft, llm.tokenizer, llm.config, load_options(options)).engine
        for name in args.only:
            requests = scenario(llm, name, args.lines, args.tokens)
            found = workload(llm, draft, name, requests, args.rounds)
            results.append(found)
            print(json.dumps(asdict(found)), flush=True)
            if found.predicted:
                print(
                    f"{name}: gain {found.gain:.2f}; {found.per_step:.2f} tokens a step of "
                    f"{found.step_share:.2f} make {found.predicted:.2f}, the engine says "
                    f"{found.told:.2f}",
                    flush=True,
                )
    if args.json:
        report = {
            "model": args.model, "draft": args.draft,
            "step_shares": shares, "results": [asdict(result) for result in results],
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
