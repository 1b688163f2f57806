"""From a model's name, or a module in memory, to a loaded engine; generates nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from helm.base.arguments import shown
from helm.base.paths import permitted
from helm.errors import InvalidError, OutOfMemoryError, printable
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.hub import bundled_model, resolve_model, resolve_tokenizer, use_name
from helm.model.model_files import read_model
from helm.model.model_uses import note_use
from helm.model.torch_module import generation_settings, module_config, module_weights
from helm.plan.schema import Plan
from helm.session.draft import Draft, load_draft
from helm.session.here import load_engine
from helm.session.options import LoadOptions
from helm.text.generation_defaults import GenerationDefaults, read_generation_defaults
from helm.text.of_model import defaults_of, tokenizer_of
from helm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What from_torch() takes as one.
AnyTokenizer: TypeAlias = "Tokenizer | PreTrainedTokenizerBase | str | os.PathLike[str]"


@dataclass
class LoadedModel:
    """An engine and what belongs to it."""

    engine: Any
    plan: Plan
    config: ModelConfig
    defaults: GenerationDefaults
    tokenizer: Tokenizer | None
    name: str
    folder: Path | None  # of the checkpoint; None for a module in memory
    longest: int  # what the context could be raised to
    draft: Draft | None = None  # that guesses for it


def load_model(
    model: str | os.PathLike[str] | None,
    revision: str | None,
    options: LoadOptions,
    tokenizer: str | os.PathLike[str] | None = None,
    draft: str | Path | None = None,
) -> LoadedModel:
    """Finds, plans and loads a checkpoint. Everything small is checked before weights are read.

    tokenizer: a folder, or the id of a model, whose tokenizer is used instead of the model's own.
    draft: a model that guesses, loaded first, within the same memory.
    """
    given = None if tokenizer is None else resolve_tokenizer(tokenizer)
    place = resolve_model(model, revision)
    with permitted("load"):
        files = read_model(place)
        own = tokenizer_of(files, given)
        defaults = _without_text(defaults_of(files), own)
        weights = files.weights()
    notices = (*weights.notices, *defaults.notices)
    folder = files.folder
    plan, engine, beside = _load_beside(
        draft, own, weights.config, weights.tensors, str(folder), {}, options, notices
    )
    if folder != bundled_model():
        note_use(use_name(place))
    local = model is None or Path(os.path.expanduser(model)).exists()
    name = place.resolve().name if local else str(model)
    longest = _longest(plan, options)
    return LoadedModel(
        engine, plan, weights.config, defaults, own, printable(name), folder, longest, beside
    )


def load_from_torch(
    module: Any,
    tokenizer: AnyTokenizer | None,
    options: LoadOptions,
    draft: str | Path | None = None,
) -> LoadedModel:
    """Plans and loads a transformers model in memory."""
    config = module_config(module)
    name = type(module).__name__
    defaults = read_generation_defaults(
        generation_settings(module), f"{name}.generation_config", config
    )
    own = None if tokenizer is None else _tokenizer(tokenizer, config.vocab_size)
    defaults = _without_text(defaults, own)
    weights = module_weights(module, config)
    notices = (*weights.notices, *defaults.notices)
    plan, engine, beside = _load_beside(
        draft, own, weights.config, weights.infos, "", weights.tensors, options, notices
    )
    longest = _longest(plan, options)
    return LoadedModel(engine, plan, weights.config, defaults, own, name, None, longest, beside)


def _load_beside(
    model: str | Path | None,
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    infos: Mapping[str, TensorInfo],
    directory: str,
    tensors: Mapping[str, Any],
    options: LoadOptions,
    notices: tuple[str, ...],
) -> tuple[Plan, Any, Draft | None]:
    """What `load_engine` loads, beside the draft `model`, which comes first."""
    if model is None:
        return (*load_engine(config, infos, directory, tensors, options, notices), None)
    draft = load_draft(model, tokenizer, config, options)
    try:
        left = draft.left_of(options)
        plan, engine = load_engine(config, infos, directory, tensors, left, notices)
    except OutOfMemoryError as error:
        draft.engine = None
        raise draft.blamed(error) from None
    except BaseException:
        draft.engine = None
        raise
    return plan, engine, draft


def _tokenizer(given: AnyTokenizer, vocab_size: int) -> Tokenizer:
    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Tokenizer.from_directory(given, vocab_size)
    if callable(getattr(given, "apply_chat_template", None)):
        return Tokenizer.from_transformers(given, vocab_size)
    raise InvalidError(
        "[from_torch] tokenizer must be transformers' own, a helm.Tokenizer or a folder, got "
        f"{shown(given)}"
    )


def _longest(plan: Plan, options: LoadOptions) -> int:
    """The longest context that may be asked for: where nobody did, the CPU alone has taken all
    that memory holds."""
    took_all = options.context is None and plan.prediction is None
    return plan.limits.context if took_all else plan.model.max_context


def _without_text(defaults: GenerationDefaults, tokenizer: Tokenizer | None) -> GenerationDefaults:
    """Without a tokenizer nothing is text that could end with a stop string."""
    return defaults if tokenizer else dataclasses.replace(defaults, stop_strings=())
