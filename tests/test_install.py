"""HELM as users install it: the README's lines, what it depends on, what it shares a name with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

import command
from cpp_program import PACKAGE, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_dependency_is_imported() -> None:
    sources = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", "\n".join(sources), re.M))
    needed = {
        re.split(r"[^\w-]", line)[0].replace("-", "_")
        for line in requires("helm-llm") or []
        if "extra ==" not in line
    }
    assert needed
    assert needed <= imported


def _compiler(name: str, version: str) -> subprocess.CompletedProcess[str]:
    variables = (f"-DCMAKE_CXX_COMPILER_ID={name}", f"-DCMAKE_CXX_COMPILER_VERSION={version}")
    script = ROOT / "cmake" / "compiler.cmake"
    return subprocess.run(["cmake", *variables, "-P", script], capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_old_compilers_are_refused_and_the_readme_says_so() -> None:
    for name, old, least in (("GNU", "10.2.1", "11"), ("Clang", "13.0.1", "14")):
        refused = _compiler(name, old)
        assert refused.returncode == 1
        needed, found = "HELM needs GCC 11 or Clang 14 or newer;", f"found {name} {old}"
        assert needed in " ".join(refused.stderr.split())
        assert found in " ".join(refused.stderr.split())
        accepted = _compiler(name, least)
        assert accepted.returncode == 0
        (takes,) = re.findall(r"compiling takes (.*)", accepted.stdout)
        assert f"Compiling takes {takes};" in README
    assert "GCC 11, Clang 14 or newer" in README


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of packages in which crfm-helm is installed, too; the last one's files are there."""
    package = tmp_path / "helm"
    package.mkdir()
    for entry in PACKAGE.iterdir():
        if entry.name != "__init__.py" or request.param == "helm-llm":
            (package / entry.name).symlink_to(entry)
    for file in ("__init__.py", "config/__init__.py"):
        (package / file).parent.mkdir(exist_ok=True)
        (package / file).touch()
    other = tmp_path / "crfm_helm-0.5.16.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: crfm-helm\nVersion: 0.5.16\n")
    return tmp_path


@pytest.mark.parametrize("shared", ["helm-llm"], indirect=True)
def test_beside_files_of_another_package_helm_runs(shared: Path) -> None:
    assert command.helm("run", "-n", "1", PYTHONPATH=str(shared)).stdout


@pytest.mark.parametrize("shared", ["crfm-helm"], indirect=True)
def test_a_package_of_the_same_name_is_told(shared: Path) -> None:
    error = command.helm("run", "-n", "1", status=1, PYTHONPATH=str(shared)).stderr
    assert error.count("\n") == 1
    assert "[install] crfm-helm 0.5.16 is in this environment" in error
    assert "fresh one" in error


def test_python_names_the_package_of_the_same_name(tmp_path: Path) -> None:
    program = (
        "import importlib.metadata, helm\n"
        "importlib.metadata.version = lambda name: {'crfm-helm': '0.5.16'}[name]\n"
        "import sys; sys.modules['helm.session.llm'] = None\n"
        "helm.LLM\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1].startswith("ImportError: [install] crfm-helm 0.5.16 is in")


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """(the repository as it is cloned, environment variables). This one, where nobody works in it
    with an environment of his own: what was built for the tests is not built again."""
    own = ROOT / ".venv"
    if not own.exists():
        yield ROOT, {}
        shutil.rmtree(own, ignore_errors=True)
        return
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    folder = tmp_path / "helm"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    defines = "HELM_WERROR=ON;HELM_CUDA=OFF;HELM_TIERS=avx2"
    yield folder, {"SKBUILD_CMAKE_DEFINE": defines, "CCACHE_BASEDIR": str(folder)}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_readme_s_first_lines_lead_to_text(
    checkout: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    (lines,) = re.findall(r"```bash\n(python3 -m venv .*?)```", README, re.S)
    system = tmp_path / "bin"
    system.mkdir()
    (system / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    for name in ("pip", "pip3"):  # as on systems that manage their environment
        (system / name).write_text("#!/bin/sh\necho externally-managed-environment >&2; exit 1\n")
        (system / name).chmod(0o755)
    folder, variables = checkout
    path = f"{system}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-ec", lines], cwd=folder, env={**os.environ, "PATH": path, **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "HELM: compiling takes" in run.stderr
    assert re.search(r"^\s*\[\d+/\d+\] ", run.stderr, re.M), "progress"
    story = re.split(r"Successfully installed .*\n", run.stdout)[-1]
    assert len(story.split()) > 20, story
