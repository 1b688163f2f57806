"""What an accelerator can do with the formats of weights. Knows no placement."""

from __future__ import annotations

from helm.compiler.problem import PUBLISHED_POLICIES, Policy
from helm.errors import InvalidError
from helm.machine.profile import Profile
from helm.plan.schema import Plan


def check_vram(profile: Profile | None, vram_bytes: int | None, kv_vram_bytes: int | None) -> None:
    """InvalidError where memory of an accelerator was limited and there is none; no profile stands
    for the CPU alone."""
    if profile is not None and profile.accelerator is not None:
        return
    reason = "the model runs on the CPU alone"
    if profile is not None:
        reason = f"{profile.name} has no accelerator"
    for what, option, given in (
        ("memory of an accelerator was", "vram_bytes=", vram_bytes),
        ("KV pages in accelerator memory were", "kv_vram_bytes=", kv_vram_bytes),
    ):
        if given:
            raise InvalidError(
                f"[plan] {what} limited with {option}, but {reason}; choose an accelerator with "
                "device=, or another profile=, or leave the limit out"
            )


def slow_bf16(plan: Plan, profile: Profile | None, most: str) -> list[str]:
    """Says so where the accelerator has no units for the weights that it multiplies. most: the
    format of most of them."""
    own = None if profile is None else profile.accelerator
    if own is None or plan.accelerator is None or most != "bf16":
        return []
    rates = own.matmul_flops
    if not {"bf16", "f16"} <= rates.keys():
        return []
    tokens = plan.limits.step_tokens
    share = float(own.matmul_rate("bf16", tokens) / own.matmul_rate("f16", tokens))
    if share >= 0.5:
        return []
    return [
        f"{own.name} multiplies bf16 at {share:.2g} of its f16 rate, as GPUs before Ampere do; "
        "prompts would be faster with dtype='f16', whose numbers end at 65504"
    ]


def check_policy(policy: Policy, profile: Profile | None) -> None:
    """InvalidError for a policy that shares layers with an accelerator that is not there."""
    shares = policy == "cut" or policy in PUBLISHED_POLICIES
    if shares and (profile is None or profile.accelerator is None):
        raise InvalidError(
            f"[plan] policy={policy!r} was asked for, but there is no accelerator to share layers "
            "with; choose 'auto', or a machine or device= that has one"
        )
