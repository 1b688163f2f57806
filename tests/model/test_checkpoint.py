"""Safetensors headers: tables of real files; every kind of damage named with file and tensor."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
import small_models
from helm.errors import CheckpointError, HelmError
from helm.model.checkpoint import TensorInfo
from helm.model.checkpoint.safetensors import read_checkpoint, read_header
from helm.model.source import Extent

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def pack(header, data=bytes(32)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(folder, content, name="model.safetensors"):
    (folder / name).write_bytes(content)
    return folder


def test_table_of_a_file(tmp_path):
    base = len(pack({"a": A, "b": B}, b""))
    assert read_checkpoint(write(tmp_path, pack({"a": A, "b": B}))) == {
        "a": TensorInfo("a", (2, 3), "f32", (Extent("model.safetensors", base, 2),)),
        "b": TensorInfo("b", (4,), "bf16", (Extent("model.safetensors", base + 24, 4),)),
    }


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_bytes_at_the_offsets_are_the_tensors(name):
    folder = small_models.model_dir(name)
    assert (folder / "model.safetensors").exists() != small_models.CASES[name].sharded
    tensors = read_checkpoint(folder)
    model = small_models.make_model(name)
    assert tensors.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        info = tensors[key]
        (extent,) = info.extents
        stored = np.fromfile(
            folder / extent.file, np.float32, info.nbytes // 4, offset=extent.offset
        )
        np.testing.assert_array_equal(stored.reshape(info.shape), parameter.detach().numpy())


def test_empty_and_scalar_tensors_and_padding(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]},
        "scalar": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
    }
    content = pack(json.dumps(header).encode() + b"   ", bytes(8))
    tensors = read_checkpoint(write(tmp_path, content))
    assert tensors["scalar"].nbytes == 8
    assert tensors["empty"].shape == (0, 4)


def test_only_float_weights_are_usable(tmp_path):
    tensors = read_checkpoint(
        write(tmp_path, pack({"a": {**A, "dtype": "I32"}, "b": {**B, "dtype": "F16"}}))
    )
    assert tensors["b"].weight_dtype == "f16"
    with pytest.raises(CheckpointError, match=r"'a'.*I32.*expected F32, F16 or BF16"):
        _ = tensors["a"].weight_dtype


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_in_memory(dtype):
    info = TensorInfo.in_memory("w", dtype, (3, 5))
    assert (info.weight_dtype, info.file) == (dtype, None)
    assert info.nbytes == (60 if dtype == "f32" else 30)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not safetensors"),
        (b"\x01\0\0", "truncated or not safetensors"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated or not safetensors"),
        (b"\xff" * 16, "truncated or not safetensors"),
        (pack(b"[1, 2]", b""), "not a JSON object"),
        (pack(b"{oops", b""), "not valid JSON"),
        (pack(b'{"\xff": 1}', b""), "not UTF-8"),
        (pack(b'{"a": 1, "a": 2}', b""), "'a' occurs twice"),
        (pack({"a": A, "b": B}, bytes(31)), "'b' ends at byte .* truncated"),
        (pack({"a": A, "b": B}, bytes(33)), "1 bytes after tensor 'b'"),
        (pack({"a": A}, bytes(32)), "8 bytes after tensor 'a'"),
        (pack({"b": B}), "24 unused bytes between the header and tensor 'b'"),
        (pack({"a": A, "b": {**B, "data_offsets": [20, 28]}}), "'b' overlaps tensor 'a'"),
        (pack({"a": A, "b": {**A}}, bytes(24)), "overlaps"),
        (pack({"a": {**A, "shape": [2, -3]}}), r"a\.shape\[1\]: expected an integer"),
        (pack({"a": {**A, "shape": [2.0, 3]}}), r"a\.shape\[0\]: expected an integer"),
        (pack({"a": {**A, "shape": 6}}), r"a\.shape: expected an array"),
        (pack({"a": {**A, "shape": [2, 4]}}), r"a\.data_offsets: 24 bytes for F32 .* expected 32"),
        (pack({"a": {**A, "shape": [2**40, 2**40]}}), r"a\.data_offsets: 24 bytes"),
        (pack({"a": {**A, "shape": [2**48] * 60}}), r"a\.data_offsets: 24 bytes"),
        (pack({"a": {**A, "shape": [1] * 65}}), r"a\.shape: 65 dimensions"),
        (pack({"a": {**A, "data_offsets": [24, 0]}}), r"a\.data_offsets: expected \[begin, end\]"),
        (pack({"a": {**A, "data_offsets": [0, 1, 2]}}), r"a\.data_offsets"),
        (pack({"a": {**A, "data_offsets": [-24, 0]}}), r"a\.data_offsets\[0\]"),
        (pack({"a": {**A, "dtype": "F33"}}), "a.dtype: unknown dtype 'F33'"),
        (pack({"a": {**A, "dtype": None}}), r"a\.dtype: expected a string"),
        (pack({"a": {**A, "note": 1}}), r"a: unknown key 'note'"),
        (pack({"a": {"dtype": "F32", "shape": [1]}}), r"'data_offsets' is missing"),
        (pack({"a": []}), r"\ba: expected an object"),
        (pack({"a": A, "b": B, "__metadata__": {"n": 1}}), r"__metadata__\.n: expected a string"),
    ],
)
def test_damage_is_named_with_the_file(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(write(tmp_path, content))
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_header_over_the_formats_limit(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little") + b"{")
    os.truncate(path, 100_000_100)  # sparse
    with pytest.raises(CheckpointError, match="over 100 MB"):
        read_checkpoint(tmp_path)


def index(folder, weight_map):
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "s.safetensors", "x": "s.safetensors"}, "tensor 'x' is in no shard"),
        ({"a": "t.safetensors"}, "shard t.safetensors does not exist"),
        ({"a": "../s.safetensors"}, "leaves the model directory"),
        ({"a": "sub/../../s.safetensors"}, "leaves the model directory"),
        ({"a": "/etc/passwd"}, "leaves the model directory"),
        ({"a": ""}, "leaves the model directory"),
        ({"a": "s\0"}, "leaves the model directory"),
        ({"a": 3}, r"weight_map\.a: expected a string"),
        ({"a": "."}, "leaves the model directory|not a regular file"),
        ([], "weight_map: expected an object"),
        ("{", "not valid JSON"),
        ("{}", "'weight_map' is missing"),
    ],
)
def test_hostile_index(tmp_path, weight_map, message):
    write(tmp_path, pack({"a": A, "b": B}), "s.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(index(tmp_path, weight_map))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write(tmp_path, pack({"a": A, "b": B}), "s-1.safetensors")
    write(tmp_path, pack({"b": {**B, "data_offsets": [0, 8]}}, bytes(8)), "s-2.safetensors")
    for place in ("s-1.safetensors", "s-2.safetensors"):
        index(tmp_path, {"a": "s-1.safetensors", "b": place, "c": "s-2.safetensors"})
        with pytest.raises(CheckpointError, match=r"'b' is in s-1\.safetensors and in s-2\.safe"):
            read_checkpoint(tmp_path)


def test_shards_that_the_index_does_not_list_are_not_read(tmp_path):
    write(tmp_path, pack({"a": A, "b": B}), "s-1.safetensors")
    write(tmp_path, b"oops", "s-2.safetensors")
    assert read_checkpoint(index(tmp_path, {"a": "s-1.safetensors"})).keys() == {"a", "b"}


def test_damage_in_a_shard_names_the_shard(tmp_path):
    write(tmp_path, pack({"a": A}), "s-2.safetensors")
    with pytest.raises(CheckpointError, match=r"s-2\.safetensors: 8 bytes after"):
        read_checkpoint(index(tmp_path, {"a": "s-2.safetensors"}))


def test_pickle_only_folder_says_convert(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="convert them with transformers"):
        read_checkpoint(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="holds neither"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_checkpoint(tmp_path / "absent")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint(tmp_path)


def test_snapshot_of_symlinks_is_read(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs", pack({"a": A, "b": B}), "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert len(read_checkpoint(tmp_path / "snapshot")) == 2


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("valid") / "v.safetensors"
    tensors = {"one": np.ones((3, 2), np.float32), "two": np.zeros(5, np.float16)}
    safetensors.numpy.save_file(tensors, path, metadata={"format": "np"})
    return path


@settings(max_examples=400, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(b'\0"[]{},:-019eF~\xff')), max_size=4
    ),
    cut=st.none() | st.integers(0, 400),
    extra=st.binary(max_size=3),
)
def test_mutated_bytes_load_as_safetensors_does_or_raise_helm_error(valid_file, edits, cut, extra):
    content = bytearray(valid_file.read_bytes()[:cut] + extra)
    for place, byte in edits:
        if place < len(content):
            content[place] = byte
    path = valid_file.with_name("mutated.safetensors")
    path.write_bytes(content)
    try:
        tensors = read_header(path, "mutated.safetensors")
    except HelmError:
        return
    theirs = safetensors.deserialize(bytes(content))
    assert {name: tuple(t["shape"]) for name, t in theirs} == {
        name: info.shape for name, info in tensors.items()
    }
    for info in tensors.values():
        assert info.extents[0].offset + info.nbytes <= len(content)


def test_reference_reads_bf16():
    bits = np.array([0x3F80, 0xC000, 0x0001], np.uint16)
    np.testing.assert_array_equal(reference.bf16_to_f64(bits), [1.0, -2.0, 2.0**-133])
