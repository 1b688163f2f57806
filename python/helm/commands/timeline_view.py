"""Draws a plan's steps over time as an SVG file: a row for each lane, a bar for each task."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from helm.base.arguments import shown
from helm.errors import InvalidError

if TYPE_CHECKING:
    from helm.compiler.solve import Study
    from helm.compiler.steps import Span, Steps

_COLOURS = {
    "run": ("#4a90d9", "computes"),
    "copy": ("#c0392b", "activations cross"),
    "visit": ("#8e6bbf", "weights visit"),
    "page": ("#e08a1e", "KV pages move"),
    "leave": ("#8a8a8a", "KV pages make room"),
    "read": ("#3d8b6e", "weights are read"),
}
_LIGHT = {"run": "#9cc3ea", "copy": "#df9a92", "visit": "#c4b3de", "page": "#f0c78d",
          "leave": "#c4c4c4", "read": "#94c4b2"}  # fmt: skip  # of the second step
_LANES = {"cpu": "CPU", "up": "copies to the GPU", "down": "copies back", "disk": "disk"}
_WIDTH, _LEFT, _RIGHT = 1240, 150, 30
_ROW, _BAR = 36, 26
_CHARACTER = 6.3  # width of one in a bar
_ORDER = ("cpu", "accelerator", "up", "down", "disk")


def check_timeline(file: str) -> None:
    """Raises InvalidError before any work is done if `file` cannot be drawn."""
    if Path(file).suffix.lower() != ".svg":
        raise InvalidError(f"[timeline] cannot draw {shown(file)}; expected a name ending in .svg")
    folder = Path(file).expanduser().resolve().parent
    if not os.access(folder, os.W_OK):
        raise InvalidError(f"[timeline] cannot write to {folder}; choose another folder")


def save_timeline(study: Study, steps: Sequence[Steps], file: str) -> None:
    """Writes the drawing; InvalidError if that fails."""
    try:
        Path(file).expanduser().write_text(drawing(study, steps), encoding="utf-8")
    except (OSError, ValueError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise InvalidError(
            f"[timeline] cannot write {file}: {why}; choose another --timeline FILE"
        ) from None


def drawing(study: Study, steps: Sequence[Steps]) -> str:
    """The SVG text."""
    top, panels = 96.0, []
    for each in steps:
        body, height = _panel(each, top)
        panels += body
        top += height + 26
    best = study.best.predicted
    title = f"{study.problem.name} on {study.profile.name}"
    figures = (
        f"predicted: {best.decode_tokens_per_s:,.1f} tokens/s, first token after "
        f"{_time(best.ttft_s)}, {study.plan.units_cpu} units on the CPU, "
        f"{study.plan.units_accelerator} on the GPU"
        + (f", {study.plan.units_cut} cut" if study.plan.units_cut else "")
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top:.0f}" '
            f'viewBox="0 0 {_WIDTH} {top:.0f}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{_WIDTH}" height="{top:.0f}" fill="#ffffff"/>',
            _text(20, 30, title, 18, weight="bold"),
            _text(20, 52, figures, 13),
            *_legend(steps),
            *panels,
            "</svg>",
            "",
        ]
    )


def _legend(steps: Sequence[Steps]) -> Iterator[str]:
    used = {span.verb for each in steps for span in each.spans}
    x = 20.0
    for verb, (colour, words) in _COLOURS.items():
        if verb in used:
            yield f'<rect x="{x:.0f}" y="66" width="14" height="14" fill="{colour}"/>'
            yield _text(x + 20, 78, words, 12)
            x += 34 + 6.8 * len(words)
    if any(span.step for each in steps for span in each.spans):
        yield _text(x + 6, 78, "lighter: the second step", 12)


def _panel(steps: Steps, top: float) -> tuple[list[str], float]:
    """A title, rows of lanes and an axis; how high it is."""
    lanes = sorted({span.lane for span in steps.spans}, key=_place)
    bottom = top + 26 + _ROW * len(lanes)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(steps.seconds, 1e-12)
    lines = [_text(20, top + 14, f"{steps.title}: {_time(steps.seconds)}", 14, weight="bold")]
    for tick in _ticks(steps.seconds):
        x = _LEFT + tick * scale
        lines.append(
            f'<line x1="{x:.1f}" y1="{top + 22:.0f}" x2="{x:.1f}" y2="{bottom + 4:.0f}" '
            'stroke="#dddddd"/>'
        )
        lines.append(_text(x, bottom + 18, f"{tick * 1e3:g}", 11, anchor="middle"))
    lines.append(_text(_WIDTH - 20, bottom + 34, "ms", 11, anchor="end"))
    for row, lane in enumerate(lanes):
        y = top + 26 + _ROW * row
        lines.append(_text(20, y + 17, _LANES.get(lane, "GPU"), 12))
        lines += [_bar(span, y, scale) for span in steps.spans if span.lane == lane]
    return lines, bottom + 34 - top


def _bar(span: Span, y: float, scale: float) -> str:
    x, width = _LEFT + span.start_s * scale, max(0.4, (span.end_s - span.start_s) * scale)
    colour = _LIGHT[span.verb] if span.step else _COLOURS[span.verb][0]
    edge = ' stroke="#ffffff" stroke-width="0.6"' if width > 3 else ""
    often = f", {span.count} times" if span.count != 1 else ""
    words = (
        f"{span.verb} {span.task}{often}: {_time(span.end_s - span.start_s)}, from "
        f"{_time(span.start_s)} to {_time(span.end_s)}"
    )
    inside = ""
    if _CHARACTER * len(span.task) + 6 <= width:
        ink = "#1a1a1a" if span.step else "#ffffff"
        inside = _text(x + 4, y + 17, span.task, 11, colour=ink)
    return (
        f'<g><title>{escape(words)}</title><rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{_BAR}" fill="{colour}"{edge}/>{inside}</g>'
    )


def _place(lane: str) -> int:
    return _ORDER.index(lane) if lane in _ORDER else 1


def _ticks(seconds: float) -> Iterator[float]:
    """About eight, at round numbers."""
    raw = max(seconds, 1e-9) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    for number in range(int(seconds / step) + 1):
        yield round(number * step, 12)


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.3g} us"


def _text(
    x: float, y: float, words: str, size: int, *, weight: str = "normal", anchor: str = "start",
    colour: str = "#222222",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
    )
