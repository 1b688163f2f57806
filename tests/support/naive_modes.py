"""What a step takes in each mode by a predictor's tables, one number after the other. The oracle of
`helm.compiler.step_prices`, with which it shares nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helm.plan.predictor import Predictor


@dataclass(frozen=True)
class Rows:
    """near, far: positions of each decoding row. prompts: (past, tokens, how many such chunks)."""

    near: Sequence[float] = ()
    far: Sequence[float] = ()
    prompts: Sequence[tuple[float, float, float]] = ()
    outputs: float = 0.0


def step_s(tables: Predictor, mode: str, rows: Rows) -> float:
    """Near: without the far rows. Split: all of them are the second sub-batch."""
    far = [] if mode == "near" else list(rows.far)
    prompt_rows = sum(tokens * count for _, tokens, count in rows.prompts)
    first, second = len(rows.near) + prompt_rows, 0.0
    if mode == "split":
        second = len(far)
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
        near, near_slow = kind.near_s * seen[0], kind.near_beside_s * seen[0]
        for past, tokens, count in rows.prompts:
            pairs = sum_to(past + tokens, kind.window) - sum_to(past, kind.window)
            reach = past + tokens
            if kind.window:
                reach = min(reach, kind.window + tokens - 1)
            compute = [pairs * line(tables.rows, table, tokens)
                       for table in (kind.cpu_pair_s, kind.pair_s)]  # fmt: skip
            seconds += count * max(compute[0], reach * kind.cpu_s)
            near += count * max(compute[1], reach * kind.near_s)
            near_slow += count * max(compute[1], reach * kind.near_beside_s)
        if not far:
            seconds += near
            continue
        ask = kind.layers * (tables.ask_s + tables.ask_row_s * len(far))
        answer = kind.layers * (tables.answer_s + tables.answer_row_s * len(far))
        cpu, cpu_slow = kind.far_s * seen[1], kind.far_beside_s * seen[1]
        if mode == "joint":
            part = kind.layers * tables.near_part_s
            near, near_slow = near + part, near_slow + part
            left = max(0.0, near - ask)
            rest, attended = ends(left, left * near_slow / near, cpu, cpu_slow)
            seconds += max(near - left + rest, ask + attended + answer)
            seconds += kind.layers * tables.parts_s
        else:
            share = kind.layers / layers
            slow = share * line(tables.rows, tables.accelerator_beside_s, first)
            crossing = ask + answer
            seconds += max(ends(share * own[0], slow, crossing + cpu, crossing + cpu_slow))
            seconds += share * own[1] + near + 2 * kind.layers * tables.parts_s
    return seconds


def ends(one: float, one_slow: float, other: float, other_slow: float) -> tuple[float, float]:
    """Of two works at once, each slow until the first has ended."""
    if min(one, other) == 0.0:
        return one, other
    first = min(one_slow, other_slow)
    return first + one * (1 - first / one_slow), first + other * (1 - first / other_slow)


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
