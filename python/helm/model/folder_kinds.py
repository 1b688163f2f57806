"""What a folder is that is taken for a model and is none, and the way out. Reads no weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from helm.base.jsonio import read_json
from helm.errors import CheckpointError, HelmError

_CACHED = re.compile(r"models--(.+)")
_ADAPTER = "adapter_config.json"


def refuse_other(folder: Path) -> None:
    """CheckpointError for a folder without a model that is of a known other kind; says nothing of
    one that cannot be listed, as whoever reads from it will."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    found = _cache(folder.absolute(), names) or _adapter(folder, names)
    if found is not None:
        raise CheckpointError(f"[model] {folder} {found}")


def _cache(folder: Path, names: list[str]) -> str | None:
    """The Hugging Face cache, or a model's folder there; snapshots/<commit> holds the model."""
    if folder.name in ("snapshots", "blobs", "refs"):
        folder = folder.parent
    model = cached_id(folder.name)
    if model is None:
        kept = [name for name in map(cached_id, names) if name is not None]
        if not kept:
            return None
        return (
            f"is a cache of {len(kept)} models from the Hugging Face hub; give a model's id, as "
            f"{kept[0]}"
        )
    snapshots = sorted((folder / "snapshots").glob("*/config.json"))
    there = f", or the folder {snapshots[-1].parent}" if snapshots else ""
    return f"is the hub's cache of a model, not its folder; give the id {model}{there}"


def cached_id(name: str) -> str | None:
    """The Hugging Face id of a model whose folder in the hub's cache has this name."""
    found = _CACHED.fullmatch(name)
    return None if found is None else found[1].replace("--", "/")


def _adapter(folder: Path, names: list[str]) -> str | None:
    if _ADAPTER not in names:
        return None
    try:
        base = read_json(folder / _ADAPTER, CheckpointError).get("base_model_name_or_path").value
    except HelmError:
        base = None
    return (
        f"holds an adapter (LoRA) of {base if isinstance(base, str) else 'another model'}, not a "
        "whole model; merge them with peft: AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
        ".merge_and_unload().save_pretrained(NEW_FOLDER), and give that folder"
    )
