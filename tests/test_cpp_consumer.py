"""A C++ program built with find_package(helm) against the package gets Python's tokens."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import helm

SOURCE = Path(__file__).parent / "consumer"
PACKAGE = Path(helm.__file__).parent


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built program."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    build = tmp_path_factory.mktemp("consumer")
    prefix = f"-DCMAKE_PREFIX_PATH={PACKAGE}"
    subprocess.run([cmake, "-S", SOURCE, "-B", build, prefix], check=True, capture_output=True)
    subprocess.run([cmake, "--build", build], check=True, capture_output=True)
    return build / "consumer"


def test_consumer_gets_the_same_tokens(consumer: Path, tmp_path: Path) -> None:
    with helm.LLM() as llm:
        prompt = llm.tokenizer.encode("Once upon a time")
        expected = llm.generate(prompt, max_tokens=60, temperature=0).tokens
        plan = tmp_path / "plan.json"
        plan.write_text(llm.plan.to_json())
        folder = llm.folder
    command = [consumer, plan, folder, str(len(expected)), *map(str, prompt)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert [int(token) for token in run.stdout.split()] == expected


def test_consumer_reports_a_bad_plan(consumer: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"format": "helm-plan", "version": 99}')
    run = subprocess.run([consumer, plan, tmp_path, "4", "1"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "version: this runtime executes version" in run.stderr
