"""The oracle of overflowing KV: moves blocks one at a time, as the runtime does, and adds up pages.

Shares nothing with helm; `naive_search` prices with it.
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field


@dataclass
class Cache:
    """Slots for KV blocks on the accelerator; `total` blocks are all there ever are. Without any
    slot every position lies in host memory."""

    slots: int
    total: int
    page_tokens: int
    watermark: float
    used: int = 0
    far: dict[int, int] = field(default_factory=lambda: collections.defaultdict(int))
    full: collections.deque[int] = field(default_factory=collections.deque)  # sequences

    def blocks(self, positions: int) -> int:
        return math.ceil(positions / self.page_tokens)

    def followed(self, positions: int) -> int:
        """Blocks of a sequence that may leave."""
        return max(0, self.blocks(positions) - (1 if self.slots else 0))

    def make_room(self, new: int) -> int:
        """Evicts what lies past the watermark; how many blocks."""
        left = 0
        while self.slots < self.total and self.full:
            if self.used + new <= int(self.watermark * self.slots):
                break
            self.far[self.full.popleft()] += 1
            self.used -= 1
            left += 1
        return left

    def grow(self, sequence: int, past: int, tokens: int) -> None:
        self.used += self.blocks(past + tokens) - self.blocks(past)
        for _ in range(self.followed(past), self.followed(past + tokens)):
            self.full.append(sequence)

    @property
    def spare(self) -> int:
        return self.slots - int(self.watermark * self.slots)


def after_prompts(cache: Cache, sequences: int, context: int) -> list[int]:
    """Blocks of each sequence in host memory when all have `context` positions."""
    for sequence in range(sequences):
        cache.grow(sequence, 0, context)
    cache.make_room(0)
    return [cache.far[sequence] for sequence in range(sequences)]


@dataclass
class Away:
    """One step of prefill: far blocks of each run, blocks that left before it, and whether it
    waits for the step before."""

    far: list[int]
    left: int
    waits: bool


def through_prefill(cache: Cache, steps: list[list[tuple[int, int]]]) -> list[Away]:
    found, sequence = [], -1
    for runs in steps:
        named = []
        for past, tokens in runs:
            sequence += past == 0
            named.append((sequence, past, tokens))
        new = sum(cache.blocks(past + n) - cache.blocks(past) for _, past, n in named)
        left = cache.make_room(new)
        found.append(
            Away([cache.far[s] for s, _, _ in named], left, left > 0 and cache.spare < new)
        )
        for run in named:
            cache.grow(*run)
    return found


@dataclass
class Visits:
    """Of one run: pages with visible positions, positions copied for them, positions seen."""

    pages: int = 0
    copied: int = 0
    seen: int = 0


def visits(far: int, page_tokens: int, filled: int, hidden: int) -> Visits:
    """Page by page, of the first `far` blocks; no query sees the first `hidden` positions."""
    found = Visits()
    for block in range(far):
        positions = range(block * page_tokens, min((block + 1) * page_tokens, filled))
        visible = sum(position >= hidden for position in positions)
        if (block + 1) * page_tokens > hidden:
            found.pages += 1
            found.copied += len(positions)
            found.seen += visible
    return found


def layer_seconds(pages: int, copy: float, attend: float, other: float) -> float:
    """A layer that pages visit: those after the second wait for their copies if these are longer
    than attention to a page; copies alone bound it as well."""
    if pages == 0:
        return other
    late = sum(max(0.0, copy - attend) / pages for _ in range(2, pages))
    return max(copy, other + attend + late)


def two_visitors(layers: int, pages: int, copy: float, attend: float, other: float) -> float:
    """Seconds per layer of many layers, by simulation: every page is copied into the buffer that
    the page before last has left, then attended to, and the rest of the layer follows."""
    copied, now, read = 0.0, 0.0, [0.0, 0.0]
    ends = []
    for _ in range(layers):
        for page in range(pages):
            copied = max(copied, read[page % 2]) + copy
            now = max(now, copied) + attend
            read[page % 2] = now
        if pages % 2:
            read.reverse()
        now += other
        ends.append(now)
    half = layers // 2
    return (ends[-1] - ends[half - 1]) / (layers - half)
