"""Finds a model's folder or GGUF file: bundled, local or on the Hugging Face hub; reads no
weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from helm.base.arguments import short, shown
from helm.base.files import open_file
from helm.base.paths import kind, permitted
from helm.errors import CheckpointError, InvalidError
from helm.model.download import GgufOnHub, download_config, download_model, download_tokenizer
from helm.model.folder_kinds import cached_id, refuse_other
from helm.model.gguf.choose import choose, models_of
from helm.model.gguf.file import SUFFIX
from helm.model.gguf.reader import MAGIC

BUNDLED = "bundled"
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?)(:(?P<wanted>[\w./+-]+))?")


def resolve_model(model: str | os.PathLike[str] | None, revision: str | None = None) -> Path:
    """The local folder of `model`, or its GGUF file.

    None or "bundled" is the bundled model; a folder or a GGUF file is taken as it is, and of a
    folder with nothing but one GGUF model that; anything else must be a Hugging Face id, which is
    downloaded into the hub's cache (progress on stderr; HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are
    honoured). An id may end in ":Q4_K_M", a word of the GGUF file that is meant, or its name.
    CheckpointError says what is missing and what to do.
    """
    found = _here(model, revision)
    return found if isinstance(found, Path) else download_model(*found)


def _here(
    model: str | os.PathLike[str] | None, revision: str | None
) -> Path | tuple[str, str | None, str | None]:
    """As `resolve_model`; a Hugging Face id, its revision and what is wanted of it for a model that
    is not a path here."""
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
            return _gguf_in(path) or path
        return path
    if found == "file":
        if revision is not None:
            raise InvalidError(f"[model] {model} is a local file without revisions; leave it out")
        if is_gguf(path):
            return path
        raise CheckpointError(
            f"[model] {text} is a file; give the folder that holds config.json and the "
            f".safetensors files (here: {path.parent}), or a file in GGUF"
        )
    if os.path.islink(path):
        raise CheckpointError(
            f"[model] {text} is a symbolic link that leads nowhere or in a circle; make it lead to "
            "a model's folder"
        )
    named = _HUB_ID.fullmatch(text)
    if isinstance(model, Path) or named is None or ".." in text:
        raise CheckpointError(
            f"[model] no folder {short(text)}; give an "
            "existing folder or GGUF file, or a Hugging Face id such as Qwen/Qwen3-0.6B"
        )
    return named["id"], revision, named["wanted"]


def _gguf_in(folder: Path) -> Path | None:
    """The one GGUF model in a folder; None where there is none."""
    names = os.listdir(folder)
    if not models_of(names):
        return None
    return folder / choose(names, None, str(folder), "give one of these files")[0]


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


def resolve_config(
    model: str | os.PathLike[str] | None, revision: str | None = None
) -> Path | GgufOnHub:
    """The config.json of `model`, or its GGUF file: as `resolve_model`, but another file is taken
    as a configuration. Of a Hugging Face id nothing but config.json is fetched, and of one in GGUF
    nothing yet."""
    if isinstance(model, (str, os.PathLike)) and model != "":
        path = Path(os.path.expanduser(model))
        with permitted("model"):
            found = kind(path)
        if found == "file" and path.suffix != ".safetensors" and not is_gguf(path):
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
    place = _here(model, revision)
    if not isinstance(place, Path):
        fetched = download_config(*place)
        if isinstance(fetched, GgufOnHub):
            return fetched
        place = fetched
    return place if is_gguf(place) else place / "config.json"


def is_gguf(path: Path) -> bool:
    """Whether a file is in GGUF, by its name or by its first bytes."""
    with permitted("model"):
        if kind(path) != "file":
            return False
    if path.suffix == SUFFIX:
        return True
    with open_file(path, place="model", gguf=True) as (stream, _):
        return stream.read(len(MAGIC)) == MAGIC


def hub_id(folder: Path) -> str | None:
    """The Hugging Face id of a folder in the hub's cache; None for others."""
    snapshots = folder.absolute().parent
    return cached_id(snapshots.parent.name) if snapshots.name == "snapshots" else None


def use_name(place: Path) -> str:
    """What to call a model on this machine by: the Hugging Face id of a folder in the hub's cache,
    with the file's name behind a colon for one in GGUF, or else the whole path."""
    file = place if is_gguf(place) else None
    found = hub_id(place if file is None else file.parent)
    if found is None:
        return os.fspath(place.resolve())
    return found if file is None else f"{found}:{file.name}"


def resolve_tokenizer(tokenizer: str | os.PathLike[str]) -> Path:
    """The folder of a tokenizer: one on this machine, or that of a Hugging Face id, of which its
    files alone are fetched. Raises what `resolve_model` raises."""
    found = _here(tokenizer, None)
    return found if isinstance(found, Path) else download_tokenizer(found[0])
