"""Counts and times in Prometheus' text format. Knows names, no requests' contents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_STATS = {  # of the backend
    "running": "requests that are computed",
    "waiting": "requests that the engine has not begun",
    "parked": "of these, requests that had begun and gave their room to others",
    "kv_blocks_used": "KV blocks in use",
    "kv_blocks_total": "KV blocks there are",
    "saved_s": "seconds of decode that guesses saved, of all requests; below 0: lost",
}
_COUNTED = {
    "steps": "steps of the engine",
    "tokens": "tokens that the engine generated",
    "guessed_tokens": "tokens that were computed on a guess",
    "preemptions": "times that a request gave its room to others",
    "kv_blocks_moved": "KV blocks that left the accelerator for host memory",
    "moves_far": "times that a request's KV went to host memory as a whole",
    "moves_near": "times that it came back to the accelerator",
    "far_rows": "rows for which the CPU attended",
    "experts_read": "different experts of a mixture that steps read on the CPU, of all layers",
    "experts_expected": "how many these would be, each chosen as often as any other",
    "accepted_tokens": "of them, those that were right and took no step of their own",
}
_MODES = ("near", "joint", "split")
_BY_MODE = {  # of the backend, behind the mode; the plan's tables predict
    "steps": ("mode_steps", "steps of the engine by mode"),
    "predicted_s": ("predicted_seconds", "seconds that the plan says these steps take"),
    "measured_s": ("measured_seconds", "seconds that they took, where the plan says"),
}


@dataclass
class Histogram:
    """Counts of seconds by their upper bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """One measurement."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class Metrics:
    """What /metrics shows."""

    http: dict[tuple[str, int], int] = field(default_factory=dict)  # (route, status)
    finished: dict[str, int] = field(default_factory=dict)  # choices by finish
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(_BETWEEN))
    queue: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    request: Histogram = field(default_factory=lambda: Histogram(_SECONDS))

    def answered(self, route: str, status: int, seconds: float) -> None:
        """One request of HTTP has ended."""
        self.http[route, status] = self.http.get((route, status), 0) + 1
        self.request.add(seconds)

    def text(
        self, stats: Mapping[str, float], waiting: int, rejected: Mapping[str, int], healthy: bool,
        gauges: Mapping[str, tuple[str, float]],
    ) -> str:  # fmt: skip
        """All of it. stats: of the backend. waiting: that it has not been given yet. gauges: help
        and value by name."""
        lines = self._lines(stats, waiting, rejected, healthy)
        more = (_gauge(name, *value) for name, value in gauges.items())
        return "\n".join([*lines, *chain.from_iterable(more), ""])

    def _lines(
        self, stats: Mapping[str, float], waiting: int, rejected: Mapping[str, int], healthy: bool
    ) -> Iterator[str]:
        yield from _counter(
            "http_requests_total",
            "requests by route and status",
            {f'route="{route}",status="{status}"': n for (route, status), n in self.http.items()},
        )
        yield from _counter(
            "request_success_total",
            "answers by how they ended",
            {f'finished_reason="{finish}"': n for finish, n in self.finished.items()},
        )
        yield from _counter(
            "rejected_total",
            "requests that were sent away",
            {f'reason="{reason}"': n for reason, n in rejected.items()},
        )
        for name, help_text, count in (
            ("prompt_tokens_total", "tokens of prompts", self.prompt_tokens),
            ("cached_tokens_total", "of them not computed again", self.cached_tokens),
            ("generation_tokens_total", "tokens of answers", self.generated_tokens),
        ):
            yield from _counter(name, help_text, {"": count})
        for name, help_text in _COUNTED.items():
            if name in stats:
                yield from _counter(f"engine_{name}_total", help_text, {"": stats[name]})
        for key, (name, help_text) in _BY_MODE.items():
            found = {
                f'mode="{mode}"': stats[f"{mode}_{key}"]
                for mode in _MODES
                if f"{mode}_{key}" in stats
            }
            if found:
                yield from _counter(f"engine_{name}_total", help_text, found)
        yield from _gauge("num_requests_waiting", "requests that wait for a place", waiting)
        yield from _gauge("up", "1 while requests can be computed", int(healthy))
        for name, help_text in _STATS.items():
            if name in stats:
                yield from _gauge(f"engine_{name}", help_text, stats[name])
        resident = _resident_bytes()
        if resident is not None:
            yield from _gauge("resident_bytes", "memory of the process", resident)
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "from arrival to the first token", self.first_token),
            ("inter_token_latency_seconds", "between two outputs", self.between_tokens),
            ("request_queue_time_seconds", "from arrival to a place", self.queue),
            ("http_request_duration_seconds", "of all requests", self.request),
        ):
            yield from _histogram(name, help_text, histogram)


def _head(name: str, help_text: str, kind: str) -> Iterator[str]:
    yield f"# HELP helm_{name} {help_text}"
    yield f"# TYPE helm_{name} {kind}"


def _counter(name: str, help_text: str, values: Mapping[str, float]) -> Iterator[str]:
    yield from _head(name, help_text, "counter")
    for labels, value in values.items():
        yield f"helm_{name}{f'{{{labels}}}' if labels else ''} {_number(value)}"


def _gauge(name: str, help_text: str, value: float) -> Iterator[str]:
    yield from _head(name, help_text, "gauge")
    yield f"helm_{name} {_number(value)}"


def _histogram(name: str, help_text: str, histogram: Histogram) -> Iterator[str]:
    yield from _head(name, help_text, "histogram")
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'helm_{name}_bucket{{le="{bound}"}} {total}'
    yield f"helm_{name}_sum {histogram.total:.6f}"
    yield f"helm_{name}_count {total}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    import resource

    return int(pages) * resource.getpagesize()
