"""Finds the folder of a model: bundled, local or on the Hugging Face hub; reads no weights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from helm.errors import CheckpointError, InvalidError
from helm.files import open_file
from helm.folder_kinds import refuse_other

# What a checkpoint needs. Weights that are pickled, or stored a second time for other software
# (original/, onnx/, consolidated*), are left on the hub.
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
IGNORED = ["*/*.safetensors", "*/*.json", "*/*.model", "consolidated*.safetensors"]

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
    if model is None or (model == BUNDLED and not Path(BUNDLED).is_dir()):
        if revision is not None:
            raise InvalidError(
                f"[model] the bundled model has no revisions, got {revision!r}; leave it out"
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
    if os.path.isdir(path):
        if revision is not None:
            raise InvalidError(
                f"[model] {text} is a local folder, revision {revision!r} applies only to "
                "Hugging Face ids; leave it out"
            )
        if not os.path.lexists(path / "config.json"):
            refuse_other(path)
        return path
    if os.path.isfile(path):
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
            f"[model] no folder {text if len(text) <= 255 else text[:40] + '...'}; give an "
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
    if model is not None:
        path = Path(os.path.expanduser(model))
        if os.path.isfile(path) and path.suffix != ".safetensors":
            if revision is not None:
                raise InvalidError(
                    f"[model] {model} is a local file without revisions; leave it out"
                )
            return path
        if path.suffix == ".json" and not os.path.isdir(path):
            raise CheckpointError(
                f"[model] {model} does not exist; give a config.json, a model folder or a Hugging "
                "Face id"
            )
    return resolve_model(model, revision, download=_download_config) / "config.json"


def _download_config(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    with _hub_errors(repo_id, revision):
        return Path(hf_hub_download(repo_id, "config.json", revision=revision)).parent


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(repo_id, revision):
        folder = Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=ALLOWED, ignore_patterns=IGNORED
            )
        )
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"[hub] {_wanted(repo_id, revision)} has no .safetensors weights (pickled .bin and "
            "GGUF files are not read); choose a repository with safetensors, or convert it with "
            "transformers' save_pretrained"
        )
    return folder


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
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise CheckpointError(_not_cached(wanted)) from error
        raise CheckpointError(
            f"[hub] {wanted} has no config.json; choose a repository in transformers' format"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"[hub] {repo_id!r} is not a Hugging Face id: {error}") from error
    except errors.OfflineModeIsEnabled as error:
        raise CheckpointError(_not_cached(wanted)) from error
    except Exception as error:  # the HTTP client's own errors differ between hub versions
        raise CheckpointError(
            f"[hub] downloading {wanted} failed: {type(error).__name__}: {error}; run the command "
            "again, finished files are kept"
        ) from error


def _not_cached(wanted: str) -> str:
    offline = os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}
    if offline:
        return (
            f"[hub] {wanted} is not in the local cache and HF_HUB_OFFLINE is set; unset it to "
            "download, or give a local folder"
        )
    return (
        f"[hub] {wanted} is neither a local folder nor in the cache, and the Hugging Face hub "
        "cannot be reached; check the network, or give a local folder"
    )
