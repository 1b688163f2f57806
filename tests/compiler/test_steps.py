"""The steps of one plan against what the search predicted for it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from plans import study

from helm.compiler.steps import PlannedSteps
from helm.compiler.timeline import period_s, played
from helm.machine.profile import load_profile
from search_cases import config_of

GIB = 1 << 30
LONG = {"prompt": 8192, "context": 32768, "kv_vram_bytes": GIB // 4}
CASES: dict[str, dict[str, Any]] = {
    "all on the GPU": {"name": "llama-3.2-1b"},
    "both": {"name": "qwen3-8b"},
    "prompts visit": {"name": "qwen3-32b", "prompt": 2048, "context": 4096},
    "far pages visit": {"name": "qwen3-8b", **LONG, "kv_overflow": "stream"},
    "far pages on the CPU": {"name": "qwen3-8b", **LONG, "kv_overflow": "cpu"},
    "groups": {"name": "qwen3-8b", "batch": 8, "context": 4096, "objective": "throughput"},
}  # fmt: skip


@pytest.mark.parametrize("preset", ["thesis-4060", "rtx-4080-16gb-ddr5", "cpu-desktop-64gb-ddr5"])
@pytest.mark.parametrize("case", CASES)
def test_steps_take_what_was_predicted(case: str, preset: str) -> None:
    given = {"cpu_bytes": 200 * GIB, **CASES[case]}
    name, profile = given.pop("name"), load_profile(preset)
    if profile.accelerator is None:
        given = {key: value for key, value in given.items() if not key.startswith("kv_")}
    one = study(name, config_of(name), None, profile, **given)
    best, planned = one.best, PlannedSteps(one.search, one.best, one.placed)
    predicted = best.predicted
    for context, want in (
        (one.workload.expected_context, predicted.decode_s),
        (one.workload.context, predicted.full_context_decode_s),
    ):
        flights = planned.decode(context)
        if best.decode_groups == 1:
            assert played(flights, 1)[1] == pytest.approx(want, rel=1e-9)
        elif profile.link is not None and flights[0].program.far != "cpu":
            assert profile.link.rate_while_both_compute == 1.0
            assert float(period_s(flights)) == pytest.approx(want, rel=1e-9)
    flights = planned.prompts()
    end = played(flights, 2 if best.prefill_overlap else 1)[1]
    assert end == pytest.approx(predicted.ttft_s, rel=1e-9)
    for steps in one.steps:
        assert steps.seconds > 0
        assert max(span.end_s for span in steps.spans) <= steps.seconds * (1 + 1e-9)
        for _, spans in itertools.groupby(
            sorted(steps.spans, key=lambda s: (s.lane, s.start_s)), key=lambda s: s.lane
        ):
            spans = [s for s in spans if s.count == 1 and s.verb != "leave"]
            for before, after in itertools.pairwise(spans):
                assert before.end_s <= after.start_s + 1e-12  # one at a time
