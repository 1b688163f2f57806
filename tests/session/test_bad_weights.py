"""Weights of which no text could come, in every kind of file that HELM reads: the error names the
file, the tensor and the way out, and nothing of the model stays behind."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import quantised_models as made
import torch
from safetensors.torch import load_file, save_file

import gguf_models
import helm
from engine_helpers import partitioned
from helm import _helm
from helm.errors import CheckpointError, HelmError
from helm.session import here

NAN, INF = float("nan"), float("inf")
UP, NORM = "model.layers.1.mlp.up_proj", "model.layers.1.post_attention_layernorm.weight"
ROWS, COLS = 512, 256  # of UP
AT = 300  # the row that is spoilt
# Where a block of GGML has f16: its scale, and its minimum.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
Edit = Callable[[dict[str, torch.Tensor]], Any]
Make = Callable[[Path, Path], Path]  # from the dense model and a new folder to what the user gives


# --- files, right but for one thing --------------------------------------------------------------


def gguf_file(kind: str, where: int | None, what: bytes) -> Make:
    """Matrices of zeros in blocks of one type, and `what` in one block of row AT of UP; None: none
    of it."""

    def make(source: Path, folder: Path) -> Path:
        own = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[own]
        blocks = {}
        for name, tensor in load_file(source / "model.safetensors").items():
            if tensor.ndim == 2:
                blocks[name] = np.zeros((tensor.shape[0], tensor.shape[1] // elements * size))
                blocks[name] = blocks[name].astype(np.uint8)
        if where is not None:
            blocks[f"{UP}.weight"][AT, where : where + len(what)] = np.frombuffer(what, np.uint8)
        return gguf_models.write(source, folder / "x.gguf", own, blocks=blocks)

    return make


def gguf_vector(value: float) -> Make:
    """A file in f32, but for one element of a norm."""

    def make(source: Path, folder: Path) -> Path:
        copy = shutil.copytree(source, folder / "source")
        change(copy, spoil(NORM, 7, value))
        return gguf_models.write(copy, folder / "x.gguf")

    return make


def checkpoint(how: Any, edit: Edit) -> Make:
    """What other programs quantised."""

    def make(source: Path, folder: Path) -> Path:
        made.write(source, folder / "x", folder / "dense", *how)
        change(folder / "x", edit)
        return folder / "x"

    return make


def dense(edit: Edit) -> Make:
    def make(source: Path, folder: Path) -> Path:
        shutil.copytree(source, folder / "x")
        change(folder / "x", edit)
        return folder / "x"

    return make


def change(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def spoil(name: str, where: Any, value: Any) -> Edit:
    return lambda tensors: tensors[name].__setitem__(where, value)


def saved(to: str, value: float | None) -> Make:
    """What helm-llm quantize wrote, but for one scale of row AT of UP. None: as it was."""

    def make(source: Path, folder: Path) -> Path:
        options: dict[str, Any] = {"progress": False, "compare_answers": False}
        own = helm.quantize(source, folder / "x", to=to, **options).folder
        path = own / "model.safetensors"
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        entry = json.loads(data[8:begin])[f"{UP}.weight"]
        # A strip is 16 rows of one span of 256 columns. q8: eight groups of sixteen scales; q4:
        # sixteen scales behind the eight groups of two kinds of bytes.
        header, block = {"q8": (8 * 32, 512), "q4": (2 * 128 + 64, 256)}[to]
        strip = begin + entry["data_offsets"][0] + AT // 16 * (header + 8 * block)
        place = strip + {"q8": 3 * 32, "q4": 2 * 128}[to] + AT % 16 * 2
        if value is not None:
            data[place : place + 2] = np.float16(value).tobytes()
        path.write_bytes(bytes(data))
        return own

    return make


# --- what ends a load ----------------------------------------------------------------------------


def bad() -> Iterator[tuple[str, Make, str]]:
    """Which scale or weight, the model, and what the message says of the place."""
    row = rf'tensor "{UP}\.weight" has a scale or a weight that is NaN or infinite in row {AT}, '
    for kind, places in SCALES.items():
        for i, place in enumerate(places):
            value = np.float16(INF if i else NAN).tobytes()
            yield f"{kind} at {place}", gguf_file(kind, place, value), row + "columns 0 to 255"
    yield "MXFP4 in GGUF", gguf_file("MXFP4", 0, b"\xff"), row + "columns 0 to 255"
    yield "a norm in GGUF", gguf_vector(INF), f'tensor "{NORM}" is inf at element 7, '
    f32 = torch.float32
    for name, how, scale, where in (
        ("gptq4", made.gptq(), "scales", (1, AT)),
        ("gptq8", made.gptq(bits=8, group=32), "scales", (5, AT)),
        ("gptq4, act order", made.gptq(act_order=True), "scales", (1, AT)),
        ("gptq4, scales in f32", made.gptq(dtype=f32), "scales", (1, AT)),
        ("awq", made.awq(32), "scales", (7, AT)),
        ("ct4", made.compressed(), "weight_scale", (AT, 1)),
        ("ct4 with zeros", made.compressed(group=64, symmetric=False), "weight_scale", (AT, 3)),
        ("ct8 per row", made.compressed(8, -1, packed=False), "weight_scale", (AT, 0)),
        ("ct8, f32", made.compressed(8, -1, packed=False, dtype=f32), "weight_scale", (AT, 0)),
        ("fp8 per row", made.fp8("row", "compressed-tensors"), "weight_scale", (AT, 0)),
    ):
        for value in (NAN, -INF):
            yield f"{name}, {value}", checkpoint(how, spoil(f"{UP}.{scale}", where, value)), row
    block = checkpoint(made.fp8("block"), spoil(f"{UP}.weight_scale_inv", (2, 1), INF))
    yield "fp8 per block", block, row.replace(str(AT), "256")
    whole = checkpoint(made.fp8("tensor"), spoil(f"{UP}.weight_scale", 0, NAN))
    yield "fp8 for all", whole, row.replace(str(AT), r"\d+")
    code = checkpoint(
        made.fp8(), lambda t: t[f"{UP}.weight"].view(torch.uint8).__setitem__((AT, 9), 0x7F)
    )
    yield "a code of fp8", code, row + "columns 0 to 255"
    yield "mxfp4", checkpoint(made.mxfp4(), spoil(f"{UP}.weight_scales", (AT, 2), 255)), row
    for to in ("q8", "q4"):
        for value in (NAN, INF, -INF):
            yield f"{to} that HELM saved, {value}", saved(to, value), row + "columns 0 to 255"
    norm = f'tensor "{NORM}" is nan at element 7, '
    yield "a norm beside gptq", checkpoint(made.gptq(), spoil(NORM, 7, NAN)), norm
    yield "a norm in f32", dense(spoil(NORM, 7, NAN)), norm
    yield "a norm in bf16", dense(lambda t: narrow(t, 7, NAN)), norm


def narrow(tensors: dict[str, torch.Tensor], where: int, value: float) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
    tensors[NORM][where] = value


BAD = {name: (make, words) for name, make, words in bad()}
OPTIONS: dict[str, Any] = {"threads": 2, "context": 64, "progress": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.wide_model(tmp_path_factory.mktemp("source") / "model")


def held(folder: Path) -> list[str]:
    """What this process still has open or mapped of a folder."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = [os.readlink(link) for link in links if os.path.islink(link)]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*files, *maps) if str(folder) in line]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("name", BAD)
def test_weights_that_are_no_numbers_end_the_load(name: str, source: Path, tmp_path: Path) -> None:
    make, words = BAD[name]
    path = make(source, tmp_path)
    file = path if path.is_file() else path / "model.safetensors"
    before = threads()
    with pytest.raises(CheckpointError) as caught:
        helm.LLM(path, device="cpu", weights="copied", **OPTIONS)
    said = str(caught.value)
    assert re.search(rf"^\[load\] {re.escape(str(file))}: {words}", said), said
    assert said.endswith("the file is damaged or was made wrongly: get it anew")
    assert "\n" not in said
    assert held(tmp_path) == []
    assert threads() <= before


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("Q4_K at 2", gguf_file("Q4_K", None, b"")),
        ("gptq4, nan", checkpoint(made.gptq(), lambda _: None)),
        ("q8 that HELM saved, inf", saved("q8", None)),
        ("q4 that HELM saved, nan", saved("q4", None)),
        ("a norm in f32", dense(lambda _: None)),
    ],
)
def test_on_the_way_to_an_accelerator_too(
    name: str, good: Make, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "good").mkdir()
    with helm.LLM(
        good(source, tmp_path / "good"), device="cpu", weights="copied", **OPTIONS
    ) as llm:
        plan = partitioned(llm.plan, ("cpu", "cpu", "accelerator", "accelerator"))
    make, words = BAD[name]
    (tmp_path / "bad").mkdir()
    path = make(source, tmp_path / "bad")
    folder = path.parent if path.is_file() else path
    with pytest.raises(CheckpointError, match=words):
        _helm.Engine(plan.to_json(), str(folder), {}, device="sim:vram=256MiB")
    assert held(tmp_path) == []


def test_what_is_not_spoilt_is_read(source: Path, tmp_path: Path) -> None:
    """The same files, but for the one value."""
    makes = [gguf_file(kind, None, b"") for kind in (*SCALES, "MXFP4")]
    for number, make in enumerate([*makes, saved("q8", None), saved("q4", None)]):
        (folder := tmp_path / str(number)).mkdir()
        with helm.LLM(make(source, folder), device="cpu", weights="copied", **OPTIONS) as llm:
            assert np.all(np.isfinite(llm.logits([3, 17, 99])))


# --- a mapped folder, of which nothing is read at start -------------------------------------------


@pytest.mark.parametrize("to", ["q8", "q4"])
def test_scales_of_a_mapped_folder_are_blamed_once_an_answer_is_no_number(
    to: str, source: Path, tmp_path: Path
) -> None:
    words = rf'model\.safetensors: tensor "{UP}\.weight" has a scale .* in row {AT}, columns 0 to'
    path = saved(to, NAN)(source, tmp_path)
    with helm.LLM(path, device="cpu", weights="mapped", **OPTIONS) as llm:
        for _ in range(2):
            with pytest.raises(HelmError, match=words):
                llm.generate([3, 17, 99], max_tokens=2)
        with pytest.raises(HelmError, match=words):
            llm.logits([3, 17])
    gc.collect()  # of what the errors refer to
    assert held(tmp_path) == []


def test_a_mapped_folder_with_good_scales_is_not_blamed(source: Path, tmp_path: Path) -> None:
    """Where a norm is too large for its weights, the logits are not finite, the scales are."""
    copy = shutil.copytree(source, tmp_path / "large")
    change(copy, enlarge)
    path = saved("q8", None)(copy, tmp_path)
    with helm.LLM(path, device="cpu", weights="mapped", **OPTIONS) as llm:
        for _ in range(2):
            with pytest.raises(helm.InvalidError, match="the logits are not finite"):
                llm.generate([3, 17, 99], max_tokens=2)


def enlarge(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"].fill_(3e38)


def test_a_norm_of_a_mapped_checkpoint_is_seen_at_once(source: Path, tmp_path: Path) -> None:
    path = dense(spoil(NORM, 7, NAN))(source, tmp_path)
    with pytest.raises(CheckpointError, match=f'tensor "{NORM}" is nan at element 7'):
        helm.LLM(path, device="cpu", weights="mapped", **OPTIONS)
    assert held(tmp_path) == []


# --- what does not fit together, before an engine is made -----------------------------------------


@pytest.mark.parametrize(
    ("how", "edit", "words"),
    [
        (made.gptq(), lambda t: t.update({f"{UP}.scales": torch.ones(3, ROWS).half()}),
         "has 3 groups of scales for 256 columns, expected a number that divides them"),
        (made.awq(), lambda t: t.update({f"{UP}.scales": torch.ones(3, ROWS).half()}),
         "has 3 groups of scales for 256 columns"),
        (made.compressed(), lambda t: t.update({f"{UP}.weight_scale": torch.ones(ROWS, 5)}),
         "has 5 groups of scales for 256 columns"),
        (made.mxfp4(), lambda t: t.update(
            {f"{UP}.weight_scales": torch.ones(ROWS, 7, dtype=torch.uint8)}), r"scales of u8"),
        (made.gptq(act_order=True), spoil(f"{UP}.g_idx", 77, 2),
         "has group 2 for column 77, expected 0 to 1; its g_idx is damaged"),
        (made.compressed(act_order=True), spoil(f"{UP}.weight_g_idx", 77, -1),
         "has group -1 for column 77, expected 0 to 1"),
    ],
)  # fmt: skip
def test_groups_that_do_not_fit_are_refused_before_an_engine_is_made(
    how: Any, edit: Edit, words: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(*_: object, **__: object) -> None:
        raise AssertionError("an engine was made of it")

    monkeypatch.setattr(here, "_engine", engine)
    path = checkpoint(how, edit)(source, tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        helm.LLM(path, device="cpu", **OPTIONS)
    said = str(caught.value)
    assert f"{UP}.weight" in said
    assert str(path / "model.safetensors") in said
    assert re.search("get it anew|download|original", said)
