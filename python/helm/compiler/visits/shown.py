"""Steps of published policies, task by task. Searches and prints nothing."""

from __future__ import annotations

import numpy as np

from helm.compiler.candidate import Candidate
from helm.compiler.search import Search
from helm.compiler.steps import Span, Steps
from helm.compiler.timeline import Flight, played
from helm.compiler.visits.ring import ACCELERATOR, RING
from helm.plan.units import CPU

_VERBS = {CPU: "run", ACCELERATOR: "run"}


def policy_steps(search: Search, best: Candidate) -> tuple[Steps, ...]:
    """The layers of a decode step at the expected context, where both devices compute."""
    title = f"Decode at {search.workload.expected_context:,} positions, layers"
    return tuple(_drawn(title, flight) for flight in search.policy_flights(best))


def _drawn(title: str, flight: Flight) -> Steps:
    [spans], end = played([flight], 1)
    names, tasks = flight.program.names, flight.program.tasks
    found = []
    for number, (begin, until) in spans.items():
        start_s, end_s = (float(np.ravel(each)[0]) for each in (begin, until))
        task = tasks[number]
        if task.lane == RING or not end_s > start_s or task.units is None:
            continue
        verb = _VERBS.get(task.lane, "visit")
        found.append(Span(0, task.lane, verb, names[task.units[0]], start_s, end_s))
    found.sort(key=lambda span: (span.start_s, span.end_s, span.lane))
    return Steps(title, float(np.ravel(end)[0]), tuple(found))
