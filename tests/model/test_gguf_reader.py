"""Headers of GGUF files: what is read, and what is refused with which words."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_bytes import ARRAY, BLOCKS, BOOL, F32, STRING, U8, U32, File, Tensor, string
from gguf_headers import VALID, refused
from helm.base.formats import FORMATS
from helm.errors import CheckpointError, UnsupportedModelError
from helm.model.gguf.cursor import Array
from helm.model.gguf.file import local, read_gguf
from helm.model.gguf.reader import read_header
from helm.model.gguf.types import TYPES
from helm.model.source import PACKED, STORED


def test_values_and_tensors(tmp_path: Path) -> None:
    found = read_gguf(VALID.write(tmp_path / "x.gguf"))
    assert found.files == ("x.gguf",)
    assert found.keys["llama.block_count"] == 1
    assert found.keys["a.flag"] is True
    tokens, scores = found.array("tokenizer.ggml.tokens"), found.array("tokenizer.ggml.scores")
    assert tokens is not None
    assert scores is not None
    assert tokens.strings() == ["a", "ä", "", "日本"]
    assert scores.numbers().tolist() == [0.5, -1.0, 2.0, -1000.0]
    assert found.array("absent") is None
    data = (tmp_path / "x.gguf").read_bytes()
    embed, norm = found.tensors.values()
    assert (embed.name, embed.shape, embed.stored) == ("token_embd.weight", (4, 32), "ggml.q8_0")
    assert (norm.name, norm.shape, norm.stored) == ("output_norm.weight", (32,), "f32")
    assert data[embed.offset :][: embed.nbytes] == bytes(range(136))
    assert data[norm.offset :][: norm.nbytes] == bytes(range(128))


def test_an_array_is_of_the_kind_that_it_is_asked_for(tmp_path: Path) -> None:
    found = read_gguf(VALID.write(tmp_path / "x.gguf"))
    with pytest.raises(CheckpointError, match=r"x\.gguf: key 'tokenizer.ggml.tokens' is an array"):
        found.keys["tokenizer.ggml.tokens"].numbers()
    with pytest.raises(CheckpointError, match="expected one of strings"):
        found.keys["tokenizer.ggml.scores"].strings()
    with pytest.raises(CheckpointError, match=r"llama.block_count: expected an array"):
        found.array("llama.block_count")


def test_types_are_sized_as_by_the_gguf_package() -> None:
    assert len(TYPES) == 16
    assert {kind.stored for kind in TYPES.values()} == set(STORED) - set(PACKED)
    assert {encoding.format for encoding in STORED.values()} <= set(FORMATS)
    for number, kind in TYPES.items():
        own = gguf.GGMLQuantizationType(number)
        assert own.name == kind.name
        assert gguf.GGML_QUANT_SIZES[own] == (kind.elements, kind.block_bytes)
        assert BLOCKS[number] == STORED[kind.stored][:2] == (kind.elements, kind.block_bytes)
    for other in set(gguf.GGMLQuantizationType) - set(TYPES):
        assert other.value not in TYPES


def test_the_runtime_has_the_same_encodings() -> None:
    header = next(p for p in Path(__file__).parents if (p / "cpp").is_dir()) / "cpp/include/helm"
    rows = re.findall(r'\{"([a-z0-9_.]+)", (\d+), (\d+), \{', (header / "stored.h").read_text())
    theirs = {name: (int(cols), int(size)) for name, cols, size in rows}
    assert theirs == {name: encoding[:2] for name, encoding in STORED.items()}


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_files_of_the_gguf_package(tmp_path: Path, alignment: int) -> None:
    """Every type, and shapes of one to three dimensions, lie where the package says."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(alignment)
    writer.add_token_list([f"token {i}" for i in range(1000)])
    writer.add_array("numbers", list(range(-500, 500)))
    for number, kind in TYPES.items():
        row = kind.row_bytes(512)
        for shape in ((row,), (3, row), (2, 3, row)):
            own = gguf.GGMLQuantizationType(number)
            name = f"{kind.name}.{len(shape)}"
            writer.add_tensor(name, np.zeros(shape, np.uint8), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "x.gguf")
    own = gguf.GGUFReader(tmp_path / "x.gguf")
    assert list(found.tensors) == [tensor.name for tensor in own.tensors]
    for tensor in own.tensors:
        mine = found.tensors[tensor.name]
        assert mine.shape == tuple(int(extent) for extent in tensor.shape[::-1])
        assert (mine.offset, mine.nbytes) == (int(tensor.data_offset), int(tensor.n_bytes))
        assert mine.stored.removeprefix("ggml.").upper() == tensor.tensor_type.name
    tokens = found.array("tokenizer.ggml.tokens")
    assert tokens is not None
    assert tokens.strings() == [f"token {i}" for i in range(1000)]
    assert found.keys["numbers"].numbers().tolist() == list(range(-500, 500))


def test_version_2_is_read(tmp_path: Path) -> None:
    assert read_gguf(replace(VALID, version=2).write(tmp_path / "x.gguf")).tensors


def test_a_header_alone_is_read_and_as_it_is_needed(tmp_path: Path) -> None:
    """Reads beyond the header's end are at most one step."""
    big = replace(VALID, tensors=(Tensor("token_embd.weight", (1 << 16, 100), 0),))
    path = big.write(tmp_path / "x.gguf")
    reads: list[tuple[int, int]] = []

    class Counting:
        name, size, step = "x.gguf", path.stat().st_size, 64

        def read(self, begin: int, count: int) -> bytes:
            reads.append((begin, count))
            return path.read_bytes()[begin : begin + count]

    read_header(Counting(), "x.gguf")
    assert [begin for begin, _ in reads] == [0, *np.cumsum([c for _, c in reads])[:-1].tolist()]
    assert sum(count for _, count in reads) <= len(big.header()) + 64


def test_every_cut_is_refused(tmp_path: Path) -> None:
    whole = VALID.bytes()
    path = tmp_path / "x.gguf"
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        if length > len(whole) - 32 and whole[length:].strip(b"\0") == b"":
            continue  # padding alone is missing
        message = refused(path)
        assert "download it again" in message, length


# --- bad input -----------------------------------------------------------------------------------

EMBED = Tensor("token_embd.weight", (32, 4), 8)


def key(name: str, kind: int, content: object) -> File:
    return VALID.with_keys((name, kind, content))


BAD: dict[str, tuple[File, str]] = {
    "no GGUF": (replace(VALID, magic=b"GGML"), r"begins with b'GGML', expected b'GGUF'"),
    "version 1": (replace(VALID, version=1), "has version 1, expected 2 or 3; convert"),
    "version 4": (replace(VALID, version=4), "has version 4, expected 2 or 3; update HELM"),
    "big-endian": (
        replace(VALID, version=int.from_bytes(b"\0\0\0\3", "little")),
        "is big-endian, expected a little-endian file; convert a copy with `gguf-convert-endian",
    ),
    "tensors beyond the file": (
        replace(VALID, claimed_tensors=1 << 40),
        r"claims 1099511627776 tensors, a file of \d+ bytes has at most",
    ),
    "keys beyond the file": (
        replace(VALID, claimed_keys=1 << 40),
        r"claims 1099511627776 keys, a file of \d+ bytes has at most",
    ),
    "one key too many": (replace(VALID, claimed_keys=6), "has [0-9]+ bytes, expected at most"),
    "one tensor too many": (replace(VALID, claimed_tensors=3), "tensor"),
    "a key twice": (
        replace(VALID, keys=(*VALID.keys, ("a.flag", BOOL, False))),
        "key 'a.flag' occurs twice; expected it once",
    ),
    "a tensor twice": (
        replace(VALID, tensors=(*VALID.tensors, EMBED)),
        "tensor 'token_embd.weight' occurs twice; expected it once",
    ),
    "alignment 0": (key("general.alignment", U32, 0), "general.alignment is 0, expected a power"),
    "alignment 3": (key("general.alignment", U32, 3), "general.alignment is 3, expected a power"),
    "alignment 4": (key("general.alignment", U32, 4), "of at least 8"),
    "alignment 2^31": (key("general.alignment", U32, 1 << 31), "expected a power of two"),
    "alignment true": (key("general.alignment", BOOL, True), "is True, expected a power of two"),
    "alignment of text": (key("general.alignment", STRING, "32"), "is '32', expected a power"),
    "a key that is no UTF-8": (
        replace(VALID, keys=((b"\xff\xfe", U32, 1), *VALID.keys)),
        r"key 0 of 6 b'\\xff\\xfe' is not UTF-8",
    ),
    "a tensor's name that is no UTF-8": (
        replace(VALID, tensors=(replace(EMBED, name=b"\xc3("),)),
        r"the name of tensor 0 of 1 b'\\xc3\(' is not UTF-8",
    ),
    "a value that is no UTF-8": (key("b", STRING, b"\xff"), "key 'b' .* is not UTF-8"),
    "an unknown value type": (
        replace(VALID, keys=(), claimed_keys=1, tensors=(), raw=string("k") + b"\x63\0\0\0\0"),
        "key 'k' has the unknown value type 99",
    ),
    "a truth value of 2": (
        replace(VALID, keys=(), claimed_keys=1, tensors=(), raw=string("k") + b"\7\0\0\0\2"),
        "key 'k' is 2, expected 0 or 1",
    ),
    "an array of arrays": (
        key("b", ARRAY, (ARRAY, [(U8, [1])])),
        "key 'b' is an array of arrays, expected numbers or strings",
    ),
    "an array beyond the file": (
        replace(
            VALID, keys=(), claimed_keys=1, tensors=(),
            raw=string("k") + struct.pack("<IIQ", ARRAY, F32, 1 << 60),
        ),
        r"key 'k' has \d+ elements, more than the file",
    ),
    "a string beyond the limit": (
        replace(
            VALID, keys=(), claimed_keys=1, tensors=(),
            raw=string("k") + struct.pack("<IQ", STRING, 1 << 40),
        ),
        r"key 'k' has 1099511627776 bytes, expected at most",
    ),
    "a string within an array beyond the limit": (
        replace(
            VALID, keys=(), claimed_keys=1, tensors=(),
            raw=string("k") + struct.pack("<IIQQ", ARRAY, STRING, 1, 1 << 63),
        ),
        r"'k'\[0\] has 9223372036854775808 bytes",
    ),
    "no dimensions": (replace(VALID, tensors=(replace(EMBED, shape=()),)), "has 0 dimensions"),
    "five dimensions": (
        replace(VALID, tensors=(replace(EMBED, shape=(32, 1, 1, 1, 1)),)),
        "has 5 dimensions, expected 1 to 4",
    ),
    "an extent of 0": (
        replace(VALID, tensors=(replace(EMBED, shape=(32, 0)),)),
        r"has the shape \[0, 32\], expected extents from 1",
    ),
    "extents whose product overflows": (
        replace(VALID, tensors=(replace(EMBED, shape=(1 << 40, 1 << 40), data=b""),)),
        r"tensor 'token_embd.weight' would end at byte \d{20,}",
    ),
    "rows that are no whole blocks": (
        replace(VALID, tensors=(replace(EMBED, shape=(33, 4), data=bytes(200)),)),
        "has rows of 33 elements, expected a multiple of 32 for Q8_0",
    ),
    "IQ2_XS": (
        replace(VALID, tensors=(replace(EMBED, kind=17),)),
        "is stored as IQ2_XS; HELM reads F32, .*; take a file of this model in Q2_K",
    ),
    "Q4_0_4_4": (
        replace(VALID, tensors=(replace(EMBED, kind=31),)),
        "is stored as Q4_0_4_4; .*; take the Q4_0 or IQ4_NL file",
    ),
    "an unknown type": (
        replace(VALID, tensors=(replace(EMBED, kind=99),)),
        "tensor 'token_embd.weight' has the unknown type 99; .* update HELM",
    ),
    "an offset out of line": (
        replace(VALID, tensors=(replace(EMBED, offset=8),), tail=bytes(999)),
        "begins at byte 8 of the data, expected a multiple of 32",
    ),
    "a tensor beyond the file": (
        replace(VALID, tensors=(replace(EMBED, offset=1 << 20),)),
        r"tensor 'token_embd.weight' would end at byte \d+, the file has",
    ),
    "an offset that overflows": (
        replace(VALID, tensors=(replace(EMBED, offset=(1 << 64) - 32),)),
        r"would end at byte 18446744073709",
    ),
    "overlapping tensors": (
        replace(VALID, tensors=(EMBED, Tensor("b", (32,), 0, offset=128)), tail=bytes(99)),
        "tensor 'b' overlaps tensor 'token_embd.weight'",
    ),
    "no architecture": (
        VALID.without("general.architecture"),
        "general.architecture: is missing; convert",
    ),
    "an architecture of another type": (
        key("general.architecture", U32, 3),
        "general.architecture: expected a string, found 3",
    ),
    "a vision projector": (
        key("general.architecture", STRING, "clip"),
        "it is a vision projector, which HELM does not use; give the language model's",
    ),
    "mmproj": (key("general.type", STRING, "mmproj"), "it is a vision projector"),
    "LoRA": (
        VALID.with_keys(("general.type", STRING, "adapter"), ("adapter.type", STRING, "lora")),
        "it is a LoRA adapter, no whole model; merge it into its model with llama-export-lora",
    ),
    "imatrix": (key("general.type", STRING, "imatrix"), "it is 'imatrix', expected a model"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    file, words = BAD[name]
    message = refused(file.write(tmp_path / "x.gguf"))
    assert re.search(words, message), message
    assert len(message) < 600


def test_other_kinds_are_unsupported_models(tmp_path: Path) -> None:
    for name in ("a vision projector", "LoRA"):
        with pytest.raises(UnsupportedModelError):
            read_gguf(BAD[name][0].write(tmp_path / "x.gguf"))


def test_names_are_shown_in_one_short_line(tmp_path: Path) -> None:
    bad = replace(EMBED, name="a\n\x1b[31m" + "b" * 5000, kind=99)
    message = refused(replace(VALID, tensors=(bad,)).write(tmp_path / "x.gguf"))
    assert "\x1b" not in message
    assert len(message) < 500


def test_strings_of_an_array_that_are_no_utf8(tmp_path: Path) -> None:
    file = key("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", b"\xff", "c"]))
    tokens = read_gguf(file.write(tmp_path / "x.gguf")).array("tokenizer.ggml.tokens")
    assert isinstance(tokens, Array)
    with pytest.raises(CheckpointError, match=r"'tokenizer.ggml.tokens'\[1\] is not UTF-8"):
        tokens.strings()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    file = key("b", ARRAY, (F32, [1.0] * 100_000))
    path = file.write(tmp_path / "x.gguf")
    with local(path) as source:
        path.write_bytes(path.read_bytes()[:200_000])
        with pytest.raises(CheckpointError, match=r"ended at byte 200000 while it was read"):
            read_header(source, "x.gguf")


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf does not exist; give a GGUF file"):
        read_gguf(tmp_path / "absent.gguf")
