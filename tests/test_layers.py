"""A folder sees the folders above it alone: imports of Python, includes of C++ and CUDA. And no
source file is long."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "python"
# From the top: each may import from those before it and from itself.
PYTHON_FOLDERS = (
    "base", "model", "machine", "plan", "compiler", "measure", "text", "session", "serve",
    "commands",
)  # fmt: skip
ANYONE = ("helm.errors", "helm._helm")
# Some do not exist yet.
NATIVE_FOLDERS = (
    "cpp/include/helm", "cpp/base", "cpp/plan", "cpp/device", "cpp/cpu/kernels",
    "cpp/cpu/kernels/quant", "cpp/cpu", "cpp/weights", "cpp/kv", "cpp/program", "cpp/engine",
    "cpp/serve", "cpp/probe",
)  # fmt: skip
# The plugin links nothing of libhelm.
CUDA_FOLDERS = (
    "cpp/include/helm", "cpp/base", "cpp/plan", "cpp/device", "cuda/hardware", "cuda/kernels",
    "cuda",
)  # fmt: skip
INSTALLED = "cpp/include/helm"
# These see their own files, and the bindings the installed API, the emulation what it stands for.
ALONE = {"cuda/emulation": "cuda/hardware", "python": INSTALLED}
# The simulated accelerator runs the CPU's stages, and the registry makes it.
SEE_CPU = {"sim_device.h", "sim_device.cc", "sim_stream.h", "sim_stream.cc", "registry.cc"}
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
GENERATED = {"helm/version.h"}
MOST_LINES = 400
# What a plan is asked for with, what follows from that, and what makes it, together.
PLANNER, MOST_PLANNER_LINES = ("planning_problem.py", "access.py", "solve.py"), 650
SOURCES = (".py", ".cc", ".h", ".cu", ".cuh")


def _modules() -> dict[str, Path]:
    """Every Python file of the package, by module name."""
    return {
        ".".join(file.relative_to(PYTHON).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted((PYTHON / "helm").rglob("*.py"))
    }


def _imports(tree: ast.Module, modules: Mapping[str, Path]) -> Iterator[str]:
    """What a file imports of helm, wherever in it, for types alone as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("helm."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports name the whole module"
            module = str(node.module)
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                if module.split(".")[0] == "helm":
                    yield whole if whole in modules or whole in ANYONE else module


def _python_files() -> dict[str, tuple[ast.Module, list[str]]]:
    modules = _modules()
    trees = {name: ast.parse(file.read_text()) for name, file in modules.items()}
    return {name: (tree, list(_imports(tree, modules))) for name, tree in trees.items()}


def _folder(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PYTHON_FOLDERS else ""


def test_python_folders_import_from_those_above() -> None:
    wrong = []
    for name, (_, imported) in _python_files().items():
        own = _folder(name)
        if not own:
            continue  # what users import looks everything up
        seen = PYTHON_FOLDERS[: PYTHON_FOLDERS.index(own) + 1]
        wrong += [
            f"{name} imports {other}"
            for other in imported
            if other not in ANYONE and _folder(other) not in seen
        ]
    assert wrong == []


def test_every_python_file_lies_in_a_folder_of_the_table() -> None:
    top = {name for name in _modules() if not _folder(name)}
    assert top == {"helm", "helm.__main__", "helm.errors"}


def test_folders_take_the_version_alone_from_the_package() -> None:
    taken = {
        (name, node.attr)
        for name, (tree, _) in _python_files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "helm"
    }
    assert {attribute for _, attribute in taken} == {"__version__"}


def test_no_python_files_import_each_other_in_a_circle() -> None:
    graph = {name: set(imported) - {name} for name, (_, imported) in _python_files().items()}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)  # raises CycleError


def test_the_package_itself_imports_nothing_but_errors() -> None:
    tree = _python_files()["helm"][0]
    now = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert [name for name in now if name and name.startswith("helm")] == ["helm.errors"]


def _native_files() -> dict[Path, list[Path]]:
    """Every C++ and CUDA file, with the files of the repository that it includes."""
    files = [
        file
        for folder in ("cpp", "cuda", "python")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in (".h", ".cc", ".cu", ".cuh")
    ]
    return {
        file: [
            _included(file, name)
            for name in INCLUDE.findall(file.read_text())
            if name not in GENERATED
        ]
        for file in files
    }


def _included(file: Path, name: str) -> Path:
    if file.is_relative_to(ROOT / "cuda"):  # the plugin's files are built among themselves
        own = [file.parent / name, *(ROOT / "cuda").rglob(name)]
    else:
        own = [file.parent / name]
    for place in (ROOT / "cpp" / name, ROOT / INSTALLED / ".." / name, ROOT / name, *own):
        if place.is_file():
            return place.resolve()
    raise AssertionError(f"{file.relative_to(ROOT)} includes {name}, which is nowhere")


def _native_folder(file: Path) -> str:
    return file.relative_to(ROOT).parent.as_posix()


def _visible(file: Path) -> set[str]:
    """The folders whose headers a file may include."""
    own = _native_folder(file)
    if own in ALONE:
        return {own, ALONE[own]}
    table = CUDA_FOLDERS if own.startswith("cuda") else NATIVE_FOLDERS
    seen = set(table[: table.index(own) + 1])
    return seen | {"cpp/cpu", "cpp/cpu/kernels"} if file.name in SEE_CPU else seen


def test_native_folders_include_from_those_above() -> None:
    known = {*NATIVE_FOLDERS, *CUDA_FOLDERS, *ALONE}
    files = _native_files()
    assert {_native_folder(file) for file in files} <= known
    wrong = [
        f"{file.relative_to(ROOT)} includes {other.relative_to(ROOT)}"
        for file, included in files.items()
        for other in included
        if _native_folder(other) not in _visible(file)
    ]
    assert wrong == []


def test_no_native_files_include_each_other_in_a_circle() -> None:
    graph = {file: set(included) for file, included in _native_files().items()}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)  # raises CycleError


def test_no_source_file_is_long() -> None:
    folders = ("bench", "cpp", "cuda", "docs", "examples", "python", "tests", "tools")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in SOURCES]
    lines = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in files}
    assert len(lines) > 500
    long = {f.relative_to(ROOT).as_posix(): n for f, n in lines.items() if n > MOST_LINES}
    assert long == {}


def test_the_planner_is_short() -> None:
    files = [PYTHON / "helm" / "compiler" / name for name in PLANNER]
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_PLANNER_LINES


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports them by their names alone."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
