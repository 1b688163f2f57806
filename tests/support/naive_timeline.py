"""The oracle of the timeline: an event loop that starts a task when it can. One plan at a time, in
plain numbers, without any shortcut.

It knows programs as lists of tasks, and shares no rule with `helm.compiler.timeline`.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from helm.compiler.task import Program, Task


@dataclass
class Step:
    """seconds and counts by number of the task; see `helm.compiler.timeline.Flight`."""

    program: Program
    seconds: Sequence[float]
    counts: dict[int, int] = field(default_factory=dict)
    begin_s: float = 0.0
    leaving_s: float = 0.0
    waits: bool = False
    jobs: list[Job] = field(default_factory=list)
    done: dict[int, Job] = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    """One task that happens once. needs: jobs that must have ended."""

    lane: str
    queue: str
    seconds: float
    needs: list[Job]
    begin: float | None = None
    end: float | None = None


class Machine:
    """Lanes and queues, and the thread that hands tasks over, which is a generator of what it waits
    for: a job, or seconds that it is busy."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[Job] = []
        self._lanes: dict[str, deque[Job]] = defaultdict(deque)
        self._queues: dict[str, deque[Job]] = defaultdict(deque)
        self._running: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self.main: list[Job] = []  # all of the queue of stages
        self.rings: dict[str, list[Job]] = defaultdict(list)  # jobs that have read a buffer

    def hand_over(self, job: Job) -> Job:
        self._lanes[job.lane].append(job)
        self._queues[job.queue].append(job)
        self._waiting.append(job)
        if job.queue == "main":
            self.main.append(job)
        self._start()
        return job

    def _start(self) -> None:
        started = True
        while started:
            started = False
            for job in list(self._waiting):
                if self._lanes[job.lane][0] is not job or self._queues[job.queue][0] is not job:
                    continue
                if any(other.end is None or other.end > self.now for other in job.needs):
                    continue
                self._waiting.remove(job)
                job.begin = self.now
                heapq.heappush(self._running, (self.now + job.seconds, next(self._order), job))
                started = True
            while self._running and self._running[0][0] <= self.now:
                self._finish()
                started = True

    def _finish(self) -> None:
        self.now, _, job = heapq.heappop(self._running)
        job.end = self.now
        self._lanes[job.lane].popleft()
        self._queues[job.queue].popleft()

    def _next(self) -> None:
        self._finish()
        self._start()

    def run(self, thread: Generator[Job | float, None, None]) -> float:
        for wanted in thread:
            if isinstance(wanted, Job):
                while wanted.end is None:
                    self._next()
                continue
            until = self.now + wanted
            while self._running and self._running[0][0] <= until:
                self._next()
            self.now = until
            self._start()
        return self.now


def run(steps: Sequence[Step], at_once: int) -> float:
    """When the last of all steps has ended, of which so many are on their way at once."""
    machine = Machine()
    return machine.run(_thread(machine, steps, at_once))


def _thread(machine: Machine, steps: Sequence[Step], at_once: int) -> Any:
    for number, step in enumerate(steps):
        if number >= at_once:
            yield from _collect(machine, steps[number - at_once])
        yield from _submit(machine, step)
    for step in steps[max(0, len(steps) - at_once) :]:
        yield from _collect(machine, step)


def _submit(machine: Machine, step: Step) -> Any:
    if step.leaving_s:
        job = Job("leaving", "pages", step.leaving_s, list(machine.main))
        step.jobs.append(machine.hand_over(job))
    if step.waits:
        yield from [*machine.main, *step.jobs]
    yield step.begin_s
    for number, task in enumerate(step.program.tasks):
        if _rests(task):
            break
        yield from _hand_over(machine, step, number)


def _rests(task: Task) -> bool:
    return task.lane == "cpu" and task.verb == "run" and task.after != ()


def _collect(machine: Machine, step: Step) -> Any:
    tasks = step.program.tasks
    rest = next((n for n, task in enumerate(tasks) if _rests(task)), len(tasks))
    for number in range(rest, len(tasks)):
        yield from _hand_over(machine, step, number)
    yield from step.jobs


def _hand_over(machine: Machine, step: Step, number: int) -> Any:
    task = step.program.tasks[number]
    if task.each and task.verb != "page":
        return
    if task.verb == "cached" and step.seconds[number] == 0:
        return
    numbers = (number, number + 1) if task.each else (number,)
    for _ in range(step.counts.get(number, 1)):
        for one in numbers:
            yield from _job(machine, step, one)


def _job(machine: Machine, step: Step, number: int) -> Any:
    task = step.program.tasks[number]
    needs = [step.done[other] for other in task.after if other in step.done]
    ring = machine.rings[{"visit": "weights", "page": "pages"}.get(task.verb, "")]
    if task.verb in ("visit", "page"):
        needs += ring[-2:-1]  # of two buffers the one that was read longer ago
    queue = "main"
    if task.aside:
        queue = "weights" if task.verb == "visit" else "pages"
    if task.lane == "cpu":
        yield from needs
        begin = machine.now
        yield step.seconds[number]
        job = Job("cpu", "cpu", step.seconds[number], needs, begin, machine.now)
    else:
        job = machine.hand_over(Job(task.lane, queue, step.seconds[number], needs))
        step.jobs.append(job)
    step.done[number] = job
    if task.verb == "far" and task.each:
        machine.rings["pages"].append(job)
    if task.verb == "run" and any(step.program.tasks[i].verb == "visit" for i in task.after):
        machine.rings["weights"].append(job)


def period(groups: Sequence[Step], most: int = 5000) -> float:
    """Seconds per round of these steps in turn, again and again: once a round moves the CPU and the
    device by the same time, all that follow do."""
    machine, found, ends = Machine(), [], []

    def thread() -> Any:
        steps: deque[Step] = deque()
        for number in itertools.count():
            if number >= len(groups):
                step = steps.popleft()
                yield from _collect(machine, step)
                if number % len(groups) == 0:
                    ends.append((machine.now, max((job.end for job in step.jobs), default=0.0)))
                if number % len(groups) == 0 and len(ends) > 1:
                    cpu, device = (b - a for a, b in zip(*ends[-2:], strict=True))
                    steady = not step.jobs or abs(cpu - device) <= 1e-13 * machine.now
                    if len(ends) > 3 and (steady or len(ends) > most):
                        found.append(cpu)
                        return
                del machine.main[:-4]
            one = dataclasses.replace(groups[number % len(groups)], jobs=[], done={})
            steps.append(one)
            yield from _submit(machine, one)

    machine.run(thread())
    return found[0]
