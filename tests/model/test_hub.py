"""Finding a model's folder; the hub is replaced by functions that fail as it does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
from huggingface_hub import ModelInfo, errors

from command import helm
from fake_hub import serving
from helm.errors import CheckpointError, InvalidError
from helm.model import hub
from helm.model.checkpoint.safetensors import read_checkpoint


class Response:
    """As much of an HTTP response as the hub's exceptions look at."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.request = None
        self.status_code = 404


def hub_error(kind: type[Exception]) -> Exception:
    try:
        return kind("refused", response=Response())  # type: ignore[call-arg]
    except TypeError:
        return kind("refused")


def raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_local_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    assert hub.resolve_model(tmp_path) == tmp_path
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(InvalidError, match="revision 'v1' applies only to Hugging Face ids"):
        hub.resolve_model(tmp_path, "v1")


@pytest.mark.parametrize(
    "name", ["./absent", "/absent/model", "a/b/c", "~/absent", "a\\b", "../absent"]
)
def test_absent_paths_are_not_looked_up_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises(monkeypatch, AssertionError("asked the hub"))
    with pytest.raises(CheckpointError, match="no folder"):
        hub.resolve_model(name)


def test_a_file_names_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointError, match=f"is a file.*{tmp_path.name}"):
        hub.resolve_model(path)


@pytest.mark.parametrize("model", ["", 3, b"x"])
def test_things_that_name_no_model_are_refused(model: Any) -> None:
    with pytest.raises(InvalidError, match="model"):
        hub.resolve_model(model)


def test_a_hub_id_is_downloaded_without_pickles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "model.safetensors").touch()
    assert hub.resolve_model("some-org/some.model", "v2") == tmp_path
    ((repo_id, options),) = calls
    assert (repo_id, options["revision"]) == ("some-org/some.model", "v2")

    files = ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"]
    files += ["pytorch_model.bin", "onnx/model.safetensors", "consolidated.safetensors", "a.py"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(kept) == files[:4]


def test_a_repository_without_safetensors_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda *_, **__: ModelInfo(id="org/pickled")
    )
    with pytest.raises(CheckpointError, match=r"org/pickled has no \*\.safetensors; pickled"):
        hub.resolve_model("org/pickled")
    with pytest.raises(CheckpointError, match=r"org/pickled has no config\.json; choose"):
        hub.resolve_config("org/pickled")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.RepositoryNotFoundError, "no such model on the Hugging Face hub"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
        (errors.GatedRepoError, "accept its licence at https://huggingface.co/org/model"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (errors.HFValidationError, "not a Hugging Face id"),
        (OSError, "downloading org/model at revision v9 failed"),
        (RuntimeError, "try again, finished files are kept"),
    ],
)
def test_hub_failures_say_what_to_do(
    kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises(monkeypatch, hub_error(kind))
    with pytest.raises(CheckpointError, match=message):
        hub.resolve_model("org/model", "v9")


def test_offline_and_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    raises(monkeypatch, hub_error(errors.LocalEntryNotFoundError))
    with pytest.raises(CheckpointError, match="not in the local cache and HF_HUB_OFFLINE is set"):
        hub.resolve_model("org/model")


def test_ctrl_c_during_a_download_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve_model("org/model")


def test_the_bundled_model_is_the_default() -> None:
    folder = hub.resolve_model(None)
    assert (folder / "config.json").is_file()
    assert hub.resolve_model("bundled") == folder


def test_a_configuration_is_a_file_a_folder_or_the_bundled_one(tmp_path: Path) -> None:
    file = tmp_path / "qwen.json"
    file.write_text("{}")
    assert hub.resolve_config(file) == file
    assert hub.resolve_config(str(tmp_path)) == tmp_path / "config.json"
    assert hub.resolve_config(None) == hub.bundled_model() / "config.json"
    with pytest.raises(InvalidError, match="leave it out"):
        hub.resolve_config(file, "v1")
    with pytest.raises(CheckpointError, match=r"absent\.json does not exist"):
        hub.resolve_config(tmp_path / "absent.json")


# --- a hub on this machine -----------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands' hub cache lies."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return tmp_path / "HF_HUB_CACHE"


def ask(*arguments: str, status: int = 0, **variables: str) -> str:
    shown = helm(*arguments, status=status, **{"HF_HUB_OFFLINE": "0", **variables})
    return shown.stderr if status else shown.stdout


PLAN = ("plan", "org/model", "--profile", "cpu-laptop-16gb")
RUN = ("run", "org/model", "--max-tokens", "2", "-q")


def test_a_plan_fetches_the_configuration_alone_and_a_run_the_rest(home: Path) -> None:
    with serving("org/model", hub.bundled_model()) as address:
        online = {"HF_ENDPOINT": address}
        planned = ask(*PLAN, **online)
        (snapshot,) = home.glob("models--org--model/snapshots/*")
        assert [entry.name for entry in snapshot.iterdir()] == ["config.json"]
        assert ask("plan", "org/none", status=2, **online).count("no such model") == 1
    assert ask(*PLAN, **online) == planned
    for variables, remedy in (
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; unset it"),
        (online, "the hub cannot be reached; go online"),
    ):
        refused = ask(*RUN, status=2, **variables)
        assert "org/model was not downloaded completely" in refused
        assert remedy in refused
    with serving("org/model", hub.bundled_model()) as address:
        text = ask(*RUN, HF_ENDPOINT=address)
    for variables in ({"HF_HUB_OFFLINE": "1"}, online):
        assert ask(*RUN, **variables) == text


def test_without_a_network_the_hub_is_asked_once(home: Path) -> None:
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    began = time.monotonic()
    ask("--version")
    starting_s = time.monotonic() - began
    for arguments in (PLAN, RUN):
        began = time.monotonic()
        assert "cannot be reached; check the network" in ask(*arguments, status=2, **nobody)
        assert time.monotonic() - began < 10 + 4 * starting_s  # five attempts take 23 s more


def test_a_hub_s_cache_that_cannot_be_written_is_the_reason(home: Path) -> None:
    home.write_text("a file where a folder should be")
    with serving("org/model", hub.bundled_model()) as address:
        for arguments in (PLAN, RUN):
            refused = ask(*arguments, status=2, HF_ENDPOINT=address)
            assert "set HF_HOME to a folder that this user can write to" in refused


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.LocalEntryNotFoundError, "nor in the cache"),
        (errors.RepositoryNotFoundError, "no such model"),
    ],
)
def test_a_configuration_that_cannot_be_fetched(
    kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises(monkeypatch, hub_error(kind))
    with pytest.raises(CheckpointError, match=message):
        hub.resolve_config("Qwen/Qwen3-8B")


def cached(root: Path) -> Path:
    """The hub's folder of a model, as huggingface_hub lays it out."""
    snapshot = root / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_folders_of_the_hubs_cache_say_which_to_give(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    assert hub.resolve_model(snapshot) == snapshot
    for folder in (snapshot.parent, snapshot.parent.parent):
        with pytest.raises(CheckpointError, match=r"cache of a model.*Qwen/Qwen3-0\.6B") as caught:
            hub.resolve_model(folder)
        assert str(snapshot) in str(caught.value)
    with pytest.raises(CheckpointError, match=r"cache of 1 models.*as Qwen/Qwen3-0\.6B"):
        hub.resolve_model(tmp_path)


def test_adapters_say_how_to_merge_them(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    for text, base in (('{"base_model_name_or_path": "a/b"}', "a/b"), ("oops", "another model")):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=rf"LoRA\) of {base}.*merge_and_unload"):
            hub.resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        read_checkpoint(tmp_path)


def test_a_gguf_file_is_a_model_and_so_is_a_folder_with_one(tmp_path: Path) -> None:
    file = tmp_path / "model-q4.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    odd = tmp_path / "model.bin"
    odd.write_bytes(b"GGUF" + bytes(100))
    for resolve in (hub.resolve_model, hub.resolve_config):
        assert resolve(odd) == odd
        for given in (tmp_path, file, str(file)):
            assert resolve(given) == file
        with pytest.raises(InvalidError, match=r"local file|local folder"):
            resolve(file, "v1")
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(tmp_path) == tmp_path


def test_a_folder_of_several_gguf_files_lists_them(tmp_path: Path) -> None:
    for name in ("x-Q4_K_M.gguf", "x-Q8_0.gguf", "mmproj-x-F16.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(
        CheckpointError, match=r"several GGUF files.*x-Q4_K_M\.gguf, x-Q8_0\.gguf; give one"
    ):
        hub.resolve_model(tmp_path)
    (tmp_path / "x-Q8_0.gguf").unlink()
    assert hub.resolve_model(tmp_path) == tmp_path / "x-Q4_K_M.gguf"


def test_weights_are_no_configuration(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\2\0\0\0\0\0\0\0{}")
    for resolve in (hub.resolve_model, hub.resolve_config):
        with pytest.raises(CheckpointError, match="is a file; give the folder"):
            resolve(file)


def test_links_in_a_circle_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raises(monkeypatch, AssertionError("asked the hub"))
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("gone").symlink_to("nowhere")
    for name in ("loop", "gone"):
        with pytest.raises(CheckpointError, match="symbolic link that leads nowhere or in a circ"):
            hub.resolve_model(name)
