"""Programs that run in processes of their own, for signals and containers.

`python -m fuzz.programs NAME ARGUMENT...` ends with 0 if everything was as it should be, with 3 if
HELM refused, saying why on standard error.
"""

from __future__ import annotations

import resource
import signal
import sys
from typing import Any

_seen: list[int] = []
if sys.argv[1:2] == ["handled"]:  # signals come as soon as the runtime is loaded
    for _number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGWINCH):
        signal.signal(_number, lambda number, _frame: _seen.append(number))

import helm  # noqa: E402
from fuzz.models import MEMORY_BYTES  # noqa: E402
from helm.errors import HelmError  # noqa: E402

REFUSED = 3
STORY = "Once upon a time there was a little dog"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 200}


def handled(file: str) -> None:
    """Signals with handlers, or without, while a model generates and saves: each text is whole;
    Ctrl-C ends a call and leaves the LLM as it was."""
    with helm.LLM(memory_bytes=MEMORY_BYTES, threads=2) as llm:
        text = llm.generate(STORY, **GREEDY).text
        print("ready", flush=True)
        for _ in range(12):
            try:
                again = llm.generate(STORY, **GREEDY).text
                llm.save_kv(file)
            except KeyboardInterrupt:
                _seen.append(signal.SIGINT)
                again = llm.generate(STORY, **GREEDY).text
            assert again == text, (again, text)
        assert llm.load_kv(file).cached > 0
    print("signals", len(_seen), flush=True)


def contained(folder: str, work: str, options: str) -> None:
    """A model under a memory limit: loads, and does what a user may ask for."""
    given = dict(option.split("=") for option in options.split(",") if option)
    context = int(given.pop("context", 256))
    with helm.LLM(folder, threads=2, context=context, **given) as llm:
        prompt = min(1024, llm.context // 2)
        if work == "logits":
            rows = llm.logits([1] * llm.context)
            assert rows.shape == (llm.context, llm.vocab_size)
        elif work == "batch":
            llm.generate([[i] * prompt for i in range(1, 9)], max_tokens=8)
        elif work == "logprobs":
            llm.generate([1] * 8, max_tokens=64, logprobs=500, ignore_eos=True)
        else:
            llm.generate([1] * prompt, max_tokens=8)
    print("done", flush=True)


def main() -> int:
    """Runs one program, with the limits of a usual process."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    name, *arguments = sys.argv[1:]
    try:
        {"handled": handled, "contained": contained}[name](*arguments)
    except HelmError as error:
        print(f"refused: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
