"""The examples of docs/serving.md, run against a server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import helm
from helm.serve.llm_backend import LlmBackend
from scripted_backend import served

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


def block(kind: str, containing: str) -> str:
    blocks = re.findall(rf"```{kind}\n(.*?)```", DOCUMENT.read_text(), re.S)
    return next(text for text in blocks if containing in text)


def test_examples_print_what_the_document_shows() -> None:
    shown = block("text", "Hello!")
    with helm.LLM() as llm, served(LlmBackend.over(llm)) as (url, _):
        python = block("python", "OpenAI").replace("http://127.0.0.1:8000", url)
        result = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True)
        assert result.stdout == shown, result.stderr
        curl = block("bash", "curl").replace("http://127.0.0.1:8000", url)
        answer = subprocess.run(["sh", "-c", curl], capture_output=True, text=True)
    message = json.loads(answer.stdout)["choices"][0]["message"]
    assert message["content"] == shown.splitlines()[0]
