"""config.json and generation_config.json, for loading and for planning alone."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from random import Random
from typing import Any

from fuzz import models, mutate
from fuzz.checkpoints import ARCHITECTURES, generates
from fuzz.kind import Kind, sensible, tokens_are_sensible
from helm.commands.cli import main
from helm.errors import InvalidError
from helm.model.families import load_config

_KEYS: dict[str, tuple[Any, ...]] = {
    "rope_scaling": (
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 1e30},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    ),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 0}, {"rope_theta": -1.0}, []),
    "rope_theta": (0, -1, 1e300, 1e-300, "10000"),
    "sliding_window": (0, 1, 3, 2**31, -1, None, "4096"),
    "use_sliding_window": (True, False, None, 1),
    "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2, ["linear_attention"], {}),
    "max_window_layers": (0, 1, 10**9, -1, None),
    "num_hidden_layers": (0, 1, 3, 1000, 1001, 10_000, 10**9),
    "num_key_value_heads": (0, 1, 2, 3, 4096, 4097, None),
    "head_dim": (0, 1, 2, 15, 16, 17, 4096, 4097, None),
    "hidden_size": (1, 31, 32, 2**24, 2**24 + 1),
    "vocab_size": (0, 1, 1023, 1025, 2**24),
    "max_position_embeddings": (0, 1, 2, 15, 2**20, 2**30, 2**30 + 1),
    "torch_dtype": ("half", "auto", "float64", "torch.bfloat16", None),
    "quantization_config": ({"bits": 4}, {}, [], None),
    "tie_word_embeddings": (True, False, None, 1),
    "architectures": ([], ["LLaMAForCausalLM"], ["OPTForCausalLM", "LlamaForCausalLM"], "Llama"),
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "opt", "gpt2", None, 3),
    "eos_token_id": ([], [1, 2], -1, 1.0, 2**31, [None], [[1]], "1"),
    "rms_norm_eps": (0, 1, 1e-5, -1, 1e300),
    "hidden_act": ("gelu", "gelu_new", "relu", "swish", "tanh", None),
}
_GENERATION: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": [1],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 20,
    "stop_strings": ["\n\n"],
    "transformers_version": "5.0.0",
}
_VALUES = (0, -1, 1.0, 0.5, 1.5, 1e39, -0.0, [], [1], None, True, "0.5", 2**31, 2**64, 1e-300)


def config_bytes(random: Random, original: dict[str, Any]) -> bytes:
    """A config.json that differs from `original`."""
    document: Any = dict(original)
    if random.random() < 0.6:
        for key in random.sample(list(_KEYS), random.choice((1, 1, 2, 3))):
            document[key] = random.choice(_KEYS[key])
    else:
        document = mutate.json_value(random, document)
    return mutate.dumped(random, document)


class Config(Kind):
    """A model's config.json, beside weights of another."""

    name = "config"
    inputs = 2600

    def __init__(self, folder: Path) -> None:
        self._folders = [folder / architecture for architecture in ARCHITECTURES]
        for architecture, own in zip(ARCHITECTURES, self._folders, strict=True):
            models.write_model(own, architecture)

    def run(self, random: Random, folder: Path) -> None:
        origin = random.choice(self._folders)
        (folder / "model.safetensors").hardlink_to(origin / "model.safetensors")
        original = json.loads((origin / "config.json").read_text())
        path = folder / "config.json"
        path.write_bytes(config_bytes(random, original))
        if random.random() < 0.05:
            mutate.file(random, path)
        config = load_config(folder)
        sensible(config.num_attention_heads % config.num_key_value_heads == 0, "ragged heads")
        sensible(len(config.windows) == config.num_hidden_layers, "a window per layer")
        sensible(0 < config.max_context <= 2**30, f"a context of {config.max_context}")
        generates(folder, random)


class GenerationConfig(Kind):
    """generation_config.json, whose values sampling takes."""

    name = "generation_config"
    inputs = 1200

    def __init__(self, folder: Path) -> None:
        self._origin = folder / "model"
        models.write_model(self._origin, "LlamaForCausalLM")
        models.add_tokenizer(self._origin)

    def run(self, random: Random, folder: Path) -> None:
        for path in self._origin.iterdir():
            (folder / path.name).hardlink_to(path)
        path = folder / "generation_config.json"
        path.unlink()
        document: Any = dict(_GENERATION)
        if random.random() < 0.6:
            for key in random.sample(list(_GENERATION), random.choice((1, 1, 2, 3))):
                document[key] = random.choice(_VALUES)
        else:
            document = mutate.json_value(random, document)
        path.write_bytes(mutate.dumped(random, document))
        if random.random() < 0.05:
            mutate.file(random, path)
        with models.load(folder) as llm:
            completion = llm.generate("Once upon", seed=1, **random.choice(({}, {"max_tokens": 3})))
            tokens_are_sensible(completion.tokens, models.CONTEXT, llm.vocab_size)


class PlanCommand(Kind):
    """`helm-llm plan --json` for a config.json and a machine, without weights."""

    name = "plan_command"
    inputs = 1000
    limit_s = 10.0  # a search is no small thing
    _ends = (0, 1, 2)

    def __init__(self, folder: Path) -> None:
        self._configs = [models.config_of(architecture) for architecture in ARCHITECTURES]
        large = Path(__file__).parents[1] / "data" / "configs" / "qwen3-8b.json"
        self._configs.append(json.loads(large.read_text()))

    def run(self, random: Random, folder: Path) -> None:
        path = folder / "config.json"
        path.write_bytes(config_bytes(random, random.choice(self._configs)))
        machine = random.choice(("thesis-4060", "cpu-laptop-16gb", "rtx-3090-24gb-ddr4"))
        arguments = ["plan", str(path), "--profile", machine, "--json"]
        for option, values in (
            ("--context", ("1", "0", "-1", "100000", "1073741824", "x")),
            ("--batch", ("1", "3", "64", "100000", "0")),
            ("--prompt-tokens", ("1", "100000", "0")),
            ("--output-tokens", ("1", "1000000000", "0")),
            ("--vram", ("1", "8GiB", "0", "1e30", "-1GiB", "8")),
            ("--ram", ("1", "64GiB", "1MiB")),
            ("--objective", ("decode", "throughput", "ttft", "x")),
            ("--kv-dtype", ("i8", "f32", "auto", "f64")),
            ("--page-tokens", ("16", "15", "1048576", "512")),
            ("--weights", ("copied", "mapped", "compressed")),
        ):
            if random.random() < 0.15:
                arguments += [option, random.choice(values)]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(arguments)
            except SystemExit as end:  # of arguments that are none
                status = int(end.code or 0)
        sensible(status in self._ends, f"exit of {status}")
        if status != 0:
            raise InvalidError(err.getvalue())
        plan = json.loads(out.getvalue(), parse_constant=_no_number)
        predicted = plan["predicted"]
        for name in ("ttft_s", "decode_s", "total_s", "decode_tokens_per_s"):
            sensible(math.isfinite(predicted[name]), f"{name} is {predicted[name]}")
            sensible(predicted[name] > 0, f"{name} is {predicted[name]}")


def _no_number(name: str) -> None:
    sensible(False, f"{name} in the plan")
