"""The sandbox of chat templates, with bounds on steps, time and memory; knows no messages.

A template is a program of whoever published the model. Each of its operations is counted before it
runs, by the rules of `template_limits`, so that none of them lasts long or takes much.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from helm.text import template_limits as limits
from helm.text.template_limits import LimitError, meter

SOURCE = 2**16  # characters of a template; published ones have up to half of that


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment in which published chat templates expect to run. Use within `metered`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # which would run operations that are not counted
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _tojson
        for name, function in self.filters.items():
            self.filters[name] = _counted(limits.FILTERS.get(name, limits.unusual), function)
        for name, function in self.tests.items():
            self.tests[name] = _counted(limits.TESTS.get(name, limits.refers), function)
        self.filters["helm_shown"] = _shown
        self.filters["helm_read"] = _read
        self.filters["helm_made"] = jinja2.pass_context(lambda _context, value: _made(value))
        self.filters["helm_turns"] = jinja2.pass_context(lambda _context, it: limits.turns(it))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE:
            raise LimitError(f"it has {len(source):,} characters, more than {SOURCE:,}")
        parsed = super()._parse(source, name, filename)
        tree: nodes.Template = _Checks().visit(parsed)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:  # what templates do most
            meter().made(len(left) + len(right))
            return left + right
        if isinstance(left, str) and operator == "%":
            limits.formats(left, "%", right)
        elif operator in ("*", "**"):
            limits.multiplies(operator, left, right)
        size = limits.added if operator in ("+", "*") else limits.measure  # - may hash all
        meter().read(size(left) + size(right))
        return _made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        meter().read(limits.measure(argument))  # the hash reads all of a tuple
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def call(*args: Any, **kwargs: Any) -> Any:
            limits.formats(value.__self__, "{", *args, *kwargs.values())
            return _made(wrapped(*args, **kwargs))

        return call

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name == "encode":
                raise LimitError("a template makes text, not bytes")
            args = _lists(args)
            rule: limits.Rule = limits.STRING_METHODS.get(name, limits.unusual)
            rule(owner, *args, **kwargs)
        elif isinstance(owner, (int, float)):
            limits.unusual(owner, *args, **kwargs)
        elif isinstance(owner, (list, tuple)):
            limits.reads(owner, *args, **kwargs)
        elif isinstance(__obj, Macro) or __obj is Namespace:
            limits.refers(*args, **kwargs)
        else:
            limits.reads(*args, **kwargs)
        return _made(super().call(__context, __obj, *args, **kwargs))


class _Checks(NodeTransformer):
    """Counts those operations that an environment has no other hold of."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_check("shown", child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_check("shown", child) for child in node.nodes]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _check("turns", node.iter)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _check("read", node.expr)
        for operand in node.ops:
            operand.expr = _check("read", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _check("made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _check("read", pair.key)
        return _check("made", node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _check("made", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _check("made", node) if node.ctx == "load" else node


def _check(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, f"helm_{name}", [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _shown(_context: Context, value: Any) -> str:
    """What a value adds to the output, or to text that `~` joins."""
    meter().made(limits.measure(value))
    return value if isinstance(value, str) else str(value)


@jinja2.pass_context
def _read(_context: Context, value: Any) -> Any:
    meter().read(limits.measure(value))
    return value


def _made(value: Any) -> Any:
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        return limits.turns(value)
    meter().made(limits.added(value))
    return value


def _counted(rule: limits.Rule, function: Any) -> Callable[..., Any]:
    """A filter or test after its rule, which sees iterators as lists."""
    context = int(hasattr(function, "jinja_pass_arg"))
    lazy = rule in (limits.refers, limits.groups)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not lazy:
            args = _lists(args)
        rule(*args[context:], **kwargs)
        return _made(function(*args, **kwargs))

    return call


def _lists(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_made(list(v)) if isinstance(v, Iterator) else v for v in values)


class _GenerationBlock(Extension):
    """`{% generation %}`: marks assistant text for training, renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    if not options:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    limits.unusual("", *options.values())
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, **options)
    pieces = []
    for piece in encoder.iterencode(value):  # an indent, or a separator, multiplies
        meter().made(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    limits.short(pattern)
    return datetime.now().strftime(pattern)
