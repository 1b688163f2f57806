"""Formats as advice: each row is the plan in that format; refusals and "fit" go by the rows."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import command
import gguf_models
import helm
import small_models
from helm.base.formats import ROUNDING_RMS
from helm.compiler.format_choice import FormatRow, format_rows, others_text
from helm.compiler.load_cost import LoadingRequest
from helm.compiler.planning_problem import Problem
from helm.compiler.solve import solve
from helm.machine.profile import load_profile
from helm.model.families import parse_config, read_config
from helm.session.options import load_options
from helm.session.study import problem_of
from whole import one_in

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
QWEN, LLAMA = CONFIGS / "qwen3-8b.json", CONFIGS / "llama-3.1-70b.json"
GIB = 1 << 30


@functools.cache
def large_rows() -> Mapping[str, FormatRow]:
    """Of a model that does not fit as stored."""
    return {row.format: row for row in helm.formats(LLAMA, profile="thesis-l40s")}


@functools.cache
def large_refusal() -> str:
    return refusal(LLAMA, profile="thesis-l40s")


def helm_json(*arguments: str) -> Any:
    return json.loads(command.helm("plan", *arguments, "--json").stdout)


def test_each_row_is_the_plan_in_that_format() -> None:
    machine: dict[str, Any] = {"profile": "thesis-4060", "max_sequences": 1}
    rows = {row.format: row for row in helm.formats(QWEN, **machine)}
    assert list(rows) == ["as stored", "bf16c", "q8", "q4"]
    for row in rows.values():
        options = {"weights": "copied", **row.options}
        found = helm.study(QWEN, **machine, **options)
        assert row.fits
        assert row.missing == {}
        assert row.decode_tokens_per_s == found.best.predicted.decode_tokens_per_s
        assert row.ttft_s == found.best.predicted.ttft_s
        use = found.plan.memory
        taken = {device: use[device].total_bytes + use[device].reserve_bytes for device in use}
        assert row.memory == taken
        assert row.weights_bytes == sum(part.weights_bytes for part in use.values())
    sizes = [row.weights_bytes for row in rows.values()]
    assert sizes == sorted(sizes, reverse=True)
    errors = [row.relative_rms for row in rows.values()]
    assert errors == [0.0, 0.0, ROUNDING_RMS["q8"], ROUNDING_RMS["q4"]]


def test_a_row_that_does_not_fit_says_what_lacks_and_promises_no_speed() -> None:
    rows = large_rows()
    stored = rows["as stored"]
    assert not stored.fits
    assert stored.ttft_s is stored.decode_tokens_per_s is None
    lacks = re.search(r"lacks ([\d.]+) GiB of RAM", large_refusal())
    assert lacks is not None
    assert stored.missing["cpu"] == pytest.approx(float(lacks[1]) * GIB, abs=GIB / 100)
    assert rows["q4"].fits
    assert rows["q4"].decode_tokens_per_s > 0


def refusal(model: Path, **options: Any) -> str:
    with pytest.raises(helm.OutOfMemoryError) as caught:
        helm.study(model, **options)
    return str(caught.value)


def test_a_refusal_ends_with_the_formats_that_fit_and_their_speed() -> None:
    rows, text = large_rows(), large_refusal()
    ends = [f"dtype='{name}' fits: " for name in ("q8", "q4") if rows[name].fits]
    assert ends
    assert all(end in text for end in ends)
    both = r"[\d.]+ [GM]iB of RAM \+ [\d.]+ GiB of VRAM"
    assert re.search(rf"; dtype='q4' fits: {both}, [\d.]+ tokens/s$", text)
    split = refusal(QWEN, profile="thesis-4060", memory_bytes=9 * GIB, weights="copied")
    assert re.search(
        rf"; weights='compressed' fits: {both}, [\d.]+ tokens/s; dtype='q8' fits", split
    )
    said = command.helm("plan", str(LLAMA), "--profile", "thesis-l40s", status=1).stderr
    assert re.search(r"; --dtype q4 fits: [^;]*tokens/s$", said.strip())
    nothing = refusal(LLAMA, profile="cpu-laptop-16gb")
    assert "fits:" not in nothing


def test_what_was_asked_for_is_not_advised() -> None:
    text = refusal(LLAMA, profile="thesis-l40s", dtype="q8", memory_bytes=20 * GIB)
    assert "dtype='q8' fits" not in text
    assert "dtype='q4' fits" in text


def test_bf16c_is_listed_where_it_makes_something_smaller(tmp_path: Path) -> None:
    roomy = helm.formats(QWEN, profile="thesis-l40s")  # nothing lies on the CPU
    assert [row.format for row in roomy] == ["as stored", "q8", "q4"]
    folder = small_models.model_dir("qwen3", "f16")
    rows = helm.formats(folder, profile="cpu-laptop-16gb")
    assert [row.format for row in rows] == ["as stored", "q8", "q4"]


def test_a_quantised_file_has_rows_whose_error_is_not_known(tmp_path: Path) -> None:
    import gguf

    folder = small_models.model_dir("llama")
    kind = gguf.GGMLQuantizationType
    dense = helm.formats(gguf_models.write(folder, tmp_path / "f.gguf", kind.F32),
                         profile="cpu-laptop-16gb")  # fmt: skip
    assert dense[-1].relative_rms == ROUNDING_RMS["q4"]
    real = helm_json_of_real_file()
    if real is not None:
        assert [row["relative_rms"] for row in real] == [0.0, None, None]
        assert [row["format"] for row in real] == ["as stored", "q8", "q4"]
        assert real[0]["weights_bytes"] < real[1]["weights_bytes"]


def helm_json_of_real_file() -> Any:
    try:
        file = gguf_models.real("SmolLM2-135M-Instruct.Q4_1.gguf")
    except pytest.skip.Exception:
        return None
    return helm_json(str(file), "--profile", "cpu-laptop-16gb", "--formats")["formats"]


def test_fit_takes_the_first_format_that_fits_and_says_which() -> None:
    options: dict[str, Any] = {"profile": "cpu-desktop-64gb-ddr5", "dtype": "fit"}
    for memory_bytes, kind, held in (
        (20 * GIB, "bf16", "holds weights as stored"),
        (15 * GIB, "bf16c", "as stored, in bf16c"),
        (10 * GIB, "c8.s32", "in q8: as stored they do not fit"),
        (7 * GIB, "c4.km32", "in q4: as stored they do not fit"),
    ):
        found = helm.study(QWEN, memory_bytes=memory_bytes, **options)
        assert kind in {part.format for part in found.plan.slices}
        (said,) = [notice for notice in found.plan.notices if "dtype='fit'" in notice]
        assert held in said
    text = refusal(QWEN, memory_bytes=GIB, **options)
    assert "in q4, the last format that dtype='fit' tries" in text
    assert "fits:" not in text


def test_fit_goes_by_the_rows() -> None:
    problem = problem_of(QWEN, None, load_options({"profile": "thesis-4060"}))
    for memory_bytes in one_in(2, range(1 * GIB, 14 * GIB, 2 * GIB)):
        bounded = dataclasses.replace(problem, memory_bytes=memory_bytes)
        fitting = [row for row in format_rows(bounded) if row.fits]
        options: dict[str, Any] = {"profile": "thesis-4060", "memory_bytes": memory_bytes}
        if not fitting:
            refusal(QWEN, dtype="fit", **options)
            continue
        found = helm.study(QWEN, dtype="fit", **options)
        lossless = fitting[0].format in ("as stored", "bf16c")
        assert found.problem.dtype == ("auto" if lossless else fitting[0].format)
        assert (found.access == "compressed") == (fitting[0].format == "bf16c")


def test_auto_never_loses_a_bit() -> None:
    for name in ("thesis-4060", "cpu-laptop-16gb", "thesis-l40s"):
        try:
            plan = helm.study(QWEN, profile=name).plan
        except helm.OutOfMemoryError:
            continue
        assert {part.format for part in plan.slices} <= {"bf16", "bf16c", "f32"}


def test_the_table_and_its_json() -> None:
    shown = command.helm("plan", str(LLAMA), "--profile", "thesis-l40s", "--formats").stdout
    found = helm_json(str(LLAMA), "--profile", "thesis-l40s", "--formats")
    assert found.keys() == {"model", "profile", "workload", "formats", "notices"}
    assert found["model"] == {"name": "llama-3.1-70b", "architecture": "LlamaForCausalLM"}
    for row in found["formats"]:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{row['format']} ")]
        assert ("--dtype" in line or "--weights" in line) == row["fits"]
        assert ("lacks" in line) != row["fits"]
    assert "normally distributed weights" in " ".join(shown.split())


@pytest.mark.parametrize(
    "option", [("--dtype", "q8"), ("--weights", "mapped"), ("--write", "x"), ("--plot", "x.png")]
)
def test_options_that_ask_for_one_plan_do_not_go_with_formats(option: tuple[str, str]) -> None:
    said = command.helm(
        "plan", str(QWEN), "--profile", "thesis-4060", "--formats", *option, status=2
    ).stderr
    assert f"leave {option[0]} out" in said


def test_wrong_input_is_named() -> None:
    with pytest.raises(helm.InvalidError, match="dtype is 'q8', but all formats are compared"):
        helm.formats(QWEN, profile="thesis-4060", dtype="q8")
    with pytest.raises(helm.InvalidError, match="unknown parameter 'weights'"):
        helm.formats(QWEN, profile="thesis-4060", weights="mapped")
    with pytest.raises(helm.InvalidError, match="expected auto, f32, f16, bf16, q8, q4, fit"):
        helm.study(QWEN, profile="thesis-4060", dtype="fits")


def test_a_loaded_model_takes_what_fits() -> None:
    whole = helm.LLM(dtype="auto", weights="copied", context=64, max_sequences=1, threads=1)
    with whole as llm:
        use = llm.plan.memory["cpu"]
    with helm.LLM(dtype="fit", context=64, max_sequences=1, threads=1) as llm:
        assert any("holds weights as stored" in notice for notice in llm.plan.notices)
    short = use.total_bytes + use.reserve_bytes - (1 << 19)  # nor does bf16c fit
    options: dict[str, Any] = {"context": 64, "max_sequences": 1, "threads": 1}
    with pytest.raises(helm.OutOfMemoryError, match=r"dtype='q8' fits: [\d.]+ MiB of RAM"):
        helm.LLM(memory_bytes=short, weights="copied", **options)
    with helm.LLM(memory_bytes=short, **options) as llm:  # from disk, and says what would not be
        assert any(re.match(r"without the disk, dtype='q8' fits", n) for n in llm.plan.notices)
    with helm.LLM(dtype="fit", memory_bytes=short, **options) as llm:
        assert any("holds weights in q8" in notice for notice in llm.plan.notices)
        assert len(llm.generate("Once upon", max_tokens=4, ignore_eos=True).tokens) == 4


def test_a_refusal_without_a_profile_tells_speeds_where_rates_are_known() -> None:
    config = read_config(QWEN)
    cpu = load_profile("cpu-desktop-64gb-ddr5").cpu
    threads = cpu.threads
    for known, speed in ((None, ""), (cpu, r", [\d.]+ tokens/s")):
        problem = Problem(
            config, None, context=4096, max_sequences=1, threads=threads, memory_bytes=11 * GIB,
            loading=LoadingRequest(cpu=known),
        )  # fmt: skip
        with pytest.raises(helm.OutOfMemoryError):
            solve(problem)
        ends = rf"; dtype='q8' fits: [\d.]+ GiB of RAM{speed}; dtype='q4' fits: [\d.]+ GiB of RAM"
        assert re.fullmatch(ends + speed, others_text(problem))


def test_eighty_layers_take_seconds() -> None:
    config = parse_config(json.loads(LLAMA.read_text()), "llama")
    options = load_options({"max_sequences": 1})
    problem = options.problem(config, None, load_profile("thesis-l40s"))
    begin = time.process_time()
    format_rows(problem)
    assert time.process_time() - begin < 5.0
