"""What a kind of input is, and what HELM may answer. Knows no kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import ClassVar

from helm.errors import HelmError


class NonsenseError(Exception):
    """An input was accepted, and what came of it makes no sense."""


def sensible(condition: bool, what: str) -> None:
    """NonsenseError, saying `what`, unless `condition` holds."""
    if not condition:
        raise NonsenseError(what)


class Kind(ABC):
    """One kind of input. An object serves many inputs of one process, one after the other.

    refusals: the exceptions by which HELM may refuse an input. limit_s: how long one may take.
    most_bytes: of resident memory that one may take, or leave behind. inputs: how many belong to
    the full form.
    """

    name: ClassVar[str]
    refusals: ClassVar[tuple[type[Exception], ...]] = (HelmError,)
    limit_s: ClassVar[float] = 5.0
    most_bytes: ClassVar[int] = 1 << 30
    inputs: ClassVar[int]

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """Makes what is valid, in a folder of its own."""

    @abstractmethod
    def run(self, random: Random, folder: Path) -> None:
        """Makes one input, in an empty folder if it is of files, and gives it to HELM.

        Returns where HELM accepts the input and does something sensible with it; raises one of
        `refusals` where HELM refuses it, NonsenseError or anything else where it does worse.
        """

    def refused(self, error: BaseException) -> bool:
        """Whether `error` is a refusal as the contract has it: a class of it, with a message."""
        usual = isinstance(error, HelmError) or type(error) in self.refusals
        return usual and isinstance(error, self.refusals) and bool(str(error).strip())


def tokens_are_sensible(tokens: Iterable[int], most: int, vocab: int) -> None:
    """At most so many tokens, each of the vocabulary."""
    found = list(tokens)
    sensible(0 < len(found) <= most, f"{len(found)} tokens, expected 1 to {most}")
    sensible(all(0 <= token < vocab for token in found), f"{found} of a vocabulary of {vocab}")
