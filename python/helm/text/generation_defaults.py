"""What a model's generation_config.json recommends. Knows nothing of engines or tokenizers.

Values that cannot be used are left out, each with a notice: such a file only recommends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from helm.base.files import present
from helm.base.jsonio import Reader, read_json
from helm.errors import ConfigError, InvalidError
from helm.model.config import ModelConfig, read_token_id, read_token_ids
from helm.text.sampling import MODEL_DEFAULTS, SamplingParams

T = TypeVar("T")
_SHOWN = 120  # characters of a reason
# What would change the text and is not implemented, with its neutral values beside null.
_NOT_USED: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1,),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), ()),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """None: the file does not say. notices: what of it was left out, and why."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def load_generation_defaults(directory: str | Path, config: ModelConfig) -> GenerationDefaults:
    """Reads `directory`/generation_config.json; ids it lacks, or its absence, fall back to
    `config`. Raises CheckpointError or ConfigError for what is no JSON object."""
    path = Path(directory) / "generation_config.json"
    if not present(path):
        return GenerationDefaults(config.eos_token_ids, config.bos_token_id, config.pad_token_id)
    return read_generation_defaults(read_json(path, ConfigError), path.name, config)


def read_generation_defaults(node: Reader, name: str, config: ModelConfig) -> GenerationDefaults:
    """The defaults in a parsed generation_config.json; notices call it `name`."""
    notices = [
        f"{name}: {key} is not supported and left out"
        for key, neutral in _NOT_USED.items()
        if not node.get(key).null and node[key].value not in neutral
    ]

    def read(key: str, convert: Callable[[Reader], T], otherwise: T) -> T:
        child = Reader(node.get(key).value, name, ConfigError, key)
        if child.null:
            return otherwise
        try:
            return convert(child)
        except InvalidError as reason:
            why = str(reason).partition("] ")[2].partition(" ")[2]  # without place and name
            shown = why if len(why) <= _SHOWN else f"{why[:_SHOWN]}..."
            notices.append(f"{name}: {key}: {shown}; it is left out")
            return otherwise

    def parameter(key: str, own: str = "") -> Any:
        """A value that `SamplingParams` takes, where it is called `own`."""
        own = own or key
        return read(key, lambda c: getattr(SamplingParams(**{own: c.value}), own), None)

    sampling = {key: parameter(key) for key in MODEL_DEFAULTS}
    return GenerationDefaults(
        eos_token_ids=read("eos_token_id", read_token_ids, config.eos_token_ids),
        bos_token_id=read("bos_token_id", read_token_id, config.bos_token_id),
        pad_token_id=read("pad_token_id", read_token_id, config.pad_token_id),
        do_sample=read("do_sample", Reader.boolean, False),
        **sampling,
        max_new_tokens=read("max_new_tokens", lambda child: child.integer(1, 2**62), None),
        stop_strings=parameter("stop_strings", "stop") or (),
        notices=tuple(notices),
    )
