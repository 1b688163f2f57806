"""What clients do to a server. Each scenario takes a size, and asserts that others go on; what is
left behind afterwards the caller compares."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from abuse.served import Served
from abuse.wire import CHAT, COMPLETIONS, Client, answered, asked, head, message, parted, together

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
# Every token is asked for, whatever ends the text, with twenty more beside it.
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "temperature": 1}
WIDE = {**LONG, "logprobs": 20, "stream": True}
_SMALL = 4096  # bytes that the system receives for a client that reads slowly
_BODY = 32 << 20
Place = tuple[str, int]


async def _goes_on(place: Place) -> None:
    """Somebody else's short request is answered, at once or when it may come again."""
    async with asyncio.timeout(60):
        while True:
            status, top, body = await answered(place, CHAT, HELLO)
            if status == 200:
                return
            assert status in (429, 503), (status, body)
            assert b"retry-after" in top
            await asyncio.sleep(0.2)


async def _until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while not await asyncio.to_thread(true):
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.02)


async def leave_the_queue(served: Served, size: int) -> None:
    """Clients leave while they wait; nobody computes for them."""
    running = [await asked(served.place, COMPLETIONS, {**LONG, "n": 16, "stream": True})]
    await running[0].until(b"data: ")
    waiting = await together(
        asked(served.place, CHAT, {**HELLO, "stream": bool(i % 2)}) for i in range(size)
    )
    await _until(lambda: served.metrics()["helm_num_requests_waiting"] >= size)
    for i, client in enumerate(waiting):
        client.leave(rudely=i % 3 == 0)
    # The other choices of the long request may still wait.
    await _until(lambda: served.metrics()["helm_num_requests_waiting"] <= 16)
    running[0].leave()
    await _goes_on(served.place)


async def leave_the_prompt(served: Served, size: int) -> None:
    """Clients leave as soon as they have asked, with the longest prompt there may be."""
    context = int(_context(served))
    draw = random.Random(1)

    async def one(number: int) -> None:
        prompt = [5 + (i * 7 + number) % 200 for i in range(context - 8)]
        client = await asked(served.place, COMPLETIONS, {**LONG, "prompt": prompt,
                                                         "stream": bool(number % 2)})  # fmt: skip
        await asyncio.sleep(draw.random() * 0.05)
        client.leave(rudely=number % 3 == 0)

    await together(one(i) for i in range(size))
    await _goes_on(served.place)


async def leave_the_answer(served: Served, size: int) -> None:
    """Clients leave after the first tokens, and in the middle of what is being written."""

    async def one(number: int) -> None:
        client = await asked(served.place, COMPLETIONS, WIDE, _SMALL)
        await client.until(b"data: ")
        await asyncio.sleep(0.02 * (number % 5))  # nobody reads: the server's buffer fills
        client.leave(rudely=number % 2 == 0)

    await together(one(i) for i in range(size))
    await _goes_on(served.place)


async def read_slowly(served: Served, size: int) -> None:
    """Clients do not read what they asked for; their places are others' all the same."""
    slow = await together(
        asked(served.place, COMPLETIONS, {**WIDE, "stream": bool(i % 2)}, _SMALL)
        for i in range(size)
    )
    await _until(lambda: served.metrics()["helm_engine_running"] == 0, 120)
    await _goes_on(served.place)
    for client in slow:
        client.leave()


async def send_bodies_slowly(served: Served, size: int) -> None:
    """Bodies that never end: others are answered meanwhile."""
    held = await together(Client.connected(served.place) for _ in range(size))
    for client in held:
        await client.send(head(CHAT, 1000) + b'{"messages": ')
    for client in held[: size // 4]:
        await client.send(b"[")
    await _goes_on(served.place)
    for client in held:
        client.leave()


async def send_too_much(served: Served, size: int) -> None:
    """Bodies beyond the most get 413, whether they say their size or not; what all send together is
    bounded too."""

    async def one(number: int) -> int:
        client = await Client.connected(served.place)
        told = number % 2 == 0
        try:
            more = () if told else ("Transfer-Encoding: chunked",)
            start = head(CHAT, _BODY + 1, *more)
            await client.send(start if told else start.replace(b"Content-Length", b"X-Length"))
            piece = bytes(1 << 20)
            for _ in range(33):
                await client.send(piece if told else b"100000\r\n" + piece + b"\r\n")
        except OSError:  # it has answered and closed
            pass
        status, _, _ = parted(await _rest_of(client))
        client.leave()
        return status

    counts = Counter(await together(one(i) for i in range(size)))
    # 0: the system has thrown the answer away with what was still to be sent.
    assert counts[413] > 0, counts
    assert set(counts) <= {413, 503, 0}, counts
    held = await together(_half_sent(served.place, 8 << 20) for _ in range(max(4, size)))
    await _goes_on(served.place)
    assert served.metrics()["helm_request_body_bytes"] <= 128 << 20
    for client in held:
        client.leave(rudely=True)


async def _half_sent(place: Place, size: int) -> Client:
    client = await Client.connected(place)
    with contextlib.suppress(OSError):  # refused
        await client.send(head(CHAT, 2 * size) + b" " * size)
    return client


async def _rest_of(client: Client) -> bytes:
    found = b""
    try:
        while piece := await client.read():
            found += piece
    except OSError:
        pass
    return found


async def say_nothing(served: Served, size: int) -> None:
    """Connections without a request, and with a piece of one."""
    held = await together(Client.connected(served.place) for _ in range(size))
    for client in held[::2]:
        await client.send(b"POST /v1/chat/comp")
    await _goes_on(served.place)
    for client in held:
        client.leave()


async def come_at_once(served: Served, size: int) -> None:
    """So many requests at once: each is answered, or told when to come again."""

    async def one() -> int:
        status, top, body = await answered(served.place, CHAT, HELLO)
        assert status in (200, 429), (status, body[:200])
        assert status == 200 or b"retry-after" in top
        return status

    counts = Counter(await together(one() for _ in range(size)))
    assert counts[200] >= min(size, 8), counts
    await _goes_on(served.place)


async def send_malformed(served: Served, size: int) -> None:
    """Requests with some bytes changed, left out or added: never a 500."""
    draw = random.Random(2)
    seed = message(CHAT, {**HELLO, "max_tokens": 1}, "Connection: close", "Accept: */*")

    async def one(data: bytes) -> int:
        client = await Client.connected(served.place)
        try:
            await client.send(data)
            client.socket.shutdown(1)
            return parted(await _rest_of(client))[0]
        except OSError:
            return 0
        finally:
            client.leave()

    statuses: Counter[int] = Counter()
    for _ in range(0, size, 20):
        statuses.update(await together(one(_changed(draw, seed)) for _ in range(20)))
    assert all(status < 500 or status == 501 for status in statuses), statuses
    assert len(statuses) > 2, statuses
    await _goes_on(served.place)


async def give_up(served: Served, size: int) -> None:
    """The server closes connections that say nothing, and those that read nothing, in half a minute
    each; this one only waits."""
    silent = await together(Client.connected(served.place) for _ in range(size))
    for client in silent[::2]:
        await client.send(b"POST /v1/chat/comp")
    body = {**WIDE, "n": 16}
    slow = await together(asked(served.place, COMPLETIONS, body, _SMALL) for _ in range(4))
    await _until(lambda: served.metrics()["helm_connections"] == 1, 150)
    await _goes_on(served.place)
    for client in (*silent, *slow):
        client.leave()


def _changed(draw: random.Random, data: bytes) -> bytes:
    odd = (b"", b"\0", b"\r\n", b"\r\n\r\n", b"\xff\xfe", b":", b" ", b"9" * 30, b"-1",
           b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"HTTP/9.9",
           b"x" * 40_000, b"Upgrade: websocket\r\nConnection: upgrade\r\n")  # fmt: skip
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = draw.randrange(len(data))
        data = data[:place] + draw.choice(odd) + data[place + draw.choice((0, 0, 1, 3, 20)) :]
    return data


def _context(served: Served) -> int:
    import httpx

    models = httpx.get(f"{served.url}/v1/models", headers={"connection": "close"}).json()
    return int(models["data"][0]["max_model_len"])


# Short and full sizes of each.
SCENARIOS: dict[Callable[[Served, int], Awaitable[None]], tuple[int, int]] = {
    leave_the_queue: (20, 200),
    leave_the_prompt: (20, 300),
    leave_the_answer: (20, 100),
    read_slowly: (10, 100),
    send_bodies_slowly: (20, 500),
    send_too_much: (4, 24),
    say_nothing: (100, 2000),
    come_at_once: (100, 2000),
    send_malformed: (200, 4000),
}
