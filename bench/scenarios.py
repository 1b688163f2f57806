"""What compare.py measures of an engine, by name, and which engines there are. Runs nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULTS = (
    "decode",
    "prefill-512",
    "decode-x4",
    "decode-x8",
    "prefill-4096",
    "decode@4096",
    "decode@32768",
)
QUICK = ("decode", "prefill-512", "decode-x4", "decode-x8")
# What is worth its time of engines other than HELM in its default tier, which measures everything.
ONLY = {
    "helm": ("decode", "prefill-512"),
    "llama.cpp": tuple(name for name in DEFAULTS if name != "decode@32768"),
    "transformers": ("decode", "prefill-512"),
}
ONE_THREAD = "one-thread"  # a variant of llama.cpp
SHORT = 1024  # positions; up to here scenarios share an engine's set-up
LONG = 8192
PARTS = 8  # of a decode
PART_STEPS = 4  # at least, so that one of them that is disturbed does not count

_NAME = re.compile(r"(?:(prefill)-([1-9]\d{0,6})|decode(?:@([1-9]\d{0,6}))?(?:-x([1-9]\d?))?)")


@dataclass(frozen=True)
class Scenario:
    """context: tokens of each sequence's prompt; of a prefill they are what is timed. steps: of
    decode, a token of every sequence each."""

    name: str
    kind: str  # "prefill" or "decode"
    context: int
    sequences: int
    steps: int

    @property
    def part_steps(self) -> list[int]:
        """Steps of the parts that are timed one after the other, each between probes of the
        ceilings; of a prefill one."""
        parts = min(PARTS, max(1, self.steps // PART_STEPS))
        bounds = [self.steps * i // parts for i in range(parts + 1)]
        return [end - begin for begin, end in itertools.pairwise(bounds)]

    @property
    def positions(self) -> int:
        """Room that each sequence needs."""
        return self.context + self.steps + 1

    @property
    def tokens(self) -> int:
        """Tokens that are timed, of all sequences."""
        return self.context if self.kind == "prefill" else self.steps * self.sequences

    @property
    def mean_context(self) -> float:
        """Positions that a sequence's decode step attends to, on average over the steps."""
        return self.context + (self.steps + 1) / 2

    @property
    def setup(self) -> tuple[int, int]:
        """Scenarios for which this is equal share a set-up: (class of context, sequences)."""
        room = next((i for i, most in enumerate((SHORT, LONG)) if self.context <= most), 2)
        return room, self.sequences


def scenario(name: str, decode_prompt: int, tokens: int) -> Scenario:
    """The scenario of that name; decode goes on after `decode_prompt` tokens unless it says
    otherwise, for `tokens` steps, half and a quarter of them in long contexts. SystemExit for a
    name that means nothing."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise SystemExit(
            f"[bench] no scenario {name!r}; expected prefill-TOKENS, decode, decode@CONTEXT or "
            "decode-xSEQUENCES"
        )
    prefill, prompt, context, sequences = match.groups()
    if prefill:
        return Scenario(name, "prefill", int(prompt), 1, 1)
    after = int(context or decode_prompt)
    fewer = 1 if after <= SHORT else 2 if after <= LONG else 4
    return Scenario(name, "decode", after, int(sequences or 1), max(1, tokens // fewer))


def family(engine: str) -> str:
    """ "helm", "llama.cpp" or "transformers"."""
    return engine.partition(":")[0]


def variant(engine: str) -> str:
    """What follows the colon: an isa, a flash-attention setting or a dtype; or nothing."""
    return engine.partition(":")[2]


def chosen(engine: str, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Those of `scenarios` that `engine` measures: of HELM in its default tier all, of others what
    is worth its time."""
    if engine == "helm":
        return list(scenarios)
    only = ONLY[family(engine)]
    return [s for s in scenarios if s.name in only or s.name not in DEFAULTS]


def prompt_of(length: int, vocabulary: int, sequence: int = 0) -> list[int]:
    """Arbitrary tokens, the same for every engine; no two sequences' prompts begin alike."""
    most = min(vocabulary, 50000)
    return [(i * 7919 + 13 + 101 * sequence) % most for i in range(length)]
