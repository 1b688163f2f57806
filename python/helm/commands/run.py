"""`helm-llm run`: continues one prompt; streams text to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from helm.commands import common, kv_files
from helm.commands.ending import Ended, Ending
from helm.errors import InvalidError
from helm.sampling import DEFAULT_MAX_TOKENS, sampling_params

if TYPE_CHECKING:
    from helm.batch import TextStream
    from helm.completion import Completion
    from helm.llm import LLM

HELP = "continue a prompt and show how fast it went"
EPILOG = """examples:
  helm-llm run
  helm-llm run bundled "The little dog"
  helm-llm run Qwen/Qwen3-0.6B "Water boils at" --max-tokens 64
  helm-llm run ./my-model --file prompt.txt --temperature 0.7 --top-p 0.9 --seed 1
  echo "Once upon a time" | helm-llm run ./my-model - --json
  helm-llm run ./my-model --file report.txt --save-kv report.kv
  helm-llm run ./my-model --load-kv report.kv              goes on where that ended
  helm-llm run ./my-model --file report-and-question.txt --load-kv report.kv
"""
DEFAULT_PROMPT = "Once upon a time"
_ECHOED = 400  # characters; longer prompts are not shown again on the terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    common.add_model(parser)
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help=f'text to continue, - for standard input (default: "{DEFAULT_PROMPT}", or what '
        "--load-kv ended with)",
    )
    parser.add_argument("--file", metavar="PROMPTFILE", help="read the prompt from a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    kv_files.add_arguments(
        parser,
        load="do not compute again what the prompt shares with this saved text; without a prompt, "
        "continue that text",
        save="save prompt and output for --load-kv",
    )
    common.add_sampling_arguments(parser)
    common.add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 130 when Ctrl-C ended the text early, 143 or 129 when SIGTERM or
    SIGHUP ended one that was to be saved."""
    kv_files.check(args)
    common.require_text(args)
    sampling = sampling_params(None, common.sampling_options(args))
    prompt: str | list[int] | None = _prompt(args)
    silent = args.quiet or args.json
    with common.load(args, expected_tokens=args.max_tokens or DEFAULT_MAX_TOKENS) as llm:
        if not silent:
            common.say_plan(llm)
        restored = 0
        if args.load_kv is not None:
            saved = kv_files.load(llm, args.load_kv, silent)
            restored = saved.cached
            prompt = saved.tokens if prompt is None else prompt
        elif prompt is None:
            prompt = DEFAULT_PROMPT
        if not silent and isinstance(prompt, str):
            _echo(prompt, asked=args.prompt is not None or args.file is not None)
        stream, ending = llm.stream(prompt, sampling), Ending()

        def work() -> int:
            interrupted = _write(stream, args.json, ending)
            _sum_up(llm, stream.completion, restored, args)
            return 128 + signal.SIGINT if interrupted else 0

        def save() -> int:
            if stream.completion.tokens or stream.completion.finish_reason != "cancelled":
                kv_files.save(llm, args.save_kv, silent)
            return 0

        return work() if args.save_kv is None else ending.run(work, save)


def _write(stream: TextStream, silent: bool, ending: Ending) -> bool:
    """The text as it comes; whether Ctrl-C ended it."""
    try:
        with ending.interruptible():
            for chunk in stream:
                if not silent:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        return True
    except Ended:
        sys.stdout.write("" if silent else "\n")
        raise
    finally:
        stream.close()
    return False


def _sum_up(llm: LLM, completion: Completion, restored: int, args: argparse.Namespace) -> None:
    if args.json:
        result = {**completion.to_dict(), **common.placement(llm), "kv_restored": restored}
        print(json.dumps(result, ensure_ascii=False))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    if not args.quiet:
        common.say(common.summary_line(llm, completion, restored))


def _echo(prompt: str, asked: bool) -> None:
    """Shows the prompt that the text goes on from: on a terminal, or as part of the output when
    the prompt is ours and not the user's."""
    if not asked:
        sys.stdout.write(prompt)
        sys.stdout.flush()
    elif sys.stdout.isatty() and sys.stderr.isatty() and len(prompt) <= _ECHOED:
        print(prompt, end="", file=sys.stderr, flush=True)


def _prompt(args: argparse.Namespace) -> str | None:
    """None where the user gave none."""
    if args.file is not None and args.prompt is not None:
        raise InvalidError("[run] give the prompt either as an argument or with --file, not both")
    if args.file is not None:
        try:
            data = Path(args.file).read_bytes()
        except OSError as error:
            raise InvalidError(
                f"[run] cannot read {args.file}: {error.strerror}; --file needs a readable text "
                "file"
            ) from None
        return _text(_line(data), args.file)
    if args.prompt == "-":
        return _text(_line(sys.stdin.buffer.read()), "standard input")
    return None if args.prompt is None else _text(os.fsencode(args.prompt), "PROMPT")


def _line(data: bytes) -> bytes:
    """Without the newline that editors and echo put at the end."""
    return data.removesuffix(b"\n").removesuffix(b"\r")


def _text(data: bytes, source: str) -> str:
    """Refuses what no model can continue before one is loaded."""
    if not data:
        raise InvalidError(
            f"[run] the prompt is empty ({source}); give at least one character, or leave PROMPT "
            "out"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidError(
            f"[run] {source} is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
