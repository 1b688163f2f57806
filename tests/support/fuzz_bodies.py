"""Fuzzed bodies of requests. `python tests/support/fuzz_bodies.py` sends 10,000 to a server of the
bundled model; seed and number say each one."""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections import Counter
from typing import Any

import httpx

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SEEDS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be kind"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ],
        "tools": [TOOL], "tool_choice": "auto", "max_tokens": 3, "stop": ["x"], "n": 2,
    },
    {
        "messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 2,
        "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
            "type": "object", "properties": {"a": {"enum": [1, "x"]}}}}},
    },
    {"prompt": "Once", "max_tokens": 3, "echo": True, "temperature": 0.5, "seed": 1},
    {"prompt": [[5, 6], [7]], "max_tokens": 2, "logit_bias": {"5": 1.5}, "n": 2, "logprobs": 1},
    {"content": "Hello", "with_pieces": True},
    {"tokens": [5, 6, 7]},
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 1e308, -0.0, 0.5, "", "\0", "\ud800", "é",
    "<|end|>", "a" * 3000, [], {}, [[]], [None], {"": None}, [1, "a", {}], {"type": "text"},
)  # fmt: skip
RAW = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"a":NaN}', b'{"a":1,"a":2}',
    b'{"messages":' + b"[" * 100_000, b'{"n":' + b"9" * 10_000 + b"}", b'{"prompt":"\\ud800"}',
    b'{"prompt":"\xc3\x28"}', b'{"max_tokens":1e999}',
)  # fmt: skip


def body(seed: int, number: int) -> tuple[str, bytes]:
    """The address and the body of one request."""
    draw = random.Random(f"{seed}/{number}")
    path = draw.choice(PATHS)
    if draw.random() < 0.05:
        return path, draw.choice(RAW)
    value = copy.deepcopy(draw.choice(SEEDS))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        _change(draw, value)
    data = json.dumps(value).encode()
    if draw.random() < 0.05:
        place = draw.randrange(len(data))
        data = data[:place] + bytes([draw.randrange(256)]) + data[place + draw.randrange(3) :]
    return path, data


def _change(draw: random.Random, value: Any) -> None:
    """Changes one place, at some depth."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            if isinstance(value, list):
                value.append(draw.choice(ODD))
            return
        key = draw.choice(keys)
        inner = value[key]
        if isinstance(inner, (dict, list)) and draw.random() < 0.6:
            value = inner
            continue
        what = draw.random()
        if what < 0.6:
            value[key] = copy.deepcopy(draw.choice(ODD))
        elif what < 0.75:
            del value[key]
        elif isinstance(value, list):
            value += [copy.deepcopy(inner)] * draw.choice((1, 3, 200))
        else:
            value[draw.choice(("n", "stop", "tools", "prompt", "messages", "x"))] = inner
        return


def run(url: str, seed: int, count: int) -> Counter[int]:
    """Sends so many; how often each status came. AssertionError, with what repeats it, for a 500
    or a connection that breaks."""
    statuses: Counter[int] = Counter()
    with httpx.Client(timeout=60) as client:
        for number in range(count):
            path, data = body(seed, number)
            try:
                status = client.post(url + path, content=data).status_code
            except httpx.HTTPError as error:
                raise AssertionError(f"seed {seed}, number {number}: {error!r}") from error
            assert status < 500 or status == 501, f"seed {seed}, number {number}: {status}"
            statuses[status] += 1
        assert client.get(f"{url}/health").status_code == 200
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    args = parser.parse_args()
    import helm
    from helm.serve.llm_backend import LlmBackend
    from scripted_backend import served

    with helm.LLM() as llm, served(LlmBackend.over(llm)) as (url, _):
        print(dict(run(url, args.seed, args.count)))


if __name__ == "__main__":
    main()
