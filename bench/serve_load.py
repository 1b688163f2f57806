"""Requests to an OpenAI-compatible server over plain sockets: when they come, and what came of
each, and its figures. Prints nothing, starts no server."""

from __future__ import annotations

import asyncio
import csv
import datetime
import itertools
import json
import math
import random
import statistics
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MOST_TRIES = 5
_LONGEST_S = 240.0  # that a client waits in all
_FULL_GAPS = 32  # between tokens of each request, of the step at full concurrency
_SETTLED_S = 30.0  # when the server's memory is first looked at


@dataclass(frozen=True)
class Wanted:
    """One request. at_s: when it comes, after the first. prompt, output: tokens."""

    at_s: float
    prompt: int
    output: int


@dataclass
class Answer:
    """What came of one request, all its tries together. Times in seconds of the loop; statuses: of
    each try, 0 where the connection broke. times_s: when each token came. ends: how often a finish
    came (1 is right)."""

    wanted: Wanted
    asked_s: float
    statuses: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    tokens: int = 0
    ends: int = 0
    error: str = ""

    @property
    def completed(self) -> bool:
        return self.ends == 1 and not self.error

    @property
    def first_s(self) -> float | None:
        return self.times_s[0] if self.times_s else None

    def gaps_s(self, begin: float = -math.inf, end: float = math.inf) -> list[float]:
        """Seconds between two tokens, of those that came between `begin` and `end`."""
        return [b - a for a, b in itertools.pairwise(self.times_s) if begin <= a and b <= end]


def lengths_of(path: Path, context: int, scale: float) -> list[tuple[float, int, int]]:
    """(seconds, prompt tokens, output tokens) of each request of an Azure trace; lengths times
    `scale`, cut to what a context holds."""
    found = []
    with path.open() as file:
        for row in csv.DictReader(file):
            stamp = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            output = max(2, min(round(int(row["GeneratedTokens"]) * scale), context // 2))
            prompt = max(2, min(round(int(row["ContextTokens"]) * scale), context - output - 8))
            found.append((stamp.timestamp(), prompt, output))
    first = found[0][0]
    return [(at - first, prompt, output) for at, prompt, output in found]


def from_trace(rows: Sequence[tuple[float, int, int]], rate: float, seconds: float) -> list[Wanted]:
    """A trace's requests in its rhythm, so fast that `rate` come per second on average."""
    count = max(2, round(rate * seconds))
    rows = rows[:count]
    stretch = seconds / max(rows[-1][0], 1e-9)
    return [Wanted(at * stretch, prompt, output) for at, prompt, output in rows]


def bursts(
    rows: Sequence[tuple[float, int, int]], rate: float, seconds: float, shape: float, seed: int
) -> list[Wanted]:
    """Lengths of a trace; gaps of a gamma distribution. shape: 1 for Poisson arrivals, less for
    bursts."""
    draws = random.Random(seed)
    found, at = list[Wanted](), 0.0
    while at < seconds:
        _, prompt, output = draws.choice(rows)
        found.append(Wanted(at, prompt, output))
        at += draws.gammavariate(shape, 1 / (rate * shape))
    return found


class Client:
    """Asks one server for completions of random tokens, which no other request shares."""

    def __init__(self, port: int, vocab_size: int, seed: int) -> None:
        self._port = port
        self._vocab_size = vocab_size
        self._draws = random.Random(seed)

    def begin(self, wanted: Wanted) -> tuple[Answer, asyncio.Task[Answer]]:
        """The answer as it grows. Cancelling the task leaves the server, as a client that goes."""
        answer = Answer(wanted, asyncio.get_running_loop().time())
        return answer, asyncio.create_task(self._ask(answer, 1))

    async def ask(self, wanted: Wanted, most_tries: int = 1) -> Answer:
        """Streams one completion; after a 429 tries again when it is told to."""
        return await self._ask(Answer(wanted, asyncio.get_running_loop().time()), most_tries)

    async def _ask(self, answer: Answer, most_tries: int) -> Answer:
        wanted = answer.wanted
        body = json.dumps(
            {
                "prompt": [
                    self._draws.randrange(2, self._vocab_size) for _ in range(wanted.prompt)
                ],
                "max_tokens": wanted.output,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "seed": self._draws.randrange(1 << 30),
            }
        ).encode()
        for _ in range(most_tries):
            retry_s = await self._try(body, answer)
            if retry_s is None:
                break
            await asyncio.sleep(retry_s)
        return answer

    async def _try(self, body: bytes, answer: Answer) -> float | None:
        """Seconds to wait where the server is busy."""
        loop = asyncio.get_running_loop()
        answer.statuses.append(0)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            answer.error = str(error)
            return None
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            status, headers = await _head(reader)
            answer.statuses[-1] = status
            if status == 429:
                return float(headers["retry-after"])
            if status != 200:
                answer.error = (await reader.read(2000)).decode(errors="replace")
                return None
            async for event in _events(reader):
                now = loop.time()
                if "error" in event:
                    answer.error = str(event["error"])
                    return None
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    answer.ends += choice["finish_reason"] is not None
                    answer.times_s.append(now)
            answer.ended_s = loop.time()
        except (OSError, ValueError, EOFError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            writer.close()
        return None


async def closed_loop(
    client: Client, wanted: Iterator[Wanted], clients: int, seconds: float
) -> list[Answer]:
    """So many clients, each of which asks again once it has its answer."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    found: list[Answer] = []

    async def one() -> None:
        while loop.time() < end:
            found.append(await client.ask(next(wanted), _MOST_TRIES))

    await asyncio.gather(*(one() for _ in range(clients)))
    return found


async def open_arrivals(
    client: Client, wanted: Sequence[Wanted], progress: Callable[[int], Any]
) -> list[Answer]:
    """Every request when it comes, whatever became of the others; those refused try again."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    tasks = []
    for count, one in enumerate(wanted):
        await asyncio.sleep(max(0.0, begin + one.at_s - loop.time()))
        tasks.append(asyncio.create_task(client.ask(one, _MOST_TRIES)))
        progress(count)
    return list(await asyncio.gather(*tasks))


async def full_step_s(client: Client, places: int, wanted: Wanted) -> float:
    """Median seconds between tokens while as many such requests decode as share steps, no prompt
    beside them: _FULL_GAPS of each, or as many as come before one ends. SystemExit if one ends
    before another begins."""
    begun = [client.begin(wanted) for _ in range(places)]
    answers = [answer for answer, _ in begun]
    tasks = [task for _, task in begun]

    def gaps() -> list[list[float]]:
        if not all(answer.times_s for answer in answers):
            return [[]]
        begin = max(answer.times_s[0] for answer in answers)
        return [answer.gaps_s(begin, math.inf) for answer in answers]

    while min(map(len, gaps())) < _FULL_GAPS and not any(task.done() for task in tasks):
        await asyncio.sleep(0.05)
    found = list(itertools.chain.from_iterable(gaps()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if not found:
        errors = [answer.error for answer in answers if answer.error]
        raise SystemExit(f"[bench] of {places} requests one ended before others began: {errors}")
    return statistics.median(found)


async def metrics_of(port: int) -> dict[str, float]:
    """What /metrics shows, by name and labels."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    lines = (line for line in (await asyncio.to_thread(read)).splitlines() if line[:1] != "#")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status, _, rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").partition("\r\n")
    lines = (line.partition(":") for line in rest.strip().split("\r\n"))
    return int(status.split()[1]), {name.lower(): value.strip() for name, _, value in lines}


async def _events(reader: asyncio.StreamReader) -> Any:
    """The JSON of each event of a response in chunks."""
    text = b""
    while size := int(await reader.readline(), 16):
        text += (await reader.readexactly(size + 2))[:-2]
        *whole, text = text.split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: {"):
                yield json.loads(event[6:])


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    return (
        sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")
    )


@dataclass(frozen=True)
class Rates:
    """Tokens per second of requests that completed. computed: with those of prompts."""

    generated: float
    computed: float


def rates_within(answers: Sequence[Answer], begin: float, end: float) -> Rates:
    """Of the requests that completed then, while there was any request without its answer: a trace
    is silent for seconds."""
    done = [a for a in answers if a.completed and a.ended_s and begin <= a.ended_s < end]
    generated = sum(a.tokens for a in done)
    prompts = sum(a.wanted.prompt for a in done)
    seconds = wanted_seconds(answers, begin, end)
    return Rates(generated / seconds, (generated + prompts) / seconds)


def wanted_seconds(answers: Sequence[Answer], begin: float, end: float) -> float:
    """For how long somebody wanted something, those included who wait to try again. At least a
    millisecond."""
    found, until = 0.0, begin
    for answer in sorted(answers, key=lambda a: a.asked_s):
        last = min(answer.ended_s or end, end)
        found += max(0.0, last - max(answer.asked_s, until))
        until = max(until, last)
    return max(found, 1e-3)


def figures_of(
    answers: Sequence[Answer], begin: float, seconds: float, closed: Rates, memory: Sequence[int]
) -> dict[str, Any]:
    """Of an overload. closed: of the closed loop. memory: of the server, each second. first tokens:
    of those not refused."""
    settle = min(15.0, seconds / 4)
    rates = rates_within(answers, begin + settle, begin + seconds)
    waits = [(a.ended_s or float("inf")) - a.asked_s for a in answers]
    served = [a.completed and wait <= _LONGEST_S for a, wait in zip(answers, waits, strict=True)]
    admitted = [a for a in answers if 200 in a.statuses]
    firsts = [a.first_s - a.asked_s for a in answers if a.first_s and a.statuses == [200]]
    settled = memory[min(int(_SETTLED_S), len(memory) - 1)] if memory else 0
    growth = (memory[-1] - settled) if memory else 0
    return {
        "requests": len(answers),
        "tries": sum(len(a.statuses) for a in answers),
        "refusals": sum(a.statuses.count(429) for a in answers),
        "wanted_share": wanted_seconds(answers, begin + settle, begin + seconds)
        / (seconds - settle),
        "tokens_per_s": rates.generated,
        "of_closed_loop": rates.generated / closed.generated,
        "of_closed_loop_with_prompts": rates.computed / closed.computed,
        "ended_once": sum(a.ends == 1 and not a.error for a in admitted) / max(len(admitted), 1),
        "answered": sum(served) / len(answers),
        "first_token_p50_s": percentile(firsts, 0.5),
        "first_token_p99_s": percentile(firsts, 0.99),
        "between_tokens_p99_s": percentile([gap for a in answers for gap in a.gaps_s()], 0.99),
        "rss_growth_bytes": growth,
        "rss_allowed_bytes": round(0.02 * settled) + (8 << 20),
        "errors": sorted({a.error for a in answers if a.error})[:5],
    }
