"""What a chat template may use: steps, time and memory; no template takes longer or more."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from helm.errors import TokenizerError
from helm.text import template_limits
from helm.text.template_limits import MADE, NUMBER
from helm.text.tokenizer import Tokenizer
from small_tokenizers import byte_level

MESSAGES = [{"role": "user", "content": "Hi there"}]
LIMIT = "(takes|has|makes|nested) more than|is above|not bytes|not written there|expected a number"
_DOUBLING = (
    "{{% set ns = namespace(a={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{use}"
)


def doubling(start: str, step: str, use: str = "{{ ns.a | length }}") -> str:
    """A template whose value doubles sixty times."""
    return _DOUBLING.format(start=start, step="{% set ns.a = " + step + " %}", use=use)


HOSTILE = {
    # loops
    "nested loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a filtered loop": "{% for i in range(99999) if i in range(99999)|list %}{% endfor %}",
    "a recursive loop": "{% set l = range(99999)|list %}{% for x in l recursive %}{{ loop(l) }}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}"
    "{{ f(0) }}",
    "lists in a loop": "{% for i in range(99999) %}{{ range(99999)|map('string')|list|length }}"
    "{% endfor %}",
    "comparisons": "{% set a = 'x' * 4000000 %}{% set b = 'x' * 4000000 %}"
    "{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}",
    "methods": "{% set a = 'x' * 4000000 %}{% for i in range(99999) %}"
    "{% if a.isascii() %}{% endif %}{% endfor %}",
    # growth
    "text times a number": "{{ 'a' * 10 ** 10 }}",
    "a number times text": "{{ 10 ** 10 * 'a' }}",
    "a list times a number": "{{ ([0] * 10 ** 9) | length }}",
    "powers": "{{ 10 ** (10 ** 9) }}",
    "products": doubling("2", "ns.a * ns.a", "{{ ns.a % 7 }}"),
    "sums of text": doubling("'abc'", "ns.a + ns.a"),
    "joined text": doubling("'abc'", "ns.a ~ ns.a"),
    "captured text": doubling("'abc'", "ns.a", "")
    + "{% for i in range(60) %}{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}",
    "sums of lists": doubling("[1]", "ns.a + ns.a"),
    "what is kept": "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + ['ab' * (2000000 + i)] %}{% endfor %}",
    "a list by one": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [i] %}{% endfor %}",
    "text of the template": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}"
    + "y" * 60000
    + "{% endfor %}{% endfor %}{% endset %}",
    "slices": "{% set a = 'x' * 4000000 %}{% for i in range(99999) %}{% set b = a[1:] %}"
    "{% endfor %}",
    # references that only some operations follow
    **{
        f"nested lists: {use}": doubling("[1]", "[ns.a, ns.a]", use)
        for use in ("{{ ns.a }}", "{{ ns.a ~ '' }}", "{{ ns.a == [ns.a[0], ns.a[1] + []] }}",
                    "{{ ns }}", "{{ ns.a | tojson }}", "{{ ns.a | string }}", "{{ '%s' % ns.a }}",
                    "{{ '{}'.format(ns.a) }}", "{{ ns.a in [1] }}", "{{ [ns.a] | unique | list }}",
                    "{{ [ns.a] | map('string') | list | length }}")
    },
    **{
        f"nested tuples: {use}": doubling("(1,)", "(ns.a, ns.a)", use)
        for use in ("{{ {}[ns.a] }}", "{{ {ns.a: 1} | length }}", "{{ {}.get(ns.a) }}",
                    "{{ {}.keys() - [ns.a] }}", "{{ [ns.a] | map(attribute=ns.a) | list }}",
                    "{{ ns.a is lower }}", "{{ ns.a | format(1) }}")
    },
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    # what Python does with a number
    "center": "{{ 'a' | center(1000000000) }}",
    "center, a method": "{{ 'a'.center(1000000000) }}",
    "center, mapped": "{{ ['a'] | map('center', 1000000000) | list | length }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(90000) }}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% with a star": "{{ '%*d' % (1000000000, 1) }}",
    "% with many fields": "{{ ('%99999d' * 9999) % ((1,) * 9999) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "str.format": "{{ '{:1000000000d}'.format(1) }}",
    "str.format, nested": "{{ '{:{}d}'.format(1, 1000000000) }}",
    "str.format_map": "{{ '{a:1000000000}'.format_map({'a': '1'}) }}",
    "indent": "{{ ('a\n' * 100000) | indent(90000) }}",
    "indent by name": "{{ ('a\n' * 100000) | indent(first=true, width=90000) }}",
    "tojson": "{{ [[[[1]]]] | tojson(indent=1000000000) }}",
    "tojson's separators": "{{ range(99999) | list | tojson(separators=('a' * 4000, ':')) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "round": "{{ 1.5 | round(1000000000, 'floor') }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    # products of texts
    "replace": "{{ ('a' * 1000000) | replace('a', 'b' * 100000) }}",
    "replace by name": "{{ ('a' * 1000000) | replace(new='b' * 100000, old='a') }}",
    "replace, a method": "{{ ('a' * 1000000).replace('a', 'b' * 100000) }}",
    "join": "{{ (['a'] * 100000) | join('b' * 100000) }}",
    "join, a method": "{{ ('b' * 100000).join(range(99999) | map('string')) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 100000}) }}",
    "strip": "{{ ('a' * 2000000).strip('b' * 2000000) }}",
    "trim": "{{ ('a' * 2000000) | trim('b' * 2000000) }}",
    "rfind": "{{ ('a' * 3000000).rfind('b' + 'a' * 1000000) }}",
    "sum": "{{ ([[1]] * 100000) | sum(start=[]) | length }}",
    "striptags": "{{ ('<!--x-->' * 400000) | striptags }}",
    "urlize": "{{ ('http://a.b ' * 100000) | urlize }}",
    "encode": "{{ ('a' * 100000).encode('idna') }}",
    "int": "{{ ('9' * 4000000) | int }}",
    # what filters and tests do by operators
    "even": "{{ '%1000000000d' is even }}",
    "divisibleby": "{{ '%1000000000d' is divisibleby 3 }}",
    "round of text": "{{ ('a' * 4000) | round(9, 'ceil') }}",
    "attributes": "{{ ([{}] * 100000) | sort(attribute='a,' * 1000000) | length }}",
    "an attribute's parts": "{% for x in ([1] * 9999) | map(attribute='real.' * 99999 ~ 'real') %}"
    "{% endfor %}",
    "arguments": "{% macro f() %}{{ varargs | length }}{% endmacro %}"
    "{% set l = range(99999) | list %}{% for i in range(99999) %}{% set x = f(*l) %}{% endfor %}",
    # before it runs
    "while compiling": "{% autoescape 'a' | center(1000000000) %}{% endautoescape %}",
}  # fmt: skip


def test_no_template_takes_long_or_much() -> None:
    """In a process whose memory is limited, where what is not bounded fails or is killed."""
    script = (
        "import resource, sys, test_template_sandbox as t\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "t.template_limits.SECONDS = (0.3, 1e-6)\n"  # many use all of it
        "for name in t.HOSTILE: t.check(name)\n"
    )
    here = Path(__file__).parent
    path = os.pathsep.join((str(here), str(here.parent / "support")))
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=240,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def check(name: str) -> None:
    begin = time.thread_time()
    with pytest.raises(TokenizerError, match=LIMIT):
        render(HOSTILE[name])
    taken = time.thread_time() - begin
    assert taken < template_limits.SECONDS[0] + 2, (name, taken)
    # ru_maxrss would count what the process held that this one was forked from.
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
    assert peak < 4 * MADE + (600 << 20), (name, peak)


def render(template: str, **variables: object) -> str:
    tokenizer = Tokenizer(byte_level(), chat_templates={"default": template})
    return tokenizer.render_chat(MESSAGES, **variables)


@pytest.mark.parametrize(
    "template",
    [
        "{{ a }}" * 10000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "+".join("a" * 20000) + " }}",
        "{% if a %}" * 2000 + "{% endif %}" * 2000,
    ],
)
def test_what_is_too_large_to_compile_is_malformed(template: str) -> None:
    begin = time.thread_time()
    with pytest.raises(TokenizerError, match="malformed"):
        render(template)
    assert time.thread_time() - begin < 5


def test_the_template_s_own_error_is_cut() -> None:
    with pytest.raises(TokenizerError) as error:
        render("{{ raise_exception('a' * 1000000) }}")
    assert len(str(error.value)) < 1000


def test_large_conversations_may_take_more() -> None:
    words = "word " * 1_000_000
    text = render("{{ messages[0].content }}{{ document }}{{ document }}", document=words)
    assert text == "Hi there" + 2 * words
    assert 10 * len(words) < MADE
    numbers = render("{{ n | center(9) }}{{ '%05d' % n }}{{ '{:>6}'.format(n) }}", n=7)
    assert numbers == "    7    00007     7"
    assert NUMBER > 9


OPERATIONS = """{% for m in [1, 2, 3] -%}
    {{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.cycle('a', 'b') }}
{%- else %}none{% endfor %}
{% for k, v in {'a': 1, 'b': [2]}.items() if k != 'c' %}{{ k }}={{ v }};{% endfor %}
{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}
{% macro f(a, b=[1, 2]) %}{{ a }}{{ b | join('-') }}{{ caller() if caller }}{% endmacro %}
{% call f('x') %}body{% endcall %}{{ f('y', b='zz') }}{% filter upper %}up{{ 1 }}{% endfilter %}
{% set ns = namespace(n=0, s='') %}{% for i in range(5) %}{% set ns.n = ns.n + i %}
    {%- set ns.s = ns.s ~ i %}{% endfor %}{{ ns.n }}{{ ns.s }}
{% set t %}cap{{ 2 }}{% endset %}{{ t }}
{{ 'a,b'.split(',')[::-1] }}{{ 'abc'[1:] }}{{ ' x '.strip() }}{{ 'aXb'.replace('X', '-') }}
{{ (1, 2) }}{{ 1 < 2 <= 2 }}{{ 'a' in 'abc' }}{{ -3 ** 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 1 / 4 }}
{{ [3, 1, 2] | sort | map('string') | join(',') }}{{ [1, 2] | sum }}{{ [1, 2] | last }}
{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'equalto', 2) | list }}{{ 'b' | default('c') }}
{{ [{'a': 1}] | tojson }}{{ [{'a': 1}] | tojson(indent=2) }}{{ [1, 2, 3] | batch(2) | list }}
{{ undefined_name }}{{ undefined_name is defined }}{{ 'x' if false }}{{ none }}{{ 'é' | upper }}
{{ [1, 2] + [3] }}{{ 'ab' * 2 }}{{ 'a' ~ 1 ~ none }}{{ dict(a=1) }}{{ 'a b' | title }}
{% set f = '{{"n": {:>3}}}' %}{{ f.format(1) }}{{ '100 %d%% of %s' % (5, 'x') }}
{{ [1, 2] | reverse | list }}{{ [[1, 2], [3]] | sum(start=[]) }}{{ 'x' | indent(2, true) }}
{{ 'a-b' | replace('-', '+') }}{{ [1, 1] | unique | list }}{{ 'text' | length }}{{ 5 | string }}
{%- for a in [1, 2] %}{% if a == 2 %}{% break %}{% endif %}{{ a }}{% endfor %}"""


def test_ordinary_operations_give_what_they_give_unbounded() -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, indent=indent)
    assert render(OPERATIONS) == environment.from_string(OPERATIONS).render()


def test_a_short_template_takes_no_time() -> None:
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    tokenizer = Tokenizer(byte_level(), chat_templates={"default": template})
    messages = MESSAGES * 20
    tokenizer.render_chat(messages)
    best = min(_seconds(lambda: tokenizer.render_chat(messages)) for _ in range(20))
    assert best < 0.002


def _seconds(call: object) -> float:
    begin = time.thread_time()
    call()  # type: ignore[operator]
    return time.thread_time() - begin
