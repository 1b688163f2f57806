"""Files of a model folder that are not what they should be: refused at once, by every reader."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

import helm
from helm.base.files import decoded, present, read_file, read_text
from helm.errors import HelmError, ProfileError
from helm.machine.profile import Profile, load_profile
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import load_config
from helm.model.hub import bundled_model
from helm.plan.schema import Plan
from helm.text.generation_defaults import load_generation_defaults
from helm.text.tokenizer import Tokenizer

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/more.jinja",
]


def load(folder: Path) -> None:
    """Every reader of a model folder, but for the weights themselves."""
    config = load_config(folder)
    load_generation_defaults(folder, config)
    Tokenizer.from_directory(folder, config.vocab_size)
    read_checkpoint(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(bundled_model(), tmp_path / "model")
    load(tmp_path / "model")
    return tmp_path / "model"


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)  # sparse


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456789\n")


def gguf(path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(200))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is not a regular file"),
        (endless, "is not a regular file"),
        (Path.mkdir, "is not a regular file"),
        (loop, "Too many levels of symbolic links"),
        (huge, "is over|the header is not a JSON object"),
        (pointer, "is a Git LFS pointer.*git lfs pull"),
        (gguf, "is a GGUF file"),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_what_stands_in_a_files_place_is_named(
    folder: Path, name: str, make: Callable[[Path], Any], message: str
) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    make(path)
    begin = time.monotonic()
    with pytest.raises(HelmError, match=message) as caught:
        load(folder)
    assert str(path) in str(caught.value)
    assert str(caught.value).count("\n") == 0
    assert time.monotonic() - begin < 5.0


def test_a_profile_that_is_none_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.json")
    with pytest.raises(ProfileError, match="is not a regular file"):
        load_profile(tmp_path / "p.json")
    huge(tmp_path / "big.json")
    with pytest.raises(ProfileError, match="over 4 MiB"):
        load_profile(tmp_path / "big.json")


MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
}


@pytest.mark.parametrize("encoding", MARKS)
def test_byte_order_marks_are_accepted_everywhere(folder: Path, encoding: str) -> None:
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "more.jinja").write_text("{{ messages[0].content }}é")
    (folder / "generation_config.json").write_text('{"top_k": 7}')
    weights = read_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "only.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "only.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    texts = [p for p in folder.rglob("*") if p.suffix in (".json", ".jinja")]
    assert len(texts) >= 5
    for path in texts:
        path.write_bytes(MARKS[encoding] + path.read_text().encode(encoding))
    config = load_config(folder)
    assert load_generation_defaults(folder, config).top_k == 7
    assert read_checkpoint(folder).keys() == weights.keys()
    ours, theirs = Tokenizer.from_directory(folder), Tokenizer.from_directory(bundled_model())
    assert ours.encode("Once upon a time") == theirs.encode("Once upon a time")
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.render_chat(messages, template="more") == "Hié"
    plan = make_plan(config, read_checkpoint(folder), threads=1, memory_bytes=4 << 30)
    text = plan.to_json()
    for marked in ("\ufeff" + text, MARKS[encoding] + text.encode(encoding)):
        assert Plan.from_json(marked) == plan
    profile = load_profile("cpu-laptop-16gb")
    marked = MARKS[encoding] + profile.to_json().encode(encoding)
    assert Profile.from_json(marked, "p").digest == profile.digest
    (folder / "p.json").write_bytes(marked)
    assert load_profile(folder / "p.json").digest == profile.digest


PARSED = [name for name in FILES if name.endswith(".json") and name != "tokenizer.json"]


@pytest.mark.parametrize("name", PARSED)  # tokenizer.json is parsed by the tokenizers library
def test_a_key_that_occurs_twice_is_named(folder: Path, name: str) -> None:
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_text('{"same": 1, "same": 2}')
    with pytest.raises(HelmError, match="key 'same' occurs twice") as caught:
        load(folder)
    assert name in str(caught.value)


def test_a_folder_in_a_circle_is_named(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).symlink_to("b" if name == "a" else "a")
    with pytest.raises(HelmError, match="in a circle"):
        helm.LLM(folder / "a")


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert not present(path)
    assert not present(path / "below")
    path.write_bytes(b"x" * 10)
    assert present(path)
    assert read_file(path, most=10) == b"x" * 10
    with pytest.raises(HelmError, match="over 0 MiB"):
        read_file(path, most=9)
    with pytest.raises(HelmError, match="over 0 MiB"):
        read_file(Path("/proc/self/maps"), most=9)  # says that it has no bytes
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(HelmError, match="not UTF-8 text"):
        read_text(path)
    for bad in (tmp_path / "absent", Path("a\0b")):
        with pytest.raises(HelmError, match="cannot read"):
            read_file(bad)
    assert decoded("\ufeffx") == decoded(b"\xef\xbb\xbfx") == decoded("x") == "x"
