"""Templates of strangers end, soon and with little memory, whatever they try."""

import resource
import time

import pytest

from outpace.errors import ModelError, RequestError
from outpace.models.chat import compile_template, render

SAID = [{"role": "user", "content": "hi"}]
GROWS = "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a macro without end": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "times": "{{ 'a' * 20000000000 }}",
    "times a list": "{{ ([1] * 2000000000) | length }}",
    "times before": "{{ 20000000000 * 'a' }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "many powers": GROWS.replace("'abcdefgh'", "3").replace("%s", "ns.x * ns.x"),
    "plus": GROWS.replace("%s", "ns.x + ns.x"),
    "tilde": GROWS.replace("%s", "ns.x ~ ns.x"),
    "lists in lists": GROWS.replace("%s", "[ns.x, ns.x, ns.x]") + "{{ ns.x }}",
    "lists as json": GROWS.replace("%s", "[ns.x, ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "join": GROWS.replace("%s", "[ns.x, ns.x] | join"),
    "join with": GROWS.replace("%s", "ns.x.join(['a', 'b', 'c'])"),
    "join of a map": "{{ ([{'k': 'a' * 8000000}] * 2000) | map(attribute='k') | join }}",
    "replace": GROWS.replace("%s", "ns.x.replace('a', ns.x)"),
    "replace, a filter": GROWS.replace("%s", "ns.x | replace('a', ns.x)"),
    "center": "{{ 'a'.center(20000000000) }}",
    "center, a filter": "{{ 'a' | center(20000000000) }}",
    "indent": "{{ 'a\nb\nc' | indent(2000000000) }}",
    "many indents": "{{ ('a\n' * 1000000) | indent(1000000) }}",
    "format": "{{ '{:20000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 2000000000) }}",
    "percent": "{{ '%20000000000d' % 1 }}",
    "percent, a filter": "{{ '%20000000000d' | format(1) }}",
    "json": "{{ [[1, 2], [3]] | tojson(indent=2000000000) }}",
    "set": "{% set x %}{% for a in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "bytes": "{{ (1).to_bytes(20000000000, 'big') }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "sum": "{{ ([[1] * 10000] * 10000) | sum(start=[]) | length }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_given_up(source):
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((RequestError, ModelError)) as caught:
        render(compile_template(source), SAID)
    assert time.process_time() - begin < 6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_messages_that_are_too_long_are_to_be_shortened():
    long = [{"role": "user", "content": "a " * (1 << 22)}]
    with pytest.raises(RequestError, match="more than 8388608 characters; shorten the messages"):
        render(compile_template("{{ 'User: ' ~ messages[0].content }}"), long)


def test_honest_templates_write_what_they_did():
    source = (
        "{% set ns = namespace(all='') %}{% for m in messages %}{% set ns.all = ns.all ~ m.role ~ ':' %}"
        "{{ '<' + m['content'].strip().replace('a', 'bb') + '>' }}{% endfor %}{{ ns.all }}"
        "{{ [1, 'x', {'k': 2}] | tojson(indent=2) }}{{ '%s-%05d' % ('a', 7) }}{{ ['a', 'b'] | join(', ') }}"
        "{{ '{:>4}|{}'.format(1, 'z') }}{{ 'x\ny' | indent(2) }}{{ 7 * 6 }}{{ 2 ** 8 }}{{ 'ab' * 2 }}"
        "{{ messages | map(attribute='role') | list }}"
        "{{ (['ab'] * 10000) | map('upper') | join('c') | length }}{{ ([1, 2] + [3])[::-1] }}"
        "{{ 'q' | center(5) }}"
    )
    said = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}]
    assert render(compile_template(source), said) == (
        '<bb><b>user:assistant:[\n  1,\n  "x",\n  {\n    "k": 2\n  }\n]a-00007a, b'
        "   1|zx\n  y42256abab['user', 'assistant']29999[3, 2, 1]  q  "
    )


def test_a_long_conversation_is_no_hostile_one():
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim }}{% endfor %}"
    said = [{"role": "user", "content": "word " * 20}] * 10_000
    assert len(render(compile_template(source), said)) == 10_000 * (99 + 8)
