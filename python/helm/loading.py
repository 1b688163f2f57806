"""From a model's name, or a module in memory, to a loaded engine; generates nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from helm.arguments import shown
from helm.checkpoint import TensorInfo
from helm.config import ModelConfig, load_config
from helm.errors import ConfigError, InvalidError, printable
from helm.files import present
from helm.generation_defaults import (
    GenerationDefaults,
    load_generation_defaults,
    read_generation_defaults,
)
from helm.hub import bundled_model, hub_id, resolve_model
from helm.jsonio import Reader
from helm.load_options import LoadOptions
from helm.local_plan import load_engine
from helm.model_uses import note_use
from helm.paths import permitted
from helm.plan_format import Plan
from helm.tokenizer import TOKENIZER_FILE, Tokenizer
from helm.weight_names import name_weights, read_weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# What from_torch() takes as one.
AnyTokenizer: TypeAlias = "Tokenizer | PreTrainedTokenizerBase | str | os.PathLike[str]"

_COMPARED_ROWS = 4096


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


def load_model(
    model: str | os.PathLike[str] | None, revision: str | None, options: LoadOptions
) -> LoadedModel:
    """Finds, plans and loads a checkpoint. Everything small is checked before weights are read."""
    folder = resolve_model(model, revision)
    with permitted("load"):
        config = load_config(folder)
        defaults = load_generation_defaults(folder, config)
        tokenizer = None
        if present(folder / TOKENIZER_FILE):
            tokenizer = Tokenizer.from_directory(folder, config.vocab_size)
        defaults = _without_text(defaults, tokenizer)
        weights = read_weights(folder, config)
    notices = (*weights.notices, *defaults.notices)
    plan, engine = load_engine(weights.config, weights.tensors, str(folder), {}, options, notices)
    if folder != bundled_model():
        note_use(hub_id(folder) or os.fspath(folder.resolve()))
    name = folder.resolve().name if model is None or Path(model).is_dir() else str(model)
    longest = _longest(plan, options)
    return LoadedModel(
        engine, plan, weights.config, defaults, tokenizer, printable(name), folder, longest
    )


def load_from_torch(
    module: Any, tokenizer: AnyTokenizer | None, options: LoadOptions
) -> LoadedModel:
    """Plans and loads a transformers model in memory."""
    generation = getattr(module, "generation_config", None)
    settings = [getattr(module, "config", None), *([] if generation is None else [generation])]
    methods = [(module, "state_dict"), *((part, "to_dict") for part in settings)]
    if not all(callable(getattr(holder, method, None)) for holder, method in methods):
        raise _no_model(module)
    source = f"{type(module).__name__}.config"
    config = ModelConfig.from_dict(_config_dict(module), source)
    known = Reader({} if generation is None else generation.to_dict(), source, ConfigError)
    defaults = read_generation_defaults(known, f"{type(module).__name__}.generation_config", config)
    own = None if tokenizer is None else _tokenizer(tokenizer, config.vocab_size)
    defaults = _without_text(defaults, own)
    state = _state_dict(module)
    stored = {
        name: TensorInfo(name, str(tensor.dtype), tuple(tensor.shape), None, 0, 0)
        for name, tensor in state.items()
    }
    weights = name_weights(config, stored, lambda a, b: _same(state[a.name], state[b.name]))
    tensors = {name: state[info.name] for name, info in weights.tensors.items()}
    infos = {
        name: TensorInfo.in_memory(name, _dtype_name(name, tensor), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    notices = (*weights.notices, *defaults.notices)
    plan, engine = load_engine(weights.config, infos, "", tensors, options, notices)
    name = type(module).__name__
    longest = _longest(plan, options)
    return LoadedModel(engine, plan, weights.config, defaults, own, name, None, longest)


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


def _no_model(module: Any) -> InvalidError:
    return InvalidError(
        f"[from_torch] expected a transformers model with a config and weights, got "
        f"{type(module).__name__}; a folder or a Hugging Face id goes to helm.LLM(...)"
    )


def _longest(plan: Plan, options: LoadOptions) -> int:
    """The longest context that may be asked for: where nobody did, the CPU alone has taken all
    that memory holds."""
    took_all = options.context is None and plan.prediction is None
    return plan.limits.context if took_all else plan.model.max_context


def _without_text(defaults: GenerationDefaults, tokenizer: Tokenizer | None) -> GenerationDefaults:
    """Without a tokenizer nothing is text that could end with a stop string."""
    return defaults if tokenizer else dataclasses.replace(defaults, stop_strings=())


def _config_dict(module: Any) -> dict[str, Any]:
    """The module's configuration as config.json would have it."""
    config = dict(module.config.to_dict())
    if not config.get("architectures"):
        config["architectures"] = [type(module).__name__]  # written on saving only
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None and not isinstance(dtype, str):
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def _state_dict(module: Any) -> dict[str, Tensor]:
    """The weights by name on the CPU and contiguous; only those that are not so are copied."""
    tensors = {}
    state = module.state_dict()
    if not isinstance(state, Mapping) or not all(hasattr(t, "is_meta") for t in state.values()):
        raise _no_model(module)
    for name, tensor in state.items():
        if tensor.is_meta:
            raise InvalidError(
                f"[from_torch] {name} has no data (it is on the meta device); load the module's "
                "weights first"
            )
        tensors[name] = tensor.detach().cpu().contiguous()
    return tensors


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are one tensor, or have the same values; some rows at a time."""
    if a.shape != b.shape:
        return False
    one = a.data_ptr() == b.data_ptr() and a.dtype == b.dtype
    rows = range(0, len(a), _COMPARED_ROWS)
    return one or all(
        bool((a[i : i + _COMPARED_ROWS] == b[i : i + _COMPARED_ROWS]).all()) for i in rows
    )


def _dtype_name(name: str, tensor: Tensor) -> str:
    names = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
    found = names.get(str(tensor.dtype))
    if found is None:
        raise InvalidError(
            f"[from_torch] {name} is {tensor.dtype}; expected float32, float16 or bfloat16: "
            "convert the module with module.to(torch.bfloat16)"
        )
    return found
