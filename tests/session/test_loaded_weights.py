"""Copied, mapped or compressed weights: what is executed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import command
import helm
from helm import _helm
from helm.errors import CompressionError
from helm.machine.resources import read_machine
from helm.measure.threads import ThreadChoice
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import load_config
from helm.model.hub import bundled_model
from helm.session import here
from helm.session.here import LoadOptions, Target, load_engine, plan_here

PRESET = "cpu-laptop-16gb"


def test_an_llm_loads_as_its_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that no profile decides
    texts = set()
    for weights in ("auto", "copied", "mapped", "compressed"):
        with helm.LLM(weights=weights, kv_dtype="f32") as llm:
            stats = llm.stats
            assert llm.plan.loading == ("copied" if weights == "auto" else weights)
            assert llm.plan.memory["cpu"].weights_bytes == stats["weights_bytes"]
            in_files = llm.plan.loading_choice.copy_bytes
            mapped = in_files if weights == "mapped" else 0
            # The arena's size is in whole pages of at most 2 MiB.
            assert 0 <= stats["copied_bytes"] - (stats["weights_bytes"] - mapped) <= 2 << 20
            granted = stats["huge_page_bytes"]
            assert granted is None or 0 <= granted <= stats["copied_bytes"]
            texts.add(llm.generate("Once upon a time", max_tokens=12).text)
    assert len(texts) == 1


def test_weights_that_do_not_compress_are_copied_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # so that no profile decides
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(bundled_model(), folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    weights[name][:, ::20] *= torch.tensor(2.0**-60)  # every twentieth weight all but vanishes
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CompressionError, match=f'weights of tensor "{name}" do not compress'):
        helm.LLM(folder, weights="compressed")
    config, tensors = load_config(folder), read_checkpoint(folder)
    options = LoadOptions(threads=1, expected_tokens=10**9)
    with monkeypatch.context() as patch:
        chosen = ThreadChoice(1, (), "", compressed_ratio={1: 1.3})
        patch.setattr(here, "_threads_for", lambda _bytes, _machine: chosen)
        assert plan_here(config, tensors, options, Target(read_machine(), None, None)).loading == (
            "compressed"
        )
        plan, engine = load_engine(config, tensors, str(folder), {}, options)
    assert plan.loading == "copied"
    assert any("do not compress" in notice for notice in plan.notices)
    assert engine.stats["weights_bytes"] == plan.memory["cpu"].weights_bytes


def test_huge_pages_are_counted() -> None:
    asked = 64 << 20
    granted = _helm.granted_huge_page_bytes(asked)
    assert _helm.granted_huge_page_bytes(0) == 0
    if granted is None:
        pytest.skip("/proc/self/smaps does not tell of huge pages here")
    assert 0 <= granted <= asked
    if read_machine().huge_pages == "never":
        assert granted == 0
    if read_machine().huge_pages in ("madvise", "always"):
        assert granted % (2 << 20) == 0


def test_commands_take_it_and_tell() -> None:
    for weights in ("copied", "mapped", "compressed"):
        options = ["run", "bundled", "The dog", "--max-tokens", "4", "--weights", weights]
        told = json.loads(command.helm(*options, "--json").stdout)["loading"]
        assert told["weights"] == weights
        assert told["reason"].startswith("as asked for")
        assert told["copied_bytes"] >= 0
        assert f" bf16, {weights} | KV" in command.helm(*options).stderr
    plan = ["plan", "bundled", "--profile", PRESET, "--weights", "mapped"]
    assert "weights mapped: as asked for; copying" in " ".join(command.helm(*plan).stdout.split())
    assert json.loads(command.helm(*plan, "--json").stdout)["loading"]["weights"] == "mapped"
    doctor = json.loads(command.helm("doctor", "--json").stdout)["huge_pages_trial"]
    assert doctor["granted_bytes"] is None or doctor["granted_bytes"] <= doctor["asked_bytes"]
    assert "of 64.0 MiB granted" in command.helm("doctor").stdout
