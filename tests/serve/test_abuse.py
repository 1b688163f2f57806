"""Clients that leave, stall and come too many, in short; `tests/abuse/run` is the full form."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import socket
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import pytest

from abuse.ends import ENDS
from abuse.scenarios import SCENARIOS
from abuse.served import Served, serving
from abuse.wire import CHAT, head, message
from helm.serve import connection, http_body
from scripted_backend import ScriptedBackend, says, served

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
LONG = [20 + i % 7 for i in range(400)]
_GROWTH_BYTES = 64 << 20  # of the first time that a scenario runs


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--context", "512") as made:
        yield made
        made.check_log()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_stays_behind(
    server: Served, scenario: Callable[[Served, int], Awaitable[None]]
) -> None:
    expected = server.answer()
    before = server.held()
    asyncio.run(scenario(server, SCENARIOS[scenario][0]))
    after = server.settled(before)
    assert after.resident_bytes < before.resident_bytes + _GROWTH_BYTES
    assert server.answer() == expected


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_it_ends_as_it_says(end: Callable[..., None]) -> None:
    end(*ENDS[end][0])


def closes(made: socket.socket, seconds: float) -> bool:
    """Whether the other side closes in time; what it sends before is not read."""
    end = time.monotonic() + seconds
    made.settimeout(0.05)
    while time.monotonic() < end:
        try:
            if not made.recv(1 << 16):
                return True
        except TimeoutError:
            pass
        except ConnectionError:
            return True
    return False


def connect(url: str, buffer_bytes: int = 0) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    made = socket.socket()
    if buffer_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    made.connect((host, int(port)))
    return made


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat/comp", b"\r\n"])
def test_who_sends_no_request_is_cut_off(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with served(ScriptedBackend(says("Hello"))) as (url, serving), connect(url) as silent:
        silent.sendall(said)
        assert closes(silent, 5)
        assert serving.connections is not None  # it has begun
        assert serving.connections.open == 0


def test_who_sends_a_piece_now_and_then_has_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.5)
    with served(ScriptedBackend(says("Hello"))) as (url, _), connect(url) as drip:
        begun = time.monotonic()
        for byte in message(CHAT, HELLO)[:60]:
            try:
                drip.sendall(bytes([byte]))
            except ConnectionError:
                break
            time.sleep(0.05)
        assert closes(drip, 2)
        assert time.monotonic() - begun < 2.5


def test_a_request_that_is_computed_for_long_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    backend = ScriptedBackend(says("Hello"), prompt_s=0.8)
    with served(backend) as (url, _), connect(url) as patient:
        for _ in range(2):  # on one connection
            patient.sendall(message(CHAT, HELLO))
            answer = http.client.HTTPResponse(patient)
            answer.begin()
            assert answer.status == 200
            assert b"Hello" in answer.read()


@pytest.mark.parametrize("stream", [False, True])
def test_who_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(connection, "STALL_S", 0.3)
    # So that the system holds little of an answer for the client.
    bind = socket.socket.bind

    def small(made: socket.socket, place: tuple[str, int]) -> None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        bind(made, place)

    monkeypatch.setattr(socket.socket, "bind", small)
    backend = ScriptedBackend(lambda _: LONG)
    body = {**HELLO, "stream": stream, "logprobs": True, "top_logprobs": 2}
    with served(backend) as (url, serving), connect(url, 4096) as slow:
        slow.sendall(message(CHAT, body))
        end = time.monotonic() + 10
        while not backend.requests or serving.connections is None or serving.connections.open:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert not serving.admission.running


def test_bodies_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "ALL_BYTES", 100_000)
    with served(ScriptedBackend(says("Hello"))) as (url, serving):
        first, second = connect(url), connect(url)
        with first, second:
            first.sendall(head(CHAT, 90_000) + b" " * 80_000)
            end = time.monotonic() + 5
            while serving.bodies_bytes < 80_000:
                assert time.monotonic() < end
                time.sleep(0.01)
            second.sendall(head(CHAT, 90_000) + b" " * 40_000)
            second.settimeout(5)
            answer = second.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in answer
        end = time.monotonic() + 5
        while serving.bodies_bytes:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": [' + b"1," * (1 << 21) + b"1]}"),
        ("/detokenize", b'{"tokens": [' + b"1," * (1 << 21) + b"1]}"),
        (CHAT, b'{"messages": [' + b"{}," * (1 << 18) + b"{}]}"),
        ("/v1/completions", b'{"prompt": "' + b"hello " * (1 << 19) + b'"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "' + b"a " * (1 << 20) + b'"}]}'),
        ("/tokenize", b'{"content": "' + b"hello " * (1 << 17) + b'"}'),
    ],
)
def test_a_large_request_does_not_hold_up_others(path: str, body: bytes) -> None:
    with served(ScriptedBackend(says("Hello"))) as (url, _), httpx.Client(timeout=60) as other:
        other.get(f"{url}/health")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            large = pool.submit(httpx.post, url + path, content=body, timeout=60)
            longest = 0.0
            while not large.done():
                begun = time.monotonic()
                assert other.get(f"{url}/health").status_code == 200
                longest = max(longest, time.monotonic() - begun)
        assert large.result().status_code == (200 if path == "/tokenize" else 400)
        assert longest < 1.5
