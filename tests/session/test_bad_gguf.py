"""Bad GGUF files as a user meets them: LLM(...) and helm-llm run name what is wrong and the way
out, before an engine is made."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_whole import ROWS, whole

import command
import helm
import small_models
import small_tokenizers
from gguf_bytes import ARRAY, F32, I32, STRING, U32, File, Tensor
from helm.commands import cli
from helm.errors import HelmError
from helm.session import here

VALID = whole()
VALID_TENSORS = {tensor.name: tensor for tensor in VALID.tensors}
Q8_0, Q4_K = 8, 12
Make = Callable[[Path], Path]  # writes into a folder, returns what the user gives


def one(file: File, name: str = "x.gguf") -> Make:
    return lambda folder: file.write(folder / name)


def key(name: str, kind: int, content: Any) -> Make:
    return one(VALID.with_keys((name, kind, content)))


def tensor(name: str, /, **changes: Any) -> Make:
    return one(with_tensor(name, **changes))


def with_tensor(name: str, /, **changes: Any) -> File:
    found = [replace(t, **changes) if t.name == name else t for t in VALID.tensors]
    return replace(VALID, tensors=tuple(found))


def more(*tensors: Tensor) -> Make:
    return one(replace(VALID, tensors=(*VALID.tensors, *tensors)))


def split(*names: str, count: int = 2) -> Make:
    """The two halves of the model under these names, "" for one that is missing."""

    def make(folder: Path) -> Path:
        middle = len(VALID.tensors) // 2
        halves = (VALID.tensors[:middle], VALID.tensors[middle:])
        for i, (name, tensors) in enumerate(zip(names, halves, strict=True)):
            keys = (("split.no", U32, i), ("split.count", U32, count))
            part = replace(VALID, keys=(*(VALID.keys if i == 0 else ()), *keys), tensors=tensors)
            if name:
                part.write(folder / name)
        return folder / next(name for name in names if name)

    return make


def big_endian() -> Make:
    return one(replace(VALID, version=3 << 24))


def cut(folder: Path) -> Path:
    path = VALID.write(folder / "x.gguf")
    path.write_bytes(path.read_bytes()[:-999])
    return path


def array_of(count: int) -> bytes:
    return struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", ARRAY, F32, count)


def blocks(kind: int, scale: bytes, at: int) -> bytes:
    """The embedding's bytes with one scale in its second row."""
    size = {Q8_0: 34}[kind]
    data = bytearray(ROWS * size)
    data[size + at : size + at + len(scale)] = scale
    return bytes(data)


def quantised_folder(method: str) -> Make:
    """A checkpoint whose config.json says how it was quantised."""

    def make(folder: Path) -> Path:
        model = small_models.model_dir("llama")
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, "bits": 4}
        (folder / "config.json").write_text(json.dumps(config))
        return small_tokenizers.save(small_tokenizers.byte_level(), folder)

    return make


EMBED = "token_embd.weight"
TOKENS = ["<s>", *map(chr, range(97, 97 + ROWS))]
INF, NAN = struct.pack("<e", float("inf")), struct.pack("<e", float("nan"))


def bad() -> Iterator[tuple[str, Make, str]]:
    """What is wrong, the file, and what the message says of it and of the way out."""
    yield "IQ2_XS", tensor(EMBED, kind=17), f"'{EMBED}' is stored as IQ2_XS; .*; take a file of"
    yield "type 99", tensor(EMBED, kind=99), f"'{EMBED}' has the unknown type 99; .*update HELM"
    yield "version 1", one(replace(VALID, version=1)), "version 1, expected 2 or 3; convert the"
    yield "version 9", one(replace(VALID, version=9)), "version 9, expected 2 or 3; update HELM"
    yield "big-endian", big_endian(), "is big-endian, .*`gguf-convert-endian FILE little`"
    yield (
        "a kind of words",
        key("tokenizer.ggml.pre", STRING, "novel"),
        "tokenizer.ggml.pre: 'novel' is not supported; expected one of .*; give .*--tokenizer",
    )
    yield (
        "a kind of tokenizer",
        key("tokenizer.ggml.model", STRING, "rwkv"),
        "tokenizer.ggml.model: 'rwkv' is not supported; .*--tokenizer",
    )
    yield (
        "an architecture",
        key("general.architecture", STRING, "novel"),
        "general.architecture: 'novel' is not supported; supported in GGUF are",
    )
    yield (
        "no second part",
        split("m-00001-of-00002.gguf", ""),
        "m-00002-of-00002.gguf does not exist; .*one of the 2 parts of this model",
    )
    yield (
        "no first part",
        split("", "m-00002-of-00002.gguf"),
        "m-00001-of-00002.gguf does not exist; .*one of the 2 parts of this model",
    )
    yield "renamed parts", split("a.gguf", "b.gguf"), "split.count.*one of 2 parts.*names back"
    yield (
        "parts of three",
        split("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", count=3),
        "split.count.*one of 3 parts.*names back",
    )
    yield "overlap", tensor("blk.0.ffn_up.weight", offset=32), "overlaps tensor .*download the file"
    yield "beyond", tensor(EMBED, offset=1 << 40), f"'{EMBED}' would end at byte .*download it"
    yield "cut", cut, "would end at byte .*it is truncated, download it again"
    yield "no place", tensor(EMBED, offset=8), "begins at byte 8 .*a multiple of 32; .*download"
    yield (
        "a key twice",
        one(replace(VALID, keys=(*VALID.keys, VALID.keys[2]))),
        "'llama.block_count' occurs twice; .*download it",
    )
    yield "a tensor twice", more(VALID_TENSORS[EMBED]), f"'{EMBED}' occurs twice; .*download the"
    for wrong in (0, 3, 4, 48):
        yield (
            f"alignment {wrong}",
            key("general.alignment", U32, wrong),
            f"general.alignment is {wrong}, expected a power of two of at least 8; convert the",
        )
    for what, claim in (("tensors", "claimed_tensors"), ("keys", "claimed_keys")):
        for count in (1 << 20, 1 << 40, (1 << 64) - 1):
            yield (
                f"{count} {what}",
                one(replace(VALID, **{claim: count})),
                rf"claims {count} {what}, a file of \d+ bytes has at most \d+; .*download it again",
            )
    yield (
        "elements beyond the file",
        one(replace(VALID, keys=(), claimed_keys=1, tensors=(), raw=array_of(1 << 50))),
        "key 'k' has 1125899906842624 elements, more than the file",
    )
    yield "a name", tensor(EMBED, name=b"\xc3("), r"name of tensor 0 .*is not UTF-8.*download"
    yield "a key's name", key(b"\xff", U32, 1), r"key \d+ of \d+ b'\\xff' is not UTF-8.*download"
    yield "a key's text", key("general.name", STRING, b"\xff"), "'general.name'.*is not UTF-8"
    yield (
        "a token's text",
        key("tokenizer.ggml.tokens", ARRAY, (STRING, [b"\xff", "a"])),
        r"tokens'?\[0\] is not UTF-8.*download",
    )
    yield (
        "rows of 33",
        tensor(EMBED, shape=(33, ROWS), data=bytes(34 * 2 * ROWS)),
        f"'{EMBED}' has rows of 33 elements, expected a multiple of 32 for Q8_0; .*download",
    )
    yield (
        "rows of 32 in blocks of 256",
        tensor(EMBED, kind=Q4_K, data=bytes(144 * ROWS)),
        f"'{EMBED}' has rows of 32 elements, expected a multiple of 256 for Q4_K; .*download",
    )
    yield (
        "more tokens than rows",
        key("tokenizer.ggml.tokens", ARRAY, (STRING, TOKENS)),
        f"tokenizer.ggml.tokens has {ROWS + 1} tokens, tensor '{EMBED}' has {ROWS} rows; .*convert",
    )
    yield (
        "a stated size",
        key("llama.vocab_size", U32, 7),
        f"llama.vocab_size: is 7, tensor '{EMBED}' has {ROWS} rows; .*convert",
    )
    yield (
        "an end beyond the tokens",
        key("tokenizer.ggml.eos_token_id", U32, ROWS),
        rf"tokenizer.ggml.eos_token_id: expected an integer from 0 to \d+, found {ROWS}",
    )
    yield (
        "kinds of fewer tokens",
        key("tokenizer.ggml.token_type", ARRAY, (I32, [1])),
        "tokenizer.ggml.token_type: 1 elements, tokenizer.ggml.tokens has .*convert",
    )
    yield (
        "a missing tensor",
        one(VALID.without("blk.0.ffn_up.weight")),
        "lacks: .*blk.0.ffn_up.weight.*download the whole model",
    )
    yield (
        "another shape",
        tensor("blk.0.ffn_up.weight", shape=(32, 32), data=bytes(34 * 32)),
        r"'blk.0.ffn_up.weight' has the shape \[32, 32\], its keys say \[64, 32\]",
    )
    yield "an unknown tensor", more(Tensor("v.patch.weight", (32,))), "v.patch.weight.*take another"
    yield (
        "a vision projector",
        key("general.architecture", STRING, "clip"),
        "it is a vision proj.*give the language model's GGUF file",
    )
    yield "mmproj", key("general.type", STRING, "mmproj"), "it is a vision projector.*give the lang"
    yield (
        "LoRA",
        one(VALID.with_keys(("general.type", STRING, "adapter"), ("adapter.type", STRING, "lora"))),
        "it is a LoRA adapter.*merge it into its model",
    )
    yield "no GGUF", one(replace(VALID, magic=b"GGML")), "begins with b'GGML'.*download it again"
    yield "unknown quant_method", quantised_folder("exl2"), "quantization_config.*exl2"


BAD = {name: (make, words) for name, make, words in bad()}


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object, **__: object) -> None:
        raise AssertionError("an engine was made of it")

    monkeypatch.setattr(here, "_engine", made)


def test_the_file_that_is_spoilt_is_a_model(tmp_path: Path) -> None:
    for make in (one(VALID), split("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")):
        with helm.LLM(make(tmp_path), threads=1) as llm:
            assert len(llm.generate([1, 2, 3], max_tokens=3, ignore_eos=True).tokens) == 3


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_before_an_engine_is_made(
    name: str, tmp_path: Path, no_engine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = BAD[name]
    path = make(tmp_path)
    with pytest.raises(HelmError) as caught:
        helm.LLM(path, threads=1)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 900
    capsys.readouterr()
    assert cli.main(["run", str(path), "-p", "x", "-n", "1"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: [")
    shown = " ".join(error.split())
    assert re.search(words, shown), shown
    assert re.search(words.replace("--tokenizer", "tokenizer="), said), said
    assert str(tmp_path) in shown


@pytest.mark.parametrize("what", [INF, NAN], ids=["inf", "nan"])
def test_scales_that_are_no_numbers_end_the_load(what: bytes, tmp_path: Path) -> None:
    """Data are read while they are loaded; nothing is generated from them."""
    path = tensor(EMBED, data=blocks(Q8_0, what, 0))(tmp_path)
    with pytest.raises(HelmError) as caught:
        helm.LLM(path, threads=1)
    said = r"NaN or infinite in row 1, columns 0 to 31, .*the file is damaged.*get it anew"
    assert re.search(said, str(caught.value))
    ran = command.helm("run", str(path), "-p", "a", "-n", "1", status=2)
    assert re.search(said, " ".join(ran.stderr.split()))
    assert ran.stdout == ""


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.ffn_norm.weight"])
def test_weights_that_are_no_numbers(name: str, tmp_path: Path) -> None:
    values = np.ones(32, np.float32)
    values[7] = np.nan
    path = tensor(name, data=values.tobytes())(tmp_path)
    with (
        pytest.raises(HelmError, match=r"NaN or infinite|not finite"),
        helm.LLM(path, threads=1) as llm,
    ):
        llm.generate([1, 2], max_tokens=1)
