"""Writes models as GPTQ, AWQ, compressed-tensors, FP8 and MXFP4 checkpoints, from their published
formulas, and dense ones of the same values in f32. Shares nothing with HELM."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # pieces, and values in f32


def wide_model(folder: Path, seed: int = 11, **changes: Any) -> Path:
    """A Llama whose rows are whole groups of every kind. changes: of its configuration."""
    config = transformers.LlamaConfig(
        vocab_size=144, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=2, **changes,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


def write(
    source: Path, target: Path, dense: Path, quantise: Quantise, config: dict[str, Any]
) -> None:
    """source: a folder in f32. config: its quantization_config. All but embedding, head and norms
    is quantised."""
    stored: Tensors = {}
    values: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = values[name] = tensor
            continue
        pieces, values[name] = quantise(tensor)
        base = name.removesuffix(".weight")
        stored.update({f"{base}.{piece}": own.contiguous() for piece, own in pieces.items()})
    for folder, tensors in ((target, stored), (dense, values)):
        shutil.copytree(source, folder)
        save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    stated = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**stated, "quantization_config": config}))


def pack(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Any:
    """Codes along an axis in words of 32 bits; order[i] is the place of code i of a word."""
    per = 32 // bits
    moved = np.moveaxis(codes, axis, -1)
    words = moved.reshape(*moved.shape[:-1], -1, per)
    out = np.zeros(words.shape[:-1], np.uint64)
    for i in range(per):
        out |= words[..., order[i] if order else i].astype(np.uint64) << np.uint64(bits * i)
    packed = np.ascontiguousarray(np.moveaxis(out, -1, axis)).astype(np.uint32).view(np.int32)
    return torch.from_numpy(packed)


def rounded(
    tensor: torch.Tensor, bits: int, group_of: np.ndarray, dtype: torch.dtype, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
    """Codes [rows, cols], zero points [rows, groups], scales [rows, groups] in `dtype`, and the
    values scale * (code - zero) in f32."""
    weights, most = tensor.float().numpy(), (1 << bits) - 1
    groups = int(group_of.max()) + 1
    low = np.stack([weights[:, group_of == g].min(1) for g in range(groups)], 1)
    high = np.stack([weights[:, group_of == g].max(1) for g in range(groups)], 1)
    if symmetric:
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    scales = torch.from_numpy((high - low) / most).to(dtype)
    wide = scales.float().numpy()
    zeros = np.full(low.shape, 1 << bits - 1) if symmetric else np.clip(
        np.rint(-low / wide), 1, most
    ).astype(np.int64)  # fmt: skip
    codes = np.clip(np.rint(weights / wide[:, group_of]) + zeros[:, group_of], 0, most)
    codes = codes.astype(np.int64)
    less = (codes - zeros[:, group_of]).astype(np.float32)
    return codes, zeros, scales, torch.from_numpy(wide[:, group_of] * less)


def gptq(
    bits: int = 4, group: int = 128, v2: bool = False, act_order: bool = False,
    symmetric: bool = False, dtype: torch.dtype = torch.float16, index: bool = True,
) -> tuple[Quantise, dict[str, Any]]:  # fmt: skip
    rng = np.random.default_rng(5)

    def quantise(tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        cols = tensor.shape[1]
        group_of = np.arange(cols) // (cols if group < 0 else group)
        if act_order:
            rng.shuffle(group_of)
        codes, zeros, scales, values = rounded(tensor, bits, group_of, dtype, symmetric)
        pieces = {
            "qweight": pack(codes.T, bits, 0),
            "qzeros": pack(zeros.T - (0 if v2 else 1), bits, 1),
            "scales": scales.T,
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return ({**pieces} if index else {k: v for k, v in pieces.items() if k != "g_idx"}), values

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    return quantise, {**config, **({"checkpoint_format": "gptq_v2"} if v2 else {})}


def awq(group: int = 128) -> tuple[Quantise, dict[str, Any]]:
    def quantise(tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group_of = np.arange(tensor.shape[1]) // group
        codes, zeros, scales, values = rounded(tensor, 4, group_of, torch.float16, False)
        return {
            "qweight": pack(codes.T, 4, 1, AWQ_ORDER),
            "qzeros": pack(zeros.T, 4, 1, AWQ_ORDER),
            "scales": scales.T,
        }, values

    return quantise, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}


def compressed(
    bits: int = 4, group: int = 128, packed: bool = True, symmetric: bool = True,
    act_order: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Quantise, dict[str, Any]]:  # fmt: skip
    """compressed-tensors; group -1: one scale per row."""
    rng = np.random.default_rng(6)

    def quantise(tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, cols = tensor.shape
        group_of = np.arange(cols) // (cols if group < 0 else group)
        if act_order:
            rng.shuffle(group_of)
        codes, zeros, scales, values = rounded(tensor, bits, group_of, dtype, symmetric)
        signed = torch.from_numpy((codes - (1 << bits - 1)).astype(np.int8))
        pieces: Tensors = {"weight_scale": scales}
        if packed:
            pieces["weight_packed"] = pack(codes, bits, 1)
            pieces["weight_shape"] = torch.tensor([rows, cols])
        else:
            pieces["weight"] = signed
        if not symmetric and packed:
            pieces["weight_zero_point"] = pack(zeros, bits, 0)
        elif not symmetric:
            pieces["weight_zero_point"] = torch.from_numpy(
                (zeros - (1 << bits - 1)).astype(np.int8)
            )
        if act_order:
            pieces["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return pieces, values

    format = "pack-quantized" if packed else "int-quantized"
    return quantise, {"quant_method": "compressed-tensors", "format": format, "config_groups": {}}


def fp8(scale: str = "block", method: str = "fp8") -> tuple[Quantise, dict[str, Any]]:
    """scale: for one "tensor", "row" or "block" of 128 x 128."""

    def quantise(tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, cols = tensor.shape
        high, wide = {"tensor": (rows, cols), "row": (1, cols), "block": (128, 128)}[scale]
        blocks = torch.stack([
            torch.stack([part.abs().max() / 448 for part in band.split(wide, 1)])
            for band in tensor.split(high, 0)
        ])  # fmt: skip
        every = blocks.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :cols]
        small = (tensor / every).to(torch.float8_e4m3fn)
        stated = blocks[0, :1] if scale == "tensor" else blocks
        name = "weight_scale_inv" if method == "fp8" and scale == "block" else "weight_scale"
        return {"weight": small, name: stated.float()}, small.float() * every

    config: dict[str, Any] = {"quant_method": method}
    if method == "fp8":
        config["weight_block_size"] = [128, 128] if scale == "block" else None
    else:
        config["format"] = "float-quantized"
    return quantise, config


def mxfp4() -> tuple[Quantise, dict[str, Any]]:
    def quantise(tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, cols = tensor.shape
        groups = tensor.float().numpy().reshape(rows, cols // 32, 32)
        powers = np.ceil(np.log2(np.abs(groups).max(2) / 6)).astype(np.int32)
        scaled = groups / np.ldexp(np.float32(1), powers)[:, :, None]
        codes = np.abs(scaled[..., None] - E2M1).argmin(3)
        values = (E2M1[codes] * np.ldexp(np.float32(1), powers)[:, :, None]).reshape(rows, cols)
        flat = codes.reshape(rows, cols).astype(np.uint8)
        return {
            "weight_blocks": torch.from_numpy(flat[:, ::2] | flat[:, 1::2] << 4),
            "weight_scales": torch.from_numpy((powers + 127).astype(np.uint8)),
        }, torch.from_numpy(values.astype(np.float32))

    return quantise, {"quant_method": "mxfp4"}
