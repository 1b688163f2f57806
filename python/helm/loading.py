"""From a model's name, or a module in memory, to a loaded engine; generates nothing."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.arguments import shown
from helm.checkpoint import TensorInfo, read_checkpoint
from helm.config import (
    GenerationDefaults,
    ModelConfig,
    load_config,
    load_generation_defaults,
    read_generation_defaults,
)
from helm.errors import ConfigError, InvalidError, printable
from helm.hub import resolve_model
from helm.jsonio import Reader
from helm.local_plan import LoadOptions, load_engine
from helm.paths import permitted
from helm.plan_format import Plan
from helm.tokenizer import TOKENIZER_FILE, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


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


def load_model(
    model: str | os.PathLike[str] | None, revision: str | None, options: LoadOptions
) -> LoadedModel:
    """Finds, plans and loads a checkpoint. Everything small is checked before weights are read."""
    folder = resolve_model(model, revision)
    with permitted("load"):
        config = load_config(folder)
        defaults = load_generation_defaults(folder, config)
        tokenizer = None
        if (folder / TOKENIZER_FILE).is_file():
            tokenizer = Tokenizer.from_directory(folder, config.vocab_size)
        infos = read_checkpoint(folder)
    plan, engine = load_engine(config, infos, str(folder), {}, options)
    name = folder.resolve().name if model is None or Path(model).is_dir() else str(model)
    return LoadedModel(engine, plan, config, defaults, tokenizer, printable(name), folder)


def load_from_torch(
    module: Any, tokenizer: Tokenizer | str | os.PathLike[str] | None, options: LoadOptions
) -> LoadedModel:
    """Plans and loads a transformers model in memory."""
    if not callable(getattr(module, "state_dict", None)) or not hasattr(module, "config"):
        raise InvalidError(
            f"[from_torch] expected a transformers model with a config and weights, got "
            f"{type(module).__name__}; a folder or a Hugging Face id goes to helm.LLM(...)"
        )
    source = f"{type(module).__name__}.config"
    config = ModelConfig.from_dict(_config_dict(module), source)
    generation = getattr(module, "generation_config", None)
    known = generation.to_dict() if generation is not None else {}
    known = {field.name: known.get(_HF_NAMES.get(field.name, field.name)) for field in _DEFAULTS}
    known["eos_token_id"] = known.pop("eos_token_ids")
    defaults = read_generation_defaults(Reader(known, source, ConfigError), config)
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        if not isinstance(tokenizer, (str, os.PathLike)):
            raise InvalidError(
                "[from_torch] tokenizer must be a helm.Tokenizer or a folder, got "
                f"{shown(tokenizer)}"
            )
        tokenizer = Tokenizer.from_directory(tokenizer, config.vocab_size)
    tensors = _state_dict(module, config)
    infos = {
        name: TensorInfo.in_memory(name, _dtype_name(name, tensor), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    plan, engine = load_engine(config, infos, "", tensors, options)
    return LoadedModel(engine, plan, config, defaults, tokenizer, type(module).__name__, None)


_DEFAULTS = dataclasses.fields(GenerationDefaults)
_HF_NAMES = {"eos_token_ids": "eos_token_id"}


def _config_dict(module: Any) -> dict[str, Any]:
    """The module's configuration as config.json would have it."""
    config = dict(module.config.to_dict())
    if not config.get("architectures"):
        config["architectures"] = [type(module).__name__]  # written on saving only
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None and not isinstance(dtype, str):
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def _state_dict(module: Any, config: ModelConfig) -> dict[str, Tensor]:
    """The weights by name on the CPU and contiguous; only those that are not so are copied."""
    tensors = {}
    for name, tensor in module.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue  # the embedding under a second name
        if tensor.is_meta:
            raise InvalidError(
                f"[from_torch] {name} has no data (it is on the meta device); load the module's "
                "weights first"
            )
        tensors[name] = tensor.detach().cpu().contiguous()
    return tensors


def _dtype_name(name: str, tensor: Tensor) -> str:
    names = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
    found = names.get(str(tensor.dtype))
    if found is None:
        raise InvalidError(
            f"[from_torch] {name} is {tensor.dtype}; expected float32, float16 or bfloat16: "
            "convert the module with module.to(torch.bfloat16)"
        )
    return found
