"""The tokenizer and the generation defaults of a model's files."""

from __future__ import annotations

from pathlib import Path

from helm.base.files import present
from helm.base.jsonio import Reader
from helm.errors import ConfigError
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


def _gguf_defaults(gguf: Gguf, files: ModelFiles) -> GenerationDefaults:
    keys = {name: f"general.sampling.{own}" for name, own in _SAMPLING.items()}
    stated = {name: gguf.keys[key] for name, key in keys.items() if key in gguf.keys}
    if stated:
        stated["do_sample"] = stated.get("temperature") != 0
    return read_generation_defaults(
        Reader(stated, gguf.source, ConfigError), files.path.name, files.config
    )
