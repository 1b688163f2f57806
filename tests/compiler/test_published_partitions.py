"""The search finds the partitions that were published, and their times."""

from __future__ import annotations

import pytest

from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import search
from helm.machine.profile import load_profile
from helm.plan.records import Workload
from search_cases import THESIS, model_of

PAIRS = [(card, name) for card, found in THESIS["partitions_units"].items() for name in found]


def published(card):
    low, high = THESIS["vram_for_weights_bytes"][card]
    return ResourceLimits(accelerator_weights_bytes=(low + high) // 2)


@pytest.mark.parametrize(("card", "name"), PAIRS)
def test_published_partitions(card, name):
    profile, work = load_profile(f"thesis-{card}"), Workload(128, 128, objective="decode")
    space = Space(one_boundary=True, kv="host")
    result = search(model_of(name), profile, work, published(card), space)
    want = THESIS["partitions_units"][card][name]
    assert [result.best.units_cpu, result.best.units_accelerator] == want
    assert set(result.best.devices()[: want[0]]) <= {"cpu"}
    wider = search(model_of(name), profile, work, published(card), Space(kv="any")).best
    assert wider.predicted.decode_s <= result.best.predicted.decode_s
    # One pair gains from a head on the CPU, which makes room for two more blocks.
    moved = (card, name) == ("3090", "qwen3-32b")
    assert wider.layout == (("cpu", 40, "cpu") if moved else result.best.layout)


@pytest.mark.parametrize(("card", "name"), [("3090", "qwen3-14b"), ("l40s", "qwen3-32b")])
def test_published_times_from_which_the_presets_were_derived(card, name):
    """No accuracy is claimed: the CPU rates of these presets come from these very rows."""
    space = Space(one_boundary=True, kv="host")
    result = search(model_of(name), load_profile(f"thesis-{card}"), Workload(128, 128),
                    published(card), space)  # fmt: skip
    got = result.best.predicted.decode_s * 1e3
    assert got == pytest.approx(THESIS["table_6_5_ms"][card][name]["pred"], rel=0.05)
