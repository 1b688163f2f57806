"""`helm-llm run`: answers or continues one prompt; text to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

from helm.commands import common, kv_files, options, template_options
from helm.commands.answer_view import AnswerView, view_of
from helm.commands.ending import Ending
from helm.commands.lines import say
from helm.commands.parser import Parser
from helm.commands.prompt_input import read_prompt
from helm.errors import InvalidError
from helm.text.sampling import DEFAULT_MAX_TOKENS, sampling_params

if TYPE_CHECKING:
    from helm.session.calls import TextStream
    from helm.session.llm import LLM
    from helm.text.completion import Completion

HELP = "answer a question, or continue a text, and show how fast it went"
EPILOG = """examples:
  helm-llm run
  helm-llm run Qwen/Qwen3-0.6B "Why is the sky blue?" -n 200
  cat report.txt | helm-llm run ./my-model "Summarise this."
  helm-llm run ./my-model --raw "Water boils at" --temperature 0.7 --seed 1
  helm-llm run ./my-model --file report.txt --save-kv report.kv
"""
DEFAULT_PROMPT = "Once upon a time"
_ECHOED = 400  # characters; longer prompts are not shown again on the terminal


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    options.add_model(parser)
    options.add_prompt(
        parser,
        "question, or text to continue; what is piped in comes before it "
        f'(default: continues "{DEFAULT_PROMPT}")',
    )
    parser.add_argument("--file", metavar="FILE", help="read PROMPT from FILE (default: none)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the template's)")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT; no chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    kv_files.add_arguments(
        parser,
        load="do not compute again what the prompt shares with this saved text; without a prompt, "
        "continue that text",
        save="save prompt and output for --load-kv",
    )
    template_options.add_arguments(parser)
    options.add_sampling_arguments(parser, "the model's or no limit; raw: 256")
    options.add_model_arguments(parser)
    options.add_speculation(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 130 when Ctrl-C ended the text early, 143 or 129 when SIGTERM or
    SIGHUP ended one that was to be saved."""
    kv_files.check(args)
    common.require_text(args)
    sampling = sampling_params(None, options.sampling_options(args))
    template = template_options.template(args)
    question = read_prompt(args, "run")
    _chat_options(args, question)
    silent = args.quiet or args.json
    with common.load(args, expected_tokens=args.max_tokens or DEFAULT_MAX_TOKENS) as llm:
        messages = _messages(llm, question, args)
        if not silent:
            common.say_plan(llm)
        restored = 0
        prompt: str | list[int] = DEFAULT_PROMPT if question is None else question
        if args.load_kv is not None:
            saved = kv_files.load(llm, args.load_kv, silent)
            restored = saved.cached
            prompt = saved.tokens if question is None else question
        if messages is not None:
            if args.think is not None:
                template = template_options.thinking(llm.tokenizer, template, args.think)
            view = view_of(llm, template, messages)
            stream = template_options.answer(
                llm, template, messages, common.answer_sampling(llm, sampling, args)
            )
        else:
            view = AnswerView()
            if not silent and isinstance(prompt, str):
                _echo(view, prompt, asked=question is not None)
            stream = llm.stream(prompt, sampling)
        ending = Ending()

        def work() -> int:
            interrupted = _write(stream, None if args.json else view, ending)
            _sum_up(llm, stream.completion, restored, args)
            return 128 + signal.SIGINT if interrupted else 0

        def save() -> int:
            if stream.completion.tokens or stream.completion.finish_reason != "cancelled":
                said = stream.completion
                answer = {"role": "assistant", "content": said.text, "tokens": said.tokens}
                talk = None if messages is None else [*messages, answer]
                kv_files.save(llm, args.save_kv, silent, talk)
            return 0

        return work() if args.save_kv is None else ending.run(work, save)


def _chat_options(args: argparse.Namespace, prompt: str | None) -> list[str]:
    """The options that a chat template needs; refused where none is used."""
    given = [*(["--system"] if args.system is not None else []), *template_options.given(args)]
    if given and args.raw:
        raise InvalidError(f"[run] --raw uses no chat template; leave {given[0]} out")
    if given and prompt is None:
        raise InvalidError(f"[run] {given[0]} is for a question; give it as PROMPT")
    return given


def _messages(
    llm: LLM, prompt: str | None, args: argparse.Namespace
) -> list[dict[str, Any]] | None:
    """The conversation that is answered; None where text is continued."""
    templates = llm.tokenizer.chat_templates if llm.tokenizer is not None else {}
    if args.raw or prompt is None or not (templates or _chat_options(args, prompt)):
        return None
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": prompt}]


def _write(stream: TextStream, view: AnswerView | None, ending: Ending) -> bool:
    """Shows the text as it comes, if it is to be shown; whether Ctrl-C ended it."""
    try:
        with ending.interruptible():
            for chunk in stream:
                if view is not None:
                    view.write(chunk.text, chunk.tokens)
    except KeyboardInterrupt:
        return True
    finally:
        stream.close()
        if view is not None:
            view.end()
    return False


def _sum_up(llm: LLM, completion: Completion, restored: int, args: argparse.Namespace) -> None:
    if args.json:
        result = {**completion.to_dict(), **common.placement(llm), "kv_restored": restored}
        print(json.dumps(result, ensure_ascii=False))
    elif not args.quiet:
        say(common.summary_line(llm, completion, restored))


def _echo(view: AnswerView, prompt: str, asked: bool) -> None:
    """Shows the prompt that the text goes on from: on a terminal, or as part of the output when
    the prompt is ours and not the user's."""
    if not asked or (sys.stdout.isatty() and len(prompt) <= _ECHOED):
        view.write(prompt)
