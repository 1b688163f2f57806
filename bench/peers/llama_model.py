"""GGUF files in llama.cpp, through its C API: token ids and logits. Measures nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FLASH = {"": -1, "no-fa": 0, "fa": 1}  # llama.cpp's enum llama_flash_attn_type
CHUNK = 512  # tokens that llama.cpp gets at once, its own default of a step


class LlamaModel:
    """vocabulary_alone: no weights are loaded. said: what the library says of flash attention."""

    def __init__(self, path: Path, vocabulary_alone: bool = False) -> None:
        import llama_cpp

        self.llama, self.said = llama_cpp, ""
        self._log = llama_cpp.llama_log_callback(self._read_log)  # must outlive the library
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = vocabulary_alone
        self.handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.handle, f"llama.cpp did not load {path}"
        self._vocabulary = llama_cpp.llama_model_get_vocab(self.handle)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(self._vocabulary)

    def _read_log(self, _level: int, text: bytes, _: Any) -> None:
        line = " ".join(text.decode(errors="replace").split())
        if "flash_attn =" in line or "Flash Attention" in line:
            self.said = line

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text without tokens around it. special: control tokens in it are found."""
        data = text.encode()
        room = len(data) + 16
        ids = (ctypes.c_int32 * room)()
        count = self.llama.llama_tokenize(
            self._vocabulary, data, len(data), ids, room, False, special
        )
        assert count >= 0, f"llama_tokenize wants room for {-count} tokens of {len(data)} bytes"
        return list(ids[:count])

    def close(self) -> None:
        self.llama.llama_model_free(self.handle)


class LlamaContext:
    """Sequences of up to `positions` each. flash: a key of FLASH."""

    def __init__(
        self, model: LlamaModel, positions: int, threads: int, sequences: int = 1, flash: str = ""
    ) -> None:
        self._llama, self._vocabulary, self._sequences = model.llama, model.vocabulary, sequences
        params = self._llama.llama_context_default_params()
        params.n_ctx = sequences * (positions + 8)
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH[flash]
        self._context = self._llama.llama_init_from_model(model.handle, params)
        assert self._context, "llama.cpp made no context"
        self._memory = self._llama.llama_get_memory(self._context)
        self._batch = self._llama.llama_batch_init(CHUNK, 0, 1)

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """rows: sequence, position, token, whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        found = self._llama.llama_decode(self._context, batch)
        assert found == 0, f"llama_decode returned {found}"

    def row(self, index: int) -> np.ndarray:
        """Logits of a row of the last step, in the library's own memory: f32 [vocabulary]."""
        pointer = self._llama.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, (self._vocabulary,))

    def rewind(self, positions: int) -> None:
        for sequence in range(self._sequences):
            assert self._llama.llama_memory_seq_rm(self._memory, sequence, positions, -1)

    def close(self) -> None:
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)
