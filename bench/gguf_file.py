"""GGUF files to measure: of synthetic checkpoints, also in blocks, and published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open

if TYPE_CHECKING:
    import gguf
    import torch

BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.experts.*.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


# llama.cpp's enum llama_ftype.
BLOCKS = {
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1",
    "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
}
MODEL = "model.gguf"


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{BLOCK[module]}.{kind}"


def in_gguf_order(name: str, tensor: torch.Tensor, config: dict) -> torch.Tensor:
    """The tensor as llama.cpp wants it: of Llama it rotates neighbouring elements of a head where
    Hugging Face rotates halves, so the rows of Q and K change places."""
    if config["model_type"] != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    half = config["head_dim"] // 2
    return tensor.reshape(-1, 2, half, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


def new_writer(path: Path, config: dict) -> gguf.GGUFWriter:
    """A writer that has the keys of a model without a tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(path, config["model_type"].replace("_", ""))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    return writer


def write_gguf(folder: Path) -> Path:
    """The GGUF file beside the checkpoint in `folder`, written unless it is there."""
    import gguf
    import torch

    target = folder / MODEL
    if target.exists():
        return target
    config = json.loads((folder / "config.json").read_text())
    partial = target.with_suffix(".partial")
    writer = new_writer(partial, config)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = in_gguf_order(name, file.get_tensor(name), config).contiguous()
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
            elif tensor.dtype == torch.bfloat16:
                bits = tensor.view(torch.uint8).numpy().view(np.uint8)
                writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


def quantised(checkpoint: Path, kind: str) -> Path:
    """The folder of a synthetic checkpoint whose GGUF file llama.cpp has quantised, a key of
    BLOCKS; made unless it is there."""
    import llama_cpp

    folder = checkpoint.with_name(f"{checkpoint.name}-{kind}")
    folder.mkdir(exist_ok=True)
    if not (folder / MODEL).exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, BLOCKS[kind])
        partial = folder / "partial.gguf"
        failed = llama_cpp.llama_model_quantize(
            str(write_gguf(checkpoint)).encode(), str(partial).encode(), params
        )
        assert not failed, f"llama.cpp did not quantise {checkpoint} to {kind}"
        partial.rename(folder / MODEL)
    return described(folder)


def published(file: Path, root: Path) -> Path:
    """The folder in which engines find a GGUF file as MODEL."""
    folder = root / file.stem
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MODEL).exists():
        (folder / MODEL).symlink_to(file.resolve())
    return described(folder)


def described(folder: Path) -> Path:
    """With the config that the file's keys mean."""
    from helm.model.gguf.config import config_of
    from helm.model.gguf.file import read_gguf

    config = config_of(read_gguf(folder / MODEL))
    if "head_dim" not in config:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def step_weight_bytes(folder: Path) -> int:
    """What a decode step of one sequence reads of a GGUF file's matrices, in its blocks; of
    experts, those that a token has."""
    import gguf

    tensors = {t.name: t for t in gguf.GGUFReader(folder / MODEL).tensors}
    unread = {"token_embd.weight"} if "output.weight" in tensors else set()
    read = sum(
        int(t.n_bytes) for t in tensors.values() if len(t.shape) == 2 and t.name not in unread
    )
    stacks = [t for t in tensors.values() if len(t.shape) == 3]  # [columns, rows, experts]
    if stacks:
        chosen = json.loads((folder / "config.json").read_text())["num_experts_per_tok"]
        read += sum(int(t.n_bytes) // int(t.shape[2]) * chosen for t in stacks)
    return read
