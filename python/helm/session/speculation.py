"""What `speculate` asks for, as the runtime takes it. Guesses nothing itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.arguments import is_one_of, shown
from helm.errors import InvalidError
from helm.model.gguf.file import SUFFIX
from helm.model.hub import BUNDLED

if TYPE_CHECKING:
    from helm.session.draft import Draft

CHOICES = ("auto", "off", "ngram")


@dataclass(frozen=True)
class Speculation:
    """How the next tokens are guessed. by: "ngram", "model" by the `draft`, or "off" for the
    `reason`, empty where it was asked for."""

    by: str
    reason: str = ""
    draft: Draft | None = None

    def drafter(self) -> Any:
        """A native drafter, for one service; None: nothing is guessed."""
        from helm import _helm

        if self.draft is not None:
            engine, self.draft.engine = self.draft.engine, None
            return _helm.model_drafter(engine)
        return None if self.by == "off" else _helm.ngram_drafter()

    def describe(self) -> dict[str, Any]:
        """by, reason and, of a draft, its name, memory_bytes, context and threads."""
        said: dict[str, Any] = {"by": self.by, "reason": self.reason}
        return said if self.draft is None else {**said, "draft": self.draft.describe()}


def draft_named(speculate: Any) -> Path | str | None:
    """The model that `speculate` names; None for one of CHOICES. InvalidError for anything else: a
    bare word is no model, unless it is there."""
    if is_one_of(speculate, CHOICES):
        return None
    if isinstance(speculate, os.PathLike):
        return Path(speculate)
    if isinstance(speculate, str) and "\0" not in speculate:
        there = speculate != "" and os.path.exists(os.path.expanduser(speculate))
        if there or speculate == BUNDLED or "/" in speculate or speculate.endswith(SUFFIX):
            return speculate
    raise InvalidError(
        f"[load] speculate must be {', '.join(CHOICES)} or a model that guesses (a folder, a GGUF "
        f"file, or a Hugging Face id as owner/name), got {shown(speculate)}"
    )


def choose_speculation(speculate: Any, engine: Any, draft: Draft | None = None) -> Speculation:
    """speculate: one of CHOICES, or the name of the draft. "auto" guesses where tokens are the same
    as without; the others raise InvalidError where the engine cannot compute guesses."""
    from helm import _helm

    if speculate == "off":
        return Speculation("off")
    obstacle = _helm.speculation_obstacle(engine)
    if speculate != "auto":
        if obstacle:
            asked = "ngram" if draft is None else draft.name
            raise InvalidError(
                f"[load] speculate is {asked!r}, but {obstacle}; plan with other limits, or leave "
                "it at 'auto' or 'off'"
            )
        return Speculation("ngram" if draft is None else "model", draft=draft)
    kinds = {use["kind"] for use in engine.stats["devices"]}
    if not obstacle and "cuda" in kinds:
        obstacle = "on CUDA a step of several tokens rounds otherwise than one of a single token"
    return Speculation("off", obstacle) if obstacle else Speculation("ngram")
