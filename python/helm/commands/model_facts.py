"""What a model is, told from its small files and the headers of its weights, or from what the hub
says of it. Reads no weights and loads nothing."""

from __future__ import annotations

import contextlib
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.arguments import short
from helm.base.files import present, read_text
from helm.base.jsonio import read_json
from helm.compiler.tensors import check_checkpoint
from helm.errors import CheckpointError, HelmError
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.download import ALLOWED, CARD, GgufOnHub, to_download
from helm.model.families import build_graph, load_config
from helm.model.gguf.config import VECTORS
from helm.model.gguf.remote import read_hub
from helm.model.hub import is_gguf
from helm.model.model_files import ModelFiles, gguf_config, gguf_weights, read_model
from helm.model.weight_names import NamedWeights, read_weights
from helm.text.added_tokens import read_object
from helm.text.chat_template import read_templates

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_SHOWN = 100  # characters of a licence


@dataclass(frozen=True)
class ModelFacts:
    """parameters: elements of all weights, a tied head once. dtype: what the weights are stored
    in, that of most bytes first. chat_template, license: None where neither files nor hub say.
    disk_bytes: all files; None: not on this machine. download_bytes: what is left to download."""

    architecture: str
    layers: int
    parameters: int
    context: int
    dtype: str
    vocab_size: int
    weights_bytes: int
    chat_template: bool | None
    license: str | None
    disk_bytes: int | None
    download_bytes: int | None


@dataclass(frozen=True)
class Described:
    """A model, with what a plan is made of. tensors None: its weights are not here."""

    facts: ModelFacts
    config: ModelConfig
    tensors: Mapping[str, TensorInfo] | None


def describe(place: Path, disk_bytes: int | None = None) -> Described:
    """Of a folder with a config.json and weights, or of a GGUF file. HelmError for a model that
    HELM cannot run. A tied head that is stored, too, counts as the embedding. disk_bytes: where it
    is known."""
    if is_gguf(place):
        return _describe_gguf(read_model(place), disk_bytes)
    config = load_config(place)
    weights = read_weights(place, config, lambda _a, _b: True)
    return _described(
        weights,
        chat_template=bool(_templates(place)),
        license=_stated_license(place),
        disk_bytes=_folder_bytes(place) if disk_bytes is None else disk_bytes,
        download_bytes=0,
    )


def _describe_gguf(files: ModelFiles, disk_bytes: int | None) -> Described:
    gguf = files.gguf
    assert gguf is not None
    if disk_bytes is None:
        disk_bytes = sum((files.folder / name).stat().st_size for name in gguf.files)
    return _described(
        files.weights(),
        chat_template="tokenizer.chat_template" in gguf.keys,
        license=_license({"license": gguf.keys.get("general.license")}),
        disk_bytes=disk_bytes,
        download_bytes=0,
    )


def describe_remote_gguf(model: GgufOnHub) -> Described:
    """Of a GGUF model of the hub, whose header alone is fetched."""
    gguf = read_hub(model, VECTORS)
    return _described(
        gguf_weights(gguf, gguf_config(gguf)),
        chat_template="tokenizer.chat_template" in gguf.keys,
        license=_license({"license": gguf.keys.get("general.license")}),
        disk_bytes=None,
        download_bytes=sum(model.sizes.values()),
    )


def _described(weights: NamedWeights, **facts: Any) -> Described:
    """facts: those of `ModelFacts` that weights and configuration do not tell."""
    config = weights.config
    check_checkpoint(build_graph(config), weights.tensors)
    by_type: dict[str, int] = {}
    for info in weights.tensors.values():
        name = info.dtype or info.weight_dtype.removeprefix("ggml.")
        by_type[name] = by_type.get(name, 0) + info.nbytes
    return Described(
        ModelFacts(
            architecture=config.architecture,
            layers=config.num_hidden_layers,
            parameters=_parameters(config),
            context=config.max_context,
            dtype="+".join(sorted(by_type, key=lambda name: -by_type[name])),
            vocab_size=config.vocab_size,
            weights_bytes=sum(by_type.values()),
            **facts,
        ),
        config,
        weights.tensors,
    )


def describe_remote(repo_id: str, info: ModelInfo, config: ModelConfig) -> Described:
    """Of a model of the hub that is not downloaded."""
    names = [file.rfilename for file in info.siblings or []]
    stated = (info.config or {}).get("tokenizer_config") or {}
    sizes = [f.size or 0 for f in info.siblings or [] if f.rfilename.endswith(".safetensors")]
    dtype = config.dtype or "f32"
    facts = ModelFacts(
        architecture=config.architecture,
        layers=config.num_hidden_layers,
        parameters=_parameters(config),
        context=config.max_context,
        dtype=dtype,
        vocab_size=config.vocab_size,
        weights_bytes=sum(sizes),
        chat_template="chat_template.jinja" in names or "chat_template" in stated,
        license=_license(vars(info.card_data) if info.card_data else {}),
        disk_bytes=None,
        download_bytes=to_download(repo_id, info, [*ALLOWED, CARD]),
    )
    return Described(facts, config, None)


def _parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in build_graph(config).tensors.values())


def _templates(folder: Path) -> dict[str, str]:
    try:
        return read_templates(folder, read_object(folder / "tokenizer_config.json"))
    except HelmError:
        return {}  # `run` says what is wrong with them


def _folder_bytes(folder: Path) -> int:
    """Of the files in it, not in folders below."""
    try:
        states = [entry.stat() for entry in folder.iterdir()]
    except OSError as reason:
        raise CheckpointError(f"[show] cannot read {folder}: {reason.strerror}") from None
    return sum(state.st_size for state in states if stat.S_ISREG(state.st_mode))


def _stated_license(folder: Path) -> str | None:
    """By the model's card, or else by config.json."""
    from huggingface_hub import RepoCard

    stated: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a card may be anything
        if present(folder / CARD):
            card = RepoCard(read_text(folder / CARD), ignore_metadata_errors=True)
            stated = vars(card.data)
    return _license(stated) or _license(read_json(folder / "config.json", CheckpointError).names())


def _license(stated: Mapping[str, Any]) -> str | None:
    """The name of one that the hub has no name for stands beside."""
    value = stated.get("license")
    if value == "other":
        value = stated.get("license_name") or value
    names = [name for name in (value if isinstance(value, list) else [value]) if name]
    text = " ".join(", ".join(name for name in names if isinstance(name, str)).split())
    return short(text, _SHOWN) or None
