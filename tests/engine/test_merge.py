"""Attention over pages: partial results (m, s, o) and their merging, on every isa."""

from __future__ import annotations

import ctypes
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native_build import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

THESIS = json.loads((Path(__file__).parents[1] / "data" / "thesis.json").read_text())
TIERS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")


@dataclass
class Partial:
    """Maxima and sums [heads], outputs [heads, head_dim], not normalised."""

    m: np.ndarray
    s: np.ndarray
    o: np.ndarray


class Kernels:
    """The attention kernels of one tier."""

    def __init__(self, library: ctypes.CDLL, tier: str) -> None:
        self._library, self._tier = library, tier.encode()

    def attend(self, q, k, v, query=None, first_key=0, window=0, scale=1.0) -> Partial:
        """Of one query [heads, head_dim] to keys and values [count, head_dim]; by default it sees
        all of them."""
        q, k, v = (np.ascontiguousarray(x, np.float32) for x in (q, k, v))
        query = first_key + len(k) - 1 if query is None else query
        out = Partial(np.empty(len(q), "f4"), np.empty(len(q), "f4"), np.empty(q.shape, "f4"))
        sizes = (*q.shape, len(k), query, first_key, window)
        arrays = (q, k, v, out.m, out.s, out.o)
        self._library.helm_attend(
            self._tier,
            *map(ctypes.c_int64, sizes),
            ctypes.c_float(scale),
            *(array.ctypes.data_as(ctypes.c_void_p) for array in arrays),
        )
        return out

    def merge(self, into: Partial, other: Partial) -> Partial:
        """`other` merged into `into`, which it returns."""
        arrays = (into.m, into.s, into.o, other.m, other.s, other.o)
        self._library.helm_merge(
            self._tier,
            *map(ctypes.c_int64, into.o.shape),
            *(array.ctypes.data_as(ctypes.c_void_p) for array in arrays),
        )
        return into


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("native")
    build(folder, targets=["helm_attention_library"])
    return ctypes.CDLL(str(next(folder.rglob("libhelm_attention_library.*"))))


@pytest.fixture(scope="module", params=TIERS)
def kernels(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Kernels:
    if not library.helm_has_tier(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    return Kernels(library, request.param)


def exact(q, k, v, seen, scale):
    """Attention of q [heads, head_dim] to the keys that are `seen`, in one piece, in float64."""
    q, k, v = (np.asarray(x, np.float32).astype(np.float64) for x in (q, k, v))
    scores = np.where(seen, q @ k.T * np.float64(np.float32(scale)), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ v / weights.sum(axis=1, keepdims=True)


def test_the_six_tokens_of_table_4_2(kernels: Kernels) -> None:
    """HELM thesis, Table 4.2: a token a page; the state after each of them."""
    example = THESIS["streaming_attention_example"]
    total = Partial(np.full(1, -np.inf, "f4"), np.zeros(1, "f4"), np.zeros((1, 1), "f4"))
    for i, (score, value) in enumerate(zip(example["scores"], example["values"], strict=True)):
        page = kernels.attend([[1.0]], [[score]], [[value]], first_key=i)
        kernels.merge(total, page)
        found = (total.m[0], total.s[0], total.o[0, 0])
        # The table adds terms that are rounded.
        assert found == pytest.approx(example["states"][i], abs=0.011)
    assert total.o[0, 0] / total.s[0] == pytest.approx(example["out"], abs=0.05)
    whole = kernels.attend([[1.0]], np.c_[example["scores"]], np.c_[example["values"]])
    assert whole.o[0, 0] / whole.s[0] == pytest.approx(total.o[0, 0] / total.s[0], rel=1e-6)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_grouping_in_any_order_is_attention_in_one_piece(
    kernels: Kernels, data: st.DataObject
) -> None:
    pages = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=9), label="page sizes")
    group = data.draw(st.integers(1, 16), label="query heads per KV head")
    head_dim = data.draw(st.sampled_from([1, 4, 24, 64, 80, 128]), label="head_dim")
    window = data.draw(st.one_of(st.just(0), st.integers(1, sum(pages))), label="window")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    count = sum(pages)
    q, k, v = (rng.standard_normal((rows, head_dim)) for rows in (group, count, count))
    starts = np.concatenate([[0], np.cumsum(pages)])
    # Pages whose keys score far below or above the others: the maximum moves, weights vanish.
    for page, factor in enumerate(data.draw(
        st.lists(st.sampled_from([1, 1, 30, -30]), min_size=len(pages), max_size=len(pages)),
        label="factors",
    )):  # fmt: skip
        k[starts[page] : starts[page + 1]] += factor * q.mean(axis=0) / head_dim**0.5
    scale = head_dim**-0.5
    partials = [
        kernels.attend(q, k[a:b], v[a:b], count - 1, a, window, scale)
        for a, b in itertools.pairwise(starts)
    ]
    while len(partials) > 1:  # any two, either into the other
        first, second = data.draw(
            st.permutations(range(len(partials))).map(lambda p: (p[0], p[1])), label="merge"
        )
        other = partials[second]
        kernels.merge(partials[first], other)
        del partials[second]
    seen = np.arange(count) > count - 1 - window if window else np.ones(count, bool)
    want = exact(q, k, v, seen, scale)
    got = partials[0].o / partials[0].s[:, None]
    # Rounding of a score shifts its weight by as much: about 2^-24 * |score| * keys.
    scores = np.abs(q @ k.T).max() * scale
    bound = (scores + count + 10) * 2.0**-22 * np.abs(v).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def test_a_page_out_of_the_window_changes_nothing(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((rows, 64)) for rows in (4, 30, 30))
    empty = kernels.attend(q, k[:20], v[:20], query=29, window=10)
    assert np.all(empty.m == -np.inf)
    assert not empty.s.any()
    assert not empty.o.any()
    last = kernels.attend(q, k[20:], v[20:], query=29, first_key=20, window=10)
    for first, second in ((empty, last), (last, empty)):
        copies = [Partial(p.m.copy(), p.s.copy(), p.o.copy()) for p in (first, second)]
        merged = kernels.merge(*copies)
        np.testing.assert_array_equal(merged.m, last.m)
        np.testing.assert_array_equal(merged.s, last.s)
        np.testing.assert_array_equal(merged.o, last.o)
