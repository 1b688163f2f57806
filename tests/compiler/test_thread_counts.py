"""Which counts of threads the search prices: leaving out those that are slower changes no plan."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import test_search

import search_cases
from helm.compiler.problem import Space
from helm.compiler.search import Search, search
from helm.machine.profile import Profile
from helm.model.families import build_graph


@pytest.mark.parametrize("seed", range(18))
def test_no_count_of_threads_is_better(seed):
    """Those that are slower in everything are left out, but where only their scratch fits."""
    rng = random.Random(seed)
    model = search_cases.costed(build_graph(test_search.small_config(seed)))
    task = dataclasses.replace(search_cases.random_task(model, seed), batch=rng.choice((1, 5)))
    cpu = {
        **task.profile["cpu"],
        "threads": 4,
        "thread_sweep": {str(n): 1e7 * rng.uniform(0.5, 2) for n in (1, 2, 4, 8)},
    }
    if seed % 3 == 0:
        cpu["lone_op_s"] = cpu["op_s"] * rng.uniform(0.2, 1)
    profile = Profile.from_json(json.dumps({**task.profile, "cpu": cpu}))
    work = test_search.workload_of(task, "throughput" if task.batch > 1 else "decode")
    space = Space(visit_steps=task.visit_steps)
    every = Search(task.model, profile, work, test_search.limits_of(task), space).result.by_layout
    sizes = {site: [c.total_bytes(site) for c in every] for site in ("cpu", "accelerator")}
    for _ in range(4):
        near = rng.choice(sizes["cpu"]) - rng.choice((0, 1, 4096, 1 << 20))
        limits = test_search.limits_of(task, max(0, near), rng.choice(sizes["accelerator"]))
        best = search(task.model, profile, work, limits, space).best
        alone = [
            search(task.model, profile, work, limits, dataclasses.replace(space, threads=(n,))).best
            for n in (1, 2, 4, 8)
        ]
        values = [one.objective_s for one in alone if one is not None]
        assert (best is None) == (not values)
        assert best is None or best.objective_s == min(values)
