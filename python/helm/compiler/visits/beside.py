"""What published policies would reach beside the plan of a study. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass

from helm.compiler.solve import Study
from helm.compiler.visits.policies import PUBLISHED


@dataclass(frozen=True)
class PolicyRow:
    """A published policy beside the plan of a study. whose, what: see `Published`. buffers, each of
    buffer_bytes, through which host_bytes visit in a decode step. sequences: that run at once.
    missing: bytes by device, of what does not fit; the times are those with enough memory."""

    policy: str
    whose: str
    what: str
    fits: bool
    buffers: int
    buffer_bytes: int
    host_bytes: int
    sequences: int
    ttft_s: float
    decode_s: float
    decode_tokens_per_s: float
    total_s: float
    missing: dict[str, int]
    verdict: str


def policy_rows(study: Study) -> tuple[PolicyRow, ...]:
    """One for each that the machine and the model can have; none without an accelerator."""
    rows = []
    for policy, one in study.search.published.items():
        use, own, predicted = one.visit, PUBLISHED[policy], one.predicted
        assert use is not None
        verdict = one.reason_against(study.best)
        if policy == study.problem.space.policy:
            verdict = "chosen"
        lacks = {"cpu": one.missing.cpu, "accelerator": one.missing.accelerator}
        rows.append(
            PolicyRow(
                policy,
                own.whose,
                own.what,
                one.fits,
                use.buffers,
                use.buffer_bytes,
                use.host_bytes,
                one.sequences,
                predicted.ttft_s,
                predicted.decode_s,
                predicted.decode_tokens_per_s,
                predicted.total_s,
                lacks,
                verdict,
            )
        )
    return tuple(rows)
