"""bench/joint.py: what it counts of a run."""

from __future__ import annotations

import joint
import pytest


def test_steady_rate_counts_while_as_many_requests_are_there():
    """Two at once of four with four tokens each: a token every second, but two while two run."""
    came = [(s, r) for s, r in [
        (1.0, 0), (2.0, 0), (2.0, 1), (3.0, 0), (3.0, 1), (4.0, 0), (4.0, 1),  # 0 ends, 2 comes
        (5.0, 1), (6.0, 2), (7.0, 2), (7.0, 3), (8.0, 2), (8.0, 3), (9.0, 2), (9.0, 3), (10.0, 3),
    ]]  # fmt: skip
    run = joint.Generated([], came)
    assert run.steady_rate(2) == pytest.approx(8 / 5)  # from 4 to 9 s


def test_requests_that_all_end_at_once_count_from_the_begin():
    came = [(float(second), request) for second in (1, 2, 3) for request in (0, 1)]
    assert joint.Generated([], came).steady_rate(2) == pytest.approx(2.0)
