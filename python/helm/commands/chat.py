"""`helm-llm chat`: a conversation, turn by turn; answers to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from helm.commands import common
from helm.errors import HelmError

if TYPE_CHECKING:
    from helm.llm import LLM

HELP = "talk with a model, many turns"
EPILOG = """examples:
  helm-llm chat
  helm-llm chat Qwen/Qwen3-0.6B
  helm-llm chat ./my-model --system "Answer in one sentence."
  printf 'Hello\\nAnd in French?\\n' | helm-llm chat ./my-model
"""
COMMANDS = """/reset   forget the conversation
/help    show this
/exit    leave (also Ctrl-D); Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    common.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    common.add_sampling_arguments(parser)
    common.add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 2 when a piped turn failed."""
    options: dict[str, Any] = {"max_tokens": None, **common.sampling_options(args)}
    with common.load(args) as llm:
        session = Session(llm, args.system, options, quiet=args.quiet)
        session.check()
        if not args.quiet:
            common.say_plan(llm)
        terminal = sys.stdin.isatty()
        if terminal and not args.quiet:
            common.say(COMMANDS)
        return _read_turns(session, terminal)


def _read_turns(session: Session, terminal: bool) -> int:
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing and history
    status = 0
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            common.say("")
            return status
        except KeyboardInterrupt:
            if not terminal:
                raise
            common.say("\n(Ctrl-D or /exit leaves)")
            continue
        if not terminal and not line:
            return status
        line = line.strip()
        if line == "/exit":
            return status
        if line and not session.turn(line) and not terminal:
            status = 2


class Session:
    """The messages so far, and what a line of input does to them."""

    def __init__(self, llm: LLM, system: str | None, options: dict[str, Any], quiet: bool) -> None:
        self._llm = llm
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._options = options
        self._quiet = quiet

    def check(self) -> None:
        """Refuses a model without a usable chat template before the first turn."""
        if self._llm.tokenizer is not None:
            probe = [*self._opening, {"role": "user", "content": "Hello"}]
            self._llm.tokenizer.render_chat(probe)

    def turn(self, line: str) -> bool:
        """One line of input: a command, or a message to answer. False when it failed."""
        if line == "/reset":
            self._messages = list(self._opening)
            common.say("(conversation forgotten)")
        elif line == "/help":
            common.say(COMMANDS)
        elif line.startswith("/") and " " not in line and line.count("/") == 1:
            common.say(f"(no command {line})\n{COMMANDS}")
        else:
            return self._answer(line)
        return True

    def _answer(self, line: str) -> bool:
        asked = [*self._messages, {"role": "user", "content": line}]
        try:
            stream = self._llm.chat_stream(asked, **self._options)
        except HelmError as error:
            common.say(f"error: {error}\n(/reset starts over)")
            return False
        try:
            for chunk in stream:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            common.say(" (stopped)")
        finally:
            stream.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        completion = stream.completion
        if completion.text:
            self._messages = [*asked, {"role": "assistant", "content": completion.text}]
        if not self._quiet:
            common.say(common.summary_line(self._llm, completion))
        return True
