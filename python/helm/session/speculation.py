"""What `speculate` asks for, as the runtime takes it. Guesses nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helm.base.arguments import is_one_of, shown
from helm.errors import InvalidError

CHOICES = ("auto", "off", "ngram")


@dataclass(frozen=True)
class Speculation:
    """How the next tokens are guessed. by: "ngram", or "off" for the `reason`, empty where it was
    asked for."""

    by: str
    reason: str = ""

    def drafter(self) -> Any:
        """A native drafter, for one service; None: nothing is guessed."""
        from helm import _helm

        return None if self.by == "off" else _helm.ngram_drafter()


def check_speculate(speculate: Any) -> None:
    """Raises InvalidError for none of CHOICES."""
    if not is_one_of(speculate, CHOICES):
        raise InvalidError(
            f"[load] speculate must be {', '.join(CHOICES[:-1])} or {CHOICES[-1]}, got "
            f"{shown(speculate)}"
        )


def choose_speculation(speculate: str, engine: Any) -> Speculation:
    """speculate: one of CHOICES. "auto" guesses where tokens are the same as without; "ngram"
    raises InvalidError where the engine cannot compute guesses."""
    from helm import _helm

    if speculate == "off":
        return Speculation("off")
    obstacle = _helm.speculation_obstacle(engine)
    if speculate == "ngram":
        if obstacle:
            raise InvalidError(
                f"[load] speculate is 'ngram', but {obstacle}; plan with other limits, or leave it "
                "at 'auto' or 'off'"
            )
        return Speculation("ngram")
    kinds = {use["kind"] for use in engine.stats["devices"]}
    if not obstacle and "cuda" in kinds:
        obstacle = "on CUDA a step of several tokens rounds otherwise than one of a single token"
    return Speculation("off", obstacle) if obstacle else Speculation("ngram")
