"""The models in the Hugging Face cache, and how one is removed. huggingface_hub knows the cache;
this knows what HELM can run of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helm.base.arguments import short
from helm.base.paths import kind, permitted
from helm.commands.model_facts import Described, describe
from helm.errors import CheckpointError, HelmError, InvalidError
from helm.model.gguf.choose import choose, models_of
from helm.model.hub import BUNDLED, bundled_model
from helm.model.model_uses import last_uses

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True)
class Stored:
    """A model on this machine. name: what to give to a command. last_used: seconds since 1970;
    None: not by HELM, as far as it remembers. described None: HELM cannot run it, because of
    `reason`."""

    name: str
    folder: Path
    disk_bytes: int
    last_used: float | None
    described: Described | None
    reason: str | None = None


def stored_models() -> list[Stored]:
    """Those of the cache, the bundled one, and folders that HELM has loaded and that are still
    there; the last used first."""
    uses = last_uses()
    found = [model for repo in _models(_scan()) for model in _of_cache(repo, uses)]
    folders = {str(bundled_model().resolve()): BUNDLED}
    folders.update({name: name for name in uses if os.path.isabs(name) and name not in folders})
    for path, name in folders.items():
        try:
            described = describe(Path(path))
        except HelmError:
            continue  # it is gone, or something else now
        size = described.facts.disk_bytes or 0
        found.append(Stored(name, Path(path), size, uses.get(path), described))
    return sorted(found, key=lambda model: (-(model.last_used or 0), model.name))


def downloaded_place(model: str, revision: str | None = None) -> Path | None:
    """Where a revision of a model lies in the cache, perhaps in parts: its folder, or its GGUF
    file; None where it is not there. CheckpointError where several GGUF files could be meant."""
    repo_id, _, wanted = model.partition(":")
    for repo in _models(_scan()):
        if repo.repo_id != repo_id:
            continue
        for found in (_newest(repo),) if revision is None else repo.revisions:
            if revision is None or revision == found.commit_hash or revision in found.refs:
                names = _names(found.snapshot_path)
                if not wanted and (not models_of(names) or _checkpoint(names)):
                    return found.snapshot_path
                file = choose(names, wanted or None, repo_id)[0]
                return found.snapshot_path / file
    return None


def _names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _checkpoint(names: list[str]) -> bool:
    """Whether there is one in transformers' format."""
    return any(name.endswith(".safetensors") and "/" not in name for name in names)


@dataclass(frozen=True)
class Removal:
    """What removing a downloaded model takes away."""

    name: str
    folder: Path
    revisions: int
    freed_bytes: int
    execute: Callable[[], None]


def removal(model: str) -> Removal:
    """Of all revisions of a model in the cache. InvalidError for what was not downloaded."""
    path = os.path.expanduser(model)
    if model == BUNDLED:
        raise InvalidError("[rm] the bundled model is part of HELM; only downloaded ones go")
    cache = _scan()
    repos = [repo for repo in _models(cache) if repo.repo_id == model]
    with permitted("rm"):
        found = kind(path)
    if not repos and found:
        raise InvalidError(
            f"[rm] {model} was not downloaded by HELM; it removes no folder or file of yours"
        )
    whole = model.partition(":")[0]
    if any(repo.repo_id == whole for repo in _models(cache)) and not repos:
        raise InvalidError(
            f"[rm] the files of a repository go together; give {whole} to remove them all"
        )
    if not repos or cache is None:
        raise InvalidError(
            f"[rm] no model {short(model)} is downloaded; helm-llm list shows those that are"
        )
    repo = repos[0]
    strategy = cache.delete_revisions(*(found.commit_hash for found in repo.revisions))

    def execute() -> None:
        strategy.execute()  # logs what it cannot remove
        if os.path.exists(repo.repo_path):
            raise CheckpointError(
                f"[rm] {repo.repo_path} cannot be removed whole; change its permissions, or remove "
                "it as the user who downloaded it"
            )

    freed = strategy.expected_freed_size
    return Removal(model, repo.repo_path, len(repo.revisions), freed, execute)


def _scan() -> HFCacheInfo | None:
    """None where there is no cache yet."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None
    except (OSError, ValueError) as reason:
        raise CheckpointError(
            f"[models] the Hugging Face cache cannot be read: {reason}; set HF_HOME to another"
        ) from None


def _models(cache: HFCacheInfo | None) -> list[CachedRepoInfo]:
    repos = [] if cache is None else list(cache.repos)
    return [repo for repo in repos if repo.repo_type == "model" and repo.revisions]


def _newest(repo: CachedRepoInfo) -> CachedRevisionInfo:
    """What the id alone means: the revision "main", or else the last one downloaded."""
    return max(repo.revisions, key=lambda found: ("main" in found.refs, found.last_modified))


def _of_cache(repo: CachedRepoInfo, uses: dict[str, float]) -> list[Stored]:
    """One model in transformers' format, or each of those in GGUF."""
    folder, names = _newest(repo).snapshot_path, _names(_newest(repo).snapshot_path)
    models = {} if _checkpoint(names) else models_of(names)
    if not models:
        return [_stored(repo.repo_id, folder, repo.size_on_disk, uses)]
    found = []
    for first, parts in models.items():
        size = sum((folder / part).stat().st_size for part in parts if part in names)
        found.append(_stored(f"{repo.repo_id}:{Path(first).name}", folder / first, size, uses))
    return found


def _stored(name: str, place: Path, size: int, uses: dict[str, float]) -> Stored:
    described, reason = None, None
    try:
        described = describe(place, size)
    except HelmError as error:
        reason = str(error)
    return Stored(name, place, size, uses.get(name), described, reason)
