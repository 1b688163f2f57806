"""The commands list, show and rm: models on this machine, and of a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from command import Terminal, helm
from fake_hub import serving
from helm.commands.model_facts import describe
from helm.model.hub import bundled_model

FILES = sum(file.stat().st_size for file in bundled_model().iterdir())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands' hub cache lies, with org/model in it."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with serving("org/model", bundled_model()) as address:
        helm("run", "org/model", "-n", "1", "-q", HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
    return tmp_path / "HF_HUB_CACHE"


def asked(*arguments: str) -> Any:
    return json.loads(helm(*arguments, "--json").stdout)


def listed() -> dict[str, Any]:
    return {model["name"]: model for model in asked("list")["models"]}


def test_list_knows_downloads_the_bundled_model_and_folders_that_were_used(
    home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(bundled_model(), folder)
    assert list(listed()) == ["org/model", "bundled"]
    helm("run", str(folder), "-n", "1", "-q")
    models = listed()
    assert list(models) == [str(folder), "org/model", "bundled"]
    assert models["bundled"]["last_used"] is None
    assert models["org/model"]["last_used"] <= models[str(folder)]["last_used"]
    for model in models.values():
        assert (model["dtype"], model["disk_bytes"]) == ("bf16", FILES)
        assert model["parameters"] == asked("show")["parameters"]
    shown = helm("list").stdout
    assert all(len(line) <= 240 for line in shown.splitlines())
    assert "just now" in shown
    shutil.rmtree(folder)
    assert list(listed()) == ["org/model", "bundled"]


def test_list_names_what_helm_cannot_run_and_why(home: Path) -> None:
    snapshot = next(home.glob("models--org--model/snapshots/*"))
    os.truncate(snapshot / "model.safetensors", 3 << 19)
    found = asked("list")
    assert [model["name"] for model in found["models"]] == ["bundled"]
    ((name, reason),) = [(model["name"], model["reason"]) for model in found["others"]]
    assert name == "org/model"
    assert "it is truncated" in reason
    assert "not whole or not for HELM: org/model (" in helm("list").stderr


def test_list_without_a_cache(tmp_path: Path) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        assert "bundled" in helm("list", **{name: str(tmp_path / "absent")}).stdout


def test_rm_asks_on_a_terminal_and_frees_what_it_says(home: Path) -> None:
    with Terminal(["rm", "org/model"]) as terminal:
        terminal.wait_for(r"org/model: frees 2\.\d MiB in\s+\S+models--org--model")
        terminal.wait_for(r"Remove it\? \[y/N\]")
        terminal.type("\n")
        terminal.wait_for(r"\[kept\]")
        assert terminal.status() == 1
    assert "org/model" in listed()
    with Terminal(["rm", "org/model"]) as terminal:
        terminal.wait_for(r"\[y/N\]")
        terminal.type("y\n")
        terminal.wait_for(r"removed org/model: 2\.\d MiB freed")
        assert terminal.status() == 0
    assert list(listed()) == ["bundled"]
    assert not (home / "models--org--model").exists()


def test_rm_without_a_terminal_wants_yes(home: Path) -> None:
    assert "so --yes must say it" in helm("rm", "org/model", status=2).stderr
    assert "org/model" in listed()
    helm("rm", "org/model", "--yes")
    assert "no model org/model is downloaded" in helm("rm", "org/model", "-y", status=2).stderr


def test_rm_touches_nothing_but_downloads(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(bundled_model(), folder)
    snapshot = next(home.glob("models--org--model/snapshots/*"))
    for name in (str(folder), str(snapshot), str(folder / "config.json")):
        refused = helm("rm", name, "--yes", status=2).stderr
        assert "removes no folder or file of yours" in refused
    assert "part of HELM" in helm("rm", "bundled", "--yes", status=2).stderr
    assert sorted(folder.iterdir()) == sorted(folder / f.name for f in bundled_model().iterdir())
    assert (snapshot / "config.json").exists()


def test_show_says_what_the_bundled_model_is() -> None:
    config = json.loads((bundled_model() / "config.json").read_text())
    found = asked("show")
    assert (found["name"], found["architecture"]) == ("bundled", config["architectures"][0])
    assert (found["layers"], found["vocab_size"]) == (
        config["num_hidden_layers"], config["vocab_size"],
    )  # fmt: skip
    assert (found["context"], found["dtype"]) == (config["max_position_embeddings"], "bf16")
    assert found["weights_bytes"] == 2 * found["parameters"]
    assert (found["disk_bytes"], found["chat_template"]) == (FILES, True)
    assert found["fits"]["context"] == found["context"]
    assert found["fits"]["needs_bytes"] <= found["fits"]["free_bytes"]
    shown = helm("show").stdout
    for line in ("parameters", "chat template", "licence", "with a context of"):
        assert line in shown


def test_show_takes_the_licence_of_the_card_or_the_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_model(), folder)

    def licence() -> str | None:
        found: str | None = describe(folder).facts.license
        return found

    card = folder / "README.md"
    assert licence() == "apache-2.0"
    card.unlink()
    assert licence() is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "license": "bsd"}))
    assert licence() == "bsd"
    for text, expected in (
        ("---\nlicense: apache-2.0\n---\nA model.", "apache-2.0"),
        ("---\nlicense: [mit, apache-2.0]\n---", "mit, apache-2.0"),
        ("---\nlicense: other\nlicense_name: qwen\n---", "qwen"),
        ("---\nlicense: {a: b}\n---", "bsd"),
        ("---\n{{{: \n---", "bsd"),
        ("no card", "bsd"),
    ):
        card.write_text(text)
        assert licence() == expected


def test_show_reads_headers_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_model(), folder)

    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    describe(folder)  # what is imported is read, too
    before = read_bytes()
    facts = describe(folder).facts
    assert facts.weights_bytes > 1 << 20
    small = sum(f.stat().st_size for f in folder.iterdir() if f.suffix != ".safetensors")
    assert read_bytes() - before < small + (256 << 10)


def test_show_of_a_hub_s_model_downloads_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    sent: list[str] = []
    with serving("org/model", bundled_model(), asked=sent) as address:
        shown = helm("show", "org/model", "--json", HF_ENDPOINT=address, HF_HUB_OFFLINE="0").stdout
        refused = helm("show", "org/none", HF_ENDPOINT=address, HF_HUB_OFFLINE="0", status=2)
    found = json.loads(shown)
    assert sent == ["config.json from 0"]
    config_bytes = (bundled_model() / "config.json").stat().st_size
    assert found["download_bytes"] == FILES - config_bytes
    assert (found["folder"], found["disk_bytes"], found["license"]) == (None, None, "mit")
    local = asked("show")
    for name in ("architecture", "layers", "parameters", "context", "dtype", "vocab_size"):
        assert found[name] == local[name]
    assert "no such model" in refused.stderr


def test_show_refuses_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"]}')
    assert "BloomForCausalLM is not supported" in helm("show", str(tmp_path), status=2).stderr
    assert "no folder" in helm("show", "./absent", status=2).stderr
