"""Gets a model's files from the Hugging Face hub into its cache, as far as they are not there; says
in one line why it cannot. Reads no file of a model."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helm.base.arguments import short, shown
from helm.base.paths import kind, permitted
from helm.base.sizes import size_text
from helm.errors import CheckpointError
from helm.model.gguf.choose import choose, models_of

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

# What a checkpoint needs, and the model's card. Weights that are pickled, or stored a second time
# for other software (original/, onnx/, consolidated*), are left on the hub.
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
CARD = "README.md"
TOKENIZER = [
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "*.jinja"),
]
IGNORED = ["*/*.safetensors", "*/*.json", "*/*.model", "*/*.md", "consolidated*.safetensors"]

_ASK_S = 5.0  # for one answer of the hub
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST,
)  # fmt: skip
_ROOM = (
    "remove models that helm-llm list shows with helm-llm rm, or set HF_HOME to a folder with more "
    "room"
)


@dataclass(frozen=True)
class GgufOnHub:
    """A model in GGUF on the hub that is not downloaded. revision: a commit. sizes: bytes of its
    files, the first part first."""

    repo_id: str
    revision: str
    sizes: dict[str, int]


def download_config(repo_id: str, revision: str | None, wanted: str | None) -> Path | GgufOnHub:
    """The folder with config.json; of a model in GGUF what its headers can be read from, or its
    file in the cache where the hub does not answer. wanted: see `choose`."""
    answer = _ask(repo_id, revision)
    files = _gguf_files(answer, wanted)
    if files is None:
        remedy = "choose a repository in transformers' format, or one with GGUF files"
        return _fetch(answer, ["config.json"], "config.json", remedy)
    with contextlib.suppress(OSError, ValueError):
        cached = _cached(repo_id, revision if answer.info is None else answer.info.sha)
        if answer.info is None or all((cached / file).exists() for file in files):
            return cached / files[0]
    if answer.info is None:
        raise CheckpointError(f"[hub] {_not_here(repo_id, revision)}") from answer.refusal
    sizes = {file.rfilename: file.size or 0 for file in answer.info.siblings or []}
    commit = answer.info.sha or revision or "main"
    return GgufOnHub(repo_id, commit, {file: sizes[file] for file in files if file in sizes})


def download_model(repo_id: str, revision: str | None, wanted: str | None) -> Path:
    """The folder with all that a model needs; of one in GGUF its file. wanted: see `choose`."""
    answer = _ask(repo_id, revision)
    files = _gguf_files(answer, wanted)
    if files is None:
        remedy = (
            "pickled .bin files are not read, so choose a repository with safetensors or GGUF "
            "files, or convert it with transformers' save_pretrained"
        )
        return _fetch(answer, ALLOWED, "*.safetensors", remedy, [CARD])
    patterns = [glob.escape(file) for file in files]
    return _fetch(answer, patterns, patterns[0], "download it again", [CARD]) / files[0]


def _gguf_files(answer: _Answer, wanted: str | None) -> tuple[str, ...] | None:
    """The files of the GGUF model that is meant; None where a checkpoint in transformers' format
    is."""
    if wanted is None and not _in_gguf_alone(answer.names):
        return None
    if answer.info is None and not models_of(answer.names):
        _fetch(answer, ["*.gguf"], "*.gguf", "")  # says why there is none
    return choose(answer.names, wanted, _wanted(answer.repo_id, answer.revision))


def download_tokenizer(repo_id: str) -> Path:
    """The folder with the files of a tokenizer."""
    remedy = "choose the repository of the original model"
    return _fetch(_ask(repo_id, None), TOKENIZER, "tokenizer.json", remedy)


def _in_gguf_alone(names: Sequence[str]) -> bool:
    """Whether there are GGUF models and no checkpoint in transformers' format."""
    return bool(models_of(names)) and not any(
        name.endswith(".safetensors") and "/" not in name for name in names
    )


@dataclass(frozen=True)
class _Answer:
    """What the hub says of a repository; info None where it does not answer, as `refusal` says:
    then the names are those in the cache."""

    repo_id: str
    revision: str | None
    info: ModelInfo | None
    refusal: Exception | None
    names: tuple[str, ...]


def _ask(repo_id: str, revision: str | None) -> _Answer:
    info, refusal = None, None
    names: tuple[str, ...] = ()
    try:
        info = ask_hub(repo_id, revision)
        names = tuple(file.rfilename for file in info.siblings or [])
    except Exception as error:  # the HTTP client's own errors differ between hub versions
        refusal = error
        with contextlib.suppress(OSError, ValueError):
            cached = _cached(repo_id, revision)
            paths = (path for path in cached.rglob("*") if path.is_file())
            names = tuple(str(path.relative_to(cached)) for path in paths)
    return _Answer(repo_id, revision, info, refusal, names)


def _cached(repo_id: str, revision: str | None) -> Path:
    """The folder of a revision in the cache, with what there is; OSError where it is not there."""
    repo, name = cache_of(repo_id), revision or "main"
    reference = repo / "refs" / name
    commit = reference.read_text().strip() if reference.is_file() else name
    folder = repo / "snapshots" / commit
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    return folder


def ask_hub(repo_id: str, revision: str | None) -> ModelInfo:
    """What the hub says of a model, with the sizes of its files. One attempt; raises whatever
    huggingface_hub does."""
    from huggingface_hub import HfApi

    return HfApi().model_info(repo_id, revision=revision, timeout=_ASK_S, files_metadata=True)


def cache_of(repo_id: str) -> Path:
    """The folder in the hub's cache where a model lies, or would."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model")


def _fetch(
    answer: _Answer, patterns: list[str], needed: str, remedy: str, beside: Sequence[str] = ()
) -> Path:
    """The folder with the files that match `patterns`, `needed` among them; what is in the cache
    and as on the hub is not downloaded again. Where the hub does not answer, the cache does.
    beside: patterns of files that the cache may lack."""
    from huggingface_hub import errors, snapshot_download

    repo_id, revision, info, refusal = (
        answer.repo_id, answer.revision, answer.info, answer.refusal,
    )  # fmt: skip
    with hub_errors(repo_id, revision):
        if info is not None:
            patterns = [*patterns, *beside]
            _check_room(repo_id, revision, info, patterns)
        try:
            found = snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=IGNORED,
                local_files_only=info is None,
            )
        except errors.LocalEntryNotFoundError:
            if isinstance(refusal, (errors.HfHubHTTPError, errors.HFValidationError)):
                raise refusal from None
            raise
    folder = Path(found)
    if any(folder.glob(needed)):
        return folder
    if info is None:
        raise CheckpointError(f"[hub] {_not_here(repo_id, revision)}") from refusal
    raise CheckpointError(f"[hub] {_wanted(repo_id, revision)} has no {needed}; {remedy}")


def _check_room(repo_id: str, revision: str | None, info: ModelInfo, patterns: list[str]) -> None:
    """CheckpointError where the disk does not hold what is still to be downloaded."""
    needed = to_download(repo_id, info, patterns)
    folder, free = _free(cache_of(repo_id))
    if needed > free:
        raise CheckpointError(
            f"[hub] {_wanted(repo_id, revision)} takes {size_text(needed)} more on the disk, and "
            f"{folder} has {size_text(free)} free; {_ROOM}"
        )


def to_download(repo_id: str, info: ModelInfo, patterns: list[str]) -> int:
    """Bytes of the files that match and are not in the cache, nor parts of them."""
    from huggingface_hub import utils

    blobs = cache_of(repo_id) / "blobs"
    chosen = utils.filter_repo_objects(  # type: ignore[attr-defined]  # documented all the same
        info.siblings or [],
        allow_patterns=patterns,
        ignore_patterns=IGNORED,
        key=lambda file: file.rfilename,
    )
    total = 0
    for file in chosen:
        name = file.blob_id if file.lfs is None else file.lfs.sha256
        with contextlib.suppress(OSError):
            if name is None or not (blobs / name).exists():
                part = blobs / f"{name}.incomplete"
                total += (file.size or 0) - (part.stat().st_size if part.exists() else 0)
    return max(0, total)


def _free(folder: Path) -> tuple[Path, int]:
    """The folder, or the nearest above it that there is, and the bytes free there."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return place, shutil.disk_usage(place).free
    return folder, 0


def _wanted(repo_id: str, revision: str | None) -> str:
    return f"{repo_id} at revision {revision}" if revision else repo_id


@contextlib.contextmanager
def hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns the hub's exceptions into CheckpointErrors that say what to do."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the HTTP client's own errors differ between hub versions
        raise CheckpointError(f"[hub] {_reason(error, repo_id, revision)}") from error


def _reason(error: Exception, repo_id: str, revision: str | None) -> str:
    from huggingface_hub import errors

    wanted, told = _wanted(repo_id, revision), " ".join(str(error).split())
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo_id} is gated: accept its licence at https://huggingface.co/{repo_id}, "
            "then log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{repo_id} has no revision {revision!r}; give one of its branches, tags or "
            "commit hashes"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {repo_id} here and no such model on the Hugging Face hub; "
            "check the spelling, and for a private model log in with `hf auth login`"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{shown(repo_id)} is not a Hugging Face id: {short(told.partition(': ')[0])}"
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            return (
                f"the Hugging Face hub does not give {wanted} to this user ({status}); see "
                f"https://huggingface.co/{repo_id}, and log in with `hf auth login` or set "
                "HF_TOKEN to a token that may read it"
            )
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return _not_here(repo_id, revision)
    if any(map(_is_full, _causes(error))):
        folder, free = _free(cache_of(repo_id))
        return (
            f"the disk is full: downloading {wanted} stopped with {size_text(free)} free in "
            f"{folder}; {_ROOM}, and try again; finished files are kept"
        )
    remedy = "try again, finished files are kept"
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        remedy = "set HF_HOME to a folder that this user can write to"
    return f"downloading {wanted} failed: {type(error).__name__}: {told}; {remedy}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what is behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_full(error: BaseException) -> bool:
    """Of the disk; the hub's faster downloads say so in words alone."""
    full = isinstance(error, OSError) and error.errno in _FULL
    return full or os.strerror(errno.ENOSPC) in str(error)


def _not_here(repo_id: str, revision: str | None) -> str:
    """Why the cache has no such model, or not all of it, while the hub is out of reach."""
    from huggingface_hub import try_to_load_from_cache

    with permitted("hub"):
        kind(cache_of(repo_id) / "refs")
    wanted = _wanted(repo_id, revision)
    offline = os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}
    if isinstance(try_to_load_from_cache(repo_id, "config.json", revision=revision), str):
        why = (
            "HF_HUB_OFFLINE is set; unset it" if offline else "the hub cannot be reached; go online"
        )
        return (
            f"{wanted} was not downloaded completely, only some of its files are in the "
            f"cache, and {why} and try again to download the rest"
        )
    if offline:
        return (
            f"{wanted} is not in the local cache and HF_HUB_OFFLINE is set; unset it to "
            "download, or give a local folder"
        )
    return (
        f"{wanted} is neither a local folder nor in the cache, and the Hugging Face hub "
        "cannot be reached; check the network, or give a local folder"
    )
