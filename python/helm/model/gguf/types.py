"""The element types of GGUF files: which HELM reads and how large their blocks are.

A block holds the elements of one run along a row. Sizes are those of ggml.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """name: as ggml calls the type. elements: of one block along a row. block_bytes: what one block
    takes in the file. format: that of weights which holds them exactly."""

    name: str
    elements: int
    block_bytes: int
    format: str

    @property
    def stored(self) -> str:
        """As a plan calls it: a dtype, or "ggml.q4_0" and kin."""
        plain = self.elements == 1
        return self.name.lower() if plain else f"ggml.{self.name.lower()}"

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` elements, which are whole blocks."""
        return cols // self.elements * self.block_bytes


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, "f32"),
    1: BlockType("F16", 1, 2, "f16"),
    2: BlockType("Q4_0", 32, 18, "c4.s32"),
    3: BlockType("Q4_1", 32, 20, "c4.m32"),
    6: BlockType("Q5_0", 32, 22, "c5.s32"),
    7: BlockType("Q5_1", 32, 24, "c5.m32"),
    8: BlockType("Q8_0", 32, 34, "c8.s32"),
    10: BlockType("Q2_K", 256, 84, "c4.km16"),
    11: BlockType("Q3_K", 256, 110, "c4.k16o4"),
    12: BlockType("Q4_K", 256, 144, "c4.km32"),
    13: BlockType("Q5_K", 256, 176, "c5.km32"),
    14: BlockType("Q6_K", 256, 210, "c6.k16"),
    20: BlockType("IQ4_NL", 32, 18, "nl4.s32"),
    23: BlockType("IQ4_XS", 256, 136, "nl4.k32"),
    30: BlockType("BF16", 1, 2, "bf16"),
    39: BlockType("MXFP4", 32, 17, "mx4.e32"),
}

_SMALL = "take a file of this model in Q2_K, Q3_K_M or Q4_K_M, or make one with llama-quantize"
_OLD = "take a newer file of this model, or convert the original checkpoint again"
_REPACKED = "take the Q4_0 or IQ4_NL file of this model"
_OTHER = "take a file of this model in Q8_0, Q4_K_M or BF16"
# What HELM does not read: the type's name and the way out.
_REFUSED: dict[int, tuple[str, str]] = {
    4: ("Q4_2", _OLD),
    5: ("Q4_3", _OLD),
    9: ("Q8_1", _OTHER),
    15: ("Q8_K", _OTHER),
    16: ("IQ2_XXS", _SMALL),
    17: ("IQ2_XS", _SMALL),
    18: ("IQ3_XXS", _SMALL),
    19: ("IQ1_S", _SMALL),
    21: ("IQ3_S", _SMALL),
    22: ("IQ2_S", _SMALL),
    24: ("I8", _OTHER),
    25: ("I16", _OTHER),
    26: ("I32", _OTHER),
    27: ("I64", _OTHER),
    28: ("F64", _OTHER),
    29: ("IQ1_M", _SMALL),
    31: ("Q4_0_4_4", _REPACKED),
    32: ("Q4_0_4_8", _REPACKED),
    33: ("Q4_0_8_8", _REPACKED),
    34: ("TQ1_0", _SMALL),
    35: ("TQ2_0", _SMALL),
    36: ("IQ4_NL_4_4", _REPACKED),
    37: ("IQ4_NL_4_8", _REPACKED),
    38: ("IQ4_NL_8_8", _REPACKED),
    40: ("NVFP4", _OTHER),
    41: ("Q1_0", _SMALL),
}


def refusal(number: int) -> str:
    """Why a tensor of type `number` is not read, and what would do; for numbers not in TYPES."""
    known = ", ".join(kind.name for kind in TYPES.values())
    if number in _REFUSED:
        name, remedy = _REFUSED[number]
        return f"is stored as {name}; HELM reads {known}; {remedy}"
    return (
        f"has the unknown type {number}; HELM reads {known}; {_OTHER}, or update HELM if the file "
        "is newer than it"
    )
