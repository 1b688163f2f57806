"""How the next token is chosen, as the user states it; knows nothing of engines or tokenizers."""

from __future__ import annotations

import dataclasses
import math
import numbers
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from helm.base.arguments import is_integer, shown
from helm.base.familiar import named_fields
from helm.errors import InvalidError

FLOAT32_MAX = 3.4028234663852886e38  # the runtime computes in float32
INT32_MAX = 2**31 - 1
DEFAULT_MAX_TOKENS = 256
# Parameters that a model's generation_config.json may set.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingKeywords(TypedDict, total=False):
    """SamplingParams as keywords of a call."""

    max_tokens: int | Literal["auto"] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    stop: tuple[str, ...] | list[str] | str | None
    seed: int | None
    logprobs: int | None
    stop_token_ids: tuple[int, ...] | list[int] | None
    ignore_eos: bool
    json_schema: Mapping[str, Any] | str | bool | None
    regex: str | None
    grammar: str | None
    priority: int


@named_fields("sampling")
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters under their usual names; None means the model's own default.

    A model's default comes from its generation_config.json when that says `do_sample`; otherwise
    decoding is greedy. Applied in this order: repetition penalty, presence and frequency penalty,
    logit bias, grammar, temperature, top-k, top-p, min-p. Every field is checked here: InvalidError
    names the parameter and its range.

    max_tokens: new tokens at most, >= 1; None: up to the context limit; "auto": the model's
    `max_new_tokens`, or 256.
    temperature: >= 0; 0 is greedy.
    top_p: in (0, 1]; the smallest set of tokens with this much probability (Holtzman et al. 2020).
    top_k: only the k most likely tokens; 0 or -1: all.
    min_p: in [0, 1]; drops tokens below min_p times the likeliest one (Nguyen et al. 2024).
    repetition_penalty: > 0; 1 is off (Keskar et al. 2019).
    presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logit of each token of the
    output so far, once and for each time it occurs (OpenAI's).
    logit_bias: {token id: number in [-100, 100]}; added to the logit of that token.
    stop: strings that end the text, in place of the model's `stop_strings`; the text is cut
    before them.
    stop_token_ids: token ids that end the text beside the model's own.
    ignore_eos: do not stop at the model's end-of-sequence tokens.
    seed: in [0, 2**64); None: a random one, which the result reports.
    logprobs: None: none; 0: of each chosen token; n: of the n most likely ones too.
    json_schema, regex, grammar: one at most; what the text must be: JSON without white space after
    a schema (a dict, or its text), a match of a regular expression, or a text of a grammar in
    llguidance's variant of Lark's syntax. They need the package llguidance. The end-of-sequence
    token comes where the text is complete, and not before; with max_tokens too low the text is cut.
    priority: 0 (batch), 1 (normal) or 2 (interactive); who waits goes in this order, and who finds
    no memory left takes it from a lower one. A class that is passed over rises with time.
    """

    max_tokens: int | Literal["auto"] | None = "auto"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] | list[str] | str | None = None
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    ignore_eos: bool = False
    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    priority: int = 1

    def __post_init__(self) -> None:
        if is_integer(self.top_k) and int(self.top_k) == -1:
            self._set("top_k", 0)
        if self.max_tokens != "auto":
            self._integer("max_tokens", 1, 2**62)
        self._integer("top_k", 0, INT32_MAX)
        self._integer("logprobs", 0, INT32_MAX)
        if self.priority is None:
            self._set("priority", 1)
        self._integer("priority", 0, 2)
        self._integer("seed", 0, 2**64 - 1)
        self._real("temperature", 0.0, FLOAT32_MAX)
        self._real("top_p", 0.0, 1.0, open_low=True)
        self._real("min_p", 0.0, 1.0)
        self._real("repetition_penalty", 0.0, FLOAT32_MAX, open_low=True)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) is None:
                self._set(name, 0.0)
            self._real(name, -2.0, 2.0)
        self._set("logit_bias", _biases(self.logit_bias))
        self._check_grammar()
        if not isinstance(self.ignore_eos, bool):
            raise _bad("ignore_eos", "True or False", self.ignore_eos)
        if self.stop is not None:
            self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_tokens(self.stop_token_ids))

    def _check_grammar(self) -> None:
        names = ("json_schema", "regex", "grammar")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidError(
                f"[sampling] {given[0]} and {given[1]} were given; a text obeys one of them"
            )
        for name in given:
            text = getattr(self, name)
            if name == "json_schema":
                if not isinstance(text, (str, bool, Mapping)):
                    raise _bad(name, "a JSON object (a dict) or its text", text)
            elif not isinstance(text, str) or not text:
                raise _bad(name, "text, and not empty", text)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        rule = f"an integer of at least {low}"
        if not is_integer(value):
            raise _bad(name, rule, value)
        value = int(value)
        if not low <= value <= high:
            raise _bad(name, rule if value < low else f"an integer of at most {high}", value)
        self._set(name, value)

    def _real(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if high == FLOAT32_MAX:
            rule = f"a finite number {'above' if open_low else 'of at least'} {low:g}"
        else:
            rule = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise _bad(name, rule, value)
        try:
            number = float(value)
        except OverflowError:
            raise _bad(name, rule, value) from None
        if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
            raise _bad(name, rule, value)
        self._set(name, number)

    def resolve(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """The same with every None that has a model default filled in, and a seed chosen."""
        defaults: dict[str, Any] = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop": generation_config.get("stop_strings") or (),
        }
        if generation_config.get("do_sample") is True:
            defaults["temperature"] = 1.0
            for name in MODEL_DEFAULTS:
                if generation_config.get(name) is not None:
                    defaults[name] = generation_config[name]
        elif generation_config.get("repetition_penalty") is not None:
            defaults["repetition_penalty"] = generation_config["repetition_penalty"]
        wanted = {name: v for name, v in defaults.items() if getattr(self, name) is None}
        if self.max_tokens == "auto":
            wanted["max_tokens"] = generation_config.get("max_new_tokens") or DEFAULT_MAX_TOKENS
        try:
            resolved = dataclasses.replace(self, **wanted)
        except InvalidError as error:
            raise InvalidError(f"[sampling] generation_config.json: {error}") from None
        if resolved.seed is None:
            # Below 2**53: survives JSON readers that know only doubles.
            resolved = dataclasses.replace(resolved, seed=secrets.randbits(53))
        return resolved


def sampling_params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    """`params` (or the defaults) with keyword overrides; InvalidError for an unknown name."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidError(
            f"[sampling] expected helm.SamplingParams, got {type(params).__name__}; give "
            "sampling parameters as keywords, or as a SamplingParams object"
        )
    return dataclasses.replace(params or SamplingParams(), **overrides)


def _bad(name: str, rule: str, value: Any) -> InvalidError:
    return InvalidError(f"[sampling] {name} must be {rule}, got {shown(value)}")


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    strings = _items("stop", strings, "a string or a list of strings")
    if not all(isinstance(s, str) for s in strings):
        raise _bad("stop", "a string or a list of strings", value)
    if not all(strings):
        raise _bad("stop", "made of non-empty strings", value)
    return strings


def _stop_tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    rule = "a list of token ids"
    if isinstance(value, (str, bytes, bytearray)):
        raise _bad("stop_token_ids", rule, value)
    ids = _items("stop_token_ids", value, rule)
    if not all(is_integer(i) and 0 <= int(i) <= INT32_MAX for i in ids):
        raise _bad("stop_token_ids", rule, value)
    return tuple(int(i) for i in ids)


def _biases(value: Any) -> dict[int, float] | None:
    rule = "a dict of token ids and numbers in [-100, 100]"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _bad("logit_bias", rule, value)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        if not is_integer(token) or not 0 <= int(token) <= INT32_MAX:
            raise _bad("logit_bias", rule, value)
        if not number or not -100 <= bias <= 100:
            raise _bad("logit_bias", rule, value)
        biases[int(token)] = float(bias)
    return biases


def _items(name: str, value: Any, rule: str) -> tuple[Any, ...]:
    """Of a list, a generator, an array or a tensor."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Iterable):
        raise _bad(name, rule, value)
    return tuple(value)
