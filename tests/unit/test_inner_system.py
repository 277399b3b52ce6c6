"""System messages within a conversation: kept in place, or shown as the user's."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_gguf.serve.prompts import PromptBuilder
from dflash_gguf.serve.schemas import TemplateBody
from dflash_gguf.text.tokenizer import Tokenizer

SHOWN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
DROPPING = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
USER, SYSTEM, ASSISTANT = (
    {"role": role, "content": role[0]} for role in ("user", "system", "assistant")
)


def prompt(tokenizer: Tokenizer, template: str, *messages: Any) -> str:
    return PromptBuilder(tokenizer, template).chat_text(TemplateBody(messages=list(messages)))


@pytest.mark.parametrize("template", [STRICT, DROPPING, ALTERNATING])
def test_they_join_the_users_turn_if_the_template_does_not_show_them(
    tokenizer: Tokenizer, template: str
) -> None:
    found = prompt(tokenizer, template, USER, SYSTEM, ASSISTANT, SYSTEM, USER)
    assert found == "user:u\n\ns;assistant:a;user:s\n\nu;"


def test_they_stay_where_the_template_shows_them(tokenizer: Tokenizer) -> None:
    found = prompt(tokenizer, SHOWN, USER, SYSTEM, ASSISTANT, SYSTEM, USER)
    assert found == "user:u;system:s;assistant:a;system:s;user:u;"


def test_those_at_the_beginning_become_one(tokenizer: Tokenizer) -> None:
    assert prompt(tokenizer, STRICT, SYSTEM, SYSTEM, USER, USER) == "system:s\n\ns;user:u;user:u;"
    assert prompt(tokenizer, SHOWN, SYSTEM, SYSTEM, USER) == "system:s;system:s;user:u;"


def test_a_later_one_leaves_the_prompt_before_it_as_it_was(tokenizer: Tokenizer) -> None:
    for template in (STRICT, DROPPING, SHOWN):
        before = prompt(tokenizer, template, SYSTEM, USER, SYSTEM)
        after = prompt(tokenizer, template, SYSTEM, USER, SYSTEM, ASSISTANT, SYSTEM)
        assert after.startswith(before)
