"""Forked children of a process that has loaded a model: refused at once, and end as ever."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import concurrent.futures, gc, json, multiprocessing, os, signal, sys, threading
import helm
from helm import _helm

STORY, LONG = "Once upon a time", {"max_tokens": 100, "ignore_eos": True}
llm = helm.LLM(context=256, max_sequences=3, threads=2)
stream = llm.stream(STORY, **LONG)
next(stream)
stage = _helm.StageProbe(0)
stage.empty_ops(2, 1, 0.0)
device = _helm.DeviceProbe("sim:vram=1GiB,link=16GB/s", 0)
stop, busy = threading.Event(), threading.Event()

def generate():
    while not stop.is_set():
        busy.set()
        llm.generate(STORY, **LONG)

def refusals():
    calls = [
        lambda: llm.generate(STORY),
        lambda: next(stream),
        lambda: llm.stream(STORY),
        lambda: llm.chat([{"role": "user", "content": STORY}]),
        lambda: llm.logits([1, 2]),
        lambda: llm.save_kv("never"),
        lambda: llm.load_kv("never"),
        lambda: llm.stats,
        lambda: stage.empty_ops(2, 1, 0.0),
        lambda: device.empty_ops(1, 0.0),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("done")
        except helm.HelmError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said

def child(work):
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(60)  # one that hangs
        os.write(writing, json.dumps(work()).encode())
        sys.exit(0)  # with all that Python does at its end
    os.close(writing)
    with open(reading) as text:
        told = json.loads(text.read())
    return told, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def closing():
    stream.close()
    llm.close()

def collecting():
    global llm, stream, stage, device
    llm = stream = stage = device = None
    gc.collect()

def in_a_callback():
    def fork_once(done, total):
        if os.getpid() == parent and not children:
            children.append(os.fork())
    parent, children = os.getpid(), []
    try:
        helm.LLM(context=64, threads=2, progress=fork_once)
    except helm.InvalidError as error:
        os._exit(7 if "a callback forked and returned in the child" in str(error) else 8)
    return os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])

def own():
    with helm.LLM(context=64, threads=2) as other:
        return other.generate(STORY, max_tokens=5).tokens

if sys.argv[1] == "busy":
    thread = threading.Thread(target=generate)
    thread.start()
    busy.wait()
told = {work.__name__: child(work) for work in (refusals, closing, collecting, own)}
context = multiprocessing.get_context("fork")
with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
    told["pool"] = pool.submit(refusals).result()
process = context.Process(target=refusals)
process.start()
process.join()
told["process"] = process.exitcode
stop.set()
told["callback"] = in_a_callback()
told["left"] = sum(len(chunk.tokens) for chunk in stream)
told["tokens"] = llm.generate(STORY, max_tokens=5).tokens
print(json.dumps(told))
"""


@pytest.mark.parametrize("parent", ["idle", "busy"])
def test_forked_children_are_refused_and_end(parent: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, parent],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    told: dict[str, Any] = json.loads(ended.stdout)
    refusals, status = told["refusals"]
    assert status == 0
    assert len(refusals) == 10
    for said in (*refusals, *told["pool"]):
        assert said.startswith("InvalidError: [")
        assert "is a forked child without its threads; " in said
    assert told["closing"] == told["collecting"] == [None, 0]
    assert told["own"] == [told["tokens"], 0]
    assert told["process"] == 0
    assert told["callback"] == 7
    assert told["left"] == 99
