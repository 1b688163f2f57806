"""Calls of the native objects in any order, with numbers that fit nowhere."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from device_profiles import fast_accelerator
from engine_helpers import greedy, prompt_of
from fuzz import models, odd
from fuzz.kind import Kind, NonsenseError, sensible
from fuzz.plans import SIM
from helm import _helm
from helm.errors import HelmError

_CONTEXT, _SEQUENCES = 64, 3
_NUMBERS = (0, 1, -1, 2, 3, 5, 17, 63, 64, 65, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63, 1.5, None)


class NativeCalls(Kind):
    """A short program over engines, sequences, generations and prefix caches."""

    name = "native_calls"
    refusals: ClassVar[tuple[type[Exception], ...]] = (
        HelmError, TypeError, ValueError, IndexError, odd.PlantedError,
    )  # fmt: skip
    inputs = 2500

    def __init__(self, folder: Path) -> None:
        self._model = folder / "model"
        models.write_model(self._model, "LlamaForCausalLM")
        sizes = {"context": _CONTEXT, "max_sequences": _SEQUENCES, "page_tokens": 16}
        with models.load(self._model, **sizes) as llm:
            self._plans = [llm.plan.to_json()]
        shared = {"device": SIM, "profile": fast_accelerator(), "batch": _SEQUENCES}
        with models.load(self._model, **sizes, **shared) as llm:
            self._plans.append(llm.plan.to_json())
        self._prompts = [prompt_of(20), prompt_of(7)]
        self._expected = greedy(self._engine(0), self._prompts, 5)

    def _engine(self, plan: int) -> Any:
        return _helm.Engine(self._plans[plan], str(self._model), threads=1, device=SIM)

    def run(self, random: Random, folder: Path) -> None:
        engine = self._engine(random.choice((0, 0, 1)))
        program = Program(random, engine, folder, self._plans[0])
        for _ in range(random.choice((3, 10, 30))):
            program.step()
        program.forget()
        gc.collect()
        for sequence in program.sequences:
            with contextlib.suppress(HelmError):  # closed before
                engine.close(sequence)
        try:
            found = greedy(engine, self._prompts, 5)
            for _ in range(_SEQUENCES):
                engine.open(_CONTEXT)
        except HelmError as error:
            raise NonsenseError(f"after all calls: {error}") from error
        sensible(found == self._expected, f"tokens {found} after all calls, not {self._expected}")


class Program:
    """What a program holds, and one more call of it."""

    def __init__(self, random: Random, engine: Any, folder: Path, plan: str) -> None:
        self._random = random
        self._engine = engine
        self._plan = plan
        self._file = str(folder / "x.kv")
        self.sequences: list[int] = []
        self._generations: list[Any] = []
        self._caches: list[Any] = []

    def forget(self) -> None:
        """Drops every object but the engine."""
        if self._random.random() < 0.5:
            self._caches.clear()
        self._generations.clear()
        self._caches.clear()

    def step(self) -> None:
        """One call; a refusal is as good as any answer."""
        calls = (
            self._open, self._open, self._close, self._forward, self._forward, self._truncate,
            self._length, self._generation, self._generation, self._advance, self._advance,
            self._cancel, self._timings, self._cache, self._keep, self._files, self._drop,
            self._stats, self._engine_of_tensors,
        )  # fmt: skip
        try:
            self._random.choice(calls)()
        except (HelmError, TypeError, ValueError, IndexError, odd.PlantedError) as error:
            sensible(bool(str(error).strip()), f"a {type(error).__name__} without a message")

    def _number(self) -> Any:
        return self._random.choice(_NUMBERS)

    def _sequence(self) -> Any:
        if self.sequences and self._random.random() < 0.8:
            return self._random.choice(self.sequences)
        return self._number()

    def _tokens(self) -> Any:
        pick = self._random.random()
        if pick < 0.6:
            count = self._random.choice((0, 1, 5, 16, 17, 64))
            tokens = [self._random.randrange(models.VOCAB) for _ in range(count)]
        elif pick < 0.8:
            tokens = [self._random.choice((0, -1, models.VOCAB, 2**31 - 1, -(2**31)))]
        else:
            return odd.value(self._random)
        return np.array(tokens, self._random.choice((np.int32, np.int32, np.int32, np.int64)))

    def _list(self) -> Any:
        tokens = self._tokens()
        return tokens.tolist() if isinstance(tokens, np.ndarray) else tokens

    def _open(self) -> None:
        capacity = self._random.choice((_CONTEXT, 20, 1, self._number()))
        if self._caches and self._random.random() < 0.5:
            sequence, _ = self._random.choice(self._caches).open(self._list(), capacity)
        else:
            sequence = self._engine.open(capacity)
        self.sequences.append(sequence)

    def _close(self) -> None:
        holder = self._random.choice((self._engine, *self._caches))
        holder.close(self._sequence())

    def _engine_of_tensors(self) -> None:
        name = self._random.choice(("model.norm.weight", "absent", 3))
        _helm.Engine(self._plan, "", {name: odd.value(self._random)}, threads=1)

    def _forward(self) -> None:
        rows = self._engine.forward(self._sequence(), self._tokens(), self._random.random() < 0.5)
        sensible(rows.ndim == 2 and rows.shape[1] == models.VOCAB, f"logits {rows.shape}")
        sensible(bool(np.isfinite(rows).all()), "logits that are no numbers")

    def _truncate(self) -> None:
        self._engine.truncate(self._sequence(), self._number())

    def _length(self) -> None:
        length = self._engine.length(self._sequence())
        sensible(0 <= length <= _CONTEXT, f"a length of {length}")

    def _generation(self) -> None:
        requests = [self._request() for _ in range(self._random.choice((0, 1, 1, 2, 5)))]
        prefixes = self._random.choice((None, *self._caches))
        self._generations.append(_helm.Generation(self._engine, requests, prefixes))

    def _request(self) -> Any:
        options: dict[str, Any] = {"prompt": prompt_of(self._random.choice((1, 7, 20)))}
        options["max_tokens"] = self._random.choice((1, 5, 40))
        if self._random.random() < 0.3:
            options.update(sequence=self._sequence(), cached=self._random.choice((0, 1, 7)))
        special = (*_NUMBERS, float("nan"), float("inf"), -1e30)
        if self._random.random() < 0.4:
            name = self._random.choice((
                "cached", "sequence", "max_tokens", "temperature", "top_k", "top_p", "min_p",
                "repetition_penalty", "seed", "logprobs", "presence_penalty", "frequency_penalty",
            ))  # fmt: skip
            options[name] = self._random.choice(special)
        if self._random.random() < 0.1:
            options["prompt"] = self._list()
        if self._random.random() < 0.1:
            options["stop_tokens"] = self._list()
        if self._random.random() < 0.1:
            options["logit_bias"] = [(self._random.choice(_NUMBERS), self._random.choice(special))]
        return _helm.Request(**options)

    def _advance(self) -> None:
        if self._generations:
            seconds = self._random.choice((0.0, 0.0, 0.001, -1.0, float("nan"), 1e-300))
            for token in self._random.choice(self._generations).advance(seconds):
                failed = token.finish == "error" and token.id == -1
                sensible(failed or 0 <= token.id < models.VOCAB, f"token {token.id}")

    def _cancel(self) -> None:
        if self._generations:
            self._random.choice(self._generations).cancel(
                self._random.choice((0, 1, self._number()))
            )

    def _timings(self) -> None:
        if self._generations:
            generation = self._random.choice(self._generations)
            sensible(generation.done in (True, False), "neither done nor not")
            generation.timings(self._random.choice((0, 1, self._number())))

    def _cache(self) -> None:
        if self._caches and self._random.random() < 0.5:
            cache = self._random.choice(self._caches)
            self._random.choice(
                (cache.clear, lambda: cache.kept, lambda: cache.fits(self._number()))
            )()
        else:
            self._caches.append(_helm.PrefixCache(self._engine))

    def _keep(self) -> None:
        if self._caches:
            self._random.choice(self._caches).keep(self._sequence(), self._list())

    def _files(self) -> None:
        if not self._caches:
            return
        cache, progress = (
            self._random.choice(self._caches),
            self._random.choice((None, odd.planted)),
        )
        if self._random.random() < 0.5:
            cache.save(self._list(), self._file, self._random.choice(("", "{}", "\x00")), progress)
        else:
            cache.load(self._file, progress)

    def _drop(self) -> None:
        held = self._random.choice((self._generations, self._caches, self.sequences))
        if held and held is not self.sequences:
            held.pop(self._random.randrange(len(held)))

    def _stats(self) -> None:
        self._engine.count_op_times(self._random.random() < 0.5)
        sensible(self._engine.stats["weights_bytes"] > 0, "no weights")
