"""A smaller model that guesses for another: found, compared with it, planned and loaded before it.
Guesses nothing itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helm.base.arguments import shown
from helm.base.paths import permitted
from helm.base.sizes import size_text
from helm.errors import HelmError, InvalidError, OutOfMemoryError, printable
from helm.machine.devices import CPU
from helm.model.config import ModelConfig
from helm.model.hub import resolve_model
from helm.model.model_files import read_model
from helm.session.here import load_engine
from helm.session.options import LoadOptions
from helm.text.of_model import tokenizer_of
from helm.text.tokenizer import Tokenizer

_CONTEXT = 4096  # positions of a draft where nobody says
_NAMED = 3  # tokens that a refusal shows


@dataclass
class Draft:
    """A loaded one. engine: for one drafter alone. memory_bytes: of the host, by its plan."""

    engine: Any
    name: str
    memory_bytes: int
    context: int
    threads: int

    def describe(self) -> dict[str, Any]:
        """Without the engine."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del facts["engine"]
        return facts

    def left_of(self, options: LoadOptions) -> LoadOptions:
        """What it leaves for the model. Raises OutOfMemoryError if nothing."""
        limit = options.memory_bytes
        if limit is None:
            return options  # what is free is less by what it was granted
        if limit <= self.memory_bytes:
            raise OutOfMemoryError(
                f"[load] the draft {self.name} takes {size_text(self.memory_bytes)} of host "
                f"memory, which leaves nothing of the {size_text(limit)} that memory_bytes= "
                "grants; raise that, or choose a smaller draft with speculate="
            )
        return dataclasses.replace(options, memory_bytes=limit - self.memory_bytes)

    def blamed(self, error: OutOfMemoryError) -> OutOfMemoryError:
        """The refusal of the model that found too little room beside it."""
        return OutOfMemoryError(
            f"{error}; the draft {self.name} takes {size_text(self.memory_bytes)} of host memory "
            "before it: choose a smaller one with speculate=, or leave that out"
        )


def load_draft(
    model: str | Path, tokenizer: Tokenizer | None, config: ModelConfig, options: LoadOptions
) -> Draft:
    """The draft for a model of this tokenizer and configuration, which options are for. The draft
    lies in host memory, with a context of its own where theirs says nothing.

    Raises InvalidError for another vocabulary, before weights are read, OutOfMemoryError where it
    does not fit, and what loading any model raises; each names the draft.
    """
    name = printable(str(model))
    try:
        place = resolve_model(str(model))
        with permitted("load"):
            files = read_model(place)
            own = tokenizer_of(files)
            _check_vocabulary(name, own, files.config, tokenizer, config)
            weights = files.weights()
        wanted = options.context or max(
            _CONTEXT, (options.prompt_tokens or 0) + (options.output_tokens or 0)
        )
        context = min(wanted, files.config.max_context)
        plan, engine = load_engine(
            weights.config, weights.tensors, str(files.folder), {}, _options(options, context)
        )
    except HelmError as error:
        raise type(error)(f"[speculate] the draft {name}: {error}") from None
    use = plan.memory["cpu"]
    return Draft(engine, name, use.total_bytes, plan.limits.context, int(engine.stats["threads"]))


def _options(options: LoadOptions, context: int) -> LoadOptions:
    return LoadOptions(
        context=context,
        max_sequences=options.max_sequences,
        threads=options.threads,
        weights=options.weights,
        memory_bytes=options.memory_bytes,
        batch=options.batch,
        device=CPU,
    )


def _check_vocabulary(
    name: str,
    own: Tokenizer | None,
    own_config: ModelConfig,
    tokenizer: Tokenizer | None,
    config: ModelConfig,
) -> None:
    """The ids of both stand for the same tokens. Where one has no tokenizer, the sizes tell."""
    if own is None or tokenizer is None:
        if own_config.vocab_size != config.vocab_size:
            raise InvalidError(
                f"it has a vocabulary of {own_config.vocab_size} tokens, the model one of "
                f"{config.vocab_size}; choose a draft of the same family with speculate="
            )
        return
    differing = differing_ids(_tokens(own, False), _tokens(tokenizer, False), missing=True)
    differing |= differing_ids(_tokens(own, True), _tokens(tokenizer, True), missing=False)
    if differing:
        said = [
            f"{i} is {_named(found)} there and {_named(wanted)} in the model"
            for i, (found, wanted) in sorted(differing.items())[:_NAMED]
        ]
        rest = len(differing) - len(said)
        more = f", and {rest:,} more" if rest else ""
        raise InvalidError(
            f"it has another vocabulary, {len(differing):,} token ids differ: "
            f"{', '.join(said)}{more}; choose a draft of the same family with speculate="
        )


def differing_ids(
    own: Mapping[int, str], other: Mapping[int, str], missing: bool
) -> dict[int, tuple[str | None, str | None]]:
    """By id, the tokens of two vocabularies that are not the same; missing: also those that one
    lacks."""
    ids = own.keys() | other.keys() if missing else own.keys() & other.keys()
    pairs = {i: (own.get(i), other.get(i)) for i in ids}
    return {i: pair for i, pair in pairs.items() if pair[0] != pair[1]}


def _tokens(tokenizer: Tokenizer, added: bool) -> dict[int, str]:
    """By id; added: those that were added to the vocabulary, too."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=added)
    return {i: token for token, i in vocabulary.items()}


def _named(token: str | None) -> str:
    return "none" if token is None else shown(token)
