"""What interactive Python shows of an object: one line, or a small table in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape

from helm.base.arguments import short
from helm.errors import printable

_MOST = 80  # characters of a name or a fact


class Summarized(ABC):
    """An object with a name and facts."""

    @abstractmethod
    def _summary(self) -> tuple[str, dict[str, str]]:
        """The name, and facts by what they are about; each says alone what it means."""

    def __repr__(self) -> str:
        name, facts = self._summary()
        listed = ", ".join(_line(fact) for fact in facts.values())
        return f"<{type(self).__name__} {_line(name)}: {listed}>"

    def _repr_html_(self) -> str:
        name, facts = self._summary()
        rows = "".join(
            f"<tr><th>{escape(about)}</th><td>{escape(_line(fact))}</td></tr>"
            for about, fact in facts.items()
        )
        title = escape(f"{type(self).__name__} {_line(name)}")
        return f"<table><caption>{title}</caption>{rows}</table>"


def _line(text: str) -> str:
    return short(" ".join(printable(text).split()), _MOST)
