"""The engines that bench/worker.py measures, behind the same calls. Compares and prints nothing.

An engine has `logits(tokens, alone)`, f32 [tokens, vocabulary] of a prompt of which the last
`alone` arrive one at a time, as in decode; `prepare(scenario)`, untimed: what it needs is loaded,
its sequences hold what comes before the timed tokens; `run(scenario)`: of each part, as it is asked
for, the seconds of each step, and what else it knows of them; `details`, what it says of itself.
Right before `run`, `prepare` has been called; both may be called again and again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gguf_file import MODEL
from helm.compiler.load_cost import WEIGHTS
from peers.llama_model import CHUNK, FLASH, LlamaContext, LlamaModel
from scenarios import ONE_THREAD, SHORT, Scenario, prompt_of, variant


@dataclass
class Timed:
    """A part of a scenario. ops: HELM's seconds by kind of op in the CPU's stages, barriers
    included. alone_s: of decode of several sequences with HELM, the same steps of one alone."""

    step_s: list[float] = field(default_factory=list)
    ops: dict[str, float] = field(default_factory=dict)
    alone_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.step_s)


class Engine(Protocol):
    @property
    def details(self) -> dict[str, str]: ...
    def logits(self, tokens: Sequence[int], alone: int) -> np.ndarray: ...
    def prepare(self, scenario: Scenario) -> None: ...
    def run(self, scenario: Scenario) -> Iterator[Timed]: ...


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has weights apart from a GGUF file."""
    return any(folder.glob("*.safetensors"))


def room(scenarios: Sequence[Scenario], setup: tuple[int, int]) -> int:
    """Positions that a sequence needs in any scenario of that set-up; 64 for verification."""
    return max(64, *(s.positions for s in scenarios if s.setup == setup))


def timed_steps(steps: int, step: Callable[[], None]) -> list[float]:
    """Seconds of each of `steps` calls."""
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


class Helm:
    """HELM on the CPU as `helm.LLM` loads it, its isa the environment's; or with weights
    loaded in one way, which its variant names."""

    def __init__(
        self, folder: Path, scenarios: Sequence[Scenario], args: argparse.Namespace
    ) -> None:
        from helm import _helm

        self._native, self._scenarios, self._args = _helm, scenarios, args
        self._model_path = folder if has_checkpoint(folder) else folder / MODEL
        self._setup: tuple[int, int] | None = None
        self._load(scenarios[0])

    def _load(self, scenario: Scenario) -> None:
        if scenario.setup == self._setup:
            return
        from helm.session.here import LoadOptions
        from helm.session.open import load_model

        self._engine = self._kept = None  # frees the memory of the last one first
        named = variant(self._args.engine)
        options = LoadOptions(
            context=room(self._scenarios, scenario.setup),
            max_sequences=scenario.sequences,
            batch=scenario.sequences,
            threads=self._args.threads,
            weights=named if named in WEIGHTS else self._args.weights,
            device="cpu",
        )
        loaded = load_model(self._model_path, None, options)
        self._setup, self._plan, self._engine = scenario.setup, loaded.plan, loaded.engine
        self._kept = self._native.PrefixCache(self._engine)
        self._vocabulary = loaded.plan.model.vocab_size
        self._open(scenario.sequences)

    def _open(self, sequences: int) -> None:
        context = self._plan.limits.context
        self._sequences = [self._kept.open([], context)[0] for _ in range(sequences)]
        self._held = 0  # positions of the scenarios' prompts in every sequence

    @property
    def details(self) -> dict[str, str]:
        return {"isa": self._engine.stats["isa"], "weights": self._plan.loading}

    @property
    def weight_bytes(self) -> float:
        """Read in a decode step."""
        return float(self._engine.stats["decode_bytes"])

    def logits(self, tokens: Sequence[int], alone: int) -> np.ndarray:
        ids, together = np.array(tokens, np.int32), len(tokens) - alone
        self._rewind(0)
        parts = [ids[:together], *(ids[i : i + 1] for i in range(together, len(ids)))]
        rows = [self._engine.forward(self._sequences[0], part, all=True) for part in parts]
        self._rewind(0)
        return np.concatenate(rows)

    def prepare(self, scenario: Scenario) -> None:
        self._load(scenario)
        if scenario.kind == "prefill":
            self._rewind(0)
        elif self._held >= scenario.context:
            self._rewind(scenario.context)
        elif scenario.context > SHORT and scenario.sequences == 1:
            self._fill(scenario.context)
        else:
            self._rewind(0)
            self._generate(scenario.context, 0, 1, self._sequences)

    def run(self, scenario: Scenario) -> Iterator[Timed]:
        held = scenario.context
        if scenario.kind == "prefill":
            yield self._time(held, 0, 1)
            return
        for steps in scenario.part_steps:
            alone_s = []
            if scenario.sequences > 1:
                alone_s = self._generate(held, held, steps, self._sequences[:1])
                self._engine.truncate(self._sequences[0], held)
            timed = self._time(held, held, steps)
            timed.alone_s = alone_s
            yield timed
            held += steps

    def _time(self, context: int, cached: int, new: int) -> Timed:
        self._engine.count_op_times(True)
        step_s = self._generate(context, cached, new, self._sequences)
        self._engine.count_op_times(False)
        return Timed(step_s, {op["op"]: op["seconds"] for op in self._engine.stats["cpu_ops"]})

    def _rewind(self, positions: int) -> None:
        for sequence in self._sequences:
            self._engine.truncate(sequence, positions)
        self._held = positions

    def _generate(
        self, context: int, cached: int, new: int, sequences: Sequence[int]
    ) -> list[float]:
        """Seconds of the steps that give `new` tokens to each of `sequences`."""
        tail = [1] if cached else []
        requests = [
            self._native.Request(
                prompt=[*prompt_of(context, self._vocabulary, i), *tail],
                sequence=sequence,
                cached=cached,
                max_tokens=new,
            )
            for i, sequence in enumerate(sequences)
        ]
        generation, step_s, tokens = self._native.Generation(self._engine, requests), [], 0
        while not generation.done:
            begin = time.perf_counter()
            tokens += len(generation.advance(0.0))
            step_s.append(time.perf_counter() - begin)
        assert tokens == new * len(requests), f"{tokens} tokens of {new} x {len(requests)}"
        self._held = context
        return step_s

    def _fill(self, context: int) -> None:
        from long_cache import write_long_cache

        for sequence in self._sequences:
            self._kept.close(sequence)
        with tempfile.TemporaryDirectory(dir=self._args.scratch) as folder:
            path = Path(folder) / "cache.kv"
            write_long_cache(self._engine, self._kept, self._plan, context, path)
            tokens, _ = self._kept.load(str(path))
        sequence, held = self._kept.open([*tokens, 1], self._plan.limits.context)
        assert held == context, f"the cache holds {held} positions of {context}"
        self._sequences, self._held = [sequence], context


class LlamaCpp:
    """llama.cpp through its C API. Flash attention as it chooses itself, on (fa) or off (no-fa);
    or with one thread."""

    def __init__(
        self, folder: Path, scenarios: Sequence[Scenario], args: argparse.Namespace
    ) -> None:
        self._scenarios, self._args = scenarios, args
        self._setting = variant(args.engine)
        self._model = LlamaModel(folder / MODEL)
        self._vocabulary = self._model.vocabulary
        self._setup: tuple[int, int] | None = None
        self._context: LlamaContext | None = None
        self._load(scenarios[0])

    @property
    def details(self) -> dict[str, str]:
        return {"flash attention": self._model.said}

    def _load(self, scenario: Scenario) -> None:
        if scenario.setup == self._setup:
            return
        if self._context is not None:
            self._context.close()
        self._context = LlamaContext(
            self._model,
            room(self._scenarios, scenario.setup),
            1 if self._setting == ONE_THREAD else self._args.threads,
            scenario.sequences,
            self._setting if self._setting in FLASH else "",
        )
        self._setup, self._held = scenario.setup, 0

    @property
    def _open(self) -> LlamaContext:
        assert self._context is not None
        return self._context

    def logits(self, tokens: Sequence[int], alone: int) -> np.ndarray:
        self._rewind(0)
        fed = [(0, i, token, True) for i, token in enumerate(tokens)]
        together = len(tokens) - alone
        rows = []
        for part in (fed[:together], *([row] for row in fed[together:])):
            self._open.decode(part)
            rows += [self._open.row(i).copy() for i in range(len(part))]
        self._rewind(0)
        return np.array(rows)

    def prepare(self, scenario: Scenario) -> None:
        self._load(scenario)
        if scenario.kind == "decode" and self._held >= scenario.context:
            self._rewind(scenario.context)
            return
        self._rewind(0)
        if scenario.kind == "decode":
            for sequence in range(scenario.sequences):
                self._prompt(scenario.context, sequence)

    def run(self, scenario: Scenario) -> Iterator[Timed]:
        if scenario.kind == "prefill":
            yield Timed(timed_steps(1, lambda: self._prompt(scenario.context, 0)))
            return
        tokens = [1] * scenario.sequences
        position = scenario.context

        def step() -> None:
            nonlocal tokens, position
            self._open.decode([(i, position, token, True) for i, token in enumerate(tokens)])
            tokens = [int(self._open.row(i).argmax()) for i in range(scenario.sequences)]
            position += 1

        for steps in scenario.part_steps:
            step_s = timed_steps(steps, step)
            assert np.isfinite(self._open.row(0)).all()
            yield Timed(step_s)

    def _prompt(self, length: int, sequence: int) -> int:
        """The token after a prompt."""
        prompt = prompt_of(length, self._vocabulary, sequence)
        for first in range(0, length, CHUNK):
            chunk = prompt[first : first + CHUNK]
            self._open.decode(
                [(sequence, i, token, i == length - 1) for i, token in enumerate(chunk, first)]
            )
        self._held = length
        return int(self._open.row(-1).argmax())

    def _rewind(self, positions: int) -> None:
        self._open.rewind(positions)
        self._held = positions


class Transformers:
    """Hugging Face transformers in the checkpoint's dtype, or in f32."""

    def __init__(
        self, folder: Path, scenarios: Sequence[Scenario], args: argparse.Namespace
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(args.threads)
        self._torch = torch
        dtype = {"": "auto", "f32": torch.float32}[variant(args.engine)]
        file = {} if has_checkpoint(folder) else {"gguf_file": MODEL}
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **file)
        self._vocabulary = self._model.config.vocab_size
        self._out: Any = None
        self._held = (0, 0)  # sequences, positions

    @property
    def details(self) -> dict[str, str]:
        return {"dtype": str(self._model.dtype)}

    def logits(self, tokens: Sequence[int], alone: int) -> np.ndarray:
        together, rows, past = len(tokens) - alone, [], None
        with self._torch.inference_mode():
            for part in (tokens[:together], *([token] for token in tokens[together:])):
                out = self._model(self._torch.tensor([part]), past_key_values=past, use_cache=True)
                past = out.past_key_values
                rows.append(out.logits[0].float().numpy())
        return np.concatenate(rows)

    def prepare(self, scenario: Scenario) -> None:
        if scenario.kind == "prefill":
            self._out, self._held = None, (0, 0)
        elif self._held == (scenario.sequences, scenario.context):
            past = self._out.past_key_values
            if past.get_seq_length() > scenario.context:
                past.crop(scenario.context - past.get_seq_length())
        else:
            self._prompt(scenario)

    def run(self, scenario: Scenario) -> Iterator[Timed]:
        if scenario.kind == "prefill":
            yield Timed(timed_steps(1, lambda: self._prompt(scenario)))
            return
        token = self._torch.ones((scenario.sequences, 1), dtype=self._torch.long)

        def step() -> None:
            nonlocal token
            past = self._out.past_key_values
            self._out = self._model(token, past_key_values=past, use_cache=True)
            token = self._out.logits[:, -1].argmax(-1, keepdim=True)

        for steps in scenario.part_steps:
            with self._torch.inference_mode():
                step_s = timed_steps(steps, step)
            assert self._torch.isfinite(self._out.logits).all()
            yield Timed(step_s)

    def _prompt(self, scenario: Scenario) -> None:
        rows = [prompt_of(scenario.context, self._vocabulary, i) for i in range(scenario.sequences)]
        with self._torch.inference_mode():
            self._out = self._model(self._torch.tensor(rows), use_cache=True, logits_to_keep=1)
            self._out.logits[:, -1].argmax(-1, keepdim=True)
        self._held = (scenario.sequences, scenario.context)


ENGINES = {"helm": Helm, "llama.cpp": LlamaCpp, "transformers": Transformers}
