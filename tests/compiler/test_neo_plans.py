"""Plans of services on machines of NEO's (Jiang and others, MLSys 2025), with the rates that
tests/native/serve/neo_test.cc has of them: split steps serve most where NEO gains most."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plans import study

from helm.compiler.explain import serving_of
from helm.machine.profile import Profile
from helm.model.families import parse_config

# GB of the card, its bytes/s and FLOP/s, GB of the host, its bytes/s.
T4 = (15.8, 250e9, 25e12, 40, 60e9)
A10G = (23.0, 500e9, 60e12, 200, 180e9)  # g5.16xlarge
LLAMA_2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
}  # fmt: skip
LLAMA_3_8B = LLAMA_2_7B | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def machine(
    vram_gb: float, vram_bytes_per_s: float, flops: float, ram_gb: float, ram_bytes_per_s: float
) -> Profile:
    kinds = ("f32", "f16", "bf16")

    def device(memory_gb: float, bytes_per_s: float, rate: float) -> dict[str, Any]:
        return {
            "memory_bytes": int(memory_gb * 1e9),
            "matvec_bytes_per_s": dict.fromkeys(kinds, bytes_per_s),
            "matmul_flops": {name: {"1": rate, "512": rate} for name in kinds},
            "attention_bytes_per_s": dict.fromkeys((*kinds, "i8"), bytes_per_s),
            "attention_flops": dict.fromkeys((*kinds, "i8"), 0.6 * rate),
            "activation_bytes_per_s": bytes_per_s,
            "op_s": 2e-6,
            "step_s": 2e-5,
        }

    cpu = device(ram_gb, ram_bytes_per_s, 1e12)
    accelerator = device(vram_gb, vram_bytes_per_s, flops)
    ends = (f"{kind}to_{end}" for kind in ("", "pageable_") for end in ("accelerator", "host"))
    link = {f"{end}_bytes_per_s": 10e9 for end in ends}
    return Profile.from_json(json.dumps({
        "format": "helm-profile", "version": 2, "name": "NEO", "estimated": True,
        "identity": {"source": "tests/native/serve/neo_test.cc"},
        "cpu": {**cpu, "threads": 1, "thread_sweep": {"1": ram_bytes_per_s}},
        "accelerator": {**accelerator, "name": "card", "reserve_bytes": 0, "stage_s": 2e-5},
        "link": {**link, "latency_s": 7e-5, "cpu_rate_while_copying": 0.9,
                 "rate_while_both_compute": 1.0},
    }))  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "config", "tokens", "page_tokens", "at_once", "least"),
    [(T4, LLAMA_2_7B, (200, 100), 16, 64, 2.0), (A10G, LLAMA_3_8B, (1000, 200), 128, 128, 1.2)],
    ids=["T4", "A10G"],
)
def test_split_steps_are_planned_where_neo_has_them(
    rates: Any, config: dict[str, Any], tokens: Any, page_tokens: int, at_once: int, least: float
) -> None:
    """Of many requests; joint ones of few."""
    found = study(
        "a model", parse_config(config, "a model"), None, machine(*rates), batch=at_once,
        objective="serve", prompt=tokens[0], output=tokens[1], context=sum(tokens),
        page_tokens=page_tokens, kv_overflow="cpu",
    )  # fmt: skip
    serves = serving_of(found)
    assert serves is not None
    modes = [rate.mode for rate in serves.rates]
    near = max(rate.tokens_per_s for rate in serves.rates if rate.mode == "near")
    assert modes[-1] == "split"
    assert serves.rates[-1].tokens_per_s >= least * near
    assert modes == sorted(modes, key=["near", "joint", "split"].index)
