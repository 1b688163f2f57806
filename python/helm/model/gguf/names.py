"""The tensors of a GGUF file by the names of transformers, in the order of rows that its families
have; knows no plan.

ggml rotates neighbours (2i, 2i + 1) of a head in architecture llama, HELM and transformers rotate
halves (i, i + n/2). Converters to GGUF put the rows of q and k in that order; extents of every
second row undo it, which moves whole blocks and changes no value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from helm.base.arguments import listed, short, shown
from helm.errors import CheckpointError
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.model.gguf.architectures import Architecture
from helm.model.gguf.config import VECTORS, architecture
from helm.model.gguf.file import Gguf
from helm.model.gguf.reader import GgufTensor
from helm.model.rope import rotary_size
from helm.model.source import STORED, Extent, row_width, stored_bytes

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
# Frequencies that old converters stored; the configuration says the same.
_LEFTOVER = re.compile(r"blk\.[0-9]+\.attn_rot_embd(\.weight)?")


def name_tensors(gguf: Gguf, config: ModelConfig) -> dict[str, TensorInfo]:
    """By transformers' names; what is none of the model's keeps its own. A tensor that scales rope
    belongs to the configuration and is left out. Raises CheckpointError."""
    found_architecture = architecture(gguf)
    adjacent, in_block = found_architecture.adjacent, _in_block(found_architecture)
    whole = {**_WHOLE, **found_architecture.whole}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: dict[str, TensorInfo] = {}
    for tensor in gguf.tensors.values():
        if tensor.name in VECTORS or _LEFTOVER.fullmatch(tensor.name):
            continue
        found = _BLOCK.fullmatch(tensor.name)
        name = whole.get(tensor.name, tensor.name)
        if found is not None:
            single = found_architecture.single.get(f"{found[2]}.{found[3]}")
            if single is not None:
                name = f"{found_architecture.block}{found[1]}.{single}"
            elif found[2] in in_block:
                name = f"{found_architecture.block}{found[1]}.{in_block[found[2]]}.{found[3]}"
        _check_vector(gguf, tensor)
        extents: tuple[Extent, ...] = (Extent(tensor.file, tensor.offset, tensor.shape[0]),)
        if adjacent and found is not None and found[2] in heads:
            extents = _in_halves(gguf, tensor, heads[found[2]], config)
        if name in tensors:
            raise CheckpointError(
                f"[load] {gguf.source}: tensors {shown(tensors[name].name)} and "
                f"{shown(tensor.name)} are both the weight {name}; expected one; convert the "
                "original checkpoint again"
            )
        tensors[name] = TensorInfo(tensor.name, tensor.shape, tensor.stored, extents)
    return tensors


def check_tensors(
    gguf: Gguf, tensors: Mapping[str, TensorInfo], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """CheckpointError, with names as in the file, unless it has the weights `wanted`, by
    transformers' names with their shapes, and no others."""
    found = architecture(gguf)
    name = found.model_type
    missing = [_own_name(weight, found) for weight in wanted if weight not in tensors]
    if missing:
        raise CheckpointError(
            f"[load] {gguf.source}: {name} needs {len(missing)} tensors that the file lacks: "
            f"{listed(missing)}; download the whole model"
        )
    for weight, shape in wanted.items():
        if tensors[weight].shape != shape:
            raise CheckpointError(
                f"[load] {gguf.source}: tensor {shown(tensors[weight].name)} has the shape "
                f"{list(tensors[weight].shape)}, its keys say {list(shape)}; convert the original "
                "checkpoint again"
            )
    unknown = [info.name for weight, info in tensors.items() if weight not in wanted]
    if unknown:
        raise CheckpointError(
            f"[load] {gguf.source}: has {len(unknown)} tensors that {name} does not use: "
            f"{short(listed(unknown), 500)}; the answer would be wrong without them, so take "
            "another file or model"
        )


def _in_block(found: Architecture) -> dict[str, str]:
    return {**_IN_BLOCK, **found.names}


def _own_name(weight: str, found: Architecture) -> str:
    """As the file calls a weight of transformers' name."""
    for own, name in {**_WHOLE, **found.whole}.items():
        if name == weight:
            return own
    layer, _, rest = weight.removeprefix(found.block).partition(".")
    for own, name in found.single.items():
        if name == rest:
            return f"blk.{layer}.{own}"
    module, _, kind = rest.rpartition(".")
    own = next(own for own, name in _in_block(found).items() if name == module)
    return f"blk.{layer}.{own}.{kind}"


def _check_vector(gguf: Gguf, tensor: GgufTensor) -> None:
    if len(tensor.shape) == 1 and STORED[tensor.stored].elements > 1:
        raise CheckpointError(
            f"[load] {gguf.source}: tensor {shown(tensor.name)} is a vector in blocks "
            f"({tensor.stored}), expected F32; convert the original checkpoint again"
        )


def _in_halves(
    gguf: Gguf, tensor: GgufTensor, heads: int, config: ModelConfig
) -> tuple[Extent, ...]:
    """Extents that give rows of neighbours the order of halves: of each head first the rows at
    even places, then those at odd ones, then what is not rotated."""
    dim = config.head_dim
    rotary = dim if config.rope is None else rotary_size(config.rope, dim)
    if len(tensor.shape) > 2 or tensor.shape[0] != heads * dim:
        raise CheckpointError(
            f"[load] {gguf.source}: tensor {shown(tensor.name)} has the shape "
            f"{list(tensor.shape)}, expected {heads * dim} rows, {heads} heads of {dim}; convert "
            "the original checkpoint again"
        )
    row = stored_bytes(tensor.stored, row_width(tensor.shape))
    extents = []
    for head in range(heads):
        begin = tensor.offset + head * dim * row
        extents += [Extent(tensor.file, begin + i * row, rotary // 2, 2 * row) for i in (0, 1)]
        if rotary < dim:
            extents.append(Extent(tensor.file, begin + rotary * row, dim - rotary))
    return tuple(extents)
