"""Calls into the tokenizers library: its failures, as HELM's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from helm.errors import TokenizerError

_REMEDY = "tokenizer.json is damaged or of another version, download it again"


@contextlib.contextmanager
def answering(what: str, remedy: str = _REMEDY) -> Iterator[None]:
    """Makes what the library raises a TokenizerError that begins with `what`: bare Exceptions, and
    panics, which are no Exception and would end the process."""
    try:
        yield
    except BaseException as error:
        raise_answer(error, what, remedy)


def raise_answer(error: BaseException, what: str, remedy: str = _REMEDY) -> NoReturn:
    """Raises what `answering` raises for an error."""
    panic = type(error).__name__ == "PanicException"  # its module cannot be imported
    if isinstance(error, TokenizerError) or not (panic or isinstance(error, Exception)):
        raise error
    raise TokenizerError(f"{what}: {error}; {remedy}") from error
