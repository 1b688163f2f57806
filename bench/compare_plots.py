"""Draws what compare.py measured, four panels for each model. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import (
    RATE,
    Figures,
    around,
    attention_flops,
    engines_of,
    product_flops,
    rounds_of,
    scenarios_of,
    series,
    step_bytes,
)
from helm.commands.plots import SUFFIXES
from scenarios import Scenario, family

# By family, an engine's variants from dark to light.
_COLORS = {
    "helm": ("#1f5fa8", "#4a90d9", "#8fbce8", "#c9def3"),
    "llama.cpp": ("#2e7d4f", "#57b27c", "#9bd4b3"),
    "transformers": ("#e67e22", "#f5b56e"),
}
_CEILING = "#b00020"


def check_plot(file: Path) -> None:
    """SystemExit if `file` cannot be drawn; to be known before hours of measuring."""
    if file.suffix.lower() not in SUFFIXES:
        raise SystemExit(f"[bench] --plot is {file}; expected a name ending in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("[bench] --plot needs matplotlib; pip install matplotlib")


def draw(documents: Sequence[dict], file: Path) -> list[Path]:
    """A file for each model: `file` if there is one, else with shape and dtype in the name."""
    found = [(m, d["machine"]) for d in documents for m in d["models"] if scenarios_of(m)]
    drawn = []
    for model, machine in found:
        name = f"{file.stem}-{model['shape']}-{model['dtype']}{file.suffix}"
        drawn.append(file.with_name(name) if len(found) > 1 else file)
        _draw_model(model, machine, drawn[-1])
    return drawn


def _draw_model(model: dict, machine: dict, file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{model['shape']}, {model['dtype']}, {machine['threads']} threads of {machine['cpu']}, "
        f"{machine['date']}",
        fontweight="bold",
    )
    (decode, prefill), (sequences, context) = figure.subplots(2, 2)
    panels = _Panels(model)
    panels.decode(decode)
    panels.prefill(prefill)
    panels.sequences(sequences)
    panels.context(context)
    for axes in (decode, prefill, sequences, context):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


class _Panels:
    """The panels of one model: medians, whiskers from the least to the most."""

    def __init__(self, model: dict) -> None:
        self._model = model
        self._rounds: list[Figures] = rounds_of(model)
        self._scenarios = scenarios_of(model)
        self._colors: dict[str, str] = {}
        for engine in engines_of(model):
            of_family = sum(family(other) == family(engine) for other in self._colors)
            shades = _COLORS[family(engine)]
            self._colors[engine] = shades[min(of_family, len(shades) - 1)]

    def decode(self, axes: Any) -> None:
        axes.set_title("decode, one sequence", fontsize=11)
        self._bars(axes, [s for s in self._scenarios if s.name == "decode"], "memory's ceiling")

    def prefill(self, axes: Any) -> None:
        found = [s for s in self._scenarios if s.kind == "prefill"]
        prompts = " and (paler) ".join(f"{s.context:,}" for s in found[:2])
        axes.set_title(f"prefill of {prompts} tokens", fontsize=11)
        self._bars(axes, found[:2], "f32 peak")

    def sequences(self, axes: Any) -> None:
        axes.set_title("decode of several sequences at once", fontsize=11)
        decodes = [s for s in self._scenarios if s.kind == "decode"]
        base = min((s.context for s in decodes), default=0)
        found = sorted((s for s in decodes if s.context == base), key=lambda s: s.sequences)
        if found:
            ones = self._values("helm", found[0]) if found[0].sequences == 1 else []
            if ones:
                counts = [s.sequences for s in found]
                one = statistics.median(ones)
                axes.plot(counts, [one * n for n in counts], ":", color="#888888",
                          label="HELM's one sequence times n")  # fmt: skip
            self._lines(axes, found, [s.sequences for s in found])
        axes.set_xlabel("sequences")
        axes.set_xticks([s.sequences for s in found])

    def context(self, axes: Any) -> None:
        axes.set_title("decode over context, one sequence", fontsize=11)
        found = [s for s in self._scenarios if s.kind == "decode" and s.sequences == 1]
        found.sort(key=lambda s: s.context)
        axes.set_xscale("log", base=2)
        if found:
            ceilings = [self._ceiling(s) for s in found]
            axes.plot([s.context for s in found], ceilings, "--", color=_CEILING,
                      label="memory's ceiling")  # fmt: skip
            self._lines(axes, found, [s.context for s in found])
        axes.set_xlabel("tokens of context")
        axes.set_xticks([s.context for s in found], [f"{s.context:,}" for s in found])
        axes.minorticks_off()

    def _values(self, engine: str, scenario: Scenario) -> list[float]:
        return series(self._rounds, engine, scenario.name, RATE)

    def _ceiling(self, scenario: Scenario) -> float:
        """Tokens/s that the median of all probes of the model's run allows."""
        config, dtype = self._model["config"], self._model["dtype"]
        if scenario.kind == "prefill":
            flops = product_flops(config, scenario.context)
            flops += attention_flops(config, scenario.context)
            return scenario.context * self._probes("fma_flops") / flops
        steps_per_s = self._probes("read_bytes_per_s") / step_bytes(config, dtype, scenario)
        return scenario.sequences * steps_per_s

    def _probes(self, ceiling: str) -> float:
        processes = itertools.chain.from_iterable(self._model["rounds"])
        return statistics.median(around(run, ceiling) for p in processes for run in p["runs"])

    def _bars(self, axes: Any, scenarios: Sequence[Scenario], ceiling: str) -> None:
        """A bar per engine and scenario, and the ceiling of each scenario."""
        engines = [e for e in self._colors if any(self._values(e, s) for s in scenarios)]
        height = 0.84 / max(1, len(scenarios))
        top = 0.0
        for i, scenario in enumerate(scenarios):
            limit = self._ceiling(scenario)
            top = max(top, limit)
            label = ceiling + (f", {scenario.context:,}" if len(scenarios) > 1 else "")
            axes.axvline(limit, color=_CEILING, ls=("--", ":")[i], lw=1.4, label=label)
            for row, engine in enumerate(engines):
                values = self._values(engine, scenario)
                if not values:
                    continue
                typical, y = (
                    statistics.median(values),
                    row + (i - (len(scenarios) - 1) / 2) * height,
                )
                axes.barh(y, typical, height * 0.92, color=self._colors[engine],
                          alpha=1 if i == 0 else 0.6)  # fmt: skip
                axes.plot([min(values), max(values)], [y, y], color="black", lw=1)
                top = max(top, *values)
                axes.annotate(
                    f"{typical:.3g}", (max(values), y), (4, 0), textcoords="offset points",
                    va="center", fontsize=8,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )  # fmt: skip
        axes.set_yticks(range(len(engines)), engines)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * top if top else 1)
        axes.set_xlabel("tokens/s")
        if scenarios:
            axes.legend(fontsize=8, loc="lower right", framealpha=0.95)

    def _lines(self, axes: Any, scenarios: Sequence[Scenario], xs: Sequence[int]) -> None:
        """A line per engine over scenarios that it has at least two of."""
        for engine, color in self._colors.items():
            points = [
                (x, values)
                for x, scenario in zip(xs, scenarios, strict=True)
                if (values := self._values(engine, scenario))
            ]
            if len(points) < 2:
                continue
            medians = [statistics.median(values) for _, values in points]
            axes.plot([x for x, _ in points], medians, "o-", color=color, label=engine)
            for x, values in points:
                axes.plot([x, x], [min(values), max(values)], color=color, lw=1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens/s")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, framealpha=0.95)
