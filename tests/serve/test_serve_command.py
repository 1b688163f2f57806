"""`helm-llm serve` as a process: where it listens, how signals end it, whom it refuses."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import httpx
import pytest

from command import environment, helm
from helm.commands import common
from helm.commands.cli import main
from helm.errors import InvalidError

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
# Some seconds of work: every token is asked for, whatever ends the text.
LONG = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 16, "temperature": 1}


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command once it listens, and its address."""
    made = subprocess.Popen(
        [sys.executable, "-m", "helm", "serve", "--port", "0", "-t", "1", *options],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert made.stderr is not None
    try:
        for line in made.stderr:
            if found := re.search(r"at (http://\S+)", line):
                yield made, found[1]
                break
        else:
            raise AssertionError("it ended before it listened")
    finally:
        made.kill()
        made.communicate()


def ready(url: str) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            assert httpx.get(f"{url}/health").json() == {"status": "ok"}
            return
        except httpx.ConnectError:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_signal_lets_running_requests_end() -> None:
    with serving() as (process, url), httpx.Client(timeout=60) as client:
        ready(url)
        with client.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as run:
            lines = run.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 5
            while httpx.get(f"{url}/health").status_code == 200:
                assert time.monotonic() < end
            refused = httpx.post(f"{url}/v1/chat/completions", json=HELLO)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line for line in rest) == 16
        assert process.wait(20) == 0


def test_a_second_signal_ends_at_once() -> None:
    with serving() as (process, url), httpx.Client(timeout=60) as client:
        ready(url)
        with client.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as run:
            lines = run.iter_lines()  # dropped, it would close the connection
            next(lines)
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 5
            while httpx.get(f"{url}/health").status_code == 200:
                assert time.monotonic() < end
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 128 + signal.SIGTERM
            assert time.monotonic() - begun < 5


def test_nobody_from_afar_without_a_key(tmp_path: object) -> None:
    refused = helm("serve", "--host", "0.0.0.0", "--port", "0", status=2)
    assert "--api-key-file" in refused.stderr
    with serving("--host", "0.0.0.0", "--api-key-file", _keys(tmp_path)) as (_, url):
        port = url.rpartition(":")[2]
        address = f"http://127.0.0.1:{port}"
        ready(address)
        assert httpx.get(f"{address}/v1/models").status_code == 401
        found = httpx.get(f"{address}/v1/models", headers={"authorization": "Bearer word"})
        assert found.json()["data"][0]["id"] == "bundled"


def test_whoever_insists_needs_no_key() -> None:
    with serving("--host", "0.0.0.0", "--no-auth", "--no-web") as (_, url):
        address = f"http://127.0.0.1:{url.rpartition(':')[2]}"
        ready(address)
        assert httpx.get(f"{address}/v1/models").status_code == 200
        assert httpx.get(f"{address}/").status_code == 404
    refused = helm("serve", "--no-auth", "--port", "0", status=2, HELM_API_KEY="word")
    assert "--no-auth lets anyone ask, and there are keys" in refused.stderr


def _keys(folder: object) -> str:
    path = os.path.join(str(folder), "keys")
    with open(path, "w") as file:
        file.write("word\n")
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "port"),
        (["--concurrency", "0"], "--concurrency"),
        (["--queue-timeout", "nan"], "--queue-timeout"),
        (["--sse-interval", "-1"], "--sse-interval"),
        (["--sse-interval", "nan"], "--sse-interval"),
        (["--tbt", "-1"], "--tbt"),
        (["--tbt", "inf"], "--tbt"),
        (["--cors-origin", "example.org"], "no origin"),
        (["--api-key-file", "/nowhere/at/all"], "/nowhere"),
        (["--host", "no.such.host.invalid"], "listen"),
    ],
)
def test_wrong_options_are_named(options: list[str], words: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "helm", "serve", *options],
        env={**environment(), "HELM_API_KEY": "k"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "objective"),
    [
        ([], "serve"),
        (["--concurrency", "1"], "total"),
        (["--objective", "decode"], "decode"),
        (["--objective", "total"], "total"),
    ],
)
def test_the_plan_is_for_a_service(
    options: list[str], objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def load(args: argparse.Namespace) -> NoReturn:
        asked.append(args.objective)
        raise InvalidError("enough")

    monkeypatch.setattr(common, "load", load)
    assert main(["serve", "--port", "0", *options]) == 2
    assert asked == [objective]


def test_without_the_extra_the_remedy_is_named() -> None:
    code = (
        "import sys; import importlib.util as u; old = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'starlette' else old(name, *a);"
        "from helm.commands.cli import main; sys.exit(main(['serve']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "helm-llm[serve]" in result.stderr
