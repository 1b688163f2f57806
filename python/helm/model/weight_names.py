"""Which stored tensor is which weight of a model. Knows names, and nothing of plans.

Weights go by the names that transformers saves. A checkpoint may have them behind a wrapper's name,
without the base model's, or with what a text model does not need beside them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from helm.base.arguments import listed
from helm.errors import CheckpointError
from helm.model.checkpoint import TensorInfo, same_data
from helm.model.checkpoint.pieces import with_pieces, zero_biases
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.config import ModelConfig
from helm.model.families import FAMILIES, build_graph
from helm.model.graph import Embedding, Linear
from helm.model.source import COLUMNS, PACKED, Extent, Piece, row_width, stored_bytes
from helm.model.stacked import check_routers, with_stacks

HEAD = "lm_head.weight"
# Modules that hold a whole model, or a part of it, and change nothing: of torch.compile,
# DistributedDataParallel, FSDP and activation checkpoints.
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Parts of multimodal models that are not the text model.
_OTHER = re.compile(
    r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower"
    r"|embed_vision|embed_audio|patch_merger)\."
)
# Tables and masks that older exporters stored, and the heads of models that rate or classify text.
_LEFTOVER = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(self_)?att(n|ention)\.(masked_)?bias"
    r"|causal_mask|position_ids|embed_positions\._float_tensor|decoder\.version)$"
    r"|(^|\.)(v_head|value_head|score|reward_head|classifier|qa_outputs)\."
)


@dataclass(frozen=True)
class NamedWeights:
    """config: with `tie_word_embeddings` as the tensors have it. tensors: by transformers' names,
    each with the name under which it is stored; what is none of the model's has its own."""

    config: ModelConfig
    tensors: dict[str, TensorInfo]
    notices: tuple[str, ...]


def read_weights(
    directory: str | Path,
    config: ModelConfig,
    same: Callable[[TensorInfo, TensorInfo], bool] | None = None,
) -> NamedWeights:
    """The weights in a folder. same: see `name_weights`; None compares the data. Raises what
    `read_checkpoint`, `with_pieces` and `name_weights` raise."""
    stored, notices = with_pieces(Path(directory), read_checkpoint(directory), config)
    named = name_weights(config, stored, same or (lambda a, b: same_data(directory, a, b)))
    zeros = zero_biases(Path(directory), named.tensors, build_graph(named.config).tensors)
    if zeros:
        notices += (f"left out {len(zeros)} biases that are zeros: {listed(zeros)}",)
    tensors = {
        name: _arranged(name, info, config)
        for name, info in named.tensors.items()
        if name not in zeros
    }
    return NamedWeights(named.config, tensors, (*notices, *named.notices))


def name_weights(
    config: ModelConfig,
    stored: Mapping[str, TensorInfo],
    same: Callable[[TensorInfo, TensorInfo], bool],
) -> NamedWeights:
    """Finds the model's weights among `stored`; helm.compiler.tensors checks that they are all.

    A tied head that is stored, too, is the embedding where `same` says so, and a head of its own
    where not, as in transformers; where only one of both is stored, it is both. Raises
    CheckpointError for names that could be two weights.
    """
    graph = build_graph(config)
    embed = graph.units[0].ops[0]
    assert isinstance(embed, Embedding)
    base = embed.table[: embed.table.removesuffix(".weight").rfind(".") + 1]
    anchor = next(op.parts[0].weight for op in graph.units[1].ops if isinstance(op, Linear))
    other = [name for name in stored if _OTHER.search(name) and name not in graph.tensors]
    text = {name: info for name, info in stored.items() if name not in set(other)}
    aliases = FAMILIES[config.architecture].aliases
    tensors = _renamed(text, base, graph.tensors, anchor.removeprefix(base), aliases)
    notices = []
    if other:
        notices.append(
            f"left out {len(other)} tensors of images or sound, which HELM does not take: "
            f"{listed(other)}"
        )
    left = [n for n in tensors if n not in graph.tensors and _LEFTOVER.search(n)]
    if left:
        notices.append(f"left out {len(left)} tensors that text does not need: {listed(left)}")
    for name in left:
        del tensors[name]
    guessing = _drafting(tensors, base, config)
    if guessing:
        notices.append(
            f"left out {len(guessing)} tensors of layers that guess tokens: {listed(guessing)}"
        )
    tensors = with_stacks({n: i for n, i in tensors.items() if n not in guessing}, graph)
    check_routers(tensors, graph)
    if config.tie_word_embeddings and HEAD in tensors:
        if embed.table not in tensors:
            tensors[embed.table] = tensors.pop(HEAD)
        elif same(tensors[embed.table], tensors[HEAD]):
            del tensors[HEAD]
        else:
            config = dataclasses.replace(config, tie_word_embeddings=False)
            notices.append(
                f"config.json ties the head to the embedding, but {HEAD} is another matrix; it is "
                "used"
            )
    return NamedWeights(config, tensors, tuple(notices))


def _drafting(tensors: Iterable[str], base: str, config: ModelConfig) -> list[str]:
    """Those of the layers behind the last that guess tokens."""
    first = config.num_hidden_layers
    layers = range(first, first + config.drafting_layers)
    begins = tuple(f"{base}layers.{layer}." for layer in layers)
    return [name for name in tensors if name.startswith(begins)] if begins else []


def _renamed(
    stored: Mapping[str, TensorInfo],
    base: str,
    wanted: Iterable[str],
    anchor: str,
    aliases: Mapping[str, str],
) -> dict[str, TensorInfo]:
    """By transformers' names. base: what those of the base model begin with; wanted: all names;
    anchor: one of the first layer, without the base; aliases: see `Family`.

    What lies beside the first block is the base model, whatever its names begin with there; the
    head may stand beside any of the modules around it.
    """
    parts = {name[len(base) :].split(".")[0] for name in wanted if name.startswith(base)}
    plain = {name: ".".join(p for p in name.split(".") if p not in _WRAPPERS) for name in stored}
    found = {n.removesuffix(anchor) for n in plain.values() if f".{n}".endswith(f".{anchor}")}
    if len(found) > 1 and base not in found:
        raise CheckpointError(
            f"[load] the checkpoint holds {len(found)} models, with names that begin with "
            f"{', '.join(map(repr, sorted(found)))}; expected one; save the language model alone"
        )
    prefix = base if base in found or not found else found.pop()
    tensors: dict[str, TensorInfo] = {}
    for old, name in plain.items():
        rest = name.removeprefix(prefix)
        if name.startswith(prefix) and rest.split(".")[0] in parts:
            name = base + rest
        elif name in aliases:
            name = aliases[name]
        elif f".{name}".endswith(f".{HEAD}") and prefix.startswith(name.removesuffix(HEAD)):
            name = HEAD
        if name in tensors:
            raise CheckpointError(
                f"[load] {tensors[name].name!r} and {old!r} are both the weight {name!r}; expected "
                "one; save the model anew without the wrapper"
            )
        tensors[name] = stored[old]
    return tensors


def rows_by_kind(name: str, config: ModelConfig) -> list[range] | None:
    """Of a weight that a checkpoint has as rows [head][q, k, v], the runs of rows that HELM stacks;
    None of any other."""
    modules = FAMILIES[config.architecture].by_head
    if not any(name.rpartition(".")[0].endswith(f".{module}") for module in modules):
        return None
    heads, dim = config.num_attention_heads, config.head_dim
    begins = ((3 * head + kind) * dim for kind in range(3) for head in range(heads))
    return [range(begin, begin + dim) for begin in begins]


def as_saved(name: str, info: TensorInfo, config: ModelConfig) -> TensorInfo:
    """The dense tensor with its rows in the order that a checkpoint has."""
    runs = rows_by_kind(name, config)
    if runs is None:
        return info
    parts = info.extents
    if len(parts) == 1:
        width = stored_bytes(info.weight_dtype, row_width(info.shape))
        begins = itertools.accumulate(map(len, runs), initial=0)
        parts = tuple(
            Extent(parts[0].file, parts[0].offset + begin * width, len(run))
            for begin, run in zip(begins, runs, strict=False)
        )
    by_row = sorted(zip(runs, parts, strict=True), key=lambda pair: pair[0].start)
    return dataclasses.replace(info, extents=tuple(part for _, part in by_row))


def lies_by_column(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint has the weight as [columns, rows]."""
    module, _, kind = name.rpartition(".")
    modules = FAMILIES[config.architecture].by_column
    return kind == "weight" and any(module.endswith(f".{own}") for own in modules)


def _arranged(name: str, info: TensorInfo, config: ModelConfig) -> TensorInfo:
    """The tensor with its rows in the order that HELM needs. Raises CheckpointError."""
    if info.stored in PACKED:  # by HELM itself
        return info
    if lies_by_column(name, config):
        return _by_column(info)
    runs = rows_by_kind(name, config)
    if runs is None:
        return info
    if info.aux or len(info.extents) != 1 or info.shape[0] != runs[-1].stop:
        raise CheckpointError(
            f"[load] tensor {info.name!r} in {info.file} is quantised or has not {runs[-1].stop} "
            "rows; expected q, k and v of every head in F32, F16 or BF16; take the original model"
        )
    width, extent = stored_bytes(info.weight_dtype, row_width(info.shape)), info.extents[0]
    extents = (Extent(extent.file, extent.offset + r.start * width, len(r)) for r in runs)
    return dataclasses.replace(info, extents=tuple(extents))


def _by_column(info: TensorInfo) -> TensorInfo:
    """The matrix of which a checkpoint has the columns one after the other."""
    if info.aux or info.dtype is None or len(info.shape) != 2:
        raise CheckpointError(
            f"[load] tensor {info.name!r} in {info.file} is quantised or no matrix; expected "
            "columns of F32, F16 or BF16; take the original model"
        )
    [extent] = info.extents
    piece = Piece("weight", info.dtype, info.shape, extent.file, extent.offset)
    return TensorInfo(info.name, info.shape[::-1], COLUMNS, (), (piece,), info.dtype)
