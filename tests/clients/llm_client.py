"""The command `llm` against a server: `llm_client.py URL MODEL`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import run

URL, MODEL = sys.argv[1:]
SETTINGS = """
- model_id: helm
  model_name: {model}
  api_base: "{url}"
  api_key_name: helm
  supports_schema: true
  supports_tools: true
"""
DAYS = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {
    "type": "object", "properties": {"days": DAYS}, "required": ["days"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION = """
def weather(days: int) -> str:
    "The weather of a number of days"
    return f"sun for {days} days"
"""


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), "prompt", "-m", "helm"]
    options = ["--key", "any", "-o", "temperature", "0", "-o", "max_tokens", "48"]
    result = subprocess.run(
        [*command, *options, *arguments], capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL, env={**os.environ, "LLM_USER_PATH": str(FOLDER)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def plain() -> str:
    text = llm("--no-stream", "Hello")
    assert text
    return text


def streaming() -> str:
    text = llm("Hello")
    assert text == plain(), text
    return text


def going_on() -> str:
    llm("Hello")
    text = llm("-c", "And then?")
    assert text
    return text


def schema() -> str:
    found = json.loads(llm("--schema", json.dumps(SCHEMA), "How many days?"))
    assert isinstance(found["days"], int)
    return str(found)


def tools() -> str:
    text = llm("--functions", FUNCTION, "--chain-limit", "2", "Hello")
    assert text
    return text


with tempfile.TemporaryDirectory() as name:
    FOLDER = Path(name)
    (FOLDER / "extra-openai-models.yaml").write_text(SETTINGS.format(model=MODEL, url=URL))
    run({
        "plain": plain, "streaming": streaming, "conversation": going_on, "schema": schema,
        "tools": tools,
    })  # fmt: skip
