"""What chat templates may use: a meter, and what each kind of operation is counted for.

A rule is called with an operation's operands before it runs, and knows how much it reads and makes.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2.utils import Namespace

MADE = 2**26  # characters that a template may make in all
OPERAND = 2**22  # characters that one operation may read or make
GIVEN = 64, 4  # how much more of both, in multiples of what the template is given
SECONDS = 1.0, 1e-6  # of processor time, and how much more per character given
UNUSUAL = 2**12  # characters of operands whose result, or time, may grow with their square
NUMBER = 10**5  # widths and counts
BITS = 2**16  # of an integer
DEPTH = 100  # containers within containers
ELEMENT = 8  # characters that a step, or an element of a container, counts for
_CLOCK = 2**18  # characters between two looks at the clock


class LimitError(jinja2.TemplateError):
    """A template wants more than it may have."""


class Meter:
    """What one template has used, in characters."""

    def __init__(self, given: int) -> None:
        self._made = 0
        self._most_made = MADE + GIVEN[0] * given
        self.operand = OPERAND + GIVEN[1] * given
        self._read = 0
        self._seconds = SECONDS[0] + SECONDS[1] * given
        self._end = time.thread_time() + self._seconds

    def read(self, size: int) -> None:
        """Counts a step that reads or makes so much."""
        if size > self.operand:
            raise LimitError(f"one operation takes more than {self.operand:,} characters")
        self._read += size + ELEMENT
        if self._read >= _CLOCK:
            self._read = 0
            if time.thread_time() > self._end:
                raise LimitError(f"the template takes more than {self._seconds:.1f} s")

    def made(self, size: int) -> None:
        """Counts a step that makes so much."""
        self._made += size + ELEMENT
        if self._made > self._most_made:
            raise LimitError(f"the template makes more than {self._most_made:,} characters")
        self.read(size)


_METER: ContextVar[Meter] = ContextVar("helm_template_meter")
meter = _METER.get


@contextmanager
def metered(given: Any = None) -> Iterator[None]:
    """While a template is compiled, or rendered with what it is given."""
    token = _METER.set(Meter(0))
    try:
        _METER.set(Meter(measure(given)))
        yield
    finally:
        _METER.reset(token)


def measure(value: Any) -> int:
    """Size of a value, counting parts as often as it refers to them; no more than is allowed."""
    if type(value) is str:
        return len(value)
    total, left, most = 0, [(value, 0)], meter().operand
    while left and total <= most:
        node, depth = left.pop()
        if isinstance(node, (Collection, Namespace)) and not isinstance(node, (str, bytes, range)):
            if depth >= DEPTH:
                raise LimitError(f"a value is nested more than {DEPTH} deep")
            children = _children(node)
            total += ELEMENT * (1 + len(children))
            left.extend((child, depth + 1) for child in children)
        else:
            total += added(node)
    return total


def _children(node: Any) -> list[Any]:
    if isinstance(node, Namespace):
        node = node._Namespace__attrs  # its text shows them
    return [*node.keys(), *node.values()] if isinstance(node, Mapping) else list(node)


def added(value: Any) -> int:
    """What a value takes beside the parts that it refers to."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 32
    return ELEMENT * len(value) if isinstance(value, Collection) else 1


def turns(values: Iterable[Any]) -> Iterator[Any]:
    """The values, each of which is a step."""
    count = meter().read
    for value in values:
        count(1)
        yield value


def refers(*values: Any, **named: Any) -> None:
    """Takes operands whole, whatever their size."""
    meter().read(ELEMENT * (len(values) + len(named)))


def numeric(*values: Any, **named: Any) -> None:
    """Computes: with text, % would format it and * repeat it."""
    short(*values, **named)
    if any(isinstance(value, (str, bytes, Collection)) for value in values):
        raise TypeError("expected a number")


def reads(*values: Any, **named: Any) -> int:
    """Reads each operand, and makes no more than that; returns how much."""
    size = sum(measure(value) for value in (*values, *named.values()))
    meter().read(size)
    return size


def short(*values: Any, **named: Any) -> None:
    """Takes no long operands."""
    if reads(*values, **named) > UNUSUAL:
        raise LimitError(f"an operation that is seldom used takes more than {UNUSUAL:,} characters")


def unusual(value: Any, *values: Any, **named: Any) -> None:
    """May do with its operands whatever they say: repeat the first as often as the others are."""
    short(value, *values, **named)
    for number in (*values, *named.values()):
        if isinstance(number, (int, float)) and not abs(number) <= NUMBER:
            raise LimitError(f"a width or count is above {NUMBER:,}")


def groups(_values: Any, *numbers: Any, **named: Any) -> None:
    """Refers to the values in groups, whose size or number is given."""
    unusual(None, *numbers, **named)


def formats(text: Any, mark: str, *values: Any) -> None:
    """str.format or %: every field may show all values, as wide as the largest number says."""
    reads(text)
    text = str(text)
    wide = re.findall(r"\d+", text)
    if mark == "%":
        dynamic = re.search(r"%[-+ #0\d.]*\*", text) is not None
    else:
        dynamic = any("{" in (spec or "") for _, _, spec, _ in string.Formatter().parse(text))
    if dynamic or any(len(number) > 5 for number in wide):
        raise LimitError("a format has a width that is not written there, or is above 99,999")
    field = reads(*values) + max(map(int, wide), default=0)
    meter().read(len(text) + text.count(mark) * field)


def replaces(s: Any, old: Any, new: Any, count: Any = None) -> None:
    """Has `new` for every `old`."""
    reads(s, old, new, count)
    s, old, new = str(s), str(old), str(new)
    meter().read(len(s) + s.count(old) * len(new))


def joins(value: Any, d: Any = "", attribute: Any = None) -> None:
    """Has `d` between all values."""
    meter().read(reads(value, d, attribute) + measure(d) * len(value))


def compares(text: Any, *values: Any, **named: Any) -> None:
    """Compares every character of the text with all of the others, at sixteen in a step."""
    others = reads(*values, **named)
    meter().read((reads(text) + others) * (1 + others) // 16)


def indents(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    """Has `width` before every line."""
    reads(s, width, first, blank)
    deep = width if isinstance(width, int) else len(str(width))
    meter().read((1 + str(s).count("\n")) * abs(deep))


def rounds(value: Any, precision: Any = 0, method: Any = "common") -> None:
    """Computes with a power of ten."""
    numeric(value)
    unusual(None, precision, method)


def sums(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    """Adds numbers; or anything, anew for each."""
    numbers = all(isinstance(item, (int, float)) for item in (start, *iterable))
    (reads if numbers else short)(iterable, attribute, start)


def multiplies(operator: str, left: Any, right: Any) -> None:
    """left * right or left ** right."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (right if operator == "**" else 1)
        if max(bits, right.bit_length()) > BITS:
            raise LimitError(f"an integer has more than {BITS:,} bits")
    elif operator == "*":
        times = next((abs(value) for value in (left, right) if isinstance(value, int)), 1)
        meter().read(max(added(left), added(right)) * times)


Rule = Callable[..., Any]


def _table(*rows: tuple[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in rows for name in names.split()}


# By name; `unusual` holds for all others.
FILTERS = _table(
    (refers, "attr count d default first items last length list map random reject rejectattr"),
    (refers, "reverse select selectattr"),
    (reads, "abs capitalize dictsort e escape forceescape groupby lower max min safe sort string"),
    (reads, "title tojson truncate unique upper urlencode wordcount"),
    (short, "int float"),
    (groups, "batch slice"),
    (lambda value, *args, **named: formats(value, "%", *args, *named.values()), "format"),
    (indents, "indent"),
    (joins, "join"),
    (replaces, "replace"),
    (rounds, "round"),
    (sums, "sum"),
    (compares, "trim"),
)
# `refers` holds for all others.
TESTS = _table(
    (reads, "in == eq equalto != ne < lt lessthan <= le > gt greaterthan >= ge lower upper"),
    (numeric, "even odd divisibleby"),
)
STRING_METHODS = _table(
    (reads, "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal"),
    (reads, "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper lower"),
    (reads, "partition removeprefix removesuffix split splitlines startswith swapcase title upper"),
    (compares, "lstrip rfind rindex rpartition rsplit rstrip strip"),
    (lambda between, values: joins(values, between), "join"),
    (replaces, "replace"),
)
