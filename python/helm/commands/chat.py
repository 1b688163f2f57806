"""`helm-llm chat`: a conversation, turn by turn; answers to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import sys

from helm.commands import common, kv_files, options, template_options
from helm.commands.chat_commands import Turns
from helm.commands.chat_input import Lines, Source
from helm.commands.ending import Ending
from helm.commands.lines import say
from helm.commands.parser import More, Parser
from helm.commands.prompt_input import text_of
from helm.commands.session import Session
from helm.errors import InvalidError
from helm.text.sampling import sampling_params

HELP = "talk with a model, many turns"
EPILOG = """examples:
  helm-llm chat
  helm-llm chat Qwen/Qwen3-0.6B "Hello"
  helm-llm chat ./my-model --system "Answer in one sentence."
  helm-llm chat ./my-model --save-kv talk.kv
  helm-llm chat ./my-model --load-kv talk.kv    goes on with that conversation
  helm-llm chat ./my-model --think off
"""
HINT = "(/? lists the commands; Ctrl-D or /bye leaves)"


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
    parser.add_argument(
        "--verbose", action="store_true", help="tokens, speeds and context in use after each answer"
    )
    template_options.add_arguments(parser)
    options.add_sampling_arguments(parser, "the model's or no limit")
    options.add_model_arguments(parser)
    options.add_speculation(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, 2 when a piped turn failed or the conversation was not saved, 143 or 129
    when SIGTERM or SIGHUP ended one that was to be saved, or typed."""
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
        if args.think is not None:
            template = template_options.thinking(llm.tokenizer, template, args.think)
        session = Session(llm, args.system, sampling, template, Ending(), args.quiet, args.verbose)
        session.check()
        if not args.quiet:
            common.say_plan(llm)
        if args.load_kv is not None:
            session.restore(args.load_kv)
        source = _open_source(session.ending)
        if source.terminal and not args.quiet:
            say(HINT)

        def work() -> int:
            failed = args.continue_final_message and not session.go_on()
            if first is not None and not session.answer(first):
                failed = True
            return max(2 if failed else 0, _talk(session, source))

        def save() -> int:
            return 0 if args.save_kv is None or session.save(args.save_kv) else 2

        if args.save_kv is None and not source.terminal:
            return work()
        return session.ending.run(work, save)


def _open_source(ending: Ending) -> Source:
    """Of this process's standard input."""
    if sys.stdin.isatty():
        from helm.commands.editing import Editor, screen

        terminal = screen()
        if terminal is not None:
            return Editor(ending, terminal)
    return Lines(ending)


def _talk(session: Session, source: Source) -> int:
    """Takes turns until the input ends; 2 where one of a pipe failed."""
    turns = Turns(session)
    status = 0
    interrupted = session.stopped  # Ctrl-C came last
    while not turns.left:
        try:
            text = source.read()
            interrupted = session.stopped = False
            failed = bool(text) and not turns.take(text)
            interrupted = session.stopped
        except EOFError:
            if source.terminal:
                say("")  # the line that was never ended
            break
        except KeyboardInterrupt:
            if not source.terminal:
                raise
            if interrupted:
                break
            say("(Ctrl-C again, Ctrl-D or /bye leaves)")
            interrupted = True
            continue
        if failed and not source.terminal:
            status = 2
    return status
