"""How a server ends while clients ask: by signals, and by a device that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import httpx

from abuse.scenarios import HELLO, LONG
from abuse.served import Served, serving
from abuse.wire import CHAT, COMPLETIONS, Client, answered, asked, parted, together
from device_profiles import fast_accelerator


def drains_under_load(size: int) -> None:
    """SIGTERM while clients stream, wait and come: whoever was admitted gets all of it."""
    with serving("--context", "512", "--grace", "120", "--max-waiting", "4096") as served:
        counts = asyncio.run(_drained(served, size))
        assert served.process.wait(30) == 0
        served.check_log()
    assert counts["stream"] == size, counts
    assert counts["503"] + counts["none"] > 0, counts


async def _drained(served: Served, size: int) -> Counter[str]:
    body = {**LONG, "max_tokens": 100, "n": 4, "stream": True}
    streams = await together(asked(served.place, COMPLETIONS, body) for _ in range(size))
    await streams[0].until(b"data: ")
    await _until_held(served, size)
    served.process.send_signal(signal.SIGTERM)
    counts: Counter[str] = Counter()

    async def late() -> None:
        try:
            status, _, _ = await answered(served.place, CHAT, HELLO)
        except OSError:  # it has ended
            status = 0
        counts["none" if status == 0 else str(status)] += 1

    async def whole(client: Client) -> None:
        text = await client.until(b"data: [DONE]\n\n")
        assert b"[DONE]" in text, text[-500:]
        counts["stream"] += 1

    await asyncio.sleep(0.1)
    await together([*(late() for _ in range(size)), *(whole(client) for client in streams)])
    assert not set(counts) - {"stream", "503", "none"}, counts
    return counts


async def _until_held(served: Served, size: int) -> None:
    """Until most of the four choices of each run or wait."""
    end = time.monotonic() + 20
    while True:
        held = await asyncio.to_thread(served.held)
        if held.running + held.waiting >= 3 * size:
            return
        assert time.monotonic() < end, held
        await asyncio.sleep(0.02)


def ends_at_once(size: int) -> None:
    """A second SIGTERM ends it, whatever still runs, and leaves nobody waiting."""
    with serving("--context", "512", "--grace", "60") as served:
        asyncio.run(_cut(served, size))
        assert served.process.wait(10) == 128 + signal.SIGTERM
        served.check_log()


async def _cut(served: Served, size: int) -> None:
    body = {**LONG, "n": 8, "stream": True}
    streams = await together(asked(served.place, COMPLETIONS, body) for _ in range(size))
    await streams[0].until(b"data: ")
    served.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 10
    while (await asyncio.to_thread(httpx.get, f"{served.url}/health")).status_code == 200:
        assert time.monotonic() < end
    begun = time.monotonic()
    served.process.send_signal(signal.SIGTERM)

    async def ends(client: Client) -> None:
        with contextlib.suppress(ConnectionError):
            await client.rest()

    await together(ends(client) for client in streams)
    assert time.monotonic() - begun < 5


def loses_its_device(size: int, commands: int) -> None:
    """The accelerator is lost after so many commands: every open request is told, as /health is."""
    device = f"sim:vram=1GiB,lost={commands}"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
        profile.write(fast_accelerator().to_json())
        profile.flush()
        options = ("--context", "512", "--device", device, "--profile", profile.name)
        _loses_it(size, options)


def _loses_it(size: int, options: tuple[str, ...]) -> None:
    with serving(*options) as served:
        asyncio.run(_lost(served, size))
        assert served.process.wait(20) == 1
        served.check_log()


async def _lost(served: Served, size: int) -> None:
    told: Counter[str] = Counter()

    async def one(number: int) -> None:
        stream = number % 2 == 0
        client = await asked(served.place, COMPLETIONS, {**LONG, "stream": stream})
        if stream:
            text = (await client.until(b'"error"')) + await client.read()
            status, _, body = parted(text)
            last = body.decode().rpartition("data: ")[2] if status == 200 else ""
            told["stream" if '"engine_error"' in last or status in (500, 503) else text[-500:]] += 1
        else:
            status, _, body = parted(await client.until(b"}}"))
            told["whole" if status in (500, 503) else f"{status} {body[:99]!r}"] += 1
        client.leave()

    work = asyncio.gather(*(one(i) for i in range(size)))
    health = httpx.Response(200)
    end = time.monotonic() + 60
    while health.status_code == 200:
        assert time.monotonic() < end
        health = await asyncio.to_thread(httpx.get, f"{served.url}/health")
        await asyncio.sleep(0.02)
    assert health.status_code == 503
    found = json.loads(health.content)
    assert found["status"] == "failed", found
    assert "lost" in found["reason"], found
    await work
    assert set(told) <= {"stream", "whole"}, told
    assert told.total() == size


def refuses_beyond_its_files(files: int, size: int) -> None:
    """More connections than the system lets it open: some are served, the others refused, and it
    neither spins nor stops to listen."""
    with serving("--context", "512", prefix=("prlimit", f"--nofile={files}")) as served:
        before = served.held()
        asyncio.run(_beyond(served, size))
        served.settled(before)
        served.answer()
        served.check_log()


async def _beyond(served: Served, size: int) -> None:
    held = await together(Client.connected(served.place) for _ in range(size))
    await asyncio.sleep(2.5)
    busy = served.processor_s()
    await asyncio.sleep(1.0)
    assert served.processor_s() - busy < 0.3
    open_now = 0
    for client in held:
        try:
            client.socket.recv(1)
        except BlockingIOError:
            open_now += 1
        except OSError:
            pass
    assert 0 < open_now < size, open_now
    client = await Client.connected(served.place)
    await client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    status, top, _ = parted(await client.read())
    assert (status, b"retry-after" in top) == (503, True), (status, top)
    client.leave()
    for client in held:
        client.leave()


ENDS: dict[Callable[..., None], tuple[tuple[int, ...], tuple[int, ...]]] = {
    drains_under_load: ((12,), (60,)),
    ends_at_once: ((6,), (30,)),
    loses_its_device: ((12, 600), (100, 600)),
    refuses_beyond_its_files: ((200, 300), (1000, 2000)),
}
