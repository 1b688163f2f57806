"""Measures one engine on one checkpoint in a process of its own and prints one line of JSON.

Run by compare.py; each engine is verified (the right number of tokens, finite logits) before its
figures count. Times are wall seconds, sizes bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# When the process was asked for, so that interpreter and imports count.
SPAWNED = float(os.environ.get("HELM_BENCH_SPAWNED", time.time()))


@dataclass
class Measurement:
    """What one process measured."""

    load_s: float  # process start to model loaded
    first_token_s: float  # process start to the first token after a prompt of 8
    prefill_s: float
    decode_s: float
    decode_tokens: int
    peak_rss_bytes: int = 0


def prompt_of(length: int) -> list[int]:
    """Arbitrary tokens, the same for every engine."""
    return [(i * 7919 + 13) % 50000 for i in range(length)]


def since_spawned() -> float:
    """Seconds since this process was asked for."""
    return time.time() - SPAWNED


def run_helm(folder: Path, args: argparse.Namespace) -> Measurement:
    import helm

    context = max(args.prompt, args.decode_prompt + args.tokens)
    options = {"context": context, "weights": args.weights, "prefix_cache": False}
    with helm.LLM(folder, threads=args.threads, **options) as llm:
        load_s = since_spawned()
        llm.generate(prompt_of(8), max_tokens=1, temperature=0, ignore_eos=True)
        first_s = since_spawned()
        prefill = llm.generate(prompt_of(args.prompt), max_tokens=1, temperature=0)
        result = llm.generate(
            prompt_of(args.decode_prompt), max_tokens=args.tokens, temperature=0, ignore_eos=True
        )
        assert len(result.tokens) == args.tokens
        decode_s = result.timings.decode_s
        return Measurement(load_s, first_s, prefill.timings.prefill_s, decode_s, args.tokens - 1)


def run_transformers(folder: Path, args: argparse.Namespace) -> Measurement:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.compute) if args.compute else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    load_s = since_spawned()
    with torch.inference_mode():
        model(torch.tensor([prompt_of(8)]), logits_to_keep=1)
        first_s = since_spawned()
        begin = time.perf_counter()
        out = model(torch.tensor([prompt_of(args.prompt)]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        prefill_s = time.perf_counter() - begin
        assert torch.isfinite(out.logits).all()
        out = model(torch.tensor([prompt_of(args.decode_prompt)]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        begin = time.perf_counter()
        for _ in range(args.tokens - 1):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
        decode_s = time.perf_counter() - begin
    return Measurement(load_s, first_s, prefill_s, decode_s, args.tokens - 1)


def run_llama(folder: Path, args: argparse.Namespace) -> Measurement:
    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    silence = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silence, ctypes.c_void_p(0))
    model_params = llama.llama_model_default_params()
    model = llama.llama_model_load_from_file(str(folder / "model.gguf").encode(), model_params)
    params = llama.llama_context_default_params()
    params.n_ctx = max(args.prompt, args.decode_prompt + args.tokens) + 8
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = args.threads
    context = llama.llama_init_from_model(model, params)
    load_s = since_spawned()
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def decode(ids: list[int]) -> int:
        array = (llama.llama_token * len(ids))(*ids)
        assert llama.llama_decode(context, llama.llama_batch_get_one(array, len(ids))) == 0
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (vocab,))
        assert np.isfinite(logits).all()
        return int(logits.argmax())

    memory = llama.llama_get_memory(context)
    decode(prompt_of(8))
    first_s = since_spawned()
    llama.llama_memory_clear(memory, True)
    begin = time.perf_counter()
    prompt = prompt_of(args.prompt)
    for first in range(0, len(prompt), 512):
        decode(prompt[first : first + 512])
    prefill_s = time.perf_counter() - begin
    llama.llama_memory_clear(memory, True)
    token = decode(prompt_of(args.decode_prompt))
    begin = time.perf_counter()
    for _ in range(args.tokens - 1):
        token = decode([token])
    decode_s = time.perf_counter() - begin
    return Measurement(load_s, first_s, prefill_s, decode_s, args.tokens - 1)


def run_ceiling(_: Path, args: argparse.Namespace) -> dict[str, float]:
    from helm import _helm

    return {
        "read_bytes_per_s": _helm.stream_read_bytes_per_s(args.threads, 1 << 30, 1.0),
        "fma_flops": _helm.fma_flops(args.threads, 0.5),
    }


ENGINES = {
    "ceiling": run_ceiling,
    "helm": run_helm,
    "transformers": run_transformers,
    "llama.cpp": run_llama,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode-prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--weights", choices=("copied", "mapped"), default="copied")
    parser.add_argument("--compute", help="transformers: torch dtype to load as")
    args = parser.parse_args()
    result = ENGINES[args.engine](args.folder, args)
    if isinstance(result, Measurement):
        result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result = asdict(result)
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
