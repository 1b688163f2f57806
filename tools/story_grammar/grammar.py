"""Text files of sentence variants and their expansion. Knows nothing of characters or plots."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PARAGRAPH = "---"  # a beat of its own that starts a new paragraph
OPTIONAL = "?"  # the first line of a beat that some tellings leave out

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(@?)(\w+)\}")


@dataclass(frozen=True)
class Plot:
    """A story's outline: values to draw once, then beats, each a list of equal variants."""

    name: str
    header: dict[str, list[str]]
    beats: list[list[str]]


def read_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_plot(path: Path) -> Plot:
    """Reads `key = value | value` lines, then beats separated by blank lines."""
    header_text, *beat_texts = path.read_text(encoding="utf-8").strip().split("\n\n")
    header = {}
    for line in header_text.splitlines():
        key, values = line.split(" = ")
        header[key] = values.split(" | ")
    return Plot(path.stem, header, [text.splitlines() for text in beat_texts])


def read_plots() -> list[Plot]:
    return [read_plot(path) for path in sorted((FOLDER / "plots").glob("*.txt"))]


def read_phrases() -> dict[str, list[str]]:
    """phrases/NAME.txt, one variant a line, as {NAME: variants}."""
    return {path.stem: read_lines(path) for path in sorted((FOLDER / "phrases").glob("*.txt"))}


def capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def expand(
    template: str, slots: Mapping[str, str], phrases: Mapping[str, list[str]], rng: random.Random
) -> str:
    """Resolves `[a|b]` to one of its parts, `{@name}` to a phrase, `{slot}` to its value.

    A slot written with a capital, `{Hero}`, is the capitalised value of `{hero}`.
    """
    while _CHOICE.search(template):
        template = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template, count=1)

    def fill(match: re.Match[str]) -> str:
        is_phrase, name = match.groups()
        if is_phrase:
            return expand(rng.choice(phrases[name]), slots, phrases, rng)
        if name[0].isupper():
            return capitalise(slots[name[0].lower() + name[1:]])
        return slots[name]

    text = _SLOT.sub(fill, template)
    return expand(text, slots, phrases, rng) if _SLOT.search(text) else text
