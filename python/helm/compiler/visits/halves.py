"""How long steps take in which the accelerator computes all layers, and what of their matrices lies
in host memory visits it by halves of layers: attention, then mlp. Ranks nothing.

Shares of what stays on the accelerator are arrays, an element for each of many plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helm.compiler.counts import CostedGraph, Step
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
from helm.compiler.visits.ring import Group, Piece, lanes_s, step_s
from helm.machine.rates import AcceleratorProfile
from helm.model.graph import Unit

NAMES = ("attention", "mlp")
ROW = 1  # of layouts: the embedding on the CPU, all layers on the accelerator


@dataclass(frozen=True)
class Shares:
    """Of every attention's and mlp's matrices, what stays on the accelerator; [plans]."""

    attention: F64
    mlp: F64

    def at(self, plan: int) -> Shares:
        return Shares(*(own[plan : plan + 1] for own in (self.attention, self.mlp)))


def matrix_bytes(model: CostedGraph, unit: Unit) -> int:
    """Of what is read as rows, as it lies in host memory; vectors stay on the accelerator."""
    tensors = model.graph.tensors
    names = {n for op in unit.ops for n in op.weight_names() if len(tensors[n]) > 1}
    return sum(model.tensor_bytes(name) for name in names)


class Halves:
    """Of one number of sequences, and one way to fill steps with prompts."""

    def __init__(self, setting: Setting, prefill: Prefill) -> None:
        self.setting, self._prefill = setting, prefill
        layers = setting.classes.units
        self._bytes = np.array([[matrix_bytes(setting.model, u) for u in x.units] for x in layers])

    # --- bytes -----------------------------------------------------------------------------------

    def host_bytes(self, of: Shares) -> I64:
        """[classes, halves, plans] that visit in a step."""
        there = np.stack([1.0 - of.attention, 1.0 - of.mlp])
        return np.ceil(self._bytes[:, :, None] * there).astype(np.int64)

    def total_bytes(self, of: Shares) -> I64:
        """[plans] of all layers that visit."""
        return np.asarray(self.host_bytes(of)[self.setting.classes.member].sum(axis=(0, 1)))

    def buffer_bytes(self, of: Shares) -> I64:
        """[plans] of a buffer of the ring: any half fits."""
        most = np.asarray(self.host_bytes(of).max(axis=(0, 1)), np.int64)
        return -(-most // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT

    # --- seconds ---------------------------------------------------------------------------------

    def groups(self, of: Shares, run_s: F64) -> list[Group]:
        """A group for each half of each layer, whose seconds are [plans, steps]. run_s: [classes,
        halves, steps]."""
        link = self.setting.link
        assert link is not None
        size = self.host_bytes(of)
        come = np.where(size > 0, link.latency_s + size / self.setting.visit_bytes_per_s, 0.0)
        runs, ups = run_s[:, :, None], come[..., None]
        return [
            [Piece(f"layer.{layer}.{name}", runs[kind, half], up_s=ups[kind, half])]
            for layer, kind in enumerate(self.setting.classes.member.tolist())
            for half, name in enumerate(NAMES)
        ]

    def decode_units(self, context: int) -> F64:
        """[classes, halves, 1, DEVICE_TERMS] of a step in which each sequence has `context`
        positions."""
        batch = self.setting.batch
        terms = self._unit_terms([Step(batch, 1, batch)])
        terms[:, 0, 0, ATTENTION] += decode_attention_s(self.setting, context, self._device)
        return terms

    def prompt_units(self) -> F64:
        """[classes, halves, steps, DEVICE_TERMS] of the steps of prompts."""
        prefill = self._prefill
        sizes = zip(prefill.tokens.tolist(), prefill.outputs.tolist(), strict=True)
        terms = self._unit_terms([Step(n, n, outputs=out) for n, out in sizes])
        terms[:, 0, :, ATTENTION] += prefill.accelerator[:, :, ATTENTION]
        return terms

    def decode_terms(self, of: Shares, slots: int, context: int) -> F64:
        """[TERMS, plans] of a step in which each sequence has `context` positions."""
        one, units = np.array([self.setting.batch]), self.setting.decode_units
        ends = units["cpu embedding"], units["accelerator head"]
        return self._terms(of, slots, self.decode_units(context), ends, one, one)

    def prefill_terms(self, of: Shares, slots: int) -> F64:
        """[TERMS, plans] until every prompt has its first token."""
        prefill = self._prefill
        ends = [own.sum(axis=0) for own in (prefill.embedding["cpu"], prefill.head["accelerator"])]
        return self._terms(of, slots, self.prompt_units(), ends, prefill.tokens, prefill.outputs)

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
        self, of: Shares, slots: int, units: F64, ends: Sequence[F64], tokens: I64, outputs: I64
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
        played = np.broadcast_to(step_s(groups, slots), shape).sum(axis=1)
        alone = np.broadcast_to(lanes_s(groups)["accelerator"], shape).sum(axis=1)
        total[VISIT] += np.maximum(0.0, played - alone)
        return total
