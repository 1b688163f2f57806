"""What a step takes in each mode by a predictor's tables, one number after the other. The oracle of
`helm.compiler.step_prices`, with which it shares nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from helm.plan.predictor import AttentionTimes, Predictor


@dataclass(frozen=True)
class Rows:
    """near, far: positions of each decoding row. prompts: (past, tokens, how many such chunks).
    first: how many of the far rows the first sub-batch of a split step has."""

    near: Sequence[float] = ()
    far: Sequence[float] = ()
    prompts: Sequence[tuple[float, float, float]] = ()
    outputs: float = 0.0
    first: float = 0.0


def step_s(tables: Predictor, mode: str, rows: Rows) -> float:
    """Near: without the far rows."""
    far = [] if mode == "near" else list(rows.far)
    prompt_rows = sum(tokens * count for _, tokens, count in rows.prompts)
    first, second = len(rows.near) + prompt_rows, 0.0
    if mode == "split":
        first, second = first + rows.first, len(far) - rows.first
    else:
        first += len(far)
    seconds = tables.step_s + tables.prompt_row_s * prompt_rows
    seconds += line(tables.rows, tables.head_s, rows.outputs)
    for size in (first, second):
        seconds += line(tables.rows, tables.cpu_s, size)
    own = [line(tables.rows, tables.accelerator_s, size) for size in (first, second)]
    if mode != "split" or not far:
        seconds += sum(own)
    layers = sum(kind.layers for kind in tables.attention)
    for kind in tables.attention:
        seen = [sum(visible(n, kind.window) for n in each) for each in (rows.near, far)]
        seconds += kind.cpu_s * sum(seen)
        seconds += prompts_s(tables, kind, rows, kind.cpu_pair_s, kind.cpu_s)
        near = kind.near_s * seen[0] + prompts_s(tables, kind, rows, kind.pair_s, kind.near_s)
        if not far:
            seconds += near
            continue
        lost = 1 / tables.rate_while_both_compute - 1
        if mode == "joint":
            ask = kind.layers * (tables.ask_s + tables.ask_row_s * len(far))
            cpu = kind.far_s * seen[1]
            near += kind.layers * tables.near_part_s
            seconds += max(near, far_s(tables, kind, len(far), seen[1]))
            seconds += lost * min(max(0.0, near - ask), cpu)
            seconds += kind.layers * tables.parts_s
        else:
            share = kind.layers / layers
            for size, own_s in ((second, share * own[0]), (rows.first, share * own[1] + near)):
                cpu = far_s(tables, kind, size, seen[1] * size / len(far))
                seconds += max(own_s, cpu) + lost * min(own_s, cpu)
            seconds += 2 * kind.layers * tables.parts_s
    return seconds


def shared_out(tables: Predictor, rows: Rows) -> Rows:
    """With so many far rows in the first sub-batch that the CPU is hidden by as much under either,
    where the accelerator has half of them in each. Far rows are alike."""
    half, low, high = len(rows.far) / 2, 0.0, float(len(rows.far))
    others = len(rows.near) + sum(tokens * count for _, tokens, count in rows.prompts)
    own = [line(tables.rows, tables.accelerator_s, size) for size in (half, others + half)]
    for kind in tables.attention:
        own[0] += kind.near_s * sum(visible(n, kind.window) for n in rows.near)
        own[0] += prompts_s(tables, kind, rows, kind.pair_s, kind.near_s)
    each = sum(
        far_s(tables, kind, 2, 2 * visible(length, kind.window))
        - far_s(tables, kind, 1, visible(length, kind.window))
        for kind in tables.attention for length in rows.far[:1]
    )  # fmt: skip
    for _ in range(100):
        first = (low + high) / 2
        more = own[0] - each * first > own[1] - each * (len(rows.far) - first)
        low, high = (first, high) if more else (low, first)
    return replace(rows, first=low)


def prompts_s(
    tables: Predictor, kind: AttentionTimes, rows: Rows, pair_s: Sequence[float], position_s: float
) -> float:
    """Attention of the chunks, on a device."""
    seconds = 0.0
    for past, tokens, count in rows.prompts:
        pairs = sum_to(past + tokens, kind.window) - sum_to(past, kind.window)
        reach = past + tokens
        if kind.window:
            reach = min(reach, kind.window + tokens - 1)
        compute = pairs * line(tables.rows, pair_s, tokens)
        seconds += count * max(compute, reach * position_s)
    return seconds


def far_s(tables: Predictor, kind: AttentionTimes, rows: float, seen: float) -> float:
    """Of the CPU for far rows, with the way there and back."""
    if rows == 0:
        return 0.0
    way = tables.ask_s + tables.ask_row_s * rows + tables.answer_s + tables.answer_row_s * rows
    return kind.layers * way + kind.far_s * seen


def line(counts: Sequence[int], table: Sequence[float], size: float) -> float:
    if size <= 0:
        return 0.0
    if size <= counts[0] or len(counts) == 1:
        return table[0]
    i = next((i for i in range(1, len(counts)) if size <= counts[i]), len(counts) - 1)
    slope = (table[i] - table[i - 1]) / (counts[i] - counts[i - 1])
    return table[i - 1] + slope * (size - counts[i - 1])


def visible(positions: float, window: int) -> float:
    return min(positions, window) if window else positions


def sum_to(end: float, window: int) -> float:
    inside = visible(end, window)
    return inside * (inside + 1) / 2 + (end - inside) * window
