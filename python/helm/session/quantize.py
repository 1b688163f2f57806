"""Saves a model in HELM's own formats: a folder that is mapped as it lies, with what that cost in
accuracy."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from helm.base.arguments import check_flag, count, is_one_of, shown
from helm.base.files import decoded
from helm.base.formats import FORMATS, PACKED_POLICIES
from helm.base.new_folder import check_room, new_folder, refuse_existing
from helm.base.paths import permitted
from helm.base.progress import Progress, progress_bar
from helm.compiler.tensors import check_checkpoint, choose_formats
from helm.errors import InvalidError, OutOfMemoryError
from helm.machine.resources import cpu_affinity
from helm.model.families import build_graph
from helm.model.hub import hub_id, resolve_model
from helm.model.model_files import ModelFiles, read_model
from helm.model.weight_names import NamedWeights, as_saved
from helm.session.compare_models import Divergence, compare
from helm.session.packed_weights import Packed, PackedFile, packed_file, write_packed
from helm.text.of_model import companions, tokenizer_of

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Quantized:
    """What was saved. bytes: of the folder; source_bytes: of the weights that it was made of.
    formats: what matrices became, by format. divergence: of its answers; None where they were not
    compared, which `notices` say."""

    folder: Path
    bytes: int
    source_bytes: int
    formats: dict[str, Packed]
    divergence: Divergence | None
    seconds: float
    notices: tuple[str, ...]


def quantize(
    model: str | os.PathLike[str] | None,
    folder: str | os.PathLike[str] | None = None,
    *,
    to: str,
    revision: str | None = None,
    requantize: bool = False,
    compare_answers: bool = True,
    threads: int | None = None,
    progress: Progress | bool | None = None,
) -> Quantized:
    """Saves a model with its matrices in 8 or 4 bits, as a folder that loads without being
    quantised again.

    model, revision: as for `LLM`. folder: a new one; None: in the present directory, named after
    the model and `to`. to: "q8" or the smaller "q4", as `LLM(dtype=)` holds weights, so that
    answers are the same, to the bit. requantize: also what is quantised already, which loses more.
    compare_answers: whether answers to a short text are compared, for which both models are loaded.
    threads: None for as many as there are CPUs. progress: called with (weights done, weights); True
    or False: whether there is a bar; None: where somebody watches.

    The folder appears whole or not at all. Raises InvalidError for a folder that exists, a disk
    without room and a model that is quantised, CheckpointError for weights that are NaN, infinite
    or too large for scales, and what `LLM` raises for a model that cannot be read.
    """
    begin = time.monotonic()
    check_flag(requantize, "[quantize] requantize")
    check_flag(compare_answers, "[quantize] compare_answers")
    if not is_one_of(to, PACKED_POLICIES):
        raise InvalidError(f"[quantize] to is {shown(to)}; expected {' or '.join(PACKED_POLICIES)}")
    workers = len(cpu_affinity()) if threads is None else count(threads, "[quantize] threads")
    place = resolve_model(model, revision)
    target = Path(f"{_name(place)}-{to}" if folder is None else os.path.expanduser(folder))
    _refuse_source(place, target)
    refuse_existing(target, "quantize")
    with permitted("load"):
        files = read_model(place)
        weights = files.weights()
    if not requantize:
        _refuse_quantised(weights, str(place))
    file = _planned(weights, to)
    beside = companions(files)
    check_room(target, file.bytes + sum(map(len, beside.values())), "quantize")
    with new_folder(target, "quantize") as part:
        with progress_bar(progress, f"quantising to {to}", " weights", "quantize") as report:
            formats = write_packed(file, part / WEIGHTS, files.folder, workers, report)
        for name, content in _fitting(beside, files, weights).items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(content)
        divergence, notices = None, weights.notices
        if compare_answers:
            divergence, more = _compared(files, part, threads)
            notices += more
        size = sum(entry.stat().st_size for entry in part.rglob("*") if entry.is_file())
    source_bytes = sum(info.nbytes for info in file.infos.values())
    took_s = time.monotonic() - begin
    return Quantized(target, size, source_bytes, formats, divergence, took_s, notices)


def _planned(weights: NamedWeights, to: str) -> PackedFile:
    graph = build_graph(weights.config)
    check_checkpoint(graph, weights.tensors)
    formats = choose_formats(graph, weights.config, weights.tensors, to)
    tensors = {
        name: info if FORMATS[formats[name]].packed else as_saved(name, info, weights.config)
        for name, info in weights.tensors.items()
    }
    return packed_file(tensors, formats)


def _name(place: Path) -> str:
    """What to call the model at a place."""
    own = place.resolve()
    found = hub_id(place)
    return own.stem if own.is_file() else own.name if found is None else found.split("/")[-1]


def _refuse_source(place: Path, target: Path) -> None:
    sources = [place] if place.is_dir() else [place, place.parent]
    if target.exists() and any(target.samefile(source) for source in sources):
        raise InvalidError(
            f"[quantize] {target} is where the model itself lies; expected the name of a new "
            "folder; name another"
        )


def _refuse_quantised(weights: NamedWeights, source: str) -> None:
    found = sorted(
        {
            info.weight_dtype
            for info in weights.tensors.values()
            if len(info.shape) == 2 and info.dtype is None
        }
    )
    if found:
        raise InvalidError(
            f"[quantize] {source} is quantised already: matrices are stored as "
            f"{', '.join(found)}; expected f32, f16 or bf16; take the original model, or allow to "
            "lose more with requantize="
        )


def _fitting(
    beside: dict[str, bytes], files: ModelFiles, weights: NamedWeights
) -> dict[str, bytes]:
    """With a configuration of what was written. The dtype of the weights decides that of the KV
    cache: the configuration says it where packed ones do not."""
    config = json.loads(decoded(beside["config.json"]))
    wide = any(info.dtype == "bf16" for info in weights.tensors.values())
    if wide and files.config.dtype != "bf16":
        config.pop("torch_dtype", None)
        config["dtype"] = "bfloat16"
    elif "quantization_config" not in config:
        return beside
    config.pop("quantization_config", None)
    return {**beside, "config.json": json.dumps(config, indent=2).encode()}


def _compared(
    source: ModelFiles, part: Path, threads: int | None
) -> tuple[Divergence | None, tuple[str, ...]]:
    made = read_model(part)
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        return None, ("the answers were not compared, as the model has no tokenizer",)
    try:
        return compare(source, made, tokenizer, threads), ()
    except OutOfMemoryError as error:
        return None, (f"the answers were not compared, as memory does not hold it: {error}",)
