"""Which KV blocks of accelerator layers lie in host memory, and how long a layer takes that visits
or asks for them. Knows blocks, positions and seconds; no model, no device and no memory limit.

The rules are the runtime's (`cpp/kv/paging.h`): a block is the same positions of every
layer; once more slots are in use than the watermark allows, the block that has been full for
longest leaves; a sequence's last block never does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from helm.compiler.times import F64, I64, Queries

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pool:
    """The accelerator's slots for KV blocks, shared by all sequences.

    slots: [choices]. blocks: of the whole contexts of all `sequences`. watermark: the share of
    the slots that stays in use once blocks leave. No slots at all, which the runtime refuses,
    stand for the published placement: every position is in host memory, attention is one op.
    """

    slots: I64
    blocks: int
    sequences: int
    page_tokens: int
    watermark: float

    @functools.cached_property
    def overflows(self) -> Bools:
        """[choices] whether blocks may come to lie in host memory."""
        return np.asarray(self.slots < self.blocks)

    @functools.cached_property
    def kept(self) -> I64:
        """[choices] blocks in use beyond which the oldest leave."""
        return np.asarray(np.floor(self.watermark * self.slots), np.int64)

    @functools.cached_property
    def executed(self) -> I64:
        """[choices] 1 where the runtime has a say: a sequence's last block stays, and a layer of
        which blocks left runs in pieces."""
        return np.asarray(self.slots > 0, np.int64)

    def blocks_of(self, tokens: I64 | int) -> I64:
        """Blocks that hold `tokens` positions of one sequence."""
        return np.asarray(-(-np.asarray(tokens, np.int64) // self.page_tokens))

    def far_blocks(self, context: int) -> I64:
        """[choices] blocks of all sequences in host memory when each has `context` positions."""
        each = self.blocks_of(context)
        excess = self.sequences * each - self.kept
        most = self.sequences * (each - self.executed)
        return np.where(self.overflows, np.clip(excess, 0, most), 0)


def least_slots(step_tokens: int, sequences: int, page_tokens: int) -> int:
    """Slots without which the runtime refuses a pool that overflows: for what a step writes."""
    return -(-step_tokens // page_tokens) + 2 * sequences


@dataclass(frozen=True)
class Far:
    """What attention finds in host memory, of all sequences together; arrays of any one shape.

    blocks: that lie there, pages: of a layer that have visible positions, copied: positions of
    those pages, seen: the visible ones.
    """

    blocks: I64
    pages: I64
    copied: I64
    seen: I64


def _far(blocks: I64, hidden: I64 | int, filled: I64 | int, page_tokens: int) -> Far:
    """Of one sequence whose first `blocks` blocks, of `filled` positions in all, lie there; no
    query sees its first `hidden` positions."""
    end = np.minimum(blocks * page_tokens, filled)
    first = hidden // page_tokens
    return Far(
        blocks,
        np.maximum(0, blocks - first),
        np.maximum(0, end - first * page_tokens),
        np.maximum(0, end - hidden),
    )


def decode_far(pool: Pool, context: int, hidden: int) -> Far:
    """[choices] when each sequence has `context` positions, of which the first `hidden` are
    outside the window. Prompts came one after the other, so the first sequences' blocks left."""
    blocks = pool.far_blocks(context)
    each = pool.blocks_of(context) - pool.executed
    whole, rest = np.divmod(blocks, np.maximum(1, each))
    full, part = (_far(n, hidden, context, pool.page_tokens) for n in (each, rest))
    return Far(
        blocks,
        whole * full.pages + part.pages,
        whole * full.copied + part.copied,
        whole * full.seen + part.seen,
    )


@dataclass(frozen=True)
class PrefillFar:
    """far: [runs, choices] of the run's sequence. left: [steps, choices] blocks that leave before
    the step. waits: [steps, choices] whether there are not enough free slots beside them, so that
    the step cannot begin before the accelerator is done with the one before."""

    far: I64
    left: I64
    waits: Bools


def prefill_far(pool: Pool, queries: Queries, prompt: int) -> PrefillFar:
    """Where blocks lie while prompts fill steps, one prompt after the other."""
    sequence = np.cumsum(queries.past == 0) - 1  # [runs]
    starts = np.flatnonzero(np.diff(queries.step, prepend=-1))
    ends = np.append(starts[1:], len(queries.step)) - 1
    each = pool.blocks_of(prompt)
    used = sequence[ends] * each + pool.blocks_of((queries.past + queries.tokens)[ends])

    def movable(runs: I64 | slice) -> I64:
        """[..., choices] blocks of a run's sequence that may lie in host memory."""
        before = pool.blocks_of(queries.past[runs])[:, None]
        return np.asarray(np.maximum(0, before - pool.executed))

    ended = each - pool.executed  # of a prompt that is done
    most = sequence[starts][:, None] * ended + movable(starts)
    away = np.where(pool.overflows, np.clip(used[:, None] - pool.kept, 0, most), 0)
    earlier = sequence[:, None] * ended
    far = np.clip(away[queries.step] - earlier, 0, movable(slice(None)))
    left = np.diff(away, axis=0, prepend=0)
    new = np.diff(used, prepend=0)[:, None]
    return PrefillFar(far, left, (left > 0) & (pool.slots - pool.kept < new))


def run_far(pool: Pool, blocks: I64, past: I64, hidden: I64) -> Far:
    """[runs, choices] of runs whose first `blocks` blocks lie in host memory."""
    return _far(blocks, hidden[:, None], past[:, None], pool.page_tokens)


def far_pairs(end: I64, past: I64, tokens: I64, window: int) -> F64:
    """(query, key) pairs with keys before position `end`, which is at most `past`, within the
    window, of queries `past` to `past + tokens`; any shapes that broadcast."""
    if not window:
        return np.asarray(end * tokens, np.float64)

    def below(queries: I64) -> F64:
        """Of all queries before this one: each beyond the window sees one key less."""
        beyond = np.minimum(np.maximum(0, queries - window), end)
        seen = end * np.minimum(queries, window) + beyond * end
        return np.asarray(seen - beyond * (beyond + 1) / 2.0)

    return np.asarray(below(past + tokens) - below(past))


def alike(spread: Bools) -> tuple[I64, I64]:
    """Choices that differ, where all without spread pages are alike: the first of those, and every
    other one. For each choice its place among them."""
    kept = np.concatenate([np.flatnonzero(~spread)[:1], np.flatnonzero(spread)])
    place = np.zeros(len(spread), np.int64)
    place[kept] = np.arange(len(kept))
    return kept, place
