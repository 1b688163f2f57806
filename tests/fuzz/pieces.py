"""Checkpoints whose matrices are several tensors: GPTQ, AWQ, compressed-tensors, FP8."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fuzz import models, mutate
from fuzz.checkpoints import generates
from fuzz.kind import Kind

Array = np.ndarray[Any, Any]
Tensors = dict[str, tuple[str, Array]]  # safetensors' dtype and the elements
METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": -1},
    "gptq8": {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "packed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "int8": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
_VALUES = {  # quantization_config's, beside what mutate makes of them
    "quant_method": ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "aqlm", None, [1]),
    "bits": (2, 3, 4, 8, 4.0, True, "4", None),
}


def pieces_of(method: str, name: str, rows: int, cols: int, rng: np.random.Generator) -> Tensors:
    """Of one matrix; codes are random."""
    base = name.removesuffix(".weight")

    def words(*shape: int) -> tuple[str, Array]:
        return "I32", rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    def scales(*shape: int, dtype: Any = np.float16) -> tuple[str, Array]:
        names = {np.float16: "F16", np.float32: "F32"}
        return names[dtype], (0.01 + 0.01 * rng.random(shape)).astype(dtype)

    if method.startswith("gptq"):
        per = 4 if method == "gptq8" else 8
        found = {
            "qweight": words(cols // per, rows), "qzeros": words(1, rows // per),
            "scales": scales(1, rows), "g_idx": ("I32", np.zeros(cols, np.int32)),
        }  # fmt: skip
    elif method == "awq":
        found = {
            "qweight": words(cols, rows // 8), "qzeros": words(1, rows // 8),
            "scales": scales(1, rows),
        }  # fmt: skip
    elif method == "packed":
        found = {
            "weight_packed": words(rows, cols // 8), "weight_scale": scales(rows, 1),
            "weight_shape": ("I64", np.array([rows, cols], np.int64)),
        }  # fmt: skip
    elif method == "int8":
        codes = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
        found = {"weight": ("I8", codes), "weight_scale": scales(rows, 1, dtype=np.float32)}
    else:
        codes = (rng.integers(0, 256, (rows, cols)) & 0xBF).astype(np.uint8)
        blocks = scales(-(-rows // 128), -(-cols // 128), dtype=np.float32)
        found = {"weight": ("F8_E4M3", codes), "weight_scale_inv": blocks}
    return {f"{base}.{piece}": own for piece, own in found.items()}


def file_parts(tensors: Tensors) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, array) in tensors.items():
        begin, data = len(data), data + array.tobytes()
        offsets = [begin, len(data)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
    return header, data


class Pieces(Kind):
    """One file, in its place among the files of a model."""

    name = "pieces"
    inputs = 1500

    def __init__(self, folder: Path) -> None:
        config = models.config_of("LlamaForCausalLM")
        self._config, self._models = config, {}
        rng = np.random.default_rng(0)
        for method in METHODS:
            tensors: Tensors = {}
            for name, array in models.weights_of(config).items():
                if "_proj.weight" in name:
                    tensors.update(pieces_of(method, name, *array.shape, rng))
                else:
                    tensors[name] = ("F32", array)
            self._models[method] = tensors

    def run(self, random: Random, folder: Path) -> None:
        method = random.choice(list(METHODS))
        tensors, stated = dict(self._models[method]), dict(METHODS[method])
        pick = random.random()
        if pick < 0.15:
            key = random.choice(list(_VALUES))
            stated[key] = random.choice(_VALUES[key])
        elif pick < 0.25:
            stated = mutate.json_value(random, stated)
        elif pick < 0.6:
            self._change(random, tensors)
        header, data = file_parts(tensors)
        if 0.6 <= pick < 0.8:
            place = random.randrange(len(data) - 64)
            data = data[:place] + random.randbytes(64) + data[place + 64 :]
        elif pick >= 0.9:
            header = mutate.json_value(random, header)
        config = {**self._config, "quantization_config": stated}
        (folder / "config.json").write_bytes(mutate.dumped(random, config))
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(models.file_of(text, data))
        generates(folder, random)

    def _change(self, random: Random, tensors: Tensors) -> None:
        """Pieces that are missing, of other matrices, of other shape or otherwise named."""
        names = [name for name in tensors if "_proj." in name]
        one, other = random.sample(names, 2)
        pick = random.randrange(6)
        if pick == 0:
            del tensors[one]
        elif pick == 1:
            tensors[one], tensors[other] = tensors[other], tensors[one]
        elif pick == 2:
            dtype, array = tensors[one]
            shape = random.choice(((-1,), (1, -1), (-1, 1), (1, -1, 1), array.shape[::-1]))
            tensors[one] = dtype, array.reshape(shape)
        elif pick == 3:
            base = one.rpartition(".")[0]
            name = random.choice(("weight", "qweight", "scales", "g_idx", "bias", "input_scale"))
            tensors[f"{base}.{name}"] = tensors[other]
        elif pick == 4:
            dtype, array = tensors[one]
            tensors[one] = dtype, np.frombuffer(random.randbytes(array.nbytes), array.dtype)
            tensors[one] = dtype, tensors[one][1].reshape(array.shape)
        else:
            dtypes = {1: ("U8", "I8", "F8_E4M3"), 2: ("F16", "BF16"), 4: ("I32", "F32")}
            size = tensors[one][1].dtype.itemsize
            tensors[one] = random.choice(dtypes.get(size, ("I64",))), tensors[one][1]
