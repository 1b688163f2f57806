"""What docs/cpp.md promises to C++ programs: examples/, versions, what the library exports."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import command
import gguf_models
import helm
from cpp_program import PACKAGE, ROOT, build
from helm.model.hub import bundled_model

HEADERS = PACKAGE / "include" / "helm"
LIBRARIES = PACKAGE / "lib"


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built program."""
    return build(ROOT / "examples", tmp_path_factory.mktemp("examples")) / "generate"


def test_the_example_runs_a_written_plan_and_gets_python_s_tokens(
    generate: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    said = command.helm("plan", "--profile", "cpu-laptop-16gb", "--write", str(plan)).stderr
    assert said == f"[plan for C++: {plan}, weights in {bundled_model()}]\n"
    with helm.LLM() as llm:
        prompt = llm.tokenizer.encode("Once upon a time")
        expected = llm.generate(prompt, max_tokens=60, temperature=0).tokens
    run = subprocess.run(
        [generate, plan, bundled_model(), str(len(expected)), *map(str, prompt)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert [int(token) for token in run.stdout.split()] == expected


@pytest.mark.parametrize(
    "name", ["small", "SmolLM2-135M-Instruct.Q4_1.gguf", "Qwen2.5-Coder-1.5B-Q4_K_M.gguf"]
)
def test_a_gguf_file_s_plan_gets_python_s_tokens_too(
    name: str, generate: Path, tmp_path: Path
) -> None:
    small = name == "small"
    model = gguf_models.talking(tmp_path / "one") if small else gguf_models.real(name)
    plan = tmp_path / "plan.json"
    arguments = ("--profile", "cpu-laptop-16gb", "-c", "128", "--write", str(plan))
    said = command.helm("plan", str(model), *arguments).stderr
    assert said == f"[plan for C++: {plan}, weights in {model.parent}]\n"
    with helm.LLM(model, context=128, device="cpu") as llm:
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode("the a")
        expected = llm.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True).tokens
    run = subprocess.run(
        [generate, plan, model.parent, str(len(expected)), *map(str, prompt)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert [int(token) for token in run.stdout.split()] == expected


def test_the_document_s_lines_are_the_example_s() -> None:
    document = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")
    example = {
        line.strip()
        for name in ("CMakeLists.txt", "generate.cc")
        for line in (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
    }
    shown = re.findall(r"```(?:cmake|cpp)\n(.*?)```", document, re.S)
    assert len(shown) == 2
    lines = [line.strip() for block in shown for line in block.splitlines() if line.strip()]
    assert [line for line in lines if line not in example] == []


def test_headers_and_library_have_the_package_s_version(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    consumer = build(ROOT / "tests" / "consumer", tmp_path_factory.mktemp("consumer"))
    run = subprocess.run([consumer / "version"], check=True, capture_output=True, text=True)
    text, numbers, running = run.stdout.split()
    assert text == running == version("helm-llm")
    assert text.startswith(numbers)


def test_the_library_s_name_has_major_and_minor_version() -> None:
    major, minor, _ = version("helm-llm").split(".", 2)
    name = f"libhelm.so.{major}.{minor}"
    assert [file.name for file in LIBRARIES.glob("libhelm.so*")] == [name], "wheels hold no links"
    listed = _tool("objdump", "-p", LIBRARIES / name)
    assert re.search(rf"SONAME +{re.escape(name)}$", listed, re.M)


def test_the_library_exports_what_the_headers_declare_and_nothing_else() -> None:
    (library,) = LIBRARIES.glob("libhelm.so*")
    symbols = _tool("nm", "-D", "--defined-only", "-C", library)
    names = {line.split(maxsplit=2)[2] for line in symbols.splitlines()}
    of_types = {
        f"{what} for helm::{name}"
        for what in ("typeinfo", "typeinfo name", "vtable")
        for name in ("Drafter", "Error", "Grammar", "TokenConstraint")
    }
    assert of_types <= names, "programs catch the first and derive from the others"
    exported = {_function(name) for name in names - of_types}
    declared = {name for header in HEADERS.glob("*.h") for name in _declared(header.read_text())}
    constants = {name for name in exported if re.search(r"::k[A-Z]\w*$", name)}
    assert exported - constants == declared


def _function(symbol: str) -> str:
    """The name of a symbol: "helm::Plan::from_json"."""
    return re.sub(r"\[abi:\w+\]|\(.*", "", symbol, flags=re.S)


def _declared(header: str) -> set[str]:
    """The public functions without a body in a header, but for virtual and deleted ones."""
    text = re.sub(r"//.*|^#.*| = \{\}", "", header, flags=re.M)
    text = re.sub(r"^ private:.*?^};", "};", text, flags=re.S | re.M)
    text = re.sub(r"\)( const)? \{(?:[^{}]|\{[^{}]*\})*\}", ") {}", text)  # bodies
    text = re.sub(r"^static_assert\([^;]*;", "", text, flags=re.M)
    found: set[str] = set()
    scopes = ["helm"]
    for part in re.finditer(
        r"^(?:class|struct) (?:HELM_API )?(\w+)[^;{]*\{|^(\};)|"
        r"^ *(?:HELM_API |static |explicit )*(?:[\w:<>&*, ]+[ &*])?(~?\w+)\([^{};]*\)[ \w]*;",
        text, re.M,
    ):  # fmt: skip
        if part[1]:
            scopes.append(part[1])
        elif part[2]:  # of a class, else of an array
            del scopes[1:]
        else:
            found.add("::".join([*scopes, part[3]]))
    return found


def _tool(*arguments: str | Path) -> str:
    if shutil.which(arguments[0]) is None:
        pytest.skip(f"{arguments[0]} is not installed")
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
