"""Which kind of quantised checkpoint a config.json describes. Reads no tensors.

Kinds are those of GPTQ (AutoGPTQ, GPTQModel), AutoAWQ, compressed-tensors (LLM Compressor),
transformers' "fp8" and gpt-oss's "mxfp4". The tensors themselves say the rest.
"""

from __future__ import annotations

from typing import NoReturn

from helm.base.arguments import shown
from helm.base.jsonio import Reader
from helm.errors import UnsupportedModelError

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
_CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
_WAY_OUT = "use the f32, f16 or bf16 checkpoint of this model, or a GGUF file of it"


def read_quantization(config: Reader) -> str | None:
    """How weights are stored, from a whole config.json: "gptq4", "gptq8", with "v2" at the end
    where zero points are stored as they are, or one of the other METHODS; None where config.json
    says nothing. UnsupportedModelError for what HELM does not read."""
    node = config.get("quantization_config")
    if node.null:
        return None
    method = node.value.get("quant_method") if isinstance(node.value, dict) else None
    name = method if isinstance(method, str) else None
    if name not in METHODS:
        by = "" if method is None else f" by {shown(method)}"
        _refuse(node, f"weights quantised{by} are not supported; expected {', '.join(METHODS)}")
    if name == "gptq":
        return _gptq(node)
    if name == "awq":
        _awq(node)
    elif name == "compressed-tensors":
        _compressed_tensors(node)
    elif name == "fp8":
        _fp8(node)
    return name


def _gptq(node: Reader) -> str:
    bits = node["bits"]
    if type(bits.value) is not int or bits.value not in (4, 8):
        _refuse(bits, f"{shown(bits.value)} bits are not supported; expected 4 or 8")
    _choice(node, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    marlin = node.get("is_marlin_format", False)
    if marlin.value not in (False, None):
        _refuse(marlin, "weights in Marlin's order are not supported; expected GPTQ's own")
    v2 = node.get("checkpoint_format").value == "gptq_v2"
    return f"gptq{bits.value}{'v2' if v2 else ''}"


def _awq(node: Reader) -> None:
    bits = node.get("bits", 4)
    if type(bits.value) is not int or bits.value != 4:
        _refuse(bits, f"{shown(bits.value)} bits are not supported; expected 4")
    _choice(node, "version", ("gemm",), "gemm")


def _compressed_tensors(node: Reader) -> None:
    _choice(node, "format", _CT_FORMATS, "dense")
    for key in ("sparsity_config", "transform_config"):
        found = node.get(key)
        if found.value and found.value != {"format": "dense"}:
            _refuse(found, "is not supported; expected none")


def _fp8(node: Reader) -> None:
    _choice(node, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = node.get("weight_block_size")
    if not block.null and block.value != [128, 128]:
        _refuse(block, f"{shown(block.value)} is not supported; expected [128, 128] or none")


def _choice(node: Reader, key: str, known: tuple[str, ...], default: str) -> None:
    found = node.get(key)
    value = default if found.null else found.value
    if not isinstance(value, str) or value.casefold() not in known:
        _refuse(found, f"{shown(value)} is not supported; expected {' or '.join(known)}")


def _refuse(node: Reader, message: str) -> NoReturn:
    raise UnsupportedModelError(f"[{node.subject}] {node.path}: {message}; {_WAY_OUT}")
