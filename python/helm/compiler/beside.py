"""What two devices that read the same memory take longer while both work. Knows no schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from helm.compiler.setting import Device, Setting
from helm.compiler.times import F64, Seconds, attention_s
from helm.model.graph import Attention


def slowdown(alone_s: Seconds, beside_s: Seconds) -> F64:
    """How many times as long a work takes beside another, given both times; 1 of no work."""
    alone, beside = np.broadcast_arrays(np.asarray(alone_s, np.float64), beside_s)
    return np.asarray(np.divide(beside, alone, out=np.ones_like(alone), where=alone > 0))


def slower_s(
    one_s: Seconds, one_beside_s: Seconds, other_s: Seconds, other_beside_s: Seconds
) -> tuple[F64, F64]:
    """By how much each of two works takes longer that begin together, given what each takes alone
    and all the time beside another: both are disturbed until the first of them ends."""
    both = np.minimum(one_beside_s, other_beside_s)
    one, other = slowdown(one_s, one_beside_s), slowdown(other_s, other_beside_s)
    return both * (1.0 - 1.0 / one), both * (1.0 - 1.0 / other)


def decode_attention_beside(setting: Setting, op: Attention, lane: int) -> float:
    """How many times as long attention of decoding rows takes on a device while the other works.
    Heads of the op may be arrays."""
    if setting.beside is setting:
        return 1.0
    each = dataclasses.replace(op, heads=int(np.max(op.heads) // np.max(op.kv_heads)), kv_heads=1)

    def seconds(at: Setting) -> Any:
        device: Device | None = at.accelerator if lane else at.cpu
        assert device is not None
        return attention_s(setting.model, each, 1, np.ones(1), np.ones(1), device)[0]

    return float(seconds(setting.beside) / seconds(setting))
