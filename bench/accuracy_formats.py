"""What a format of weights costs in accuracy: a model as held beside itself in f32, and llama.cpp.

Teacher-forced: all engines get the same prompts, and their logits after each token are set beside
those of HELM with the same weights in f32. A GGUF file is measured as stored and in llama.cpp,
whose KV is f16 like HELM's here; other models in HELM's own formats. Ends with an error where a
limit is not kept.

    python bench/accuracy_formats.py FILE.gguf
    python bench/accuracy_formats.py MODEL --dtypes q8 q4
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import helm
from helm.machine.resources import cpu_affinity, default_threads
from peers.engines_here import machine, why_not
from peers.llama_model import LlamaContext, LlamaModel

ROOT = Path(__file__).parent.parent
SHIPPED = ("docs/*.md", "python/helm/*/*.py")  # text that a model is given unless --text says else
LLAMA = "llama.cpp"
CLEAR = 0.5  # logits: a token whose two best are as far apart must stay the best
ROWS = 64  # of logits in f64 at once

Logits = Callable[[Sequence[int]], np.ndarray]  # of a prompt: f32 [tokens, vocabulary]


@dataclass(frozen=True)
class Limits:
    """What a format may cost. kl: nats a token; over_llama: times the KL of llama.cpp."""

    kl: float = float("inf")
    over_llama: float = 1.1
    perplexity: float = 0.003
    same_best: float = 0.97


STORED = Limits()
OWN = {
    "q8": Limits(kl=0.001, perplexity=0.005),
    "q4": Limits(kl=0.02, perplexity=0.02, same_best=0.9),
}


@dataclass(frozen=True)
class Divergence:
    """Of one engine from the reference. kl: mean over tokens, nats. perplexity: of the text, and
    how much larger than the reference's as a share. same_best: share of tokens; clear_changes:
    tokens whose best changed though the reference was clear."""

    tokens: int
    kl: float
    perplexity: float
    perplexity_change: float
    same_best: float
    clear_changes: int


class Sums:
    """A Divergence, prompt by prompt."""

    def __init__(self) -> None:
        self._tokens = self._clear = self._same = self._predicted = 0
        self._kl = 0.0
        self._surprise = np.zeros(2)  # of the text: the engine's, the reference's

    def add(self, logits: np.ndarray, reference: np.ndarray, tokens: Sequence[int]) -> None:
        """logits, reference: [tokens, vocabulary] of a prompt of these tokens."""
        assert logits.shape == reference.shape == (len(tokens), reference.shape[1])
        following = np.array([*tokens[1:], -1])
        for begin in range(0, len(tokens), ROWS):
            part = slice(begin, begin + ROWS)
            self._add(log_probabilities(logits[part]), log_probabilities(reference[part]),
                      following[part])  # fmt: skip

    def _add(self, found: np.ndarray, reference: np.ndarray, following: np.ndarray) -> None:
        self._tokens += len(found)
        self._kl += float(np.sum(np.exp(reference) * (reference - found)))
        best = reference.argmax(axis=1)
        same = found.argmax(axis=1) == best
        two = np.partition(reference, -2, axis=1)[:, -2:]
        self._same += int(same.sum())
        self._clear += int((~same & (two[:, 1] - two[:, 0] >= CLEAR)).sum())
        known = np.flatnonzero(following >= 0)
        self._predicted += len(known)
        self._surprise -= [rows[known, following[known]].sum() for rows in (found, reference)]

    @property
    def divergence(self) -> Divergence:
        perplexity, of_reference = np.exp(self._surprise / max(1, self._predicted))
        return Divergence(
            self._tokens,
            self._kl / self._tokens,
            float(perplexity),
            float(perplexity / of_reference - 1),
            self._same / self._tokens,
            self._clear,
        )


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """f64 [rows, vocabulary]."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def shipped_text() -> str:
    files = [file for pattern in SHIPPED for file in sorted(ROOT.glob(pattern))]
    return "\n\n".join(file.read_text() for file in files)


def prompts_of(ids: Sequence[int], tokens: int, prompt: int) -> list[list[int]]:
    """Stretches of a text, spread evenly over it."""
    count = max(1, tokens // prompt)
    if len(ids) < count * prompt:
        raise SystemExit(
            f"[bench] the text has {len(ids)} tokens, expected {count * prompt}; give a longer one "
            "by --text or fewer by --tokens"
        )
    step = (len(ids) - prompt) // max(1, count - 1)
    return [list(ids[i * step : i * step + prompt]) for i in range(count)]


def stories(llm: helm.LLM, tokens: int, prompt: int) -> list[list[int]]:
    """Texts that a model draws, of up to `prompt` tokens each."""
    found: list[list[int]] = []
    while sum(map(len, found)) < tokens:
        drawn = llm.generate([1], max_tokens=prompt - 1, temperature=1.0, seed=len(found))
        found.append([1, *drawn.tokens][:prompt])
    return found


def helm_logits(model: str | None, prompts: list[list[int]], **options: str) -> list[np.ndarray]:
    """Of each prompt."""
    context = max(map(len, prompts))
    with helm.LLM(model, device="cpu", context=context, prefix_cache=False, **options) as llm:
        return [llm.logits(prompt) for prompt in prompts]


def llama_logits(path: Path, prompts: list[list[int]], threads: int) -> Iterator[np.ndarray]:
    model = LlamaModel(path)
    context = LlamaContext(model, max(map(len, prompts)), threads)
    for prompt in prompts:
        context.rewind(0)
        context.decode([(0, i, token, True) for i, token in enumerate(prompt)])
        yield np.array([context.row(i).copy() for i in range(len(prompt))])
    context.close()
    model.close()


def measure(
    model: str | None, dtypes: Sequence[str], tokens: int, prompt: int, text: str | None = None
) -> dict[str, Divergence]:
    """By engine: the dtypes of HELM and, of a GGUF file, llama.cpp where it is installed. The
    bundled model, model=None, gets its own stories, as it knows nothing else."""
    with helm.LLM(model, device="cpu", context=prompt) as llm:
        assert llm.tokenizer is not None
        if model is None and text is None:
            prompts = stories(llm, tokens, prompt)
        else:
            ids = llm.tokenizer.encode(text or shipped_text(), add_special_tokens=False)
            prompts = prompts_of(ids, tokens, prompt)
    reference = helm_logits(model, prompts, dtype="f32", kv_dtype="f32")

    def beside(logits: Iterator[np.ndarray] | list[np.ndarray]) -> Divergence:
        sums = Sums()
        for found, expected, given in zip(logits, reference, prompts, strict=True):
            sums.add(found, expected, given)
        return sums.divergence

    found = {}
    for dtype in dtypes:
        found[dtype] = beside(helm_logits(model, prompts, dtype=dtype, kv_dtype="f16"))
    if model is not None and model.endswith(".gguf") and not why_not(LLAMA):
        threads = default_threads(cpu_affinity())
        found[LLAMA] = beside(llama_logits(Path(model), prompts, threads))
    return found


def broken(found: dict[str, Divergence]) -> list[str]:
    """A line for each limit that is not kept."""
    lines = []
    for dtype, cost in found.items():
        if dtype == LLAMA:
            continue
        limits = OWN.get(dtype, STORED)
        most = limits.kl
        if LLAMA in found:
            most = min(most, limits.over_llama * found[LLAMA].kl)
        checks = (
            ("KL", cost.kl, most),
            ("change of perplexity", abs(cost.perplexity_change), limits.perplexity),
            ("share of changed best tokens", 1 - cost.same_best, 1 - limits.same_best),
        )
        lines += [
            f"{dtype}: {what} is {value:.4g}, expected at most {limit:.4g}"
            for what, value, limit in checks
            if not value <= limit
        ]
        if dtype not in OWN and cost.clear_changes:
            lines.append(f"{dtype}: {cost.clear_changes} clear tokens changed, expected none")
    return lines


def sheet(model: str, found: dict[str, Divergence]) -> Table:
    table = Table(title=f"{model} beside itself in f32", title_justify="left")
    table.add_column("weights")
    for column in ("tokens", "KL", "perplexity", "change", "same best token", "clear changes"):
        table.add_column(column, justify="right")
    for name, cost in found.items():
        table.add_row(
            name, f"{cost.tokens:,}", f"{cost.kl:.5f}", f"{cost.perplexity:.3f}",
            f"{cost.perplexity_change:+.2%}", f"{cost.same_best:.1%}", str(cost.clear_changes),
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a GGUF file, a folder, an id, or bundled")
    add("--dtypes", nargs="+", default=["auto"], help="auto, as stored, or q8, q4, ...")
    add("--tokens", type=int, default=2048)
    add("--prompt", type=int, default=512, help="tokens of a prompt")
    add("--text", type=Path, help="a file instead of HELM's documents and sources")
    add("--json", type=Path)
    args = parser.parse_args()
    model = None if args.model == "bundled" else args.model
    text = args.text.read_text() if args.text else None
    found = measure(model, args.dtypes, args.tokens, args.prompt, text)
    Console(width=None if sys.stdout.isatty() else 120).print(sheet(args.model, found))
    if args.json:
        costs = {name: asdict(cost) for name, cost in found.items()}
        args.threads = default_threads(cpu_affinity())
        args.json.write_text(json.dumps({"machine": machine(args), "costs": costs}, indent=1))
    if lines := broken(found):
        raise SystemExit("\n".join(f"[bench] {line}" for line in lines))


if __name__ == "__main__":
    main()
