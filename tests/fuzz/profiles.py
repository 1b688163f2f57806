"""Machine profiles, and plans made by them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

from plans import study

from fuzz import models, mutate
from fuzz.kind import Kind, sensible
from helm.compiler.explain import to_dict
from helm.machine.profile import load_profile, preset_names
from helm.model.families import parse_config


class ProfileFile(Kind):
    """A profile file, read and planned with."""

    name = "profile"
    limit_s = 10.0  # a search is no small thing
    inputs = 1100

    def __init__(self, folder: Path) -> None:
        self._profiles = [load_profile(name).to_dict() for name in preset_names()]
        self._config = parse_config(models.config_of("Qwen3ForCausalLM"))

    def run(self, random: Random, folder: Path) -> None:
        path = folder / "machine.json"
        document = mutate.json_value(random, random.choice(self._profiles))
        path.write_bytes(mutate.dumped(random, document))
        if random.random() < 0.05:
            mutate.file(random, path)
        profile = load_profile(path)
        again = type(profile).from_json(profile.to_json())
        sensible(again.digest == profile.digest, "a profile that reads otherwise when written")
        if random.random() < 0.3:
            return
        request = {"prompt": random.choice((1, 100)), "output": 10, "context": 128}
        plan = to_dict(study("tiny", self._config, None, profile, **request))
        json.dumps(plan, allow_nan=False)
        for name in ("ttft_s", "decode_s", "total_s", "decode_tokens_per_s"):
            value = plan["predicted"][name]
            sensible(math.isfinite(value) and value >= 0, f"{name} is {value}")
