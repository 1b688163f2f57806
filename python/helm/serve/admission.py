"""Who is computed next, and who is sent away: bounded waiting, classes, keys that take turns. Knows
requests by their counts of tokens alone.

Higher classes go first. One that is passed over rises by one with every 30 s in which nobody of its
class and key was admitted. Within a class keys take turns by virtual token counters (Sheng et al.
2024): the key that was given least goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from helm.serve.errors import ApiError

_OUTPUT_WEIGHT = 2.0  # an output token beside a prompt token
_LONGEST_RETRY_S = 60
_SHARE = 0.2  # of a new measurement in a moving mean
_FORGOTTEN = 0.05  # of a rate with each request
_SURE = 0.8  # of the longest wait: longer ones, if told a little too short, would be in vain
_AGEING_S = 30.0  # as of the engine's own ranking


@dataclass(eq=False)
class Ticket:
    """One request that waits or runs. cost_s: seconds it is expected to hold its place."""

    client: int
    prompt_tokens: int
    output_tokens: int
    cost_s: float
    admitted: asyncio.Future[None]
    came_s: float
    priority: int = 1
    begun_s: float = 0.0


@dataclass
class _Mean:
    """A moving mean that begins with a guess."""

    value: float
    known: bool = False

    def add(self, value: float) -> None:
        if math.isfinite(value) and value >= 0:
            self.value += (_SHARE if self.known else 1.0) * (value - self.value)
            self.known = True


@dataclass
class _Rate:
    """Seconds for one unit of work, of the last requests together: a small one that waited beside a
    large one counts by its work."""

    guess: float
    seconds: float = 0.0
    work: float = 0.0

    @property
    def value(self) -> float:
        return self.seconds / self.work if self.work else self.guess

    def add(self, seconds: float, work: float) -> None:
        if math.isfinite(seconds) and seconds >= 0 and work > 0:
            self.seconds += seconds - _FORGOTTEN * self.seconds
            self.work += work - _FORGOTTEN * self.work


@dataclass
class Admission:
    """places: requests that run at once. max_waiting: that wait at most. queue_timeout_s: how long
    one waits at most."""

    places: int
    max_waiting: int = 256
    queue_timeout_s: float = 60.0
    running: set[Ticket] = field(default_factory=set)
    rejected: dict[str, int] = field(default_factory=dict)
    _queues: dict[tuple[int, int], deque[Ticket]] = field(default_factory=dict)  # (client, class)
    _begun_s: dict[tuple[int, int], float] = field(default_factory=dict)  # the last of each
    _served: dict[int, float] = field(default_factory=dict)  # virtual counters by client
    _prompt_s: _Rate = field(default_factory=lambda: _Rate(0.0))  # per token
    _output_s: _Rate = field(default_factory=lambda: _Rate(0.0))
    _pace: _Rate = field(init=False)  # per expected second, while others wait
    _paced_s: float | None = None  # when the last one left, if others wait since
    _outputs: _Mean = field(default_factory=lambda: _Mean(128.0))  # tokens of an answer
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._pace = _Rate(1 / self.places)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._queues.values()))

    def wait_s(self) -> float:
        """How long a request that came now would wait, by what others took."""
        free = self.places - len(self.running) - self.waiting
        if free > 0:
            return 0.0
        now = asyncio.get_running_loop().time()
        left = sum(max(0.0, t.cost_s - (now - t.begun_s)) for t in self.running)
        ahead = sum(ticket.cost_s for queue in self._queues.values() for ticket in queue)
        return (left + ahead) * self._pace.value

    def check(self, more: int = 1) -> None:
        """429 where `more` requests would wait too long, or among too many."""
        wait_s = self.wait_s()
        free = self.places - len(self.running)
        if self.waiting + more - max(free, 0) > self.max_waiting:
            raise self._refusal("full", f"{self.waiting} requests are waiting", wait_s)
        if wait_s > _SURE * self.queue_timeout_s:
            raise self._refusal("slow", f"the wait would be about {wait_s:.0f} s", wait_s)

    @contextlib.asynccontextmanager
    async def place(
        self, client: int, prompt_tokens: int, output_tokens: int, priority: int = 1
    ) -> AsyncIterator[Ticket]:
        """Waits for a place and holds it. 429 once that took too long."""
        cost = self._cost(prompt_tokens, output_tokens)
        loop = asyncio.get_running_loop()
        ticket = Ticket(
            client, prompt_tokens, output_tokens, cost, loop.create_future(), loop.time(), priority
        )
        self._queue(ticket)
        try:
            self._admit()
            try:
                async with asyncio.timeout(self.queue_timeout_s):
                    await ticket.admitted
            except TimeoutError:
                reason = f"it waited {self.queue_timeout_s:.0f} s"
                raise self._refusal("timeout", reason, self.wait_s()) from None
            yield ticket
        finally:
            self._leave(ticket)

    def ended(self, ticket: Ticket, timings: Mapping[str, float], output_tokens: int) -> None:
        """What a request took, by which the wait of others is told; while it holds its place."""
        now = asyncio.get_running_loop().time()
        if self._paced_s is not None:
            self._pace.add(now - self._paced_s, ticket.cost_s)
        prompt, output = timings.get("prefill_tokens", 0), timings.get("decode_tokens", 0)
        self._prompt_s.add(timings.get("prefill_s", 0.0), prompt)
        self._output_s.add(timings.get("decode_s", 0.0), output)
        self._outputs.add(output_tokens)
        charged = prompt + _OUTPUT_WEIGHT * output_tokens
        expected = ticket.prompt_tokens + _OUTPUT_WEIGHT * self._expected(ticket.output_tokens)
        self._served[ticket.client] = self._served.get(ticket.client, 0.0) + charged - expected

    async def idle(self) -> None:
        """Returns once nobody waits or runs."""
        while self.running or self._queues:
            self._idle.clear()
            await self._idle.wait()

    def _expected(self, output_tokens: int) -> float:
        return min(float(output_tokens), self._outputs.value)

    def _cost(self, prompt_tokens: int, output_tokens: int) -> float:
        return (
            prompt_tokens * self._prompt_s.value
            + self._expected(output_tokens) * self._output_s.value
        )

    def _queue(self, ticket: Ticket) -> None:
        client = ticket.client
        there = {*(key[0] for key in self._queues), *(t.client for t in self.running)}
        if client not in there:
            # Who was away gains nothing by that.
            least = min((self._served.get(other, 0.0) for other in there), default=0.0)
            if not there:
                self._served.clear()
                self._begun_s.clear()
            self._served[client] = max(self._served.get(client, 0.0), least)
        self._queues.setdefault((client, ticket.priority), deque()).append(ticket)

    def _turn(self, key: tuple[int, int], now_s: float) -> tuple[float, float, float]:
        """The queue of the least one is next."""
        client, priority = key
        came_s = self._queues[key][0].came_s
        aged = (now_s - max(came_s, self._begun_s.get(key, came_s))) // _AGEING_S
        return -priority - aged, self._served.get(client, 0.0), came_s

    def _admit(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._queues and len(self.running) < self.places:
            key = min(self._queues, key=lambda k: self._turn(k, now))
            client = key[0]
            ticket = self._queues[key].popleft()
            if not self._queues[key]:
                del self._queues[key]
            if ticket.admitted.done():
                continue
            self.running.add(ticket)
            self._begun_s[key] = now
            ticket.begun_s = now
            charge = ticket.prompt_tokens + _OUTPUT_WEIGHT * self._expected(ticket.output_tokens)
            self._served[client] = self._served.get(client, 0.0) + charge
            ticket.admitted.set_result(None)

    def _leave(self, ticket: Ticket) -> None:
        if ticket in self.running:  # the time of one that told nothing is nobody else's
            now = asyncio.get_running_loop().time()
            self._paced_s = now if self._queues else None
        self.running.discard(ticket)
        key = (ticket.client, ticket.priority)
        queue = self._queues.get(key)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._queues[key]
        self._admit()
        if not self.running and not self._queues:
            self._idle.set()

    def _refusal(self, reason: str, why: str, wait_s: float) -> ApiError:
        # By then half of those that wait are gone. Not all come again at once.
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        after_s = max(wait_s / 2, wait_s - self.queue_timeout_s) * random.uniform(1.0, 1.2)
        seconds = min(math.ceil(after_s + 1), _LONGEST_RETRY_S)
        return ApiError(
            429,
            f"the server is busy: {why}; try again in {seconds} s",
            code="server_busy",
            headers={"retry-after": str(seconds)},
        )
