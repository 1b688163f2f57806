"""OLMo 3: OLMo 2 with windows. Knows nothing of machines or placement."""

from __future__ import annotations

import dataclasses

from helm.base.jsonio import Reader
from helm.model.config import Keys, ModelConfig
from helm.model.families.decoder import read_decoder, with_windows
from helm.model.families.family import Family
from helm.model.families.olmo2 import DEFAULTS_OF_OLMO, build
from helm.model.rope import check_rope, parse_rope

_ARCHITECTURE = "Olmo3ForCausalLM"
_DEFAULTS = {**DEFAULTS_OF_OLMO, "sliding_window": 4096}
_THETA = 500000.0


def read(node: Reader) -> ModelConfig:
    """Three of four layers have a window; what scales rope is not for them."""
    keys = Keys(node, _DEFAULTS)
    config = read_decoder(keys, _ARCHITECTURE, theta=_THETA, layers="full_attention")
    slides = [(layer + 1) % 4 != 0 for layer in range(config.num_hidden_layers)]
    config = with_windows(config, node, keys.get("sliding_window"), slides)
    most = config.max_position_embeddings
    local = parse_rope(node, most, theta=_THETA, layers="sliding_attention")
    check_rope(local, config.head_dim, node)
    return dataclasses.replace(config, local_rope=local)


FAMILY = Family(_ARCHITECTURE, "olmo3", _DEFAULTS, read, build)
