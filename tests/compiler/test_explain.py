"""What an explanation says agrees with the plan and the search it explains."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from plans import study

from helm.base.formats import DTYPE_BYTES
from helm.base.sizes import parse_size
from helm.commands.plots import by_boundary, objective_terms
from helm.compiler.explain import memory_rows, picture, rivals, term_rows, to_dict, trade
from helm.compiler.segments import segments
from helm.compiler.solve import Study
from helm.errors import InvalidError, OutOfMemoryError
from helm.machine.profile import load_profile
from helm.model.families import read_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
GIB = 2**30


def plan(model: str = "qwen3-8b", profile: str = "thesis-4060", **request: object) -> Study:
    config = read_config(CONFIGS / f"{model}.json")
    request.setdefault("policy", "layer-partition")
    return study(model, config, None, load_profile(profile), **request)


@pytest.fixture(scope="module")
def split() -> Study:
    return plan(objective="decode")


@pytest.fixture(scope="module")
def cut() -> Study:
    return plan(objective="decode", policy="auto")


def test_what_is_cut_is_on_both_devices(cut: Study) -> None:
    use, whole = cut.best.cut, cut.plan
    assert use is not None
    both = [part for part in segments(cut) if part.label.endswith("(cut)")]
    assert {part.device for part in both} == {"cpu", "accelerator"}
    for device, held in whole.memory.items():
        own = sum(part.weight_bytes for part in segments(cut) if part.device == device)
        if device == "cpu":
            assert own == held.weights_bytes
        else:  # where each tensor is aligned
            assert 0 <= held.weights_bytes - own < 256 * len(whole.tensors)
    lanes, _ = picture(cut, 76)
    shared = sum(a != " " != b for a, b in zip(lanes[0].cells, lanes[1].cells, strict=True))
    assert shared == whole.units_cut == cut.best.devices().count("both")
    said = to_dict(cut)["cut"]
    assert (said["layers"], said["elements"]) == (use.layers, use.elements)
    assert sum(said["shares"].values()) == pytest.approx(1.0)


def test_rivals_of_a_cut_plan_name_whole_layers(cut: Study) -> None:
    found = list(rivals(cut))
    assert found[0].candidate == cut.best
    layouts = [rival.candidate.layout for rival in found]
    assert len(set(layouts)) == len(layouts)
    whole = cut.search.result.labelled["layer-partition"]
    assert whole.layout in layouts
    assert whole.objective_s > cut.best.objective_s
    assert "layer-partition" in [other.label for other in cut.plan.prediction.alternatives]


def test_segments_cover_all_units_once_and_hold_the_budget(split: Study) -> None:
    parts = segments(split)
    covered = [unit for part in parts for unit in range(part.first, part.last + 1)]
    assert covered == list(range(len(split.plan.places)))
    for part in parts:
        for devices in split.plan.places[part.first : part.last + 1]:
            assert devices == {part.device}
    for device, use in split.plan.memory.items():
        held = sum(part.weight_bytes for part in parts if part.device == device)
        assert held == use.weights_bytes
    assert [part.label for part in parts] == ["embedding", "layers 0-15", "layers 16-35", "head"]


def test_a_tied_matrix_is_counted_once_where_both_ends_are_together(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "qwen3-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tied = study(
        "tied", read_config(tmp_path / "config.json"), None, load_profile("cpu-desktop-64gb-ddr5"),
    )  # fmt: skip
    first, _, last = segments(tied)
    assert first.weight_bytes == 151936 * 4096 * 2
    assert last.weight_bytes < 100_000  # the final norm alone
    assert sum(p.weight_bytes for p in segments(tied)) == tied.plan.memory["cpu"].weights_bytes


def test_the_picture_has_a_letter_for_every_unit(split: Study) -> None:
    lanes, per = picture(split, 76)
    assert per == 1
    assert [lane.device for lane in lanes] == ["cpu", "accelerator"]
    assert "".join(lanes[0].cells) == "E" + "C" * 16 + " " * 20 + "H"
    assert "".join(lanes[1].cells).strip() == "G" * 20
    for cells in zip(*(lane.cells for lane in lanes), strict=True):
        assert sum(cell != " " for cell in cells) == 1


@pytest.mark.parametrize("width", [4, 5, 10, 37])
def test_a_narrow_picture_groups_blocks(split: Study, width: int) -> None:
    lanes, per = picture(split, width)
    assert per > 1
    assert all(len(lane.cells) <= width for lane in lanes)


def test_memory_rows_add_up(split: Study) -> None:
    rows = dict(memory_rows(split))
    for device in split.plan.memory:
        items = [sizes[device] for name, sizes in rows.items()]
        assert sum(items[:-3]) == rows["total"][device]
        assert rows["total"][device] + rows["free"][device] == rows["limit"][device]
        assert rows["free"][device] >= 0


def test_terms_are_shares_of_the_whole_largest_first(split: Study) -> None:
    rows = term_rows(split.best.predicted.decode_terms, least=0.0)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert sum(row.seconds for row in rows) == pytest.approx(split.best.predicted.decode_s)
    assert rows[0].name == split.best.bottleneck
    assert all(a.seconds >= b.seconds for a, b in itertools.pairwise(rows))


def test_rivals_have_the_plain_plans_and_reasons(split: Study) -> None:
    found = {rival.label: rival for rival in rivals(split)}
    assert found["chosen"].candidate == split.best
    everything = found["all on the GPU"]
    assert not everything.candidate.fits
    lacks = everything.candidate.missing.accelerator / GIB
    assert everything.verdict == f"lacks {lacks:.2f} GiB of VRAM"
    assert found["all on the CPU"].candidate.units_accelerator == 0
    # Less memory is no reason to run with fewer threads: the speed is that of a larger machine.
    assert found["all on the CPU"].fast.threads == 14
    layouts = [rival.candidate.layout for rival in found.values()]
    assert len(set(layouts)) == len(layouts)


def test_filling_the_gpu_is_priced_beside_a_better_plan() -> None:
    """Room for weights that visit brings more than another block."""
    found = plan()
    fill = {rival.label: rival for rival in rivals(found)}["fill the GPU"]
    slower = fill.candidate.objective_s / found.best.objective_s - 1
    assert slower > 0.05
    assert fill.verdict == f"{slower * 100:.1f} % slower"


def test_nothing_is_missing_where_everything_fits() -> None:
    roomy = plan(profile="thesis-l40s")
    assert roomy.plan.units_cpu == 0
    assert next(rival.label for rival in rivals(roomy)) == "chosen"
    assert "all on the GPU" in next(iter(rivals(roomy))).verdict
    assert trade(roomy) is None


def test_to_dict_says_what_the_plan_says(split: Study) -> None:
    shown, own = to_dict(split), split.plan.to_dict()
    for key in ("units_cpu", "units_accelerator", "predicted", "bottleneck", "label", "memory"):
        assert shown[key] == own[key], key
    assert json.loads(json.dumps(shown["alternatives"])) == own["alternatives"]
    listed = {(rival.candidate.layout, rival.candidate.fits): rival for rival in rivals(split)}
    lacking = [other for other in own["alternatives"] if not other["fits"]]
    assert len(lacking) >= 2
    for other in lacking:
        blocks = other["units_cpu"] - (other["embedding"] == "cpu") - (other["head"] == "cpu")
        fast = listed[(other["embedding"], blocks, other["head"]), False].fast.predicted
        assert other["decode_tokens_per_s"] == fast.decode_tokens_per_s
        assert other["ttft_s"] == fast.ttft_s
    assert shown["limits"] == {"cpu": 14_000_000_000, "accelerator": 8585740288}


def test_unlimited_memory_prices_what_does_not_fit(split: Study) -> None:
    rows = by_boundary(split)
    assert [candidate.cpu_blocks for candidate, _ in rows] == list(range(37))
    fits = {candidate.cpu_blocks: fit for candidate, fit in rows}
    assert fits[split.best.cpu_blocks]
    assert not fits[0]
    assert not fits[36]
    for candidate, _ in rows:
        assert sum(objective_terms(split, candidate).values()) == pytest.approx(
            candidate.objective_s
        )


@pytest.mark.parametrize("objective", ["ttft", "total", "throughput"])
def test_plotted_terms_add_up_to_every_objective(objective: str) -> None:
    found = plan(objective=objective, batch=3)
    for candidate, _ in by_boundary(found):
        assert sum(objective_terms(found, candidate).values()) == pytest.approx(
            candidate.objective_s
        )


def test_a_plan_bought_with_the_other_phase_names_the_trade(split: Study) -> None:
    other = trade(split)
    assert other is not None
    assert other.predicted.total_s < split.best.predicted.total_s


def test_requests_default_to_what_the_model_allows() -> None:
    short = plan(context=100)
    assert (short.workload.prompt, short.workload.output) == (50, 50)
    assert plan(prompt=5000).workload.context == 5128
    assert plan().workload.context == 4096
    with pytest.raises(InvalidError, match="the model allows 40960"):
        plan(prompt=40960)
    with pytest.raises(InvalidError, match="raise the context"):
        plan(context=100, prompt=100, output=10)


def test_vram_and_ram_are_limits() -> None:
    small = plan(profile="thesis-3090", accelerator_bytes=6 * GIB)
    assert small.plan.memory["accelerator"].total_bytes <= 6 * GIB
    none = plan(profile="thesis-3090", accelerator_bytes=0)
    assert none.plan.units_accelerator == 0
    with pytest.raises(OutOfMemoryError, match=r"lacks .* GiB of RAM"):
        plan(accelerator_bytes=0, cpu_bytes=4 * GIB)
    with pytest.raises(InvalidError, match="has no accelerator"):
        plan(profile="cpu-desktop-64gb-ddr5", accelerator_bytes=GIB)


def test_bandwidth_counts_where_the_product_of_one_token_was_measured() -> None:
    """Such a profile says the same rate twice: as bytes/s and as FLOP/s of one token."""
    machine = load_profile("cpu-desktop-64gb-ddr5")
    cpu = machine.cpu
    read = {
        dtype: 2.0 * cpu.matvec_bytes_per_s[dtype] / DTYPE_BYTES[dtype] for dtype in DTYPE_BYTES
    }
    flops = {d: {**rates, 1: read[d]} for d, rates in cpu.matmul_flops.items()}
    measured = dataclasses.replace(machine, cpu=dataclasses.replace(cpu, matmul_flops=flops))
    found = study("q", read_config(CONFIGS / "qwen3-8b.json"), None, measured)
    now = found.best.predicted.decode_tokens_per_s
    added = 10e9 / max(cpu.matvec_bytes_per_s.values())
    assert found.gains[-1].decode_tokens_per_s / now == pytest.approx(1 + added, rel=0.02)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB), ("8 GiB", 8 * GIB), ("8G", 8 * GIB), ("8g", 8 * GIB),
        ("12GB", 12 * 10**9), ("1.5GiB", 3 * GIB // 2), ("512MiB", 512 << 20), ("0", 0),
        ("1048576", 1 << 20), ("7000000B", 7_000_000), ("2TB", 2 * 10**12), ("3000kb", 3_000_000),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--vram") == size


@pytest.mark.parametrize("text", ["8", "8B", "512KiB", "4k"])
def test_a_size_without_its_unit_is_questioned(text: str) -> None:
    with pytest.raises(InvalidError, match=r"--vram is .* less than 1 MiB; did you mean 8GiB\?"):
        parse_size(text, "--vram")


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "8 gigs", "nan", "1e9", "8GiB8", "1_0", "٣GB"]
)
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidError, match=r"--vram is .* expected a size such as 8GiB"):
        parse_size(text, "--vram")
