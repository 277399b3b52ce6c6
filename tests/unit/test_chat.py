"""Chat templates: their variables, and their errors."""

from __future__ import annotations

from typing import Any

import pytest
from vocabularies import CHAT_TEMPLATE

from dflash_gguf.text.chat import render

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(template: str, **settings: Any) -> str:
    return render(template, HELLO, special_tokens=SPECIALS, **settings)


def test_a_conversation_ends_where_the_answer_begins() -> None:
    assert rendered(CHAT_TEMPLATE) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    closed = rendered(CHAT_TEMPLATE, add_generation_prompt=False)
    assert closed == "<|im_start|>user\nhi<|im_end|>\n"


def test_thinking_is_passed_on_only_when_chosen() -> None:
    template = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}open{% endif %}"
    assert rendered(template) == "open"
    assert rendered(template, enable_thinking=True) == "True"
    assert rendered(template, enable_thinking=False) == "False"
    assert rendered(CHAT_TEMPLATE, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        ("{{ 'é<' | tojson }}", '"é<"'),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{{ strftime_now('%%') }}{{ tools is none }}", "%True"),
    ],
)
def test_the_dialect_of_hugging_face(template: str, text: str) -> None:
    assert rendered(template) == text


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% if %}", "the chat template is broken in line 1"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must"),
        ("{{ nothing.at_all }}", "the chat template fails"),
        ("{{ 1 / 0 }}", "the chat template fails"),
        ("{{ messages[0].content + 1 }}", "the chat template fails"),
        ("{{ messages.__class__.__mro__ }}", "the chat template fails"),
        ("{{ messages.append(1) }}", "the chat template fails"),
    ],
)
def test_failures_are_one_sentence(template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        rendered(template)
    assert "\n" not in str(caught.value)
