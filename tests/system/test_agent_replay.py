"""Recorded conversations of coding agents, answered by a model that says the recorded answers.

Ids of calls in the requests are those that this server gave; the rest is as the agents sent it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from echo_server import MARK, SCRIPTED
from recorded_agents import (
    CONVERSATIONS,
    Exchange,
    RecordedAnswer,
    RecordedCall,
    answer_of,
    exchanges,
)
from serving import Served, scripted

from dflash_gguf.serve.responses_tools import ResponsesTools, custom_arguments

TEMPLATE = SCRIPTED.replace(
    "{{ m.role }}: ",
    f"{{% if m.role != 'assistant' %}}{{{{ m.role }}}}: {{% else %}}{MARK}{{% endif %}}",
)
"""Shows an answer as the model wrote it."""
NAMES = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
FIELDS = {"top_k": 1, "temperature": 0, "draft": "chain", "draft_max": 7}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    folder = tmp_path_factory.mktemp("replay")
    with closing(scripted(folder, [""], "--metrics", "--chat-template", TEMPLATE)) as found:
        yield found, folder / "script.json"


def wanted_of(one: Exchange) -> RecordedAnswer:
    """Returns the recorded answer, with paths as in the requests and unusual white space."""

    def odd(call: RecordedCall) -> RecordedCall:
        text = re.sub(r"/(project|tmp)[\w/]*/hello\.py", "/project/hello.py", call.text)
        if not call.is_custom:
            text = json.dumps(json.loads(text), separators=(" , ", " : "))
        return call._replace(text=text)

    answer = answer_of(one.response)
    return answer._replace(calls=tuple(map(odd, answer.calls)))


def said(answer: RecordedAnswer, request: dict[str, Any]) -> str:
    """Returns an answer as the model writes it."""
    thoughts = f"<think>\n{answer.reasoning}\n</think>\n" if answer.reasoning else ""
    return thoughts + answer.text + "".join(written(call, request) for call in answer.calls)


def written(call: RecordedCall, request: dict[str, Any]) -> str:
    name, arguments = call.name, custom_arguments(call.text) if call.is_custom else call.text
    if "input" in request:
        name = ResponsesTools(request["tools"]).function_of(call.name, call.namespace)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def sent(served: Served, one: Exchange, ids: dict[str, str]) -> RecordedAnswer:
    text = json.dumps(one.request | FIELDS)
    for theirs, ours in ids.items():
        text = text.replace(theirs, ours)
    if one.request.get("stream"):
        return answer_of({"events": served.events(one.path, **json.loads(text))})
    return answer_of({"body": served.answer(one.path, **json.loads(text))})


@pytest.mark.parametrize(
    ("client", "scenario"),
    [(client, one) for client, scenarios in CONVERSATIONS.items() for one in scenarios],
)
def test_a_conversation(served: tuple[Served, Path], client: str, scenario: str) -> None:
    server, script = served
    ids: dict[str, str] = {}
    n_before, n_turns = 0, 0
    for one in exchanges():
        if (one.client, one.scenario) != (client, scenario):
            continue
        wanted = wanted_of(one)
        script.write_text(json.dumps([said(wanted, one.request)]))
        counts = [server.metric(name) for name in NAMES]
        found = sent(server, one, ids)
        n_computed, n_cached, n_said = (
            server.metric(name) - count for name, count in zip(NAMES, counts, strict=True)
        )
        assert (found.reasoning, found.text) == (wanted.reasoning, wanted.text)
        for ours, theirs in zip(found.calls, wanted.calls, strict=True):
            assert ours[1:] == theirs[1:]
            ids[theirs.id] = ours.id
        if one.request.get("tools"):
            if n_before:
                n_turns += 1
                # The last token of an answer, which ends it, is not computed.
                assert n_cached >= n_before - 1, one.name
            n_before = n_computed + n_cached + n_said
    assert n_turns
