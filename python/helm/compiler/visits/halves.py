"""How long steps take in which the accelerator computes all layers, and what of their matrices lies
in host memory visits it by halves of layers: attention, then mlp. Ranks nothing.

Shares of what stays on the accelerator are arrays, an element for each of many plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.decode import crossing_s
from helm.compiler.layers import decode_attention_s
from helm.compiler.memory import DEVICE_ALIGNMENT
from helm.compiler.prefill import Prefill
from helm.compiler.setting import Setting
from helm.compiler.times import (
    ATTENTION,
    DEVICE_TERMS,
    F64,
    FIXED,
    I64,
    LINK,
    TERMS,
    VISIT,
    unit_s,
)
from helm.compiler.visits.ring import Group, Piece, coming_s
from helm.compiler.visits.rows import Matrix, matrices_of
from helm.machine.rates import AcceleratorProfile

NAMES = ("attention", "mlp")
ROW = 1  # of layouts: the embedding on the CPU, all layers on the accelerator


@dataclass(frozen=True)
class Shares:
    """Of every attention's and mlp's matrices, what stays on the accelerator; [plans]."""

    attention: F64
    mlp: F64

    def at(self, plan: int) -> Shares:
        return self.of(np.array([plan]))

    def of(self, plans: I64) -> Shares:
        return Shares(self.attention[plans], self.mlp[plans])


class Halves:
    """Of one number of sequences, and one way to fill steps with prompts. splits: whether rows of
    a matrix may stay while others visit."""

    def __init__(self, setting: Setting, prefill: Prefill, splits: bool = True) -> None:
        self.setting, self._prefill = setting, prefill
        layers = setting.classes.units
        self._decode_units = functools.cache(self.decode_units)
        self._matrices = [[matrices_of(setting.model, u, splits) for u in x.units] for x in layers]

    # --- bytes -----------------------------------------------------------------------------------

    def _bytes(self, of: Shares, count: Callable[[Matrix, F64], I64]) -> I64:
        """[classes, halves, plans]"""
        both, none = (of.attention, of.mlp), np.zeros(len(of.mlp), np.int64)
        found = [
            [
                sum((count(matrix, share) for matrix in own), none)
                for own, share in zip(halves, both, strict=True)
            ]
            for halves in self._matrices
        ]
        return np.array(found)

    def host_bytes(self, of: Shares) -> I64:
        """[classes, halves, plans] that visit in a step."""
        return self._bytes(of, lambda matrix, share: matrix.visiting_bytes(share, 1))

    def total_bytes(self, of: Shares) -> I64:
        """[plans] of all layers that visit."""
        return self._layers(self.host_bytes(of))

    def left_bytes(self, of: Shares) -> I64:
        """[plans] of all layers, by which the accelerator holds less than all."""

        def held(matrix: Matrix, share: F64) -> I64:
            return np.asarray(matrix.staying_bytes(share, DEVICE_ALIGNMENT))

        whole = Shares(np.ones_like(of.attention), np.ones_like(of.mlp))
        return self._layers(self._bytes(whole, held) - self._bytes(of, held))

    def buffer_bytes(self, of: Shares) -> I64:
        """[plans] of a buffer of the ring: any half fits."""
        size = self._bytes(of, lambda m, share: m.visiting_bytes(share, DEVICE_ALIGNMENT))
        return np.asarray(size.max(axis=(0, 1)))

    def sizes(self, of: Shares) -> tuple[I64, I64, I64]:
        """[plans] each of the above."""
        return self.total_bytes(of), self.left_bytes(of), self.buffer_bytes(of)

    def _layers(self, size: I64) -> I64:
        return np.asarray(size[self.setting.classes.member].sum(axis=(0, 1)))

    # --- seconds ---------------------------------------------------------------------------------

    def groups(self, of: Shares, run_s: F64) -> list[Group]:
        """A group for each half of each layer, whose seconds are [plans, steps]; layers of a class
        share theirs. run_s: [classes, halves, steps]."""
        link = self.setting.link
        assert link is not None
        size = self.host_bytes(of)
        come = np.where(size > 0, link.latency_s + size / self.setting.visit_bytes_per_s, 0.0)
        runs, ups = run_s[:, :, None], come[..., None]
        halves = [
            [
                [Piece(name, *both)]
                for name, *both in zip(NAMES, own, (0.0, 0.0), there, strict=True)
            ]
            for own, there in zip(runs, ups, strict=True)
        ]
        return [group for kind in self.setting.classes.member.tolist() for group in halves[kind]]

    def decode_units(self, context: int) -> F64:
        """[classes, halves, 1, DEVICE_TERMS] of a step in which each sequence has `context`
        positions."""
        batch = self.setting.batch
        terms = self._unit_terms([Step(batch, 1, batch)])
        terms[:, 0, 0, ATTENTION] += decode_attention_s(self.setting, context, self._device)
        return terms

    @functools.cached_property
    def prompt_units(self) -> F64:
        """[classes, halves, steps, DEVICE_TERMS] of the steps of prompts."""
        prefill = self._prefill
        sizes = zip(prefill.tokens.tolist(), prefill.outputs.tolist(), strict=True)
        terms = self._unit_terms([Step(n, n, outputs=out) for n, out in sizes])
        terms[:, 0, :, ATTENTION] += prefill.accelerator[:, :, ATTENTION]
        return terms

    def decode_terms(self, of: Shares, slots: int | None, context: int) -> F64:
        """[TERMS, plans] of a step in which each sequence has `context` positions. slots: of the
        ring; None: as if it had any number, which is a bound."""
        one, units = np.array([self.setting.batch]), self.setting.decode_units
        ends = units["cpu embedding"], units["accelerator head"]
        return self._terms(of, slots, self._decode_units(context), ends, one, one)

    def prefill_terms(self, of: Shares, slots: int | None) -> F64:
        """[TERMS, plans] until every prompt has its first token."""
        prefill = self._prefill
        ends = [own.sum(axis=0) for own in (prefill.embedding["cpu"], prefill.head["accelerator"])]
        return self._terms(of, slots, self.prompt_units, ends, prefill.tokens, prefill.outputs)

    @property
    def _device(self) -> AcceleratorProfile:
        assert self.setting.accelerator is not None
        return self.setting.accelerator

    def _unit_terms(self, steps: Sequence[Step]) -> F64:
        """[classes, halves, steps, DEVICE_TERMS] on the accelerator, but for attention."""
        model, device = self.setting.model, self._device
        found = {
            step: [
                [unit_s(model, unit, step, device) for unit in layer.units]
                for layer in self.setting.classes.units
            ]
            for step in dict.fromkeys(steps)
        }
        return np.stack([np.array(found[step]) for step in steps], axis=2)

    def _terms(
        self,
        of: Shares,
        slots: int | None,
        units: F64,
        ends: Sequence[F64],
        tokens: I64,
        outputs: I64,
    ) -> F64:
        """units: as `_unit_terms`. ends: [DEVICE_TERMS] of the embedding and the head."""
        setting, own = self.setting, slice(DEVICE_TERMS, 2 * DEVICE_TERMS)
        groups = self.groups(of, units.sum(axis=3))
        total = np.zeros((len(TERMS), len(of.mlp)))
        layers = units[setting.classes.member].sum(axis=(0, 1, 2))
        total[:DEVICE_TERMS] += ends[0][:, None]
        total[own] += (layers + ends[1])[:, None]
        total[FIXED] += len(tokens) * setting.cpu.step_s
        total[own.start + FIXED] += len(tokens) * self._device.step_s
        up, down = crossing_s(setting, "accelerator", tokens, outputs)
        total[LINK] += (up + down)[ROW].sum()
        shape = (len(of.mlp), len(tokens))
        played = np.broadcast_to(coming_s(groups, slots), shape).sum(axis=1)
        alone = layers.sum()
        total[VISIT] += np.maximum(0.0, played - alone)
        return total
