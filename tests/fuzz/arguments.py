"""Arguments of the Python API: types and values that are none of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import helm
from device_profiles import fast_accelerator
from fuzz import models, odd
from fuzz.kind import Kind, sensible, tokens_are_sensible
from helm.errors import HelmError

_PROMPTS: tuple[Any, ...] = ("Once upon", [1, 2, 3], ["a", [5, 6]], [[1]])
_MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}],
)
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 3, None),
    "temperature": (0, 0.7, 1e-30, 3e38),
    "top_p": (1.0, 0.5, 1e-300),
    "top_k": (0, -1, 5, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1.0, 1e-38, 3e38),
    "stop": (("a",), "the", ()),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 5, 2**31 - 1),
    "stop_token_ids": ((), [5]),
    "ignore_eos": (True, False),
    "presence_penalty": (0, -2.0, 2),
    "frequency_penalty": (0, -2.0, 2),
    "logit_bias": ({}, {5: 100, 7: -100.0}, {2**31 - 1: 1}),
    "json_schema": ({"enum": [1, "a"]}, "true", {"type": "object"}, {"type": "array", "items": {}}),
    "regex": ("[ab]{1,3}", "a*", "("),
    "grammar": ('start: "a" | "b"', "start:", "a"),
}
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "revision": (None, "main"),
    "context": (1, 16, 64, 128),
    "max_sequences": (1, 8, 1000),
    "dtype": ("f32", "f16", "bf16", "q8", "q4", "fit", "auto"),
    "kv_dtype": ("f32", "f16", "bf16", "i8", "auto"),
    "threads": (1, 2, 5),
    "page_tokens": (16, 512, 48),
    "kv_overflow": ("auto", "stream", "cpu"),
    "kv_vram_bytes": (1, 1 << 20),
    "watermark": (0.0, 0.5, 1.0),
    "prefix_cache": (True, False),
    "weights": ("auto", "copied", "mapped", "compressed"),
    "copies": ((), ["absent"], ["a\0b"]),
    "expected_tokens": (1, 10**9),
    "progress": (odd.planted, lambda done, total: None),
    "memory_bytes": (1 << 30, 1 << 40, 1),
    "device": ("cpu", "sim", "sim:vram=700MiB", "sim:vram=1", "sim:,", "sim:threads=0", "cuda:99"),
    "vram_bytes": (1, 700 << 20),
    "profile": ("thesis-4060", "cpu-laptop-16gb"),
    "prompt_tokens": (1, 64),
    "output_tokens": (1, 64),
    "batch": (1, 3),
    "objective": ("total", "decode", "ttft", "throughput", "serve"),
    "measuring": (odd.planted, lambda what, share: None),
}
# What measures the machine, or waits for so many threads, is no matter of arguments.
_COSTLY = {"threads": 64}


class Arguments(Kind):
    """One call of the API with an odd value in the place of one or two of its arguments."""

    name = "arguments"
    refusals: ClassVar[tuple[type[Exception], ...]] = (HelmError, TypeError, ValueError)
    inputs = 2600

    def __init__(self, folder: Path) -> None:
        self._model = folder / "model"
        models.write_model(self._model, "LlamaForCausalLM")
        models.add_tokenizer(self._model)
        self._kv = folder / "valid.kv"
        self._profile = fast_accelerator()
        self._calls: tuple[Callable[[Random, Path], None], ...] = (
            self._load, self._load, self._generate, self._generate, self._stream, self._chat,
            self._logits, self._kv_files, self._sampling, self._tokenizer, self._from_torch,
        )  # fmt: skip
        with models.load(self._model) as llm:
            self._expected = llm.generate([1, 2, 3], max_tokens=3).tokens
            llm.save_kv(self._kv)

    def run(self, random: Random, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                random.choice(self._calls)(random, folder)
            except odd.PlantedError as error:
                raise ValueError("it was planted") from error

    def _still_right(self, llm: helm.LLM) -> None:
        sensible(llm.generate([1, 2, 3], max_tokens=3).tokens == self._expected, "other tokens")

    def _load(self, random: Random, folder: Path) -> None:
        options: dict[str, Any] = {"memory_bytes": 1 << 30, "threads": 1}
        names = random.sample(list(_OPTIONS), random.choice((1, 2, 3)))
        for name in names:
            usual = random.random() < 0.4
            options[name] = random.choice(_OPTIONS[name]) if usual else odd.value(random)
        model: Any = self._model if random.random() < 0.9 else odd.value(random)
        for name, most in _COSTLY.items():
            if isinstance(options[name], int) and options[name] > most:
                options[name] = most
        if "device" in names and options.get("profile") is None:
            options["profile"] = self._profile  # or the device is measured first
        with helm.LLM(model, **options) as llm:
            tokens_are_sensible(llm.generate([1, 2], max_tokens=2).tokens, 2, llm.vocab_size)

    def _settings(self, random: Random) -> dict[str, Any]:
        found = {name: random.choice(_SAMPLING[name]) for name in random.sample(list(_SAMPLING), 2)}
        if random.random() < 0.7:
            found[random.choice((*_SAMPLING, "absent", ""))] = odd.value(random)
        if random.random() < 0.1:
            found["sampling"] = odd.value(random)
        return {"max_tokens": 3, **found}

    def _prompt(self, random: Random, usual: tuple[Any, ...]) -> Any:
        return random.choice(usual) if random.random() < 0.5 else odd.value(random)

    def _generate(self, random: Random, folder: Path) -> None:
        with models.load(self._model) as llm:
            try:
                found = llm.generate(self._prompt(random, _PROMPTS), **self._settings(random))
            finally:
                self._still_right(llm)
            for completion in found if isinstance(found, list) else [found]:
                tokens_are_sensible(completion.tokens, models.CONTEXT, llm.vocab_size)
                sensible(isinstance(completion.text, str), "no text")

    def _stream(self, random: Random, folder: Path) -> None:
        with models.load(self._model) as llm:
            try:
                stream = llm.stream(self._prompt(random, _PROMPTS[:2]), **self._settings(random))
                for _ in range(random.choice((0, 1, 99))):
                    next(stream, None)
                stream.close()
                sensible(stream.completion.finish_reason in ("stop", "length", "cancelled"), "why")
            finally:
                self._still_right(llm)

    def _chat(self, random: Random, folder: Path) -> None:
        options = self._settings(random)
        for name in ("tools", "template_variables"):
            if random.random() < 0.2:
                options[name] = odd.value(random)
        messages = self._prompt(random, _MESSAGES)
        if random.random() < 0.3:
            messages = [{"role": "user", "content": odd.value(random)}]
        with models.load(self._model) as llm:
            try:
                tokens = llm.chat(messages, **options).tokens
                tokens_are_sensible(tokens, models.CONTEXT, llm.vocab_size)
            finally:
                self._still_right(llm)

    def _logits(self, random: Random, folder: Path) -> None:
        with models.load(self._model) as llm:
            rows = llm.logits(odd.value(random))
            sensible(rows.ndim == 2 and rows.shape[1] == llm.vocab_size, f"{rows.shape}")

    def _kv_files(self, random: Random, folder: Path) -> None:
        with models.load(self._model) as llm:
            try:
                if random.random() < 0.5:
                    llm.generate([1, 2, 3, 4], max_tokens=2)
                    name = random.choice((folder / "x.kv", "x.kv", odd.value(random)))
                    options = {"messages": odd.value(random)} if random.random() < 0.5 else {}
                    if random.random() < 0.3:
                        options["progress"] = odd.value(random)
                    llm.save_kv(name, **options)
                    sensible(llm.load_kv(name).cached > 0, "nothing was saved")
                else:
                    llm.load_kv(random.choice((self._kv, odd.value(random))),
                                progress=odd.value(random))  # fmt: skip
            finally:
                self._still_right(llm)

    def _sampling(self, random: Random, folder: Path) -> None:
        params = helm.SamplingParams(**self._settings(random))
        sensible(params.resolve({}).seed is not None, "no seed")

    def _tokenizer(self, random: Random, folder: Path) -> None:
        tokenizer = helm.Tokenizer.from_directory(self._model)
        call = random.choice((
            lambda: tokenizer.encode(odd.value(random)),
            lambda: tokenizer.decode(odd.value(random)),
            lambda: tokenizer.token_text(odd.value(random)),
            lambda: tokenizer.token_id(odd.value(random)),
            lambda: tokenizer.render_chat(odd.value(random), tools=odd.value(random)),
            lambda: tokenizer.render_chat(_MESSAGES[0], template=odd.value(random)),
            lambda: helm.Tokenizer.from_directory(odd.value(random)),
            lambda: helm.Tokenizer.from_directory(self._model, odd.value(random)),
        ))  # fmt: skip
        call()

    def _from_torch(self, random: Random, folder: Path) -> None:
        class Settings:
            """As far as from_torch looks at a configuration."""

            def to_dict(self) -> Any:
                valid = models.config_of("LlamaForCausalLM")
                return valid if random.random() < 0.7 else odd.value(random)

        class Module:
            """As far as from_torch looks at a model."""

            config: Any = random.choice((Settings(), Settings(), odd.value(random)))
            generation_config: Any = random.choice((None, odd.value(random)))

            def state_dict(self) -> Any:
                return odd.value(random)

        helm.LLM.from_torch(random.choice((Module(), odd.value(random))))
