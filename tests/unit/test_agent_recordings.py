"""Recorded requests of coding agents and SDKs: accepted, and each turn extends the one before."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from recorded_agents import CONVERSATIONS, Exchange, exchanges
from vocabularies import byte_level, write

from dflash_gguf.serve.anthropic_request import MessagesBody, chat_from_messages
from dflash_gguf.serve.prompts import PromptBuilder
from dflash_gguf.serve.responses_request import ResponsesBody, chat_from_responses
from dflash_gguf.serve.schemas import ChatBody, read
from dflash_gguf.text.chat import conversation
from dflash_gguf.text.tokenizer import Tokenizer

ROUTES: dict[str, tuple[type[Any], Callable[[Any], ChatBody]]] = {
    "/v1/chat/completions": (ChatBody, lambda body: body),
    "/v1/messages": (MessagesBody, chat_from_messages),
    "/v1/messages/count_tokens": (MessagesBody, chat_from_messages),
    "/v1/responses": (ResponsesBody, chat_from_responses),
}
STRICT = (
    "{% for tool in tools or [] %}tool:{{ tool | tojson }};{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('inner system') }}{% endif %}"
    "{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
LENIENT = STRICT.replace("not loop.first", "false")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "a.gguf"
    found = Tokenizer.from_file(write(path, byte_level(add_bos_token=False)))
    assert found is not None
    return found


ASKED = [one for one in exchanges() if one.path in ROUTES]


def chat_of(one: Exchange) -> ChatBody:
    kind, translated = ROUTES[one.path]
    return translated(read(json.dumps(one.request).encode(), kind)[0])


def prompt_of(builder: PromptBuilder, one: Exchange) -> str:
    deferred = (
        read(json.dumps(one.request).encode(), MessagesBody)[0].deferred_tools
        if (one.path == "/v1/messages")
        else ()
    )
    return builder.require_tokenizer().detokenize(builder.chat(chat_of(one), deferred=deferred))


@pytest.mark.parametrize("template", [STRICT, LENIENT], ids=["strict", "lenient"])
def test_every_request_is_accepted(tokenizer: Tokenizer, template: str) -> None:
    builder = PromptBuilder(tokenizer, template)
    assert len(ASKED) > 180
    for one in ASKED:
        assert builder.chat_text(chat_of(one)), one.name


def test_each_result_answers_a_call_of_the_turn_before() -> None:
    n_results = 0
    for one in ASKED:
        calls: list[Any] = []
        for message in conversation(chat_of(one).messages):
            if message["role"] == "tool":
                assert message["tool_call_id"] in calls, one.name
                n_results += 1
            elif message["role"] == "assistant":
                calls = [call["id"] for call in message.get("tool_calls", ())]
    assert n_results > 140


@pytest.mark.parametrize("template", [STRICT, LENIENT], ids=["strict", "lenient"])
@pytest.mark.parametrize(
    ("client", "scenario"),
    [(client, one) for client, scenarios in CONVERSATIONS.items() for one in scenarios],
)
def test_a_turn_extends_the_prompt_of_the_turn_before(
    tokenizer: Tokenizer, client: str, scenario: str, template: str
) -> None:
    builder = PromptBuilder(tokenizer, template)
    prompts = [
        prompt_of(builder, one)
        for one in ASKED
        if (one.client, one.scenario) == (client, scenario) and one.request.get("tools")
    ]
    assert len(prompts) > 1
    for before, after in pairwise(prompts):
        assert after.startswith(before)
