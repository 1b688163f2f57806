"""Messages name what the reader can write: arguments in Python, options on the command line."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import helm
from command import helm as command
from helm.base.familiar import OPTIONS, as_options
from helm.commands.cli import COMMANDS, build_parser
from helm.compiler.kv_options import KvOptions
from helm.measure.benchmark import Load
from helm.session.here import LoadOptions

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "helm"
FLAG = re.compile(r"(?<![\w-])--[a-z]")
ARGUMENT = re.compile(r"(?<![\w./-])([a-z_]+)=(?=['\s,;:.)]|$)")
# Files that speak to the command line alone, and the table of both spellings.
OF_THE_COMMAND = ("cli.py", "familiar.py")
# Commands of a shell that messages recommend; their options are the same for everyone.
SHELL = re.compile(r"helm-llm [a-z]+[^;]*|`[^`]*`")


def strings(path: Path) -> Iterator[tuple[str, int]]:
    """The texts of a file of Python, but for its docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value, node.lineno


def library() -> list[Path]:
    files = [path for path in PACKAGE.rglob("*.py") if not {"commands", "serve"} & {*path.parts}]
    return [path for path in files if path.name not in OF_THE_COMMAND]


def test_the_python_api_names_no_option() -> None:
    named = [
        f"{path.name}:{line}: {text}"
        for path in library()
        for text, line in strings(path)
        if FLAG.search(SHELL.sub("", text))
    ]
    assert named == []


def test_the_runtime_which_serves_every_front_names_no_option() -> None:
    literal = re.compile(r'"(?:[^"\\\n]|\\.)*"')
    named = []
    for folder in ("cpp", "cuda"):
        for path in [*(ROOT / folder).rglob("*.cc"), *(ROOT / folder).rglob("*.h")]:
            named += [f"{path.name}: {text}" for text in literal.findall(path.read_text())
                      if FLAG.search(SHELL.sub("", text))]  # fmt: skip
    assert named == []


def parameters() -> set[str]:
    """Everything that a caller of Python may name."""
    known = {"vram", "link", "latency"}  # of --device sim:..., the same everywhere
    of_models = (helm.LLM.__init__, helm.LLM.from_torch, helm.LLM.generate, helm.LLM.chat_stream)
    for owner in (*of_models, helm.quantize):
        known |= set(inspect.signature(owner).parameters)
    for kind in (helm.SamplingParams, LoadOptions, KvOptions, Load):
        known |= set(inspect.signature(kind).parameters)
    return known


def test_arguments_in_messages_exist() -> None:
    found = {
        name for path in library() for text, _ in strings(path) for name in ARGUMENT.findall(text)
    }
    assert {"context", "threads", "vram_bytes"} <= found
    assert found - parameters() == set()


def test_the_command_line_has_an_option_for_every_argument_that_messages_name() -> None:
    subparsers = build_parser()._subparsers
    assert subparsers is not None
    choices = subparsers._group_actions[0].choices
    assert choices is not None
    options = {
        option
        for command in COMMANDS
        for action in choices[command]._actions  # type: ignore[call-overload]
        for option in action.option_strings
    }
    assert set(OPTIONS.values()) - options == set()
    found = {
        name for path in library() for text, _ in strings(path) for name in ARGUMENT.findall(text)
    }
    of_python_alone = {"prefix_cache", "progress", "gguf_file", "vram", "stop_token_ids"}
    assert found - set(OPTIONS) - of_python_alone == set()


def test_commands_name_no_argument_of_python() -> None:
    files = list((PACKAGE / "commands").rglob("*.py"))
    named = [
        f"{path.name}:{line}: {text}"
        for path in files
        for text, line in strings(path)
        if any(name in OPTIONS for name in ARGUMENT.findall(text))
    ]
    assert named == []


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("[plan] raise context= or batch=", "[plan] raise --context or --batch"),
        ("[load] memory_bytes must be at least 1", "[load] --ram must be at least 1"),
        ("leave it out with device='cpu'.", "leave it out with --device cpu."),
        ("kv_overflow= and watermark= without", "--kv-overflow and --watermark without"),
        ("[kv] prefix_cache=False", "[kv] prefix_cache=False"),
        ("/a/context=/b and a.context=", "/a/context=/b and a.context="),
        ("[chat] the seed is a number", "[chat] the seed is a number"),
    ],
)
def test_the_command_line_s_spelling(said: str, shown: str) -> None:
    assert as_options(said) == shown


SIM = "thesis-4060"


def bundled(**options: object) -> Callable[[], object]:
    return lambda: helm.LLM(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "arguments", "in_python", "on_the_command_line"),
    [
        (bundled(threads=0), ("--threads", "0"), "threads must be", "--threads must be"),
        (bundled(page_tokens=3), ("--page-tokens", "3"), "page_tokens is 3", "--page-tokens is 3"),
        (bundled(memory_bytes=5), ("--ram", "5"), "memory_bytes is 5", "--ram is "),
        (bundled(watermark=7.0), ("--watermark", "7"), r"\] watermark", r"\] --watermark"),
        (
            bundled(vram_bytes=2 << 30, device="cpu"),
            ("--vram", "2GiB", "--device", "cpu"),
            "limited with vram_bytes=, but.* with device=,",
            "limited with --vram, but.* with --device,",
        ),
        (
            bundled(prompt_tokens=500, output_tokens=500, device="sim", profile=SIM),
            (
                "--prompt-tokens",
                "500",
                "--output-tokens",
                "500",
                "--profile",
                SIM,
                "--device",
                "sim",
            ),
            "with prompt_tokens= and output_tokens=",
            "with --prompt-tokens and --output-tokens",
        ),
        (
            lambda: helm.SamplingParams(temperature=-1),
            ("--temperature", "-1"),
            r"\] temperature must be",
            r"\] --temperature must be",
        ),
        (
            lambda: helm.LLM(context=32).generate("x " * 90),
            ("--raw", "--context", "32", "-p", "x " * 90),
            "shorten the prompt or raise context=$",
            "shorten the prompt or raise --context$",
        ),
    ],
)
def test_both_fronts_speak_their_own_language(
    call: Callable[[], object],
    arguments: tuple[str, ...],
    in_python: str,
    on_the_command_line: str,
) -> None:
    with pytest.raises(helm.HelmError) as caught:
        call()
    assert re.search(in_python, str(caught.value))
    assert not FLAG.search(str(caught.value))
    prompt = () if "-p" in arguments else ("-p", "x")
    told = command("run", "bundled", *prompt, *arguments, status=2).stderr.strip()
    assert re.search(on_the_command_line, told.splitlines()[-1])
