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

from helm.added_tokens import read_object
from helm.arguments import short
from helm.chat_template import read_templates
from helm.checkpoint import TensorInfo, read_checkpoint
from helm.config import ModelConfig, load_config
from helm.download import ALLOWED, CARD, to_download
from helm.errors import CheckpointError, HelmError
from helm.files import present, read_text
from helm.jsonio import read_json
from helm.models import build_graph
from helm.weight_names import name_weights
from helm.weights import check_checkpoint

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


def describe_folder(folder: Path, disk_bytes: int | None = None) -> Described:
    """Of a folder with a config.json and weights. HelmError for a model that HELM cannot run. A
    tied head that is stored, too, counts as the embedding. disk_bytes: where it is known."""
    config = load_config(folder)
    weights = name_weights(config, read_checkpoint(folder), lambda _a, _b: True)
    check_checkpoint(build_graph(weights.config), weights.tensors)
    by_dtype: dict[str, int] = {}
    for info in weights.tensors.values():
        by_dtype[info.weight_dtype] = by_dtype.get(info.weight_dtype, 0) + info.nbytes
    facts = ModelFacts(
        architecture=config.architecture,
        layers=config.num_hidden_layers,
        parameters=_parameters(weights.config),
        context=config.max_context,
        dtype="+".join(sorted(by_dtype, key=lambda name: -by_dtype[name])),
        vocab_size=config.vocab_size,
        weights_bytes=sum(by_dtype.values()),
        chat_template=bool(_templates(folder)),
        license=_stated_license(folder),
        disk_bytes=_folder_bytes(folder) if disk_bytes is None else disk_bytes,
        download_bytes=0,
    )
    return Described(facts, weights.config, weights.tensors)


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
