"""HELM used wrongly from C++: each way ends with one clear helm::Error of the right kind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import command
import helm
from cpp_program import ROOT, build
from helm.machine.profile import load_profile
from helm.model.hub import bundled_model

PRESET = ("--profile", "cpu-laptop-16gb")
ANOTHER = "not a plan; write one with `helm-llm plan MODEL --write FILE`"

# What is done wrongly: the error's kind, and what its message says.
MISUSES = {
    "report.json": ("invalid", f"is the report of `helm-llm plan --json`, {ANOTHER}"),
    "profile.json": ("invalid", f"is a machine's profile, {ANOTHER}"),
    "config.json": ("invalid", f"is a model's config.json, {ANOTHER}"),
    "tokenizer.json": ("invalid", f"is a model's tokenizer.json, {ANOTHER}"),
    "index.json": ("invalid", f"is the index of a model's weights, {ANOTHER}"),
    "weights.safetensors": ("invalid", f"is a safetensors file, a model's weights, {ANOTHER}"),
    "model.gguf": ("invalid", f"is a GGUF file, a model's weights, {ANOTHER}"),
    "empty.json": ("invalid", f"is empty, {ANOTHER}"),
    "folder": ("invalid", f"is a folder, {ANOTHER}"),
    "absent.json": ("io", "cannot read .*absent.json: No such file or directory; give a file of"),
    "cut.json": ("invalid", "cut.json] not valid JSON: parse error at line 1"),
    "old.json": ("invalid", "version: this runtime executes version .*; make the plan anew"),
    "other.json": ("invalid", f'is JSON without "format": "helm-plan", {ANOTHER}'),
    "list.json": ("invalid", f'is JSON without "format": "helm-plan", {ANOTHER}'),
    "wrong_field.json": ("invalid", r'kv\.dtype: unknown KV dtype "int4"; known: f32, f16, bf16'),
    "no name": ("io", "cannot read a file without a name"),
    "path as text": ("invalid", 'no JSON: "models/plan.json"; Plan::from_file.. reads a file'),
    "no text": ("invalid", f"this is empty, {ANOTHER}"),
    "empty plan": ("invalid", r"the plan is empty; read one with Plan::from_file\(\)"),
    "no folder named": ("invalid", "no folder was named; give the one that holds"),
    "no such folder": ("io", "cannot read /absent/model.safetensors: .*; give the folder"),
    "folder without weights": ("io", "cannot read .*/model.safetensors: .*; give the folder"),
    "cut weights": ("io", "has 1000 bytes, tensor .* ends at .*; the file is truncated or not"),
    "threads below zero": ("invalid", "-1 threads were asked for; expected 1 to 4096, or 0 for"),
    "pace below zero": (
        "invalid",
        "a pace of -1 bytes per second was asked for; expected more than",
    ),
    "a million threads": ("invalid", "1000000 threads were asked for; expected 1 to 4096"),
    "CPUs for other threads": ("invalid", "2 CPUs were named for 1 threads; name one for each"),
    "unknown device": ("invalid", 'unknown device "gpu"; expected cuda, cuda:N or sim:'),
    "tensor of another shape": ("invalid", r"has shape \[4\], the plan says \[\d+, \d+\]"),
    "tensor without data": ("invalid", "was bound without data; expected f32, f16 or bf16"),
    "tensor in i8": ("invalid", "in a dtype of the KV cache; expected f32, f16 or bf16"),
    "tensor that nobody gives": ("invalid", "no source file in the plan and was not bound"),
    "open nothing": ("capacity", "a sequence of 0 positions was asked for"),
    "open too much": ("capacity", r"of 1073741824 positions .* context is \d+"),
    "close what is not open": ("invalid", "sequence 77 is not open"),
    "fork beyond the source": ("invalid", "with the first 5 of the 0 of sequence"),
    "step of nothing": ("capacity", "a step of 0 tokens and 0 outputs was asked for"),
    "step without tokens": ("invalid", "no tokens given for sequence"),
    "step with an unknown token": ("invalid", r"token 0 is 1073741824, outside the vocabulary of"),
    "step beyond the capacity": ("capacity", "opened for 8, 9 more do not fit"),
    "collect what was not submitted": ("invalid", "no step was submitted"),
    "save to no folder": ("io", "cannot write /absent/kv: No such file or directory"),
    "load what was not saved": ("invalid", "good.json is no KV cache saved by HELM"),
    "no prompt": ("invalid", "request 0: the prompt has no tokens"),
    "prompt token below zero": ("invalid", "prompt token 1 is -1, outside the vocabulary of"),
    "prompt beyond the context": ("capacity", "the prompt has 1048576 tokens, the context holds"),
    "no new tokens": ("invalid", "max_tokens must be at least 1, found 0"),
    "temperature that is no number": ("invalid", "temperature must be finite and at least 0"),
    "top_p over one": ("invalid", "top_p must .*, found 2"),
    "cached of no sequence": ("invalid", "cached is 2, it must be the length of the sequence"),
    "unknown sequence": ("invalid", "sequence 99 is not open"),
    "request that was not given": ("invalid", "request 1 was named; expected 0 to 0, as they"),
    "another engine's prefixes": ("invalid", "the prefix cache is of another engine; give its own"),
    "save what is not kept": ("invalid", "nothing is kept of these 1 tokens; save right after"),
    "unknown accelerator": ("invalid", '"cuda:first": expected cuda:N with the number of a GPU'),
    "reads by no thread": ("invalid", "0 threads were asked for; expected 1 or more"),
    "probe of no tokens": ("invalid", "expected 1 to 4096 tokens on a thread or more"),
    "unknown dtype": ("invalid", 'unknown dtype "int4"; known: f32, f16, bf16'),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """good.json and sim.json, and much that is no plan."""
    folder, model = tmp_path_factory.mktemp("plans"), bundled_model()
    report = command.helm("plan", *PRESET, "--json", "--write", str(folder / "good.json"))
    (folder / "report.json").write_text(report.stdout)
    with helm.LLM(device="sim:vram=1GiB,link=16GB/s", profile="thesis-4060") as llm:
        assert llm.plan.units_accelerator > 0
        (folder / "sim.json").write_text(llm.plan.to_json())
    good = (folder / "good.json").read_text()
    (folder / "cut.json").write_text(good[:2000])
    for name, path, value in (("old", ("version",), 1), ("wrong_field", ("kv", "dtype"), "int4")):
        plan = json.loads(good)
        place = plan
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        (folder / f"{name}.json").write_text(json.dumps(plan))
    (folder / "profile.json").write_text(load_profile("thesis-4060").to_json())
    (folder / "index.json").write_text('{"metadata": {}, "weight_map": {}}')
    (folder / "other.json").write_text('{"name": "x"}')
    (folder / "list.json").write_text("[]")
    (folder / "empty.json").write_text(" \n")
    (folder / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model / name, folder)
    shutil.copy(model / "model.safetensors", folder / "weights.safetensors")
    (folder / "folder").mkdir()
    (folder / "cut").mkdir()
    weights = (model / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(weights[:1000])
    return folder


@pytest.fixture(scope="module")
def outcomes(plans: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What came of each misuse: (kind of error, message)."""
    program = build(ROOT / "tests" / "consumer", tmp_path_factory.mktemp("misuse")) / "misuse"
    run = subprocess.run([program, plans, bundled_model()], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    lines = [line.split("\t") for line in run.stdout.splitlines()]
    return {name: (kind, message) for name, kind, message in lines}


def test_every_misuse_is_tried(outcomes: dict[str, tuple[str, str]]) -> None:
    assert list(outcomes) == list(MISUSES)


@pytest.mark.parametrize("misuse", MISUSES)
def test_it_is_one_clear_error(outcomes: dict[str, tuple[str, str]], misuse: str) -> None:
    expected, text = MISUSES[misuse]
    kind, message = outcomes[misuse]
    assert (kind, message) == (expected, message)
    assert re.search(text, message), message
    assert re.match(r"\[\S+\] \S|unknown dtype", message)
