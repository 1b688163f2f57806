"""Names that people know from other engines, and HELM's own for them; knows no values."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from helm.errors import InvalidError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# As Python spells them; those of the command line have dashes.
NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_tokens", "n_predict", "num_predict", "predict"),
        "max_tokens",
    ),
    **dict.fromkeys(
        ("max_model_len", "n_ctx", "num_ctx", "ctx_size", "context_size", "context_length"),
        "context",
    ),
    **dict.fromkeys(("n_threads", "num_threads"), "threads"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "stop"),
    **dict.fromkeys(("model_id", "model_path", "hf_repo"), "model"),
    **dict.fromkeys(("kv_cache_dtype", "cache_type_k", "cache_type_v"), "kv_dtype"),
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "torch_dtype": "dtype",
    "random_seed": "seed",
    "max_num_seqs": "max_sequences",
    "enable_prefix_caching": "prefix_cache",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "device_map": "device",
    "system_prompt": "system",
}
# What HELM has none of, and what there is instead.
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(
        ("n_gpu_layers", "gpu_layers", "num_gpu", "ngl"),
        "HELM places layers itself; {vram} bounds the memory of the accelerator",
    ),
    "gpu_memory_utilization": "{vram} bounds the memory of the accelerator",
    "do_sample": "{temperature} 0 is greedy, above 0 samples",
    "num_beams": "HELM decodes greedily or samples",
    "mirostat": "{temperature}, {top_p}, {top_k} and {min_p} choose how HELM samples",
    "n": "give the prompt several times, each with its own {seed}",
    "use_mmap": "{weights} mapped does that",
}
_PYTHON = {"vram": "vram_bytes"}

# Parameters of Python that the command line has, too, as options with dashes or of another name.
OPTIONS: Mapping[str, str] = {
    **{
        name: "--" + name.replace("_", "-")
        for name in (
            *("revision", "tokenizer"),
            *("context", "dtype", "kv_dtype", "threads", "page_tokens", "kv_overflow", "policy"),
            *("watermark", "weights", "speculate", "device", "profile"),
            *("prompt_tokens", "output_tokens"),
            *("batch", "objective", "max_tokens", "temperature", "top_p", "top_k", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
            *("stop", "seed", "json_schema", "tools", "chat_template"),
            *("continue_final_message", "requantize"),
        )
    },
    "template_variables": "--template-variable",
    "copies": "--copy",
    "kv_vram_bytes": "--kv-vram",
    "memory_bytes": "--ram",
    "vram_bytes": "--vram",
    "max_sequences": "--batch",
    "prompt": "--prompt-tokens",  # of helm.measure.benchmark.Load
    "output": "--output-tokens",
}
# What messages name is written as in a call: "raise context=", "give weights='copied'".
_ARGUMENT = re.compile(r"(?<![\w./-])([a-z_]+)=(?:'([^'\s]*)'|(?=[\s,;:.)]|$))")
_SUBJECT = re.compile(r"^(\[[a-z ]+\] )([a-z_]+)(?= (?:must be|is|has|cannot|goes) )")


def as_options(message: str) -> str:
    """A message of the Python API in the command line's terms."""

    def option_of(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in OPTIONS:
            return found[0]
        return OPTIONS[name] if value is None else f"{OPTIONS[name]} {value}"

    message = _SUBJECT.sub(lambda m: m[1] + OPTIONS.get(m[2], m[2]), message)
    return _ARGUMENT.sub(option_of, message)


def hint(name: str, known: Iterable[str]) -> str:
    """What to say of an unknown parameter of Python: the one that is meant, or all of them."""
    known = list(known)
    own = NAMES.get(name)
    if own in known:
        return f"here it is {own}"
    if name in ABSENT:
        return f"HELM has none: {_filled(ABSENT[name], lambda word: _PYTHON.get(word, word))}"
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def named(place: str, unpacked: type | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose unknown keywords are an InvalidError that says what is meant; `place`
    begins it. unpacked: the TypedDict of those that it does not name itself."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        own = [
            p.name
            for p in parameters
            if p.kind is not p.VAR_KEYWORD and p.name not in ("self", "cls")
        ]
        known = [*own, *([] if unpacked is None else unpacked.__annotations__)]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise InvalidError(f"[{place}] unknown parameter {name!r}; {hint(name, known)}")
            return function(*args, **kwargs)

        return checked

    return decorate


def named_fields(place: str) -> Callable[[type[T]], type[T]]:
    """The same for what a class is made from."""

    def decorate(owner: type[T]) -> type[T]:
        setattr(owner, "__init__", named(place)(owner.__init__))  # noqa: B010 - mypy's method
        return owner

    return decorate


def option(name: str) -> str | None:
    """HELM's option for another engine's; None for others. InvalidError where there is none."""
    word = name.lstrip("-").replace("-", "_")
    if word in ABSENT:
        raise InvalidError(f"[command] HELM has no {name}: {_filled(ABSENT[word], _dashed)}")
    return _dashed(NAMES[word]) if word in NAMES else None


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _filled(text: str, spell: Callable[[str], str]) -> str:
    words = ("repetition_penalty", "vram", "temperature", "top_p", "top_k", "min_p", "seed")
    return text.format(**{word: spell(word) for word in (*words, "weights")})
