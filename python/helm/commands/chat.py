"""`helm-llm chat`: a conversation, turn by turn; answers to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from helm.chat_template import extended
from helm.commands import common, kv_files, options, template_options
from helm.commands.ending import Ended, Ending
from helm.commands.parser import More, Parser
from helm.commands.prompt_input import text_of
from helm.errors import HelmError, InvalidError
from helm.prompts import Template
from helm.sampling import SamplingParams, sampling_params

if TYPE_CHECKING:
    from helm.llm import LLM

HELP = "talk with a model, many turns"
EPILOG = """examples:
  helm-llm chat
  helm-llm chat Qwen/Qwen3-0.6B "Hello"
  helm-llm chat ./my-model --system "Answer in one sentence."
  helm-llm chat ./my-model --save-kv talk.kv
  helm-llm chat ./my-model --load-kv talk.kv    goes on with that conversation
  helm-llm chat ./my-model --template-variable enable_thinking=false
"""
COMMANDS = """/continue    go on with the last answer
/reset       forget the conversation
/save FILE   save the conversation for --load-kv
/help        show this
/exit        leave (also Ctrl-D); Ctrl-C stops an answer"""
_TAKES = {
    "/save": "a FILE",
    **dict.fromkeys(("/continue", "/reset", "/help", "/exit"), "nothing else"),
}


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    options.add_model(parser)
    options.add_prompt(parser, "first message (default: the first line of input)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the template's)")
    kv_files.add_arguments(
        parser,
        load="go on with a saved conversation",
        save="save the conversation at the end, with its KV cache",
    )
    parser.add_argument(
        "--continue-final-message", action="store_true",
        help=More("go on with the last message of --load-kv first, instead of waiting for one"),
    )  # fmt: skip
    template_options.add_arguments(parser)
    options.add_sampling_arguments(parser, "the model's or no limit")
    options.add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, 2 when a piped turn failed or the conversation was not saved, 143 or 129
    when SIGTERM or SIGHUP ended one that was to be saved."""
    sampling = sampling_params(None, options.sampling_options(args))
    if args.load_kv is not None and args.system is not None:
        raise InvalidError(
            "[chat] the conversation of --load-kv has its own system prompt; leave --system out"
        )
    if args.continue_final_message and args.load_kv is None:
        raise InvalidError(
            "[chat] --continue-final-message goes on with a saved conversation; add --load-kv FILE"
        )
    if args.insists_on_input:
        raise InvalidError("[chat] standard input is the conversation; leave - out")
    first = None if args.prompt is None else text_of(args.prompt, "chat")
    kv_files.check(args)
    template = template_options.template(args)
    common.require_text(args)
    with common.load(args) as llm:
        sampling = common.answer_sampling(llm, sampling, args)
        session = Session(llm, args.system, sampling, template, args.quiet, Ending())
        session.check()
        if not args.quiet:
            common.say_plan(llm)
        if args.load_kv is not None:
            session.restore(args.load_kv)
        terminal = sys.stdin.isatty()
        if terminal and not args.quiet:
            common.say(COMMANDS)

        def work() -> int:
            failed = args.continue_final_message and not session.go_on()
            if first is not None and not session.answer(first):
                failed = True
            return max(2 if failed else 0, _read_turns(session, terminal))

        if args.save_kv is None:
            return work()
        return session.ending.run(work, lambda: 0 if session.save(args.save_kv) else 2)


def _read_turns(session: Session, terminal: bool) -> int:
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing and history
    status = 0
    while True:
        try:
            with session.ending.interruptible():
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

    def __init__(
        self, llm: LLM, system: str | None, sampling: SamplingParams, template: Template,
        quiet: bool, ending: Ending,
    ) -> None:  # fmt: skip
        self.ending = ending  # may cut an answer short
        self._llm = llm
        self._template = template
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._sampling = sampling
        self._quiet = quiet
        self._restored = 0  # tokens loaded from a file for the next turn

    def check(self) -> None:
        """Refuses a model without a usable chat template before the first turn."""
        if self._llm.tokenizer is not None:
            probe = [*self._opening, {"role": "user", "content": "Hello"}]
            self._template.render(self._llm.tokenizer, probe)

    def restore(self, path: str) -> None:
        """Goes on with the conversation of a file."""
        saved = kv_files.load(self._llm, path, self._quiet)
        if saved.messages is None:
            raise InvalidError(
                f"[chat] {path} holds no conversation but a text; use helm-llm run --load-kv"
            )
        self._messages = saved.messages
        self._opening = [m for m in saved.messages[:1] if m["role"] == "system"]
        self._restored = saved.cached

    def save(self, path: str) -> bool:
        """Writes the conversation to a file, or says why not; False when it failed."""
        if self._messages == self._opening:
            common.say("(nothing to save, the conversation has not begun)")
            return True
        try:
            kv_files.save(self._llm, path, self._quiet, self._messages)
        except HelmError as error:
            common.say(f"error: {error}")
            return False
        return True

    def turn(self, line: str) -> bool:
        """One line of input: a command, or a message to answer. False when it failed."""
        command, _, argument = line.partition(" ")
        if line == "/reset":
            self._messages = list(self._opening)
            common.say("(conversation forgotten)")
        elif command == "/save" and argument:
            return self.save(os.path.expanduser(argument.strip()))
        elif line == "/help":
            common.say(COMMANDS)
        elif line == "/continue":
            return self.go_on()
        elif command in _TAKES:
            common.say(f"({command} takes {_TAKES[command]})\n{COMMANDS}")
        elif line.startswith("/") and not argument and line.count("/") == 1:
            common.say(f"(no command {line})\n{COMMANDS}")
        else:
            return self.answer(line)
        return True

    def go_on(self) -> bool:
        """Continues the last answer; False when that failed."""
        if self._messages == self._opening:
            common.say("(nothing to go on with, the conversation has not begun)")
            return False
        return self._generate(self._messages, continues=True)

    def answer(self, line: str) -> bool:
        """Answers a message; False when that failed."""
        return self._generate([*self._messages, {"role": "user", "content": line}])

    def _generate(self, asked: list[dict[str, Any]], continues: bool = False) -> bool:
        """Answers `asked`, or goes on with its last message."""
        try:
            stream = template_options.answer(
                self._llm, self._template, asked, self._sampling, continues
            )
        except HelmError as error:
            common.say(f"error: {error}\n(/reset starts over)")
            return False
        failed = False
        try:
            with self.ending.interruptible():
                for chunk in stream:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            common.say(" (stopped)")
        except HelmError as error:
            failed = True
            common.say(f"\nerror: {error}")
            return False
        except Ended:
            sys.stdout.write("\n")
            raise
        finally:
            stream.close()
            if not failed:
                self._remember(asked, stream.completion.text, continues)
        sys.stdout.write("\n")
        sys.stdout.flush()
        if not self._quiet:
            common.say(common.summary_line(self._llm, stream.completion, self._restored))
        self._restored = 0
        return True

    def _remember(self, asked: list[dict[str, Any]], text: str, continues: bool) -> None:
        if continues:
            self._messages = [*asked[:-1], extended(asked[-1], text)]
        elif text:
            self._messages = [*asked, {"role": "assistant", "content": text}]
