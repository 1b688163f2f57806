"""The tokenizer and the generation defaults of a model's files, and the files that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helm.base.files import present, read_file
from helm.base.jsonio import Reader
from helm.errors import ConfigError
from helm.model.gguf.config import config_of
from helm.model.gguf.file import Gguf, read_gguf
from helm.model.hub import is_gguf
from helm.model.model_files import ModelFiles
from helm.text.generation_defaults import (
    GenerationDefaults,
    load_generation_defaults,
    read_generation_defaults,
)
from helm.text.gguf_tokenizer import gguf_tokenizer
from helm.text.tokenizer import TOKENIZER_FILE, Tokenizer

# What a folder has beside its weights, for HELM and for others.
_BESIDE = (
    *("*.json", "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.model", "vocab.txt"),
    *("merges.txt", "README.md", "LICENSE*"),
)
_MOST_BYTES = 256 << 20  # of one of them
# What GGUF files recommend, by the names of generation_config.json.
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def tokenizer_of(files: ModelFiles, place: Path | None = None) -> Tokenizer | None:
    """The model's own tokenizer, None where it has none; place: the folder or GGUF file of the one
    to use instead. Raises TokenizerError."""
    rows = files.config.vocab_size
    if place is not None and is_gguf(place):
        return gguf_tokenizer(read_gguf(place), rows)
    if place is not None:
        return Tokenizer.from_directory(place, rows)
    if files.gguf is not None:
        return gguf_tokenizer(files.gguf, rows)
    if present(files.folder / TOKENIZER_FILE):
        return Tokenizer.from_directory(files.folder, rows)
    return None


def defaults_of(files: ModelFiles) -> GenerationDefaults:
    """What the model's author recommends. Raises ConfigError."""
    if files.gguf is None:
        return load_generation_defaults(files.folder, files.config)
    return _gguf_defaults(files.gguf, files)


def companions(files: ModelFiles) -> dict[str, bytes]:
    """By name, the files that a folder with the model's weights has beside them: those of a folder
    as they are, those of a GGUF file as its keys say."""
    if files.gguf is None:
        return _beside(files.folder)
    found = {"config.json": config_of(files.gguf), "generation_config.json": _sampling(files.gguf)}
    tokenizer = gguf_tokenizer(files.gguf, files.config.vocab_size)
    written = {name: json.dumps(value, indent=2).encode() for name, value in found.items()}
    return written if tokenizer is None else {**written, **tokenizer.files()}


def _beside(folder: Path) -> dict[str, bytes]:
    paths = [folder / "config.json", *(path for like in _BESIDE for path in folder.glob(like))]
    return {
        str(path.relative_to(folder)): read_file(path, most=_MOST_BYTES)
        for path in sorted(paths)
        if path.is_file() and not path.name.endswith(".index.json")
    }


def _sampling(gguf: Gguf) -> dict[str, Any]:
    keys = {name: f"general.sampling.{own}" for name, own in _SAMPLING.items()}
    stated = {name: gguf.keys[key] for name, key in keys.items() if key in gguf.keys}
    if stated:
        stated["do_sample"] = stated.get("temperature") != 0
    return stated


def _gguf_defaults(gguf: Gguf, files: ModelFiles) -> GenerationDefaults:
    return read_generation_defaults(
        Reader(_sampling(gguf), gguf.source, ConfigError), files.path.name, files.config
    )
