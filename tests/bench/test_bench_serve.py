"""bench/serve.py: arrivals, figures, and one short overload of a real server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from serve_load import (
    Answer,
    Rates,
    Wanted,
    bursts,
    figures_of,
    from_trace,
    lengths_of,
    rates_within,
    wanted_seconds,
)

import helm

BENCH = Path(__file__).parents[2] / "bench"
ROWS = [(0.0, 10, 4), (1.0, 20, 6), (4.0, 30, 8)]


def test_a_trace_is_read_scaled_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4800,10\n"
        "2023-11-16 18:17:05.4799600,320,4000\n"
    )
    (first, *prompt_and_output), (second, *other) = lengths_of(path, 128, 1 / 16)
    assert (first, second) == (0.0, pytest.approx(1.5))
    assert prompt_and_output == [118, 2]  # 300 tokens do not fit beside the output
    assert other == [20, 64]


def test_a_trace_keeps_its_rhythm_at_the_rate_asked_for() -> None:
    found = from_trace(ROWS, rate=0.75, seconds=4.0)
    assert [w.at_s for w in found] == [0.0, 1.0, 4.0]
    assert [w.at_s for w in from_trace(ROWS, rate=1.5, seconds=2.0)] == [0.0, 0.5, 2.0]


@pytest.mark.parametrize(("shape", "dispersion"), [(1.0, (0.6, 1.5)), (0.25, (2.5, 6.0))])
def test_bursts_come_at_the_rate_and_as_unevenly_as_asked(
    shape: float, dispersion: tuple[float, float]
) -> None:
    found = bursts(ROWS, 20.0, 200.0, shape, seed=3)
    assert len(found) == pytest.approx(4000, rel=0.1)
    counts = [sum(second <= w.at_s < second + 1 for w in found) for second in range(200)]
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert dispersion[0] <= variance / mean <= dispersion[1]


def _answer(**fields: object) -> Answer:
    plain = {"statuses": [200], "times_s": [101.0], "ended_s": 110.0, "tokens": 40, "ends": 1}
    return Answer(Wanted(0.0, 8, 40), 100.0, **{**plain, **fields})  # type: ignore[arg-type]


def test_figures_count_what_ended_once_in_time() -> None:
    answers = [
        _answer(),
        _answer(statuses=[429, 200], ended_s=350.0),  # too late
        _answer(ends=2),
        _answer(statuses=[429] * 5, times_s=[], ended_s=None, ends=0, tokens=0),
        _answer(error="broken", ends=0),
    ]
    closed = Rates(generated=4.0, computed=8.0)
    found = figures_of(answers, begin=100.0, seconds=20.0, closed=closed, memory=[100 << 20] * 40)
    assert found["ended_once"] == 0.5
    assert found["answered"] == 0.2
    assert found["refusals"] == 6
    assert found["tokens_per_s"] == pytest.approx(40 / 15)
    assert found["of_closed_loop"] == pytest.approx(40 / 15 / 4)
    assert found["of_closed_loop_with_prompts"] == pytest.approx(48 / 15 / 8)
    assert found["rss_growth_bytes"] == 0
    assert found["errors"] == ["broken"]


def test_an_overloaded_server_ends_every_request_once(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    subprocess.run(
        # A model that takes longer than HTTP: what two cores refuse of a smaller one per second
        # leaves no time to answer.
        [sys.executable, BENCH / "serve.py", "qwen3-0.6b", "--layers", "1", "--what", "load",
         "--context", "128", "--factor", "3", "--seconds", "2", "--closed-seconds", "2",
         "--max-waiting", "16", "--arrivals", "gamma", "--json", path],
        check=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    (found,) = json.loads(path.read_text())
    assert found["requests"] > 10
    assert found["ended_once"] == 1
    assert found["refusals"] > 0
    assert found["answered"] >= 0.95
    assert found["errors"] == []
    assert found["step_at_full_s"] > 0
    assert found["near_steps"] > 0
    assert found["moved_to_host"] == 0  # there is one memory


def test_seconds_in_which_nobody_wants_anything_do_not_count() -> None:
    answers = [
        _answer(ended_s=103.0),  # all came at 100
        _answer(ended_s=104.0),
        replace(_answer(ended_s=112.0), asked_s=110.0),
    ]
    assert wanted_seconds(answers, 102.0, 120.0) == pytest.approx(2.0 + 2.0)
    assert rates_within(answers, 102.0, 120.0) == Rates(120 / 4, 144 / 4)
    answers.append(_answer(ended_s=None))  # one that had to try again all the time
    assert wanted_seconds(answers, 102.0, 120.0) == pytest.approx(18.0)


def test_two_servers_are_loaded_in_turn(tmp_path: Path) -> None:
    """The peer is HELM under llama-server's options."""
    bundled = Path(helm.__file__).parent / "bundled"
    peer, path = tmp_path / "llama-server", tmp_path / "found.json"
    peer.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert given['-np'] == '2' and given['-c'] == '64', given\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'helm', 'serve', given['-m'], '--port',\n"
        "                          given['--port'], '--context', '32', '--device', 'cpu'])\n"
    )
    peer.chmod(0o755)
    subprocess.run(
        [sys.executable, BENCH / "serve_peer.py", bundled, "--peer", peer, "--clients", "2",
         "--rounds", "1", "--seconds", "1", "--prompt", "8", "--output", "8", "--json", path],
        check=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    found = json.loads(path.read_text())
    assert sorted(found) == ["HELM", "llama.cpp"]
    for (figures,) in found.values():
        assert figures["tokens/s"] > 0
        assert 0 < figures["first token, p50, s"] <= figures["first token, p99, s"]


def test_a_client_tells_a_broken_answer_from_a_good_one() -> None:
    from serve_load import Client

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'data: {"choices":[{"finish_reason":null}]}\n\n'
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%s\r\n" % (len(body), body))
        writer.close()  # in the middle

    async def main() -> Answer:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await Client(port, 100, 0).ask(Wanted(0.0, 4, 4))

    found = asyncio.run(main())
    assert not found.completed
    assert found.ends == 0
    assert found.error
