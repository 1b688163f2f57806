"""What a chat template is given from the command line; knows no conversation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from helm.errors import InvalidError
from helm.files import read_text
from helm.jsonio import parse
from helm.prompts import Template


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `template`."""
    group = parser.add_argument_group("chat template")
    group.add_argument(
        "--chat-template", metavar="NAME", help='which of several to use ("default", or "tool_use")'
    )
    group.add_argument(
        "--template-variable", action="append", default=[], metavar="NAME=JSON",
        help="a variable for it, as enable_thinking=false (may be repeated)",
    )  # fmt: skip
    group.add_argument("--tools", metavar="FILE", help="tools for it, a JSON list")


def template(args: argparse.Namespace) -> Template:
    """What the options say; InvalidError where they cannot be meant so."""
    variables = dict(_variable(text) for text in args.template_variable)
    tools = None if args.tools is None else _tools(args.tools)
    return Template(tools, variables, args.chat_template)


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
