"""Hostile requests: no answer is a 500, and the server goes on."""

from __future__ import annotations

import socket

import httpx
import pytest

from fuzz_bodies import run
from helm.serve import http_body
from scripted_backend import ScriptedBackend, says, served

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def test_fuzzed_bodies() -> None:
    with served(ScriptedBackend(says("Hello"))) as (url, _):
        statuses = run(url, seed=1, count=600)
    assert set(statuses) <= {200, 400, 404, 413, 501}
    assert statuses[200] > 10
    assert statuses[400] > 200


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}, 3]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"priority": 3}, "priority"),
        ({"priority": -1}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"user": 3}, "user"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(change: dict, field: str) -> None:
    with served(ScriptedBackend(says("Hello"))) as (url, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json={**HELLO, **change})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert error["message"]


def test_unknown_fields_are_named_and_known_quiet_ones_are_not() -> None:
    with served(ScriptedBackend(says("Hello"))) as (url, _):
        body = {**HELLO, "frobnicate": 1, "bad\r\nname": 2, "store": True, "user": "u"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-helm-ignored"] == "frobnicate"


def test_a_large_body_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "MOST_BYTES", 1 << 20)
    with served(ScriptedBackend(says("Hello"))) as (url, _):
        whole = httpx.post(f"{url}/v1/chat/completions", content=b"x" * (2 << 20))
        pieces = httpx.post(f"{url}/v1/chat/completions", content=iter([b"x" * (1 << 19)] * 4))
        assert httpx.post(f"{url}/v1/chat/completions", json=HELLO).status_code == 200
    assert whole.status_code == pieces.status_code == 413
    assert whole.json()["error"]["code"] == "body_too_large"


def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "_BODY_S", 0.3)
    with served(ScriptedBackend(says("Hello"))) as (url, _), connected(url) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                       b"Content-Length: 100\r\n\r\n{")  # fmt: skip
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


def test_malformed_http_is_refused() -> None:
    messages = [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
    ]
    with served(ScriptedBackend(says("Hello"))) as (url, _):
        for message in messages:
            with connected(url) as client:
                try:
                    client.sendall(message)
                    client.shutdown(socket.SHUT_WR)
                    answer = client.recv(4096)
                except OSError:  # the server closed before all was sent
                    answer = b""
            assert not answer.startswith(b"HTTP/1.1 5"), message[:60]
            assert not answer.startswith(b"HTTP/1.1 200"), message[:60]
        assert httpx.post(f"{url}/v1/chat/completions", json=HELLO).status_code == 200


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)
