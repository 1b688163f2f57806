"""Shows an explained plan in a terminal or a pipe; decides and computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from helm.base.sizes import counted, rate_text, seconds_text, size_text
from helm.commands.console import console
from helm.compiler import explain
from helm.compiler.segments import segments
from helm.compiler.visits.beside import policy_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from helm.compiler.solve import Study

_COLORS = {"cpu": "cyan", "accelerator": "green"}
_NAMES = {"cpu": "CPU", "accelerator": "GPU"}
_LANE = 4  # columns of a lane's name
_BAR = 24  # columns of a term's bar
_TERMS = 5
_PIPE_WIDTH = 80


def show(study: Study, notices: Sequence[str], *, policies: bool = False) -> None:
    """Prints everything. policies: also those that were published."""
    out = console(_PIPE_WIDTH)
    for part in (
        _head,
        _picture,
        _memory,
        _loading,
        _kv,
        _prediction,
        _serving,
        _bottleneck,
        _gains,
        _rivals,
    ):
        part(study, out)
    if policies:
        _policies(study, out)
    other = None if study.best.visit else explain.trade(study)
    if other is not None:
        predicted = other.predicted
        rate = rate_text(predicted.decode_tokens_per_s)
        out.print(
            f"\nnote: --objective total would choose {explain.placement_text(other)}: first "
            f"token {seconds_text(predicted.ttft_s)}, {rate} tokens/s, "
            f"{seconds_text(predicted.total_s)} in all"
        )
    for notice in notices:
        out.print(f"note: {notice}")


def show_profiles() -> None:
    """Lists the presets with their memories and bandwidths."""
    table = _table("preset", "GPU", "VRAM GiB", "RAM GiB", "GPU GB/s", "RAM GB/s", left=2)
    for row in profile_rows():
        own = row["accelerator"] is not None
        table.add_row(
            row["name"],
            row["accelerator"].removeprefix("NVIDIA ") if own else "none",
            f"{row['vram_bytes'] / 2**30:.1f}" if own else "",
            f"{row['ram_bytes'] / 2**30:.1f}",
            f"{row['vram_bytes_per_s'] / 1e9:,.0f}" if own else "",
            f"{row['ram_bytes_per_s'] / 1e9:,.0f}",
        )
    out = console(_PIPE_WIDTH)
    out.print(table)
    out.print("\nAll are estimates; helm-llm profile measures this machine.")


def profile_rows() -> list[dict[str, Any]]:
    """The same for --json; what belongs to an accelerator is None where there is none."""
    from helm.machine.profile import load_profile, preset_names

    rows = []
    for name in preset_names():
        profile = load_profile(name)
        cpu, own = profile.cpu, profile.accelerator
        rows.append(
            {
                "name": name,
                "estimated": profile.estimated,
                "accelerator": own and own.name,
                "vram_bytes": own and own.memory_bytes,
                "vram_bytes_per_s": own and max(own.matvec_bytes_per_s.values()),
                "ram_bytes": cpu.memory_bytes,
                "ram_bytes_per_s": max(cpu.matvec_bytes_per_s.values()),
            }
        )
    return rows


def _table(*columns: str, left: int = 1) -> Table:
    """A plain table, the first `left` columns to the left and the others to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i >= left)
    return table


def _title(out: Console, text: str) -> None:
    out.print()
    out.print(Text(text, style="bold"))


def _indented(out: Console, text: str, style: str = "") -> None:
    """A paragraph, every line of it two columns in."""
    out.print(Padding(Text(text, style=style), (0, 0, 0, 2)))


def _head(study: Study, out: Console) -> None:
    work, profile = study.workload, study.profile
    weights = explain.weights_bytes(study)
    dtypes = "+".join(explain.matrix_dtypes(study))
    out.print(
        Text.assemble(
            (study.problem.name, "bold"),
            f" ({study.plan.model.architecture}), {size_text(weights)} of {dtypes} weights, "
            f"{study.plan.kv.dtype} KV cache",
        )
    )
    where = Text.assemble("on ", (profile.name, "bold"), f": {_machine(study)}")
    if profile.estimated:
        where.append("; an estimate, not measured", style="yellow")
    out.print(where)
    out.print(
        f"for {counted(work.batch, 'request')} of {counted(work.prompt, 'prompt token')} and "
        f"{counted(work.output, 'output token')}, in a context of {work.context:,}; chosen for "
        f"the {_OBJECTIVES[work.objective]}"
    )


_OBJECTIVES = {
    "decode": "least time per token",
    "ttft": "earliest first token",
    "total": "least total time",
    "throughput": "least total time of all requests",
    "serve": "most tokens/s while requests come and go",
}


def _machine(study: Study) -> str:
    own = study.profile.accelerator
    host = f"CPU with {size_text(study.limit_bytes('cpu'))}"
    if own is None:
        return f"{host}, no GPU"
    return f"{own.name} with {size_text(study.limit_bytes('accelerator'))}, {host}"


def _picture(study: Study, out: Console) -> None:
    plan, best = study.plan, study.best
    cut = f", {plan.units_cut} cut between both" if plan.units_cut else ""
    _title(
        out,
        f"Placement: {plan.units_accelerator} units on the GPU, {plan.units_cpu} on the CPU{cut}"
        if best.uses_accelerator
        else f"Placement: all {plan.units_cpu} units on the CPU",
    )
    lanes, per = explain.picture(study, out.width - _LANE - 4)
    for lane in lanes:
        color = _COLORS[lane.device]
        out.print(
            Text.assemble(
                (f"  {_NAMES[lane.device]:{_LANE}}", color),
                *((cell, f"bold {color}" if cell != " " else "") for cell in lane.cells),
            )
        )
    if per > 1:
        out.print(f"  (one letter for {per} layers)", style="dim")
    table = _table("", "device", "weights", left=2)
    for part in segments(study):
        held = size_text(part.weight_bytes) if part.weight_bytes else "shared"
        table.add_row(
            f"  {part.label}", Text(_NAMES[part.device], style=_COLORS[part.device]), held
        )
    out.print(table)
    _indented(out, _schedule(study), style="dim")


def _schedule(study: Study) -> str:
    best = study.best
    parts = [counted(best.threads, "CPU thread")]
    if best.cut is not None:
        home = "CPU" if best.cut.home == "cpu" else "GPU"
        parts.append(f"{best.cut.text}; the {home} adds both shares")
    if best.visit is not None:
        parts.append(best.visit.text)
    if best.sequences < study.workload.batch:
        serves = study.workload.objective == "serve"
        room = "KV pages of {} with full contexts" if serves else "{} at once"
        parts.append(room.format(counted(best.sequences, "request")))
    if not best.uses_accelerator:
        return parts[0]
    if best.visit_tokens:
        parts.append(
            f"prompt steps of {best.visit_tokens:,} to {best.step_tokens:,} tokens run on the "
            "GPU, to which the weights of CPU layers are copied for each"
        )
    elif best.cut_blocks:
        parts.append("cut layers compute prompts on both devices")
    elif best.cpu_blocks:
        parts.append("CPU layers compute prompts on the CPU")
    if best.prefill_overlap:
        parts.append("both devices compute prompts at once")
    if best.decode_groups > 1:
        parts.append(f"requests take turns in {best.decode_groups} groups")
    return "; ".join(parts)


def _memory(study: Study, out: Console) -> None:
    _title(out, "Memory")
    devices = list(study.plan.memory)
    table = _table("", *(_NAMES[device] for device in devices))
    for purpose, sizes in explain.memory_rows(study):
        style = "bold" if purpose == "total" else None
        label = {"kv": "KV cache"}.get(purpose, purpose)
        table.add_row(f"  {label}", *(size_text(sizes[d]) for d in devices), style=style)
    out.print(table)


def _loading(study: Study, out: Console) -> None:
    text = explain.loading_text(study)
    if text is not None:
        _title(out, "Loading")
        _indented(out, text)


def _kv(study: Study, out: Console) -> None:
    lines = explain.kv_lines(study)
    if lines:
        _title(out, "KV of the GPU's layers")
    for line in lines:
        _indented(out, line)


def _prediction(study: Study, out: Console) -> None:
    work, predicted = study.workload, study.best.predicted
    _title(out, "Prediction" + (" (estimated profile)" if study.profile.estimated else ""))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column()
    rate = rate_text(predicted.decode_tokens_per_s)
    full = rate_text(predicted.full_context_decode_tokens_per_s)
    table.add_row(
        "  time to first token", seconds_text(predicted.ttft_s), f"{work.prompt:,} prompt tokens"
    )
    table.add_row("  decode", f"{rate} tokens/s", f"at {work.expected_context:,} positions")
    table.add_row("", f"{full} tokens/s", f"at the full context of {work.context:,}")
    table.add_row("  in all", seconds_text(predicted.total_s), "first to last token")
    out.print(table)
    _indented(out, explain.guesses_text(study), style="dim")


def _serving(study: Study, out: Console) -> None:
    serves = explain.serving_of(study)
    if serves is None:
        return
    _title(out, f"Serving requests of {serves.prompt:,} and {serves.output:,} tokens")
    table = _table("  at once", "tokens/s", "mode", "near", "far", left=0)
    table.columns[2].justify = "left"
    for row in serves.rates:
        counts = (f"{row.near:,}", f"{row.far:,}" if row.far else "")
        table.add_row(f"{row.requests:,}", rate_text(row.tokens_per_s), row.mode, *counts)
    out.print(table)
    for line in explain.serving_lines(serves):
        _indented(out, line, style="dim")


def _bottleneck(study: Study, out: Console) -> None:
    predicted = study.best.predicted
    for title, terms, bound in (
        (f"A decode step, {seconds_text(predicted.decode_s)}", predicted.decode_terms, True),
        (f"The prompt, {seconds_text(predicted.ttft_s)}", predicted.prefill_terms, False),
    ):
        name = study.best.bottleneck if bound else study.best.prefill_bottleneck
        _title(out, f"{title}; bottleneck: {name}")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for _ in range(2):
            table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        for row in explain.term_rows(terms)[:_TERMS]:
            bar = Text("#" * max(0, round(row.share * _BAR)), style=_term_color(row.name))
            share = f"{row.share * 100:.0f} %"
            table.add_row(f"  {row.name}", seconds_text(row.seconds), share, bar)
        out.print(table)


def _term_color(name: str) -> str:
    found = (c for device, c in _COLORS.items() if name.startswith(_NAMES[device]))
    return next(found, "magenta")


def _gains(study: Study, out: Console) -> None:
    _title(out, "With more memory or bandwidth")
    now, whole = study.best, study.workload.objective in ("total", "throughput", "serve")
    table = _table("", "tokens/s", "", "first token", "", *(("in all", "") if whole else ()))
    for gain in study.gains:
        what = {"accelerator memory": "VRAM", "host memory bandwidth": "RAM bandwidth"}
        row = [
            f"  +{gain.added:g} {gain.unit} {what.get(gain.resource, gain.resource)}",
            rate_text(gain.decode_tokens_per_s),
            _change(gain.decode_tokens_per_s / now.predicted.decode_tokens_per_s),
            seconds_text(gain.ttft_s),
            _change(gain.ttft_s / now.predicted.ttft_s),
        ]
        if whole:
            row += [seconds_text(gain.objective_s), _change(gain.objective_s / now.objective_s)]
        table.add_row(*row)
    out.print(table)


def _worded(table: Table) -> None:
    """Names at its left, figures between, words at its right, which may wrap."""
    table.columns[0].no_wrap = True
    table.columns[-1].justify = "left"
    table.columns[-1].no_wrap = False


def _rivals(study: Study, out: Console) -> None:
    _title(out, "Other plans, with their units on each device")
    table = _table("", "CPU", "GPU", "tokens/s", "first token", "")
    _worded(table)
    bracketed = False
    for i, rival in enumerate(explain.rivals(study)):
        candidate, predicted = rival.candidate, rival.fast.predicted
        mark = "" if candidate.fits else "("
        end = "" if candidate.fits else ")"
        table.add_row(
            f"  {rival.label}",
            str(candidate.units_cpu),
            str(candidate.units_accelerator),
            f"{mark}{rate_text(predicted.decode_tokens_per_s)}{end}",
            f"{mark}{seconds_text(predicted.ttft_s)}{end}",
            rival.verdict,
            style="bold" if i == 0 else None if candidate.fits else "dim",
        )
        bracketed |= not candidate.fits
    out.print(table)
    if bracketed:
        _indented(out, "(in brackets: what it would reach if it fitted)", style="dim")


def _policies(study: Study, out: Console) -> None:
    _title(out, "Published policies")
    table = _table("", "buffers", "visit", "tokens/s", "first token", "")
    _worded(table)
    rows = policy_rows(study)
    for row in rows:
        table.add_row(
            f"  {row.policy}",
            str(row.buffers),
            size_text(row.host_bytes),
            rate_text(row.decode_tokens_per_s),
            seconds_text(row.ttft_s),
            row.verdict,
            style=None if row.fits else "dim",
        )
    out.print(table)
    for row in rows:
        _indented(out, f"{row.policy}: {row.whose}", style="dim")


def _change(factor: float) -> str:
    percent = round((factor - 1) * 100)
    return f"{percent:+d} %" if percent else "same"
