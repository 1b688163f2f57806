"""Plans of published policies: what they take, how long their steps are, and what is refused."""

from __future__ import annotations

import functools
import itertools
import json

import numpy as np
import pytest

import helm
from helm.compiler.problem import POLICIES, PUBLISHED_POLICIES
from helm.compiler.segments import segments
from helm.compiler.steps import PlannedSteps
from helm.compiler.timeline import played
from helm.compiler.visits.beside import policy_rows
from helm.compiler.visits.policies import PUBLISHED
from helm.compiler.visits.ring import Piece, coming_s, lanes_s, step_s
from helm.compiler.visits.shared import SharedLayers
from helm.errors import InvalidError, OutOfMemoryError
from helm.plan.weights import slice_bytes
from search_cases import GIB

MODEL = "tests/data/configs/qwen3-8b.json"
ACCELERATOR = ("zigzag", "helm-placement", "all-cpu")  # computes all layers


@functools.cache
def _study(policy="auto", **options):
    options = {"profile": "rtx-3060-12gb-ddr4", "memory_bytes": 48 * GIB, **options}
    return helm.study(MODEL, policy=policy, **options)


def test_every_policy_has_a_name_and_an_author():
    assert tuple(PUBLISHED) == PUBLISHED_POLICIES == POLICIES[-4:]
    assert all(own.whose and own.what for own in PUBLISHED.values())


@pytest.mark.parametrize("policy", PUBLISHED_POLICIES)
def test_a_policy_that_is_asked_for_is_planned(policy):
    study = _study(policy)
    best = study.best
    assert best.fits
    assert best.visit.policy == policy
    for terms, seconds in (
        (best.predicted.decode_terms, best.predicted.decode_s),
        (best.predicted.prefill_terms, best.predicted.ttft_s),
    ):
        assert sum(terms.values()) == pytest.approx(seconds, rel=1e-9)
    memory = {name: use.total_bytes + use.reserve_bytes for name, use in study.plan.memory.items()}
    assert all(memory[name] <= study.limit_bytes(name) for name in memory)
    assert study.plan.prediction.predicted == best.predicted
    # Nothing is lost: what visits lies in host memory, the rest on the accelerator.
    placed = segments(study)
    held = sum(part.weight_bytes for part in placed)
    assert held == sum(use.weights_bytes for use in study.plan.memory.values())


@pytest.mark.parametrize("policy", ACCELERATOR)
def test_what_visits_is_counted_once_in_each_memory(policy):
    best, whole = _study(policy).best, _study(policy, vram_bytes=11 * GIB).best
    use = best.visit
    shares = {"zigzag": None, "helm-placement": (0.0, 0.5), "all-cpu": (0.0, 0.0)}[policy]
    if shares is not None:
        assert (use.attention, use.mlp) == shares
    staging = best.memory["accelerator"]["staging"]
    assert staging == use.buffers * use.buffer_bytes
    assert use.host_bytes <= best.memory["cpu"]["weights"]
    if policy == "zigzag":  # as much as there is room for
        assert use.attention == use.mlp
        assert whole.visit.host_bytes > use.host_bytes
        free = _study(policy).limit_bytes("accelerator") - best.total_bytes("accelerator")
        assert 0 <= free < use.matrix_bytes / 64  # a step more would not fit


@pytest.mark.parametrize("policy", PUBLISHED_POLICIES)
def test_steps_take_what_the_plan_s_programs_take_played(policy):
    study = _study(policy)
    decode, _ = study.steps
    predicted = study.best.predicted
    assert decode.seconds == pytest.approx(predicted.decode_s, rel=1e-9)
    planned = PlannedSteps(study.search, study.best, study.placed)
    prompts = played(planned.prompts(), 1)[1]
    assert float(prompts) == pytest.approx(predicted.ttft_s, rel=1e-9)
    full = played(planned.decode(study.workload.context), 1)[1]
    assert float(full) == pytest.approx(predicted.full_context_decode_s, rel=1e-9)
    ends = {}
    for span in decode.spans:
        assert span.start_s >= ends.get(span.lane, 0.0) - 1e-12  # one thing at a time on a lane
        ends[span.lane] = span.end_s
    assert set(ends) == {"up", "down", "accelerator", "cpu"}


@pytest.mark.parametrize("policy", PUBLISHED_POLICIES)
def test_the_plan_s_slices_are_what_was_counted(policy):
    study = _study(policy)
    plan, use = study.placed, study.best.visit
    own, host = (slice_bytes(plan.tensors, plan.slices, name) for name in ("accelerator", "cpu"))
    visiting = {name for unit, lacks in zip(plan.units, plan.lacking, strict=True) if lacks
                for op in unit.ops for name in op.weight_names() if name not in own}  # fmt: skip
    assert sum(host[name] for name in visiting) == use.host_bytes
    assert sum(-(-size // 256) * 256 for size in own.values()) == (
        plan.memory["accelerator"].weights_bytes
    )
    assert sum(host.values()) == plan.memory["cpu"].weights_bytes
    assert plan.schedule.visit_buffers == use.buffers


def test_more_memory_is_never_slower():
    times = [_study("zigzag", vram_bytes=size * GIB).best.objective_s for size in (4, 6, 9, 11)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(times))
    assert times[-1] < times[0] * 0.9


def test_one_copy_serves_all_requests_of_a_step():
    """Of many requests a step takes hardly longer than of one, where the link is the bottleneck."""
    one = _study("all-cpu", objective="decode", context=1024).best
    many = _study("all-cpu", objective="decode", context=1024, batch=16).best
    assert many.predicted.decode_s < one.predicted.decode_s * 1.1
    assert many.predicted.decode_tokens_per_s > 14 * one.predicted.decode_tokens_per_s


def test_throughput_runs_as_many_requests_as_memory_allows():
    best = _study("all-cpu", objective="throughput", batch=64, context=2048).best
    assert 1 < best.sequences <= 64
    more = _study("all-cpu", objective="throughput", batch=64, context=2048, vram_bytes=8 * GIB)
    assert more.best.sequences <= best.sequences


@pytest.mark.parametrize("policy", PUBLISHED_POLICIES)
def test_what_does_not_fit_is_refused_with_the_bytes(policy):
    with pytest.raises(OutOfMemoryError, match=rf"policy='{policy}'.* lacks [\d.]+ .iB of"):
        _study(policy, memory_bytes=6 * GIB, vram_bytes=3 * GIB)


def test_a_refusal_names_formats_in_which_a_policy_runs():
    """What visits is never compressed."""
    with pytest.raises(OutOfMemoryError, match=r"dtype='q8' fits") as refused:
        _study("workload-distribution", memory_bytes=14 * GIB)
    assert "compressed" not in str(refused.value)


def test_work_is_distributed_by_the_corrected_balance():
    """Both devices have some of each layer, and no other share is faster by the timeline."""
    study = _study("workload-distribution")
    best, cuts = study.best, study.search._policies._cuts
    assert best.cut.layers == best.blocks
    assert best.memory["accelerator"]["weights"] < best.visit.host_bytes / 4  # the head
    choice = next(c for c in study.search._policies._choices
                  if c.setting.limits.step_tokens == best.step_tokens)  # fmt: skip
    shared, context = SharedLayers(choice, cuts), study.workload.expected_context
    of = shared.layouts
    rng = np.random.default_rng(1)
    for at in rng.integers(0, len(of), (24, 1)):
        step_s = shared.decode_terms(of.at(at), context).sum()
        assert step_s > best.predicted.decode_s * 0.98
        assert step_s == pytest.approx(shared.about_s(of.at(at), context)[0], rel=0.05)


def test_what_cannot_be_shared_is_refused_with_the_reason(tmp_path):
    config = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 128,
              "do_layer_norm_before": False, "word_embed_proj_dim": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"policy": "workload-distribution", "profile": "rtx-3060-12gb-ddr4"}
    with pytest.raises(InvalidError, match=r"placed so: no norm stands before its first product"):
        helm.study(tmp_path / "config.json", **options)


@pytest.mark.parametrize("policy", PUBLISHED_POLICIES)
def test_a_policy_takes_an_accelerator(policy):
    with pytest.raises(InvalidError, match="no accelerator to share layers with"):
        _study(policy, profile="cpu-desktop-64gb-ddr5")


def test_policies_are_shown_beside_the_plan():
    study = _study()
    rows = {row.policy: row for row in policy_rows(study)}
    assert tuple(rows) == PUBLISHED_POLICIES
    for policy, row in rows.items():
        asked = _study(policy).best
        assert row.decode_s == asked.predicted.decode_s
        assert row.fits
        # Here the whole search is as fast as any of them.
        assert row.total_s >= study.best.predicted.total_s
        assert row.verdict.endswith("slower")
    lacking = policy_rows(_study(vram_bytes=3 * GIB))
    assert any(not row.fits and sum(row.missing.values()) > 0 for row in lacking)
    assert policy_rows(_study(profile="cpu-desktop-64gb-ddr5")) == ()


# --- the ring ------------------------------------------------------------------------------------


def _naive_s(compute, come, slots):
    """Of one piece a group: when each has come and has run, one after the other."""
    came, ran = [0.0], [0.0]
    for i, (run, up) in enumerate(zip(compute, come, strict=True)):
        free = ran[i + 1 - slots] if i + 1 > slots else 0.0
        came.append(max(came[-1], free) + up)
        ran.append(max(ran[-1], came[-1] if up else 0.0) + run)
    return ran[-1]


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_the_ring_is_what_a_plain_loop_says(slots):
    rng = np.random.default_rng(slots)
    for count in (1, 2, 7, 24):
        compute, come = rng.uniform(0.1, 2.0, (2, count))
        groups = [[Piece("", run, up_s=up)] for run, up in zip(compute, come, strict=True)]
        assert float(step_s(groups, slots)) == pytest.approx(_naive_s(compute, come, slots))


def test_plans_at_once_are_what_each_is_alone():
    rng = np.random.default_rng(7)
    seconds = rng.uniform(0.0, 1.0, (6, 4, 5, 3)) * rng.integers(0, 2, (6, 4, 5, 3))
    groups = [[Piece("", *piece) for piece in group] for group in seconds]
    every = step_s(groups, 2)
    for plan in range(3):
        alone = [[Piece("", *map(float, piece[:, plan])) for piece in group] for group in seconds]
        assert every[plan] == pytest.approx(float(step_s(alone, 2)), rel=1e-12)
    assert every.max() >= max(each.max() for each in lanes_s(groups).values())


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_what_the_search_adds_up_is_what_the_ring_plays(slots):
    rng = np.random.default_rng(slots)
    for count in (1, 2, 7, 24):
        run, up = rng.uniform(0.1, 2.0, (2, count, 4)) * [[[1]], [[1]]]
        up *= rng.integers(0, 2, (count, 1))  # nothing comes for some
        groups = [[Piece("", *piece[:1], up_s=piece[1])] for piece in zip(run, up, strict=True)]
        assert coming_s(groups, slots) == pytest.approx(step_s(groups, slots))
        assert (coming_s(groups, None) <= coming_s(groups, slots) + 1e-12).all()


def test_more_buffers_are_never_slower():
    rng = np.random.default_rng(3)
    for _ in range(20):
        groups = [[Piece("", *rng.uniform(0.0, 1.0, 4))] for _ in range(12)]
        times = [float(step_s(groups, slots)) for slots in (1, 2, 3, 4)]
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(times))
