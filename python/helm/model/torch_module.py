"""A transformers model in memory: its configuration and its weights. Imports neither torch nor
transformers, as whoever has such a model has imported them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helm.base.jsonio import Reader
from helm.errors import ConfigError, InvalidError, UnsupportedModelError
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.families import parse_config
from helm.model.module_experts import with_experts
from helm.model.weight_names import lies_by_column, name_weights, rows_by_kind

if TYPE_CHECKING:
    from torch import Tensor

_COMPARED_ROWS = 4096
_DTYPES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}


@dataclass(frozen=True)
class ModuleWeights:
    """config: with `tie_word_embeddings` as the tensors have it. tensors, infos: by transformers'
    names, experts stacked; the tensors lie on the CPU, contiguous."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    infos: dict[str, TensorInfo]
    notices: tuple[str, ...]


def module_config(module: Any) -> ModelConfig:
    """The configuration of a transformers model. Raises InvalidError for what is none, and what
    `parse_config` raises."""
    generation = getattr(module, "generation_config", None)
    settings = [getattr(module, "config", None), *([] if generation is None else [generation])]
    methods = [(module, "state_dict"), *((part, "to_dict") for part in settings)]
    if not all(callable(getattr(holder, method, None)) for holder, method in methods):
        raise _no_model(module)
    config = parse_config(_config_dict(module), f"{type(module).__name__}.config")
    if config.quantization is not None:
        raise UnsupportedModelError(
            f"[from_torch] {type(module).__name__} has quantised weights ({config.quantization}); "
            "expected float32, float16 or bfloat16; give the folder that it was loaded from to "
            "helm.LLM(...)"
        )
    return config


def generation_settings(module: Any) -> Reader:
    """As generation_config.json would have them; empty where the model has none."""
    generation = getattr(module, "generation_config", None)
    settings = {} if generation is None else generation.to_dict()
    return Reader(settings, f"{type(module).__name__}.config", ConfigError)


def module_weights(module: Any, config: ModelConfig) -> ModuleWeights:
    """The weights that HELM needs. Raises InvalidError for what it cannot use, and what
    `name_weights` raises."""
    state, config = with_experts(_state_dict(module), config)
    stored = {
        name: TensorInfo(name, tuple(tensor.shape), _stored(tensor), ())
        for name, tensor in state.items()
    }
    weights = name_weights(config, stored, lambda a, b: _same(state[a.name], state[b.name]))
    tensors = {
        name: _arranged(name, state[info.name], weights.config)
        for name, info in weights.tensors.items()
    }
    infos = {
        name: TensorInfo.in_memory(name, _dtype_name(name, tensor), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    return ModuleWeights(weights.config, tensors, infos, weights.notices)


def _arranged(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """The tensor, or a copy in the order that HELM needs."""
    if lies_by_column(name, config):
        return tensor.T.contiguous()
    runs = rows_by_kind(name, config)
    return tensor if runs is None else tensor[[row for run in runs for row in run]]


def _no_model(module: Any) -> InvalidError:
    return InvalidError(
        f"[from_torch] expected a transformers model with a config and weights, got "
        f"{type(module).__name__}; a folder or a Hugging Face id goes to helm.LLM(...)"
    )


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


def _stored(tensor: Tensor) -> str:
    return _DTYPES.get(str(tensor.dtype), str(tensor.dtype))


def _dtype_name(name: str, tensor: Tensor) -> str:
    found = _DTYPES.get(str(tensor.dtype))
    if found is None:
        raise InvalidError(
            f"[from_torch] {name} is {tensor.dtype}; expected float32, float16 or bfloat16: "
            "convert the module with module.to(torch.bfloat16)"
        )
    return found
