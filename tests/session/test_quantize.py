"""Saved folders in HELM's own formats: the answers of quantising while loading, to the bit; what is
refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

import command
import gguf_models
import helm
import small_models
from helm.base import new_folder
from helm.errors import CheckpointError, InvalidError
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.hub import bundled_model

KINDS = gguf.GGMLQuantizationType
PROMPT = small_models.PROMPT


def logits(model: Path, **options: Any) -> np.ndarray:
    with helm.LLM(model, threads=1, context=64, device="cpu", **options) as llm:
        return np.array(llm.logits(PROMPT))


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the data begins."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with matrices large enough for 4 bits, and the bundled model's tokenizer; shared, so
    do not change it."""
    folder = tmp_path_factory.mktemp("wide") / "wide"
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(bundled_model() / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def saved(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That in q4; shared, so do not change it."""
    folder = tmp_path_factory.mktemp("saved") / "q4"
    return helm.quantize(wide, folder, to="q4", progress=False).folder


def changed(saved: Path, folder: Path) -> Path:
    """A copy that may be damaged; its weights."""
    shutil.copytree(saved, folder)
    return folder / "model.safetensors"


def with_header(path: Path, change: Any) -> None:
    header, begin = header_of(path)
    data = path.read_bytes()[begin:]
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


# --- what is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["q8", "q4"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("llama", "f32"), ("llama", "bf16"), ("qwen2", "f16"), ("qwen3_untied_sharded", "bf16"),
        ("opt_350m", "f32"), ("llama_tied_sharded", "bf16"), ("mistral_window", "f16"),
    ],
)  # fmt: skip
def test_logits_are_those_of_quantising_while_loading(
    case: str, dtype: str, to: str, tmp_path: Path
) -> None:
    source = small_models.model_dir(case, dtype)
    made = helm.quantize(source, tmp_path / "x", to=to, progress=False)
    expected = logits(source, dtype=to)
    for weights in ("copied", "mapped"):
        np.testing.assert_array_equal(logits(made.folder, weights=weights), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("case", ["llama", "llama3", "qwen2", "qwen3"])
def test_gguf_files_too(case: str, kind: str, tmp_path: Path) -> None:
    source = gguf_models.write(
        small_models.model_dir(case), tmp_path / "x.gguf", getattr(KINDS, kind)
    )
    made = helm.quantize(source, tmp_path / "saved", to="q4", progress=False)
    expected = logits(source, dtype="q4")
    for weights in ("copied", "mapped"):
        np.testing.assert_array_equal(logits(made.folder, weights=weights), expected)


def test_a_mapped_folder_is_read_where_it_lies(wide: Path, saved: Path) -> None:
    with helm.LLM(saved, weights="mapped", device="cpu") as llm:
        packed = {held.tensor for held in llm.plan.slices if held.format in ("c8.s32", "c4.km32")}
        assert {held.tensor for held in llm.plan.slices if held.access == "mapped"} == packed
        assert packed == {t.name for t in llm.plan.tensors if len(t.shape) == 2}
        mapped = llm.generate("Once upon a time", max_tokens=8, temperature=0).tokens
    with helm.LLM(wide, dtype="q4", device="cpu") as llm:
        assert llm.generate("Once upon a time", max_tokens=8, temperature=0).tokens == mapped


def test_the_saved_model_answers_as_the_source_does(tmp_path: Path) -> None:
    """Tokenizer, template and generation defaults come along."""
    made = helm.quantize(None, tmp_path / "x", to="q8", progress=False)
    question = [{"role": "user", "content": "Hello"}]
    with helm.LLM(dtype="q8") as first, helm.LLM(made.folder) as second:
        assert first.config == second.config
        answers = [llm.chat(question, max_tokens=12, seed=3).text for llm in (first, second)]
    assert answers[0] == answers[1] != ""
    assert (made.folder / "generation_config.json").read_bytes() == (
        bundled_model() / "generation_config.json"
    ).read_bytes()


def test_tokenizers_of_gguf_files_come_along(tmp_path: Path) -> None:

    keys = {**gguf_models.VOCABULARY, "general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    source = gguf_models.write(small_models.model_dir("llama"), tmp_path / "x.gguf", keys=keys)
    made = helm.quantize(source, tmp_path / "saved", to="q8", progress=False)
    assert made.divergence is not None
    chat = [{"role": "user", "content": "the tent"}]
    with helm.LLM(source) as first, helm.LLM(made.folder) as second:
        assert first.tokenizer.encode("the (tea)") == second.tokenizer.encode("the (tea)")
        assert first.tokenizer.special_tokens == second.tokenizer.special_tokens
        assert first.tokenizer.render_chat(chat) == second.tokenizer.render_chat(chat)
        assert first._loaded.defaults == second._loaded.defaults


def test_what_is_said_of_a_folder_is_so(tmp_path: Path) -> None:
    source = small_models.model_dir("qwen3", "bf16")
    seen: list[tuple[int, int]] = []
    made = helm.quantize(
        source, tmp_path / "x", to="q8", threads=2, progress=lambda *done: seen.append(done)
    )
    assert made.bytes == sum(path.stat().st_size for path in made.folder.iterdir())
    assert made.source_bytes == sum(info.nbytes for info in read_checkpoint(source).values())
    assert seen[-1] == (made.formats["c8.s32"].weights, made.formats["c8.s32"].weights)
    assert seen == sorted(seen)
    # Of weights in 8 bits with a scale for 32.
    assert 0.003 < made.formats["c8.s32"].relative_rms < 0.008
    assert made.divergence is None
    assert made.notices == ("the answers were not compared, as the model has no tokenizer",)


def test_errors_are_measured(wide: Path, tmp_path: Path) -> None:
    eight = helm.quantize(wide, tmp_path / "q8", to="q8", progress=False)
    four = helm.quantize(wide, tmp_path / "q4", to="q4", progress=False)
    assert set(eight.formats) == {"c8.s32"}
    assert set(four.formats) == {"c4.km32", "c8.s32"}
    assert 0.05 < four.formats["c4.km32"].relative_rms < 0.1
    assert eight.divergence.tokens == four.divergence.tokens > 100
    assert 0 < eight.divergence.kl < 0.01 < four.divergence.kl < 0.5
    assert four.divergence.same_token < eight.divergence.same_token <= 1


def test_matrices_come_first_and_aligned(saved: Path) -> None:
    header, begin = header_of(saved / "model.safetensors")
    assert begin % 4096 == 0
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    kinds = [entry["dtype"] for entry in sorted(entries, key=lambda e: e["data_offsets"])]
    assert kinds == sorted(kinds, key=lambda kind: kind != "U8")
    matrices = json.loads(header["__metadata__"]["helm.matrices"])
    for name, entry in header.items():
        assert name == "__metadata__" or (entry["dtype"] == "U8") == (name in matrices)
        if name in matrices:
            assert entry["data_offsets"][0] % 64 == 0
    with safe_open(saved / "model.safetensors", "numpy") as found:  # the format's own library
        assert set(found.keys()) == set(header) - {"__metadata__"}


def test_weights_can_be_had_dense_again(wide: Path, saved: Path) -> None:
    """f32 of a saved folder is what its codes and scales say."""
    from helm import _helm

    name = "model.layers.0.mlp.up_proj.weight"
    info = read_checkpoint(saved)[name]
    data = np.fromfile(
        saved / "model.safetensors", np.uint8, info.nbytes, offset=info.extents[0].offset
    )
    strips = {"weight": ("u8", [-(-info.shape[0] // 16), data.size * 16 // info.shape[0]], data)}
    values = _helm.read_weights(info.stored, strips, *info.shape)
    source = read_checkpoint(wide)[name]
    raw = np.fromfile(
        wide / str(source.file), np.uint16, values.size, offset=source.extents[0].offset
    )
    want = (raw.astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    error = np.linalg.norm(values - want) / np.linalg.norm(want)
    assert 0.04 < error < 0.1
    for dtype in ("f32", "bf16", "q8"):
        assert np.isfinite(logits(saved, dtype=dtype)).all()


def test_a_second_time_gives_the_same_bytes(wide: Path, saved: Path, tmp_path: Path) -> None:
    again = helm.quantize(wide, tmp_path / "x", to="q4", threads=3, progress=False)
    for path in saved.iterdir():
        assert (again.folder / path.name).read_bytes() == path.read_bytes()


# --- what is refused -----------------------------------------------------------------------------


def test_what_exists_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(InvalidError, match=f"{name} exists already; expected the name of a"):
            helm.quantize(None, tmp_path / name, to="q8")
    assert (tmp_path / "file").read_text() == "mine"
    source = gguf_models.write(small_models.model_dir("llama"), tmp_path / "x.gguf")
    for model, own in ((bundled_model(), bundled_model()), (source, source), (source, tmp_path)):
        with pytest.raises(InvalidError, match="is where the model itself lies; expected"):
            helm.quantize(model, own, to="q8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "x.gguf"]


def test_what_is_quantised_is_refused_unless_asked_for(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"quantised already: .* c4\.km32, c8\.s32; expected"):
        helm.quantize(saved, tmp_path / "x", to="q8")
    source = gguf_models.write(
        small_models.model_dir("llama_biases"), tmp_path / "x.gguf", KINDS.BF16
    )
    helm.quantize(source, tmp_path / "fine", to="q8", progress=False)
    made = helm.quantize(saved, tmp_path / "x", to="q8", requantize=True, progress=False)
    np.testing.assert_array_equal(logits(made.folder), logits(saved, dtype="q8"))


def test_a_full_disk_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(new_folder.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InvalidError, match=r"takes [\d.]+ MiB, and 1\.0 MiB are free there; make"):
        helm.quantize(None, tmp_path / "x", to="q8")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_leave_nothing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(small_models.model_dir("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][70, 3] = float("inf")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.* row 70"):
        helm.quantize(folder, tmp_path / "x", to="q4", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="to is 'q5'; expected q8 or q4"):
        helm.quantize(None, tmp_path / "x", to="q5")
    with pytest.raises(InvalidError, match="requantize"):
        helm.quantize(None, tmp_path / "x", to="q4", requantize="no")  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="threads"):
        helm.quantize(None, tmp_path / "x", to="q4", threads=0)
    with pytest.raises(InvalidError, match=r"cannot write .*absent"):
        helm.quantize(None, tmp_path / "absent" / "x", to="q4")
    with pytest.raises(InvalidError, match="progress"):
        helm.quantize(None, tmp_path / "x", to="q4", progress=3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# --- damaged and newer files ---------------------------------------------------------------------


def test_newer_and_damaged_files_are_named(saved: Path, tmp_path: Path) -> None:
    def stated(change: Any) -> Any:
        def on(header: dict[str, Any]) -> None:
            own = json.loads(header["__metadata__"]["helm.matrices"])
            change(own)
            header["__metadata__"]["helm.matrices"] = json.dumps(own)

        return on

    def layout(value: str) -> Any:
        return lambda header: header["__metadata__"].update({"helm.layout": value})

    name = "model.layers.0.mlp.up_proj.weight"
    for number, (change, message) in enumerate(
        (
            (layout("2"), r"model\.safetensors has weights in layout 2, this HELM reads 1; update"),
            (layout("one"), r"helm\.layout is 'one', expected '1'; the file is damaged"),
            (lambda h: h["__metadata__"].pop("helm.layout"), r"helm\.layout is '', expected '1'"),
            (lambda h: h["__metadata__"].pop("helm.matrices"), "key 'helm.matrices' is missing"),
            (lambda h: h["__metadata__"].update({"helm.matrices": "{"}), "not valid JSON"),
            (stated(lambda own: own.update(absent=own[name])), "names 'absent', which the file"),
            (stated(lambda own: own.pop(name)), f"does not name the matrix '{name}'"),
            (stated(lambda own: own[name].update(format="c4.s32")), "format: expected one of c8"),
            (stated(lambda own: own[name].update(shape=[16])), r"expected \[rows, columns\]"),
            (stated(lambda own: own[name].update(shape=[0, 16])), "expected an integer from 1"),
            (stated(lambda own: own[name].update(shape=[16, 16])), rf"'{name}' is U8 of shape"),
        )
    ):
        path = changed(saved, tmp_path / str(number))
        with_header(path, change)
        with pytest.raises(CheckpointError, match=message):
            helm.LLM(path.parent)
    path = changed(saved, tmp_path / "short")
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match="is truncated, download it again"):
        helm.LLM(path.parent)
    path = changed(saved, tmp_path / "shifted")
    header, begin = header_of(path)
    text = json.dumps(header).encode() + b" "
    text += b" " * (1 + -(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[begin:])
    with pytest.raises(CheckpointError, match=r"begins at byte .* expected a multiple of 64"):
        helm.LLM(path.parent)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_says_size_and_error(wide: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "q4")
    result = command.helm("quantize", str(wide), "--to", "q4", "-o", target)
    assert "c4.km32" in result.stdout
    assert "answers: KL divergence 0." in result.stdout
    assert f"[saved {target}: " in result.stderr
    result = command.helm("run", target, "Once", "-n", "3", "--weights", "mapped")
    assert "c4.km32+c8.s32, mapped" in result.stderr or "c8.s32+c4.km32, mapped" in result.stderr
    failed = command.helm("quantize", target, "--to", "q8", "-o", target + "8", status=2)
    assert "allow to lose more with --requantize" in failed.stderr
    again = command.helm("quantize", "--to", "q4", "-o", target, status=2)
    assert "exists already" in again.stderr
    told = json.loads(
        command.helm("quantize", "--to", "q8", "-o", target + "8", "--no-compare", "--json").stdout
    )
    assert told["divergence"] is None
    assert [found["format"] for found in told["formats"]] == ["c8.s32"]
    assert told["formats"][0]["relative_rms"] < 0.01


def test_the_name_follows_from_the_model(tmp_path: Path) -> None:
    result = subprocess.run(
        [*command.COMMAND, "quantize", "--to", "q8", "--no-compare"], cwd=tmp_path,
        env=command.environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "bundled-q8" / "config.json").is_file()
