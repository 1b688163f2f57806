"""GGUF models of several files: any one opens them, and parts that do not belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_bytes import I32, U64, File, Tensor
from gguf_headers import VALID, refused
from helm.model.gguf.file import read_gguf


def part(index: int, count: int, tensors: tuple[Tensor, ...], total: int) -> File:
    keys = (
        ("split.no", 2, index),
        ("split.count", 2, count),
        ("split.tensors.count", I32, total),
    )
    return File((*(VALID.keys if index == 0 else ()), *keys), tensors)


def write_parts(folder: Path) -> list[Path]:
    embed, norm = VALID.tensors
    files = [part(0, 3, (embed,), 2), part(1, 3, (), 2), part(2, 3, (norm,), 2)]
    return [file.write(folder / f"x-{i:05}-of-00003.gguf") for i, file in enumerate(files, start=1)]


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_of_a_split_model_opens_it(given: int, tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    found = read_gguf(paths[given])
    assert found.files == tuple(path.name for path in paths)
    assert [tensor.file for tensor in found.tensors.values()] == [paths[0].name, paths[2].name]
    assert found.keys["general.architecture"] == "llama"
    norm = found.tensors["output_norm.weight"]
    assert paths[2].read_bytes()[norm.offset :][: norm.nbytes] == bytes(range(128))


def test_a_missing_part(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[1].unlink()
    message = refused(paths[0])
    assert "x-00002-of-00003.gguf does not exist" in message
    assert "it is one of the 3 parts of this model, which must lie in one folder" in message


def test_parts_with_exchanged_names(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    second, third = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(third)
    paths[2].write_bytes(second)
    assert "split.no: it is part 3 of 3, its name says 2" in refused(paths[0])


def test_a_part_under_another_name(tmp_path: Path) -> None:
    path = write_parts(tmp_path)[0].rename(tmp_path / "model.gguf")
    assert "split.count: it is one of 3 parts, its name says 1" in refused(path)


def test_parts_of_different_models(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    part(2, 3, (Tensor("token_embd.weight", (32,), 0),), 2).write(paths[2])
    assert "tensor 'token_embd.weight' is in x-00001-of-00003.gguf and in" in refused(paths[0])
    part(2, 3, (), 2).write(paths[2])
    assert "split.tensors.count: the model has 2 tensors, its 3 parts hold 1" in refused(paths[0])


def test_a_name_alone_makes_no_parts(tmp_path: Path) -> None:
    path = VALID.write(tmp_path / "x-00001-of-00001.gguf")
    assert read_gguf(path).files == (path.name,)
    odd = U64  # a count of another integer type is as good
    file = VALID.with_keys(("split.count", odd, 1), ("split.no", odd, 0))
    assert read_gguf(file.write(tmp_path / "y-00001-of-00001.gguf")).tensors
