"""GGUF files of the Hugging Face hub, which is a server on this machine: which file is meant, what
is fetched of it, and what is said where that fails."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from command import helm
from fake_hub import serving
from gguf_bytes import F32, STRING, U32, File, Tensor
from helm.errors import CheckpointError
from helm.model.gguf import remote
from helm.model.gguf.choose import choose, models_of

NAMES = (
    "README.md",
    "config.json",
    "mmproj-model-f16.gguf",
    "model.imatrix.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny-Q4_K_S.gguf",
    "tiny.Q8_0.gguf",
    "big/tiny-BF16-00001-of-00002.gguf",
    "big/tiny-BF16-00002-of-00002.gguf",
)
HIDDEN, ROWS, LAYERS = 64, 260_000, 2


def test_whole_models_among_files() -> None:
    assert models_of(NAMES) == {
        "big/tiny-BF16-00001-of-00002.gguf": NAMES[-2:],
        **{name: (name,) for name in NAMES[4:7]},
    }


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny.Q8_0.gguf"),
        ("bf16", "big/tiny-BF16-00001-of-00002.gguf"),
        ("tiny-Q4_K_S.gguf", "tiny-Q4_K_S.gguf"),
        ("big/tiny-BF16-00001-of-00002.gguf", "big/tiny-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_word_of_its_name_is_enough(wanted: str, file: str) -> None:
    assert choose(NAMES, wanted, "org/model")[0] == file


def test_what_could_be_several_is_listed() -> None:
    with pytest.raises(CheckpointError, match=r"org/model has several GGUF files, .*tiny-Q4_K_M"):
        choose(NAMES, None, "org/model")
    with pytest.raises(CheckpointError, match=r"no GGUF file 'Q4_K', expected one: .*tiny\.Q8_0"):
        choose(NAMES, "Q4_K", "org/model")
    with pytest.raises(CheckpointError, match="org/model has no GGUF file; give a repository"):
        choose(NAMES[:3], "Q4_K", "org/model")


def model() -> File:
    """A Llama of a large vocabulary, so that its data outweigh its header by far."""
    numbers = {
        "block_count": LAYERS, "context_length": 512, "embedding_length": HIDDEN,
        "feed_forward_length": 128, "attention.head_count": 2,
    }  # fmt: skip
    keys = (
        ("general.architecture", STRING, "llama"),
        ("general.license", STRING, "mit"),
        *((f"llama.{name}", U32, number) for name, number in numbers.items()),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
    )
    shapes = {
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (HIDDEN, 128), "ffn_up": (HIDDEN, 128), "ffn_down": (128, HIDDEN),
    }  # fmt: skip
    blocks = [
        Tensor(f"blk.{layer}.{name}.weight", shape, 8 if len(shape) == 2 else 0)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    ]
    table = Tensor("token_embd.weight", (HIDDEN, ROWS), 8)
    factors = Tensor("rope_freqs.weight", (16,), 0, b"\0\0\x80?" * 16)
    return File(keys, (table, Tensor("output_norm.weight", (HIDDEN,)), *blocks, factors))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands' hub cache lies."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path / "HF_HUB_CACHE"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the hub has: a model, whole and in two parts, and other files."""
    found = tmp_path / "hub"
    found.mkdir()
    model().write(found / "tiny-Q8_0.gguf")
    whole = model()
    parts = (whole.tensors[:1], whole.tensors[1:])
    for i, tensors in enumerate(parts):
        keys = (("split.no", U32, i), ("split.count", U32, 2), ("split.tensors.count", U32, 21))
        part = dataclasses.replace(whole, keys=(*(whole.keys if i == 0 else ()), *keys))
        part = dataclasses.replace(part, tensors=tensors)
        part.write(found / f"tiny-XL-0000{i + 1}-of-00002.gguf")
    (found / "config.json").write_text("{}")
    return found


def plan(name: str, address: str, status: int = 0) -> str:
    shown = helm(
        "plan", name, "--profile", "thesis-4060", "--json", status=status, HF_ENDPOINT=address,
        HF_HUB_OFFLINE="0",
    )  # fmt: skip
    return shown.stderr if status else shown.stdout


def test_plan_fetches_headers_alone(home: Path, folder: Path) -> None:
    asked: list[str] = []
    with serving("org/model", folder, asked=asked) as address:
        found = json.loads(plan("org/model:Q8_0", address))
    size = (folder / "tiny-Q8_0.gguf").stat().st_size
    assert found["model"]["name"] == "org/model:Q8_0"
    first, vector = asked
    assert first == f"tiny-Q8_0.gguf from 0 to {remote.STEP_BYTES}"
    assert size > 2 * remote.STEP_BYTES
    begin, end = (int(word) for word in vector.split()[2::2])
    assert end - begin == 16 * 4  # what the configuration has of rope
    assert not list(home.glob("**/*.gguf"))


def test_plan_of_a_split_model_reads_every_header(home: Path, folder: Path) -> None:
    asked: list[str] = []
    with serving("org/model", folder, asked=asked) as address:
        plan("org/model:XL", address)
    assert [line.split()[0] for line in asked][:2] == [
        "tiny-XL-00001-of-00002.gguf",
        "tiny-XL-00002-of-00002.gguf",
    ]


def test_show_tells_what_the_header_says(home: Path, folder: Path) -> None:
    with serving("org/model", folder) as address:
        shown = helm(
            "show", "org/model:Q8_0", "--json", HF_ENDPOINT=address, HF_HUB_OFFLINE="0"
        ).stdout
    facts = json.loads(shown)
    assert facts["dtype"] == "q8_0+f32"
    assert facts["license"] == "mit"
    assert facts["vocab_size"] == ROWS
    assert facts["download_bytes"] == (folder / "tiny-Q8_0.gguf").stat().st_size
    assert facts["disk_bytes"] is None


def test_several_files_are_listed(home: Path, folder: Path) -> None:
    with serving("org/model", folder) as address:
        for name in ("org/model", "org/model:Q2_K"):
            shown = plan(name, address, 2)
            assert "tiny-Q8_0.gguf, tiny-XL-00001-of-00002.gguf; name one of them" in shown


def test_a_server_without_ranges_is_named(home: Path, folder: Path) -> None:
    with serving("org/model", folder, ranges=False) as address:
        shown = plan("org/model:Q8_0", address, 2)
    assert "the server gives no parts of files, so download it: hf download org/model" in shown


def test_a_refusal_says_how_to_log_in(home: Path, folder: Path) -> None:
    with serving("org/model", folder, refusal=(403, "GatedRepo")) as address:
        assert "accept its licence" in plan("org/model:Q8_0", address, 2)


def test_a_header_that_is_damaged_is_named(home: Path, folder: Path) -> None:
    path = folder / "tiny-Q8_0.gguf"
    path.write_bytes(path.read_bytes()[:2000])
    with serving("org/model", folder) as address:
        shown = plan("org/model:Q8_0", address, 2)
    assert "org/model/tiny-Q8_0.gguf: tensor 'token_embd.weight' would end at byte" in shown


def test_no_network_is_one_line(home: Path) -> None:
    shown = plan("org/model:Q8_0", "http://127.0.0.1:1", 2)
    assert "cannot be reached; check the network" in shown
    assert shown.count("\n") == 1
