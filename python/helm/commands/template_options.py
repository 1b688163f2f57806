"""What a chat template is given from the command line; knows no conversation."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.commands.parser import More, Parser
from helm.errors import InvalidError
from helm.files import read_text
from helm.jsonio import parse
from helm.prompts import Template

if TYPE_CHECKING:
    from helm.batch import TextStream
    from helm.llm import LLM
    from helm.sampling import SamplingParams


def add_arguments(parser: Parser) -> None:
    """The options of `template`."""
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
    values = (args.chat_template, args.template_variable or None, args.tools)
    names = ("--chat-template", "--template-variable", "--tools")
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
