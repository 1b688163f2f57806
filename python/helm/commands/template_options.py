"""What a chat template is given from the command line; knows no conversation."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.files import read_text
from helm.base.jsonio import parse
from helm.commands.lines import say
from helm.commands.parser import More, Parser
from helm.errors import InvalidError
from helm.text.prompts import Template
from helm.text.thinking import thinking_switch

if TYPE_CHECKING:
    from helm.session.calls import TextStream
    from helm.session.llm import LLM
    from helm.text.sampling import SamplingParams
    from helm.text.tokenizer import Tokenizer


def add_arguments(parser: Parser) -> None:
    """The options of `template`."""
    parser.add_argument(
        "--think", choices=("on", "off"), metavar="on|off",
        help="think before answering or not (default: the template's)",
    )  # fmt: skip
    group = parser.add_argument_group("chat template")
    group.add_argument(
        "--chat-template", metavar="NAME",
        help=More('which of several to use (default: "default", or "tool_use" with --tools)'),
    )  # fmt: skip
    group.add_argument(
        "--template-variable", action="append", default=[], metavar="NAME=JSON",
        help=More("a variable for it, as enable_thinking=false; may be repeated (default: none)"),
    )  # fmt: skip
    group.add_argument(
        "--tools", metavar="FILE", help=More("tools for it, a JSON list (default: none)")
    )


def template(args: argparse.Namespace) -> Template:
    """What the options say; InvalidError where they cannot be meant so."""
    variables = dict(_variable(text) for text in args.template_variable)
    tools = None if args.tools is None else _tools(args.tools)
    return Template(tools, variables, args.chat_template)


def thinking(tokenizer: Tokenizer | None, template: Template, wanted: str) -> Template:
    """The template with thinking "on" or "off"; a note where it has no switch for that."""
    name = None if tokenizer is None else thinking_switch(tokenizer)
    if name is None:
        say(f"note: the model's chat template cannot turn thinking {wanted}; it stays as it is")
        return template
    return dataclasses.replace(
        template, variables={**(template.variables or {}), name: wanted == "on"}
    )


def answer(
    llm: LLM, template: Template, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams,
    continues: bool = False,
) -> TextStream:  # fmt: skip
    """Answers a conversation, or goes on with its last message."""
    return llm.chat_stream(
        messages, sampling, tools=template.tools, template_variables=template.variables,
        chat_template=template.name, continue_final_message=continues,
    )  # fmt: skip


def given(args: argparse.Namespace) -> list[str]:
    """The options of `template` that were given."""
    values = (args.chat_template, args.template_variable or None, args.tools, args.think)
    names = ("--chat-template", "--template-variable", "--tools", "--think")
    return [name for name, value in zip(names, values, strict=True) if value is not None]


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidError(
            f"[chat] --template-variable must be NAME=JSON, as enable_thinking=false, got {text!r}"
        )
    return name, parse(value, f"--template-variable {name}", InvalidError).value


def _tools(path: str) -> list[Any]:
    text = read_text(Path(path), InvalidError, "chat")
    node = parse(text, f"--tools {path}", InvalidError)
    for tool in node.items():
        tool.names()
    return list(node.value)
