"""Finds the folder of a model: bundled, local or on the Hugging Face hub; reads no weights."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from helm.arguments import short, shown
from helm.errors import CheckpointError, InvalidError
from helm.files import open_file
from helm.folder_kinds import refuse_other
from helm.paths import kind, permitted

# What a checkpoint needs. Weights that are pickled, or stored a second time for other software
# (original/, onnx/, consolidated*), are left on the hub.
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
IGNORED = ["*/*.safetensors", "*/*.json", "*/*.model", "consolidated*.safetensors"]

BUNDLED = "bundled"
_ASK_S = 5.0  # for one answer of the hub
_CACHE_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENOSPC, errno.EDQUOT),
)
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
    return (download or _download)(text, revision)


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
    return resolve_model(model, revision, download=_download_config) / "config.json"


def _download_config(repo_id: str, revision: str | None) -> Path:
    remedy = "choose a repository in transformers' format"
    return _fetch(repo_id, revision, ["config.json"], "config.json", remedy)


def _download(repo_id: str, revision: str | None) -> Path:
    remedy = (
        "pickled .bin and GGUF files are not read, so choose a repository with safetensors, or "
        "convert it with transformers' save_pretrained"
    )
    return _fetch(repo_id, revision, ALLOWED, "*.safetensors", remedy)


def _fetch(
    repo_id: str, revision: str | None, patterns: list[str], needed: str, remedy: str
) -> Path:
    """The folder with the files that match `patterns`, `needed` among them; what is in the cache
    and as on the hub is not downloaded again. One attempt: without network the cache answers."""
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(repo_id, revision):
        folder = Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED
            )
        )
        if any(folder.glob(needed)):
            return folder
    try:
        HfApi().model_info(repo_id, revision=revision, timeout=_ASK_S)
    except Exception as error:
        raise CheckpointError(_not_here(repo_id, revision)) from error
    raise CheckpointError(f"[hub] {_wanted(repo_id, revision)} has no {needed}; {remedy}")


def _wanted(repo_id: str, revision: str | None) -> str:
    return f"{repo_id} at revision {revision}" if revision else repo_id


@contextlib.contextmanager
def _hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns the hub's exceptions into CheckpointErrors that say what to do."""
    from huggingface_hub import errors

    wanted = _wanted(repo_id, revision)
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"[hub] {repo_id} is gated: accept its licence at https://huggingface.co/{repo_id}, "
            "then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"[hub] {repo_id} has no revision {revision!r}; give one of its branches, tags or "
            "commit hashes"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"[hub] there is no folder {repo_id} here and no such model on the Hugging Face hub; "
            "check the spelling, and for a private model log in with `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(_not_here(repo_id, revision)) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"[hub] {repo_id!r} is not a Hugging Face id: {error}") from error
    except Exception as error:  # the HTTP client's own errors differ between hub versions
        remedy = "run the command again, finished files are kept"
        if isinstance(error, OSError) and error.errno in _CACHE_ERRORS:
            remedy = "set HF_HOME to a folder that this user can write to and that has room"
        raise CheckpointError(
            f"[hub] downloading {wanted} failed: {type(error).__name__}: {error}; {remedy}"
        ) from error


def _not_here(repo_id: str, revision: str | None) -> str:
    """Why the cache has no such model, or not all of it, while the hub is out of reach."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repo_id, repo_type="model")
    with permitted("hub"):
        kind(Path(constants.HF_HUB_CACHE) / folder / "refs")
    wanted = _wanted(repo_id, revision)
    offline = os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}
    if isinstance(try_to_load_from_cache(repo_id, "config.json", revision=revision), str):
        why = (
            "HF_HUB_OFFLINE is set; unset it" if offline else "the hub cannot be reached; go online"
        )
        return (
            f"[hub] {wanted} was not downloaded completely, only some of its files are in the "
            f"cache, and {why} and run the command again to download the rest"
        )
    if offline:
        return (
            f"[hub] {wanted} is not in the local cache and HF_HUB_OFFLINE is set; unset it to "
            "download, or give a local folder"
        )
    return (
        f"[hub] {wanted} is neither a local folder nor in the cache, and the Hugging Face hub "
        "cannot be reached; check the network, or give a local folder"
    )
