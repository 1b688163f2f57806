"""What HELM says of a family that it does not run: the nearest that it runs, and what it lacks.

Keys of config.json tell what a model has that no family here has. Of those that run, it knows no
name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

_LACKING = {
    "latent attention": ("kv_lora_rank",),
    "gated delta nets": ("linear_num_value_heads", "linear_conv_kernel_dim"),
    "state space layers": ("state_size", "ssm_cfg", "mamba_d_state", "mamba_n_heads", "d_state"),
    "KV shared between layers": ("num_kv_shared_layers",),
    "encoders": ("is_encoder_decoder", "encoder_layers"),
    "alibi": ("alibi",),
}
# Beginnings of names that people try, without dots and dashes, and what HELM would need for them.
_KNOWN = {
    "deepseek": "latent attention",
    "kimi": "latent attention",
    "qwen35": "gated delta nets",
    "qwen3next": "gated delta nets",
}
KNOWN = "; HELM knows this family and does not run it yet"
_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model")


def lacks(values: Mapping[str, Any]) -> list[str]:
    """What a configuration with these keys needs that HELM does not run."""
    inner = values.get("text_config")
    keys = {**values, **(inner if isinstance(inner, dict) else {})}
    return [what for what, names in _LACKING.items() if any(keys.get(name) for name in names)]


def nearest(name: str, known: Collection[str]) -> str | None:
    """The most similar of the known names."""
    by_stem = {_stem(one): one for one in known}
    close = difflib.get_close_matches(_stem(name), by_stem, 1, 0.6)
    return by_stem[close[0]] if close else None


def needed(name: str) -> str | None:
    """What a family that HELM knows and does not run needs; None of any other."""
    plain = "".join(letter for letter in name.casefold() if letter.isalnum())
    return next((need for begin, need in _KNOWN.items() if plain.startswith(begin)), None)


def said_of(name: str, values: Mapping[str, Any], known: Collection[str]) -> str:
    """The end of a sentence that refuses a model: "; ..."."""
    close, missing = nearest(name, known), lacks(values)
    near = "" if close is None else f"; the nearest that is: {close}"
    needs = needed(name)
    if needs is not None:
        near = f"{KNOWN}{near}"
        missing = [needs, *(what for what in missing if what != needs)]
    lacking = f"; HELM lacks {' and '.join(missing)}" if missing else ""
    return f"{near}{lacking}; supported are {', '.join(sorted(known))}"


def _stem(name: str) -> str:
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name.casefold()
