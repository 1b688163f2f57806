"""Options under the names that people know, wrong uses, help, and completion by shells."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import helm as package
from command import helm
from helm.base.familiar import NAMES, option
from helm.commands.cli import COMMANDS
from helm.commands.cli import build_parser as parser_of_all
from helm.commands.parser import Parser
from helm.model.hub import bundled_model

QWEN = str(Path(__file__).parents[1] / "data" / "configs" / "qwen3-8b.json")
GREEDY = ("--temperature", "0", "-q")


# --- names ---------------------------------------------------------------------------------------


def test_short_options_and_those_of_other_engines_mean_the_same() -> None:
    model = str(bundled_model())
    long = (
        "run", "bundled", "The dog", "--max-tokens", "6", "--context", "64", "--threads", "1",
        "--seed", "7", "--temperature", "2", "--repetition-penalty", "1.5", "-q",
    )  # fmt: skip
    expected = helm(*long).stdout
    short = ("-n", "6", "-c", "64", "-t", "1", "-s", "7")
    others = (
        "--n-predict", "6", "--ctx-size=64", "--n_threads", "1", "--random-seed", "7",
    )  # fmt: skip
    rest = ("--temp", "2", "--repeat-penalty", "1.5", "-q")
    for words in (
        ("-m", model, "-p", "The dog"),
        ("-m", "bundled", "The dog"),
        ("The dog", "-m", "bundled"),
        ("bundled", "-p", "The dog"),
        ("-p", "The dog"),
        ("--model", "bundled", "--prompt=The dog"),
    ):
        assert helm("run", *words, *short, *rest).stdout == expected
    assert helm("run", "bundled", "The dog", *others, *rest).stdout == expected


def test_every_familiar_name_is_an_option_of_some_command() -> None:
    ours = {name for command in commands().values() for a in actions(command) for name in a}
    # These are parameters of Python alone.
    assert {option(f"--{name}") for name in NAMES} - ours == {
        "--max-sequences", "--prefix-cache"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bfloat16", "bf16"),
        ("float16", "f16"),
        ("half", "f16"),
        ("fp16", "f16"),
        ("float32", "f32"),
    ],
)
def test_dtypes_by_other_names(given: str, dtype: str) -> None:
    plan = ("plan", "--profile", "rtx-4090-24gb-ddr5", "--json")
    found = json.loads(helm(*plan, "--dtype", given, "--kv-dtype", given).stdout)["model"]
    assert (found["dtypes"], found["kv_dtype"]) == ([dtype], dtype)
    with package.LLM(dtype=given, kv_dtype=given, context=32, weights="copied") as llm:
        matrices = {t.name for t in llm.plan.tensors if len(t.shape) == 2}
        assert {s.format for s in llm.plan.slices if s.tensor in matrices} == {dtype}
        assert llm.plan.kv.dtype == dtype


def test_packed_weights_can_be_planned() -> None:
    plan = ("plan", QWEN, "--profile", "cpu-desktop-64gb-ddr5", "--json")
    whole, *packed = (
        json.loads(helm(*plan, "--dtype", dtype).stdout) for dtype in ("auto", "q8", "q4")
    )
    assert [found["model"]["dtypes"] for found in packed] == [["c8.s32"], ["c8.s32", "c4.km32"]]
    sizes = [found["model"]["weights_bytes"] for found in (whole, *packed)]
    assert sizes[0] * 0.54 > sizes[1] > sizes[2]
    rates = [found["predicted"]["decode_tokens_per_s"] for found in (whole, *packed)]
    assert rates == sorted(rates)
    own = ("plan", QWEN, "--profile", "rtx-4090-24gb-ddr5", "--policy", "layer-partition", "--json")
    found, stored = (json.loads(helm(*own, "--dtype", d).stdout) for d in ("q4", "bf16"))
    assert found["units_cpu"] == 0
    assert found["notices"] == []
    assert (
        found["predicted"]["decode_tokens_per_s"] > 2 * stored["predicted"]["decode_tokens_per_s"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 64}, "[load] unknown parameter 'n_ctx'; here it is context"),
        ({"max_model_len": 64}, "here it is context"),
        ({"n_threads": 1}, "here it is threads"),
        ({"torch_dtype": "half"}, "here it is dtype"),
        ({"max_num_seqs": 2}, "here it is max_sequences"),
        ({"n_gpu_layers": 3}, "HELM places layers itself; vram_bytes bounds"),
        ({"contexts": 64}, "did you mean context?"),
        ({"zzz": 1}, "known: model, revision, tokenizer, context"),
        ({"dtype": "int4"}, "dtype is 'int4'; expected auto, f32, f16, bf16"),
    ],
)
def test_unknown_parameters_of_a_model_say_what_is_meant(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(package.InvalidError) as caught:
        package.LLM(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_new_tokens", "here it is max_tokens"),
        ("n_predict", "here it is max_tokens"),
        ("temp", "here it is temperature"),
        ("repeat_penalty", "here it is repetition_penalty"),
        ("presence_penalties", "did you mean presence_penalty?"),
        ("guided_json", "here it is json_schema"),
        ("do_sample", "HELM has none: temperature 0 is greedy, above 0 samples"),
        ("temperatur", "did you mean temperature?"),
        ("beams", "known: max_tokens"),
    ],
)
def test_unknown_sampling_parameters_say_what_is_meant(name: str, message: str) -> None:
    with package.LLM(context=32) as llm:
        for call in (
            lambda: package.SamplingParams(**{name: 1}),  # type: ignore[arg-type]
            lambda: llm.generate("x", **{name: 1}),
            lambda: llm.chat([{"role": "user", "content": "x"}], **{name: 1}),
        ):
            with pytest.raises(package.InvalidError) as caught:
                call()
            assert str(caught.value).startswith(f"[sampling] unknown parameter '{name}'; {message}")


# --- wrong uses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --prompt 512", "--prompt 512: the number of prompt tokens to plan for is "
         "--prompt-tokens 512"),
        ("plan -p 512", "is --prompt-tokens 512"),
        ("plan --output 128", "is --output-tokens 128"),
        ("plan -n 128", "is --output-tokens 128"),
        ("bench --prompt=512", "is --prompt-tokens 512"),
        ("bench --output 4", "is --output-tokens 4"),
        ("run --prompt 512", "is --prompt-tokens 512"),
        ("run --output 128", "is --output-tokens 128"),
        ("chat -p 512", "is --prompt-tokens 512"),
        ("chat --output 128", "is --output-tokens 128"),
        ("run --logit-bias 42", "argument --logit-bias: 42 is none; expected a token's id and"),
        ("chat --logit-bias a=1", "argument --logit-bias: a=1 is none"),
        ("run -ngl 99", "no -ngl: HELM places layers itself; --vram bounds"),
        ("run --temprature=1", "unrecognized arguments: --temprature=1, did you mean "
         "--temperature?"),
        ("run --dtype int4", "argument --dtype: invalid choice: 'int4'"),
        ("run -n many", "-n/--max-tokens: invalid int value: 'many'"),
        ("run -m a b c", "MODEL is given twice"),
        ("plan a -m b", "MODEL is given twice"),
        ("run a b -p c", "PROMPT is given twice"),
        ("run a -p", "-p/--prompt: expected one argument"),
        ("run --raw --system x bundled q", "--raw uses no chat template; leave --system out"),
        ("run --system x", "--system is for a question; give it as PROMPT"),
        ("chat bundled -", "standard input is the conversation; leave - out"),
        ("help fly", "invalid choice: 'fly'"),
        ("--print-completion fish", "invalid choice: 'fish'"),
        ("chat bundled Hello there", "unrecognized arguments: there"),
    ],
)  # fmt: skip
def test_a_wrong_use_is_one_clear_line(line: str, message: str) -> None:
    result = helm(*line.split(), status=2)
    assert result.stdout == ""
    (found,) = result.stderr.splitlines()
    assert found.startswith("error: ")
    assert message in found


# --- help ----------------------------------------------------------------------------------------


def commands() -> dict[str, Parser]:
    (found,) = (a for a in parser_of_all()._actions if isinstance(a.choices, dict))
    return dict(found.choices)


def actions(parser: Parser) -> list[list[str]]:
    return [list(action.option_strings) for action in parser._actions]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_names_every_default(command: str) -> None:
    short = helm(command, "--help", COLUMNS="80").stdout
    whole = helm(command, "--help-all", COLUMNS="80").stdout
    assert helm("help", command, COLUMNS="80").stdout == short
    assert len(short.splitlines()) <= 40
    assert max(map(len, whole.splitlines())) <= 80
    for action in commands()[command]._actions:
        if action.help == "==SUPPRESS==":
            continue
        for name in action.option_strings[-1:]:
            assert f"{name} " in whole or f"{name}\n" in whole
        same = "the same as" in str(action.help)
        needed = action.required and not action.option_strings
        if action.nargs != 0 and not same and not needed:
            assert "(default: " in str(action.help), action.option_strings
    for name in re.findall(r"^  (-.*?)(?:  |$)", short, re.M):
        assert name in whole


def test_help_of_all_and_version() -> None:
    text = helm("help", COLUMNS="80").stdout
    assert text == helm("--help", COLUMNS="80").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert re.fullmatch(r"helm-llm \d+\.\d+.*\n", helm("--version").stdout)


# --- completion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    pytest.importorskip("shtab")
    script = helm("--print-completion", shell).stdout
    for word in (*COMMANDS, "help", "--max-tokens", "--prompt-tokens", "--kv-overflow"):
        assert word in script or word.removeprefix("--") in script


def test_bash_completes_as_the_script_says() -> None:
    pytest.importorskip("shtab")
    script = helm("--print-completion", "bash").stdout
    asked = """
COMP_WORDS=(helm-llm run --max-t); COMP_CWORD=2
$(complete -p helm-llm | sed 's/.*-F \\([^ ]*\\).*/\\1/') helm-llm --max-t run
printf '%s\\n' "${COMPREPLY[@]}"
"""
    result = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == ["--max-tokens"], result.stderr


def test_without_shtab_completion_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "shtab.py").write_text("raise ImportError")
    path = f"{tmp_path}"
    result = helm("--print-completion", "bash", status=2, PYTHONPATH=path)
    assert result.stderr == (
        "error: [completion] shtab is not installed; run pip install 'helm-llm[completion]'\n"
    )
