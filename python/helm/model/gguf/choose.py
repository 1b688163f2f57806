"""Which GGUF files of a folder or of a repository are the model that is meant; reads none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from helm.base.arguments import short
from helm.errors import CheckpointError
from helm.model.gguf.file import SUFFIX, part_names

_ON_THE_HUB = "name one of them behind a colon, or a word of its name, as :Q4_K_M"
_SHOWN = 12  # models in one message
_BESIDE = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)


def models_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Whole models among files of these names: the first part -> all parts. What stands beside a
    model, as a vision projector, is none."""
    files = {name for name in names if name.lower().endswith(SUFFIX)}
    found = {}
    for name in sorted(files):
        parts = _parts(name)
        if parts[0] == name and not _BESIDE.search(PurePosixPath(name).name):
            found[name] = parts
    return found


def choose(
    names: Iterable[str], wanted: str | None, where: str, remedy: str = _ON_THE_HUB
) -> tuple[str, ...]:
    """The files of the one model that `wanted` names, by its file or by a word of its name such as
    Q4_K_M; None: the only one there is. where: what the files are in, for the message, which ends
    with the remedy. Raises CheckpointError that lists them."""
    models = models_of(names)
    fitting = [name for name in models if wanted is None or _fits(name, wanted)]
    exact = [name for name in fitting if _same(name, wanted)]
    if len(exact or fitting) == 1:
        return models[(exact or fitting)[0]]
    if not models:
        raise CheckpointError(
            f"[model] {where} has no GGUF file; give a repository with one, or leave "
            f"{short(':' + wanted) if wanted else 'it'} out"
        )
    said = f"no GGUF file {short(wanted)!r}" if wanted and not fitting else "several GGUF files"
    listed = ", ".join((fitting or list(models))[:_SHOWN])
    more = len(fitting or models) - _SHOWN
    listed += f" and {more} more" if more > 0 else ""
    raise CheckpointError(f"[model] {where} has {said}, expected one: {listed}; {remedy}")


def _parts(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    return tuple(str(path.with_name(part)) for part in part_names(path.name))


def _same(name: str, wanted: str | None) -> bool:
    return wanted is not None and wanted in (name, PurePosixPath(name).name)


def _fits(name: str, wanted: str) -> bool:
    """Whether it is the file's name, or a word of it."""
    stem = PurePosixPath(name).name[: -len(SUFFIX)]
    word = rf"(^|[-._]){re.escape(wanted)}($|[-.])"
    return _same(name, wanted) or re.search(word, stem, re.IGNORECASE) is not None
