"""Chat templates in a process of their own: the same texts, and limits that no template escapes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dflash_gguf.text import template_process
from dflash_gguf.text.chat import conversation, render
from dflash_gguf.text.template_process import TemplateProcess

HELLO = [{"role": "user", "content": "hello"}]
LOOP = "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplateProcess]:
    found = TemplateProcess()
    yield found
    found.close()


def test_texts_and_errors_are_those_of_render(templates: TemplateProcess) -> None:
    call = {"function": {"name": "f", "arguments": ' {"a": 1}'}}
    messages = conversation([*HELLO, {"role": "assistant", "tool_calls": [call]}])
    walks = (
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}{{ c.function.arguments }}"
        "{{ c.function.arguments.a }}{% endfor %}{% endfor %}{{ bos_token }}{{ x }}{{ '\u00e9' }}"
    )
    settings = {"special_tokens": {"bos_token": "<s>"}, "variables": {"x": [1]}}
    assert templates.render(walks, messages, **settings) == render(walks, messages, **settings)
    for template in ("{% if %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ {}.a.b }}"):
        with pytest.raises(ValueError) as expected:
            render(template, HELLO, special_tokens={})
        with pytest.raises(ValueError) as found:
            templates.render(template, HELLO, special_tokens={})
        assert str(found.value) == str(expected.value)
    templates.check("{{ 1 }}")
    with pytest.raises(ValueError, match="not Jinja"):
        templates.check("text")


@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% set r = range(99999)|list %}{% for a in r %}{% if -1 in r %}{% endif %}{% endfor %}",
        "{{ 9**(9**9) }}",
        "{% set a = 9 %}{{ a**(a**a) }}",
        "{{ range(10)|slice(10**11)|list }}",
        "{{ lipsum(n=10**8) }}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) ~ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_endless_templates_are_ended(
    templates: TemplateProcess, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(template_process, "MAX_RENDER_S", 0.5)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"the chat template (fails|needs)"):
        templates.render(template, HELLO, special_tokens={})
    assert time.monotonic() - began < 5
    monkeypatch.undo()
    assert templates.render("{{ 1 }}", HELLO, special_tokens={}) == "1"


def test_parsing_is_limited_too(
    templates: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "MAX_RENDER_S", 0.5)
    with pytest.raises(ValueError, match="the chat template fails"):
        templates.check("{{ 9**(9**9) }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**11 }}",
        "{{ 'a'|center(10**11) }}",
        "{% set n = 3 * 10**9 %}{{ 'a' * n }}",
        "{% set l = [0] * 10**9 %}{{ l|length }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ ('a\n' * 10**6)|indent(10**6) }}",
        "{% for a in [1] %}" * 25 + "x" + "{% endfor %}" * 25,
        "{% if a %}" * 200_000 + "{% endif %}" * 200_000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{{ 5|dictsort }}",
        "{{ messages.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_that_break_what_runs_them(templates: TemplateProcess, template: str) -> None:
    with pytest.raises(ValueError, match="the chat template"):
        templates.render(template, HELLO, special_tokens={})
    assert templates.render("{{ 1 }}", HELLO, special_tokens={}) == "1"


def test_a_killed_process_starts_again(templates: TemplateProcess) -> None:
    templates.render("{{ 1 }}", HELLO, special_tokens={})
    process = templates._process
    assert process is not None
    process.kill()
    process.wait()
    assert templates.render("{{ 2 }}", HELLO, special_tokens={}) == "2"
    templates.close()
    templates.close()
    assert templates.render("{{ 3 }}", HELLO, special_tokens={}) == "3"


def test_threads_share_a_process(templates: TemplateProcess) -> None:
    found: list[str] = []

    def act(n: int) -> None:
        found.append(templates.render(f"{{{{ {n} }}}}", HELLO, special_tokens={}))

    threads = [threading.Thread(target=act, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, found)) == list(range(20))


def test_a_value_that_cannot_be_copied(templates: TemplateProcess) -> None:
    with pytest.raises(ValueError, match="cannot be copied"):
        templates.render("{{ x }}", HELLO, special_tokens={}, variables={"x": lambda: 1})


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "import os, sys, threading, time\n"
        "from dflash_gguf.text.template_process import TemplateProcess\n"
        "t = TemplateProcess(); t.render('{{ 1 }}', [], special_tokens={})\n"
        f"threading.Thread(target=lambda: t.render({LOOP!r}, [], special_tokens={{}})).start()\n"
        "print(t._process.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
    ends_at = time.monotonic() + template_process.MAX_RENDER_S + 60
    while _runs(child):
        assert time.monotonic() < ends_at
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
