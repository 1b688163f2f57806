"""A model as its files describe it: a folder in transformers' format, or a GGUF file. Reads
configuration and headers, and no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from helm.base.paths import kind
from helm.model.config import ModelConfig
from helm.model.download import GgufOnHub
from helm.model.families import build_graph, load_config, parse_config
from helm.model.gguf.config import VECTORS, config_of
from helm.model.gguf.file import Gguf, read_gguf
from helm.model.gguf.names import check_tensors, name_tensors
from helm.model.gguf.remote import read_hub
from helm.model.stacked import check_routers, with_stacks
from helm.model.weight_names import NamedWeights, read_weights


@dataclass(frozen=True)
class ModelFiles:
    """path: the folder, or the GGUF file. folder: what the files of weights are relative to. gguf:
    None of a folder."""

    path: Path
    folder: Path
    config: ModelConfig
    gguf: Gguf | None = None

    def weights(self) -> NamedWeights:
        """Where they lie. Raises what `read_weights` raises."""
        if self.gguf is None:
            return read_weights(self.folder, self.config)
        return gguf_weights(self.gguf, self.config)


def read_model(path: Path) -> ModelFiles:
    """Of a folder, or of a GGUF file, which may be any part of a split one. Raises
    CheckpointError, ConfigError or UnsupportedModelError."""
    if kind(path) != "file":
        return ModelFiles(path, path, load_config(path))
    gguf = read_gguf(path, VECTORS)
    return ModelFiles(path, path.parent, gguf_config(gguf), gguf)


def gguf_config(gguf: Gguf) -> ModelConfig:
    """The configuration in a GGUF file."""
    return parse_config(config_of(gguf), gguf.source)


def gguf_weights(gguf: Gguf, config: ModelConfig) -> NamedWeights:
    """The weights in a GGUF file. Raises CheckpointError unless they are those of `config`."""
    graph = build_graph(config)
    first, guessing = config.num_hidden_layers, config.drafting_layers
    left = tuple(f"blk.{layer}." for layer in range(first, first + guessing))
    named = {n: t for n, t in name_tensors(gguf, config).items() if not t.name.startswith(left)}
    tensors = with_stacks(named, graph)
    check_routers(tensors, graph)
    check_tensors(gguf, tensors, graph.tensors)
    return NamedWeights(config, tensors, ())


def read_remote_model(model: GgufOnHub) -> tuple[ModelConfig, NamedWeights]:
    """Of a GGUF model on the hub, whose headers alone are fetched."""
    gguf = read_hub(model, VECTORS)
    config = gguf_config(gguf)
    return config, gguf_weights(gguf, config)
