"""GGUF files of mixtures for measuring speed, out of random blocks; quantises nothing.

llama.cpp makes blocks of a checkpoint in f16, which of a mixture takes several times the file's
size. So its blocks are drawn here, tensor by tensor, in the types that llama.cpp would choose.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from gguf_file import MODEL, described, gguf_name, new_writer
from helm.model.families import build_graph, parse_config
from helm.model.stacked import routers

KIND = "q4_0"
_NOISE = 65_521  # blocks, repeated to fill a tensor; a prime, so that no two experts are alike
_DEVIATION = 0.03  # of weights


def is_mixture(config: dict) -> bool:
    return parse_config(config).mixture is not None


def random_mixture(name: str, config: dict, kind: str, root: Path) -> Path:
    """The folder of a mixture's GGUF file, matrices in `kind` and the head in Q6_K, written unless
    it is there. SystemExit for another kind than KIND."""
    if kind != KIND:
        raise SystemExit(f"[bench] {name} is a mixture, whose files are made in {KIND}; got {kind}")
    folder = root / f"{name}-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MODEL).exists():
        partial = folder / "partial.gguf"
        _write(partial, config)
        partial.rename(folder / MODEL)
    return described(folder)


def _write(path: Path, config: dict) -> None:
    import gguf

    types = gguf.GGMLQuantizationType
    graph, rng = build_graph(parse_config(config)), np.random.default_rng(0)
    noise = {types.Q4_0: _q4_0(rng), types.Q6_K: _q6_k(rng)}
    kept = routers(graph)
    tensors = []
    writer = new_writer(path, config)
    for name, rows in graph.tensors.items():
        kind = types.Q6_K if name == "lm_head.weight" else types.Q4_0
        if len(rows) == 1 or name in kept:
            kind = types.F32
        shape = (config["num_experts"], rows[0] // config["num_experts"], *rows[1:])
        shape = shape if "*" in name else rows
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // elements * nbytes
        writer.add_tensor_info(gguf_name(name), shape, np.dtype(np.float32), size, kind)
        tensors.append((kind, shape, size))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for kind, shape, size in tensors:
        if kind in noise:
            data = np.resize(noise[kind], size)
        elif len(shape) == 1:
            data = np.ones(shape, np.float32)
        else:
            data = rng.standard_normal(shape, np.float32) * np.float32(_DEVIATION)
        writer.write_tensor_data(data)
    writer.close()


def _q4_0(rng: np.random.Generator) -> np.ndarray:
    """Blocks of a scale in f16 and 32 codes of 0 to 15, whose values are scale * (code - 8): u8
    [blocks * 18]."""
    scale = np.full((_NOISE, 1), _DEVIATION / 4.6, np.float16)  # 4.6: the deviation of codes
    codes = rng.integers(0, 256, (_NOISE, 16), np.uint8)
    return np.concatenate([scale.view(np.uint8), codes], axis=1).ravel()


def _q6_k(rng: np.random.Generator) -> np.ndarray:
    """Blocks of 256 codes of 0 to 63, low and high bits apart, 16 scales in i8 and one in f16:
    scale * scales * (code - 32); u8 [blocks * 210]."""
    codes = rng.integers(0, 256, (_NOISE, 192), np.uint8)
    scales = rng.integers(32, 64, (_NOISE, 16), np.int8)
    scale = np.full((_NOISE, 1), _DEVIATION / 18.5 / 48, np.float16)  # 18.5: of codes
    return np.concatenate([codes, scales.view(np.uint8), scale.view(np.uint8)], axis=1).ravel()
