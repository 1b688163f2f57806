"""Finds the folder of a model: bundled, local or on the Hugging Face hub; reads no weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from helm.arguments import short, shown
from helm.download import download_config, download_model
from helm.errors import CheckpointError, InvalidError
from helm.files import open_file
from helm.folder_kinds import cached_id, refuse_other
from helm.paths import kind, permitted

BUNDLED = "bundled"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


Download = Callable[[str, str | None], Path]  # (id, revision) -> folder


def resolve_model(
    model: str | os.PathLike[str] | None,
    revision: str | None = None,
    *,
    download: Download | None = None,
) -> Path:
    """The local folder of `model`.

    None or "bundled" is the bundled model; a folder is taken as it is; anything else must be a
    Hugging Face id, which is downloaded into the hub's cache (progress on stderr; HF_HUB_OFFLINE,
    HF_HOME and HF_TOKEN are honoured). CheckpointError says what is missing and what to do.
    """
    if revision is not None and not isinstance(revision, str):
        raise InvalidError(f"[model] expected a revision as text, got {shown(revision)}")
    bundled = isinstance(model, str) and model == BUNDLED and not Path(BUNDLED).is_dir()
    if model is None or bundled:
        if revision is not None:
            raise InvalidError(
                f"[model] the bundled model has no revisions, got {shown(revision)}; leave it out"
            )
        return bundled_model()
    if not isinstance(model, (str, os.PathLike)):
        raise InvalidError(
            f"[model] expected a folder or a Hugging Face id, got {type(model).__name__}; "
            "a transformers model in memory goes to helm.LLM.from_torch(module)"
        )
    text = os.fspath(model)
    if not text:
        raise InvalidError("[model] the model's name is empty; give a folder or an id")
    path = Path(os.path.expanduser(text))
    with permitted("model"):
        found = kind(path)
        if found == "folder":
            kind(path / "config.json")  # whether it may be entered
    if found == "folder":
        if revision is not None:
            raise InvalidError(
                f"[model] {text} is a local folder, revision {shown(revision)} applies only to "
                "Hugging Face ids; leave it out"
            )
        if not os.path.lexists(path / "config.json"):
            refuse_other(path)
        return path
    if found == "file":
        with open_file(path, place="model"):  # names it, if it is of a known kind
            pass
        raise CheckpointError(
            f"[model] {text} is a file; give the folder that holds config.json and the "
            f".safetensors files (here: {path.parent})"
        )
    if os.path.islink(path):
        raise CheckpointError(
            f"[model] {text} is a symbolic link that leads nowhere or in a circle; make it lead to "
            "a model's folder"
        )
    if isinstance(model, Path) or not _HUB_ID.fullmatch(text) or ".." in text:
        raise CheckpointError(
            f"[model] no folder {short(text)}; give an "
            "existing folder, or a Hugging Face id such as Qwen/Qwen3-0.6B"
        )
    return (download or download_model)(text, revision)


def bundled_model() -> Path:
    """Folder of the small model that comes with HELM."""
    from importlib.resources import files

    path = Path(str(files("helm") / "bundled"))
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"[model] the bundled model is missing from this installation ({path}); reinstall "
            "helm-llm, or name a model: helm-llm run MODEL"
        )
    return path


def resolve_config(model: str | os.PathLike[str] | None, revision: str | None = None) -> Path:
    """The config.json of `model`: as `resolve_model`, but a file is taken as a configuration, and
    of a Hugging Face id nothing but config.json is fetched."""
    if isinstance(model, (str, os.PathLike)) and model != "":
        path = Path(os.path.expanduser(model))
        with permitted("model"):
            found = kind(path)
        if found == "file" and path.suffix != ".safetensors":
            if revision is not None:
                raise InvalidError(
                    f"[model] {model} is a local file without revisions; leave it out"
                )
            return path
        if path.suffix == ".json" and found != "folder":
            raise CheckpointError(
                f"[model] {model} does not exist; give a config.json, a model folder or a Hugging "
                "Face id"
            )
    return resolve_model(model, revision, download=download_config) / "config.json"


def hub_id(folder: Path) -> str | None:
    """The Hugging Face id of a folder in the hub's cache; None for others."""
    snapshots = folder.absolute().parent
    return cached_id(snapshots.parent.name) if snapshots.name == "snapshots" else None
