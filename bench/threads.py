"""Threads that call one LLM, beside the same calls in turn: tokens/s of both, in turns.

python bench/threads.py [MODEL] --threads 4 --tokens 64 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import helm

PROMPT = "Once upon a time there was number"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="default: the bundled one")
    parser.add_argument("--threads", type=int, default=4, help="that call (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="of both (default: 5)")
    args = parser.parse_args()
    prompts = [f"{PROMPT} {i}" for i in range(args.threads)]
    rates: dict[str, list[float]] = {"in turn": [], "threads": []}
    with (
        helm.LLM(args.model, max_sequences=args.threads, prefix_cache=False) as llm,
        ThreadPoolExecutor(args.threads) as pool,
    ):

        def call(prompt: str) -> list[int]:
            return llm.generate(prompt, max_tokens=args.tokens, ignore_eos=True).tokens

        expected = [call(prompt) for prompt in prompts]
        for _ in range(args.rounds):
            for name, run in (("in turn", map), ("threads", pool.map)):
                begin = time.perf_counter()
                found = list(run(call, prompts))
                rates[name].append(args.threads * args.tokens / (time.perf_counter() - begin))
                assert found == expected, "equal calls gave other tokens"
    for name, found_rates in rates.items():
        low, high = min(found_rates), max(found_rates)
        print(f"{name}  {statistics.median(found_rates):,.1f} tokens/s [{low:,.1f}, {high:,.1f}]")


if __name__ == "__main__":
    main()
