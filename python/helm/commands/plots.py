"""Draws an explained plan: time over the boundary k, or by term where the CPU does all, and
memory by device. Needs matplotlib."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.arguments import shown
from helm.compiler.explain import memory_rows
from helm.errors import HelmError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from helm.compiler.candidate import Candidate
    from helm.compiler.solve import Study

SUFFIXES = (".png", ".svg", ".pdf")
# Stacked from below: name, colour and the terms of helm.compiler.times.TERMS that it sums.
_STACK = (
    ("CPU: reading weights", "#1f5fa8", ("cpu_memory_s",)),
    ("CPU: matrix products", "#4a90d9", ("cpu_compute_s",)),
    ("CPU: attention", "#8fbce8", ("cpu_attention_s",)),
    ("CPU: other ops", "#c9def3", ("cpu_elementwise_s", "cpu_fixed_s")),
    ("GPU: reading weights", "#2e7d4f", ("accelerator_memory_s",)),
    ("GPU: matrix products", "#57b27c", ("accelerator_compute_s",)),
    ("GPU: attention", "#9bd4b3", ("accelerator_attention_s",)),
    ("GPU: other ops", "#cfeadb", ("accelerator_elementwise_s", "accelerator_fixed_s")),
    ("transfers", "#c0392b", ("link_s",)),
    ("KV cache in RAM", "#e67e22", ("overflow_s",)),
    ("weights copied to the GPU", "#8e6bbf", ("stream_s",)),
)
_PURPOSES = {
    "weights": "#34608f",
    "kv": "#e0a030",
    "activations": "#6fae8a",
    "workspace": "#a77fc0",
    "staging": "#c46a5a",
    "reserve": "#b5b5b5",
}
_REST, _LIMIT = "#888888", "#b00020"
_WIDTH = 0.86  # of a bar, in steps of k
_NAMES = {"cpu": "CPU", "accelerator": "GPU"}
_GIB = 2**30
_LEAST = 0.01  # of the whole; smaller terms are drawn together


def check_plot(file: str) -> None:
    """Raises HelmError before any work is done if `file` cannot be drawn."""
    if Path(file).suffix.lower() not in SUFFIXES:
        raise InvalidError(
            f"[plot] cannot draw {shown(file)}; expected a name ending in .png, .svg, .pdf"
        )
    folder = Path(file).expanduser().resolve().parent
    if not os.access(folder, os.W_OK):
        raise InvalidError(f"[plot] cannot write to {folder}; choose another folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise HelmError(
            "[plot] matplotlib, which draws, is not installed; pip install 'helm-llm[plot]'"
        ) from None


def save_plot(study: Study, file: str) -> None:
    """Draws both panels into `file`; its ending says the format."""
    check_plot(file)
    with _place_to_write(Path(file).expanduser().resolve().parent):
        _draw(study, file)


@contextlib.contextmanager
def _place_to_write(folder: Path) -> Iterator[None]:
    """matplotlib wants to keep what it knows of fonts, or fails: in `folder` for as long as this
    lasts where the system has no place for temporary files."""
    try:
        tempfile.gettempdir()
    except OSError:
        with tempfile.TemporaryDirectory(prefix=".fonts-", dir=folder) as place:
            os.environ.setdefault("MPLCONFIGDIR", place)
            yield
    else:
        yield


def _draw(study: Study, file: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2.6, 1))
    estimate = ", estimated profile" if study.profile.estimated else ""
    figure.suptitle(f"{study.problem.name} on {study.profile.name}{estimate}", fontweight="bold")
    rows = by_boundary(study)
    if len(rows) == 1:
        _draw_terms(study, left)
    else:
        _draw_times(study, rows, left)
    _draw_memory(study, right)
    try:
        figure.savefig(Path(file).expanduser(), dpi=150)
    except OSError as reason:
        raise HelmError(f"[plan] cannot write {file}: {reason.strerror}") from None


def by_boundary(study: Study) -> list[tuple[Candidate, bool]]:
    """(the best candidate, whether it fits) for k = 0 to all layers on the CPU; one that does not
    fit as it would be if memory were no object."""
    ideal = {candidate.layout: candidate for candidate in study.search.unlimited.by_layout}
    found: dict[int, list[Candidate]] = {}
    for candidate in study.search.result.by_layout:
        found.setdefault(candidate.cpu_blocks, []).append(candidate)
    rows = []
    for k in sorted(found):
        fitting = [candidate for candidate in found[k] if candidate.fits]
        options = fitting or [ideal[candidate.layout] for candidate in found[k]]
        rows.append((min(options, key=lambda c: c.objective_s), bool(fitting)))
    return rows


def objective_terms(study: Study, candidate: Candidate) -> dict[str, float]:
    """The seconds that the objective adds up, by term."""
    work, predicted = study.workload, candidate.predicted
    if work.objective == "decode":
        return dict(predicted.decode_terms)
    if work.objective == "ttft":
        return dict(predicted.prefill_terms)
    waves = -(-work.batch // candidate.sequences)
    return {
        name: waves * (seconds + (work.output - 1) * predicted.decode_terms[name])
        for name, seconds in predicted.prefill_terms.items()
    }


def _what(study: Study) -> str:
    """What the objective times."""
    names = {"decode": "one decode step", "ttft": "time to first token"}
    return names.get(study.workload.objective, "the whole workload")


def _scale(seconds: float) -> tuple[float, str]:
    """(factor, unit) in which so much is a readable number."""
    return (1e3, "ms") if seconds < 1 else (1.0, "s")


def _draw_terms(study: Study, axes: Any) -> None:
    """Bars of the terms, where there is one placement."""
    terms = objective_terms(study, study.best)
    whole = sum(terms.values())
    scale, unit = _scale(whole)
    found = [(name, color, sum(terms[n] for n in names)) for name, color, names in _STACK]
    shown = [row for row in found if row[2] >= _LEAST * whole]
    rest = whole - sum(seconds for *_, seconds in shown)
    if rest > 0:
        shown.append(("rest", _REST, rest))
    for i, (_, color, seconds) in enumerate(shown):
        axes.barh(-i, scale * seconds, 0.6, color=color)
        text = f" {scale * seconds:,.3g} {unit}, {seconds / whole * 100:.0f} %"
        axes.text(scale * seconds, -i, text, va="center", fontsize=9)
    axes.set_yticks([-i for i in range(len(shown))], [name for name, *_ in shown])
    axes.set_xlim(0, 1.25 * scale * max(seconds for *_, seconds in shown))
    axes.set_xlabel(f"time ({unit})")
    axes.set_title(f"{_what(study)} on the CPU: {scale * whole:,.3g} {unit}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_times(study: Study, rows: list[tuple[Candidate, bool]], axes: Any) -> None:
    ks = [candidate.cpu_blocks for candidate, _ in rows]
    terms = [objective_terms(study, candidate) for candidate, _ in rows]
    scale, unit = _scale(max(sum(t.values()) for t in terms))
    bottom = [0.0] * len(rows)
    totals = [scale * sum(t.values()) for t in terms]
    rest = [0.0] * len(rows)
    for name, color, names in _STACK:
        heights = [scale * sum(t[n] for n in names) for t in terms]
        if max(h / total for h, total in zip(heights, totals, strict=True)) < _LEAST:
            rest = [r + h for r, h in zip(rest, heights, strict=True)]
            continue
        axes.bar(ks, heights, _WIDTH, bottom, color=color, label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.bar(ks, rest, _WIDTH, bottom, color=_REST, label="rest")
    bottom = [b + h for b, h in zip(bottom, rest, strict=True)]
    if any(total < (1 - _LEAST) * b for total, b in zip(totals, bottom, strict=True)):
        axes.step(ks, totals, where="mid", color="black", lw=1.2, label="after overlap")
    _shade(axes, [(k, fits) for k, (_, fits) in zip(ks, rows, strict=True)])
    _mark(study, axes, scale, unit, max(bottom), ks)
    axes.set_title(f"{_what(study)}: best placement for each k", fontsize=11)
    axes.set_xlabel("k: layers on the CPU (the others on the GPU)")
    axes.set_ylabel(f"time ({unit})")
    axes.set_xlim(ks[0] - 0.5, ks[-1] + 0.5)
    axes.set_ylim(0, 1.22 * max(bottom))
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes, 4)


def _legend(axes: Any, columns: int) -> None:
    """Below the panel, where it covers nothing."""
    axes.legend(
        fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False
    )


def _shade(axes: Any, rows: list[tuple[int, bool]]) -> None:
    """Where nothing fits, in runs of neighbouring k."""
    label: str | None = "does not fit (as it would be)"
    start: int | None = None
    for k, fits in [*rows, (rows[-1][0] + 1, True)]:
        if not fits and start is None:
            start = k
        elif fits and start is not None:
            axes.axvspan(
                start - 0.5, k - 0.5, facecolor="white", edgecolor="#999999", alpha=0.62,
                hatch="//", lw=0, zorder=3, label=label,
            )  # fmt: skip
            start, label = None, None


def _mark(study: Study, axes: Any, scale: float, unit: str, top: float, ks: list[int]) -> None:
    """The chosen k, above all bars and inside the panel."""
    k, value = study.best.cpu_blocks, scale * study.best.objective_s
    place = (k - ks[0]) / (ks[-1] - ks[0])
    axes.annotate(
        "", (k, value), (k, 1.08 * top), arrowprops={"arrowstyle": "-|>", "color": "black"}
    )
    axes.text(
        k,
        1.08 * top,
        f"chosen: k = {k}, {value:,.3g} {unit}",
        ha="left" if place < 0.2 else "right" if place > 0.8 else "center",
        va="bottom",
        fontweight="bold",
        bbox={"boxstyle": "round", "facecolor": "#fff6cc", "edgecolor": "black"},
        zorder=5,
    )


def _draw_memory(study: Study, axes: Any) -> None:
    devices = list(study.plan.memory)
    limits = [study.limit_bytes(device) / _GIB for device in devices]
    bottom = [0.0] * len(devices)
    held: Mapping[str, dict[str, int]] = dict(memory_rows(study))
    for purpose, color in _PURPOSES.items():
        sizes = [held[purpose][device] / _GIB for device in devices]
        if max(sizes) < 0.002 * max(limits):
            continue
        label = "KV cache" if purpose == "kv" else purpose
        axes.bar(range(len(devices)), sizes, 0.55, bottom, color=color, label=label)
        bottom = [b + size for b, size in zip(bottom, sizes, strict=True)]
    top = max(*limits, *bottom)
    for i, (limit, used) in enumerate(zip(limits, bottom, strict=True)):
        axes.hlines(limit, i - 0.38, i + 0.38, color=_LIMIT, lw=2)
        total, most = f"{used:.1f} GiB", f"limit {limit:.1f} GiB"
        if limit - used < 0.08 * top:  # one label, where two would cover each other
            axes.text(i, max(limit, used), f"{total},\n{most}", ha="center", va="bottom")
        else:
            axes.text(i, used, total, ha="center", va="bottom", fontweight="bold")
            axes.text(i, limit, most, color=_LIMIT, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(devices)), [_NAMES[device] for device in devices])
    axes.set_xlim(-0.6, len(devices) - 0.4)
    axes.set_ylim(0, 1.15 * top)
    axes.set_ylabel("memory (GiB)")
    axes.set_title("memory of the chosen plan", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, 3)
