"""Synthetic checkpoints, and what two threads could do with their weights at most."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from cut_layers import least_step_s

from figures import matrix_elements
from synthetic import SHAPES, make_checkpoint, write_tokenizer
from synthetic_folder import config_file


def test_tokens_are_whole_characters_and_come_one_by_one(tmp_path: Path) -> None:
    """Or streams tell them late, and what is measured between texts is not between tokens."""
    size = 20_000
    write_tokenizer(tmp_path / "tokenizer.json", size)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    broken = [i for i in range(size) if "\ufffd" in tokenizer.decode([i])]
    assert len(broken) <= 128  # single bytes of longer characters
    assert tokenizer.decode(tokenizer.encode("to be or not").ids) == "to be or not"


def test_a_folder_of_an_older_writer_is_written_anew(tmp_path: Path) -> None:
    shape = str(config_file(tmp_path))
    folder = make_checkpoint(shape, "bf16", tmp_path)
    written = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_text("kept")
    assert make_checkpoint(shape, "bf16", tmp_path) == folder
    assert (folder / "tokenizer.json").read_text() == "kept"
    (folder / "complete").write_text("1")
    make_checkpoint(shape, "bf16", tmp_path)
    assert (folder / "tokenizer.json").read_bytes() == written


def test_a_step_is_bounded_by_reading_or_by_arithmetic() -> None:
    raw = SHAPES["qwen3-0.6b"]
    elements = sum(matrix_elements(raw))
    probed = {"read_2_bytes_per_s": 1e10, "fma_2_flops": 1e11}
    assert least_step_s(raw, 1, "f16", probed) == pytest.approx(2 * elements / 1e10)
    assert least_step_s(raw, 64, "f16", probed) == pytest.approx(2 * elements * 64 / 1e11)
