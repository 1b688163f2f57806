"""Command-R7B and Command-A. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.cohere import DEFAULTS_OF_COHERE, NAMES, build, read_cohere
from helm.model.families.decoder import with_windows
from helm.model.families.family import Family

_ARCHITECTURE = "Cohere2ForCausalLM"
_DEFAULTS = {**DEFAULTS_OF_COHERE, "sliding_window": 4096}


def read(node: Reader) -> ModelConfig:
    """Three of four layers have a window and rope, the others have neither."""
    keys = Keys(node, _DEFAULTS, NAMES)
    config = read_cohere(keys, _ARCHITECTURE, 10000.0)
    pattern = node.get("sliding_window_pattern", 4).integer(1, 2**31)
    slides = [(layer + 1) % pattern != 0 for layer in range(config.num_hidden_layers)]
    config = with_windows(config, node, keys.get("sliding_window"), slides)
    whole = tuple(layer for layer, window in enumerate(config.windows) if window == 0)
    return dataclasses.replace(config, unrotated=whole)


FAMILY = Family(_ARCHITECTURE, "cohere2", _DEFAULTS, read, build)
