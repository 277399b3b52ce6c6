"""Constraints over HTTP: every route and name, errors before the first token, log lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving import CODE, ROUTES, USER, Served, text_of, tiny

import dflash_gguf

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["red", "green"]}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = tiny("--metrics")
    yield found
    found.close()


def body(path: str, **more: Any) -> dict[str, Any]:
    return ({"messages": USER} if "chat" in path else {"prompt": CODE}) | {"max_tokens": 60} | more


def is_right(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"a", "b"}
        and value["a"] in ("red", "green")
        and isinstance(value["b"], int)
        and value["b"] <= 99
    )


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("path", ROUTES)
def test_constraints_bind_the_answers_of_all_routes(served: Served, path: str) -> None:
    for seed in range(3):
        for fields in (
            {"json_schema": SCHEMA},
            {"response_format": strict(SCHEMA)},
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        ):
            wanted = body(path, seed=seed, temperature=1.0, **fields)
            plain = text_of(served.answer(path, **wanted, draft="none"))
            assert is_right(json.loads(plain)), plain
            assert text_of(served.answer(path, **wanted)) == plain
            assert text_of(served.answer(path, **wanted, draft="tree")) == plain
        assert text_of(served.answer(path, **body(path, guided_choice=["yes", "no"]))) in (
            *("yes", "no"),
        )
        found = served.answer(path, **body(path, grammar='root ::= "x" [0-9]{3}', n=2))
        assert re.fullmatch("x[0-9]{3}", text_of(found if isinstance(found, dict) else found[0]))


@pytest.mark.parametrize("path", ROUTES)
def test_streams_of_constrained_answers(served: Served, path: str) -> None:
    whole = text_of(served.answer(path, **body(path, json_schema=SCHEMA)))
    text = ""
    for event in served.events(path, **body(path, json_schema=SCHEMA)):
        for choice in event.get("choices", [event]):
            part = choice.get("delta", choice)
            text += part.get("content") or part.get("text") or ""
    assert text == whole
    assert is_right(json.loads(text))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"response_format": strict({"not": {}})},
            'response_format: keywords that cannot be enforced: ["not"]; leave them out',
        ),
        ({"json_schema": {"type": "thing"}}, "json_schema: Invalid type: thing"),
        ({"grammar": "root ::= x"}, "grammar: Rule 'x' not found"),
        ({"regex": "("}, "regex: "),
        ({"regex": "a" * 99999}, "regex has 99999 bytes, the limit is 65536"),
        ({"response_format": {"type": "xml"}}, "type of response_format is 'xml'"),
    ],
)
def test_bad_constraints_get_one_sentence_before_the_head(
    served: Served, path: str, is_stream: bool, fields: dict[str, Any], sentence: str
) -> None:
    found = served.post(path, body(path, stream=is_stream, **fields))
    assert found.status_code == 400, found.text
    message = found.json()["error"]["message"]
    assert message.startswith(sentence)
    assert "\n" not in message


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: ("}
STRICT = {"type": "json_schema", "name": "x", "schema": {"not": {}}, "strict": True}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        ("/v1/responses", {"tools": [{"type": "custom", "name": "patch", "format": GRAMMAR}]}, ""),
        ("/v1/responses", {"text": {"format": STRICT}}, "text.format: keywords that cannot be"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "type of text.format is 'xml'"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "thing"}}}},
            "output_config.format: Invalid type: thing",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "xml"}}},
            "type of output_config.format is 'xml'",
        ),
    ],
)
def test_bad_constraints_of_agents_routes_get_400_in_their_words(
    served: Served, path: str, fields: dict[str, Any], sentence: str, is_stream: bool
) -> None:
    """Their streams begin with events before the prompt is computed, but not before this."""
    asked = {"input": "add"} if path == "/v1/responses" else {"messages": USER, "max_tokens": 9}
    found = served.post(path, asked | fields | {"stream": is_stream})
    assert found.status_code == 400, found.text
    message = found.json()["error"]["message"]
    assert message.startswith(sentence)
    assert "response_format" not in message


def test_the_log_has_the_reason_of_a_refusal_and_no_quotation(served: Served) -> None:
    served.post("/completion", body("/completion", response_format={"type": "se'cret"}))
    served.wait_for(r"POST /completion 400 \d+ ms, type of response_format is \.\.\.")
    served.post("/completion", body("/completion", grammar=7))
    served.wait_for(r"POST /completion 400 \d+ ms, grammar")
    assert "se'cret" not in served.log


def test_keywords_that_are_not_enforced_are_logged(served: Served) -> None:
    schema = {"type": "array", "maxItems": 1, "uniqueItems": True, "items": {"type": "null"}}
    found = served.answer("/completion", **body("/completion", json_schema=schema))
    assert json.loads(text_of(found)) in ([], [None])
    served.wait_for(r"warning: json_schema is not enforced in full: .*uniqueItems")


def test_other_protocols_constrain_answers_too(served: Served) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    found = served.answer("/v1/responses", input="add", text={"format": form}, max_output_tokens=60)
    (message,) = (item for item in found["output"] if item["type"] == "message")
    assert is_right(json.loads(message["content"][0]["text"]))
    found = served.answer(
        "/v1/messages", messages=USER, output_config={"format": form}, max_tokens=60
    )
    assert is_right(json.loads(found["content"][-1]["text"]))


def test_python_and_the_server_give_the_same_constrained_text(served: Served) -> None:
    with dflash_gguf.load("python-tiny", n_threads=1) as decoder:
        right = decoder.generate(CODE, json_schema=SCHEMA, max_tokens=60, draft="none")
    found = served.answer("/completion", **body("/completion", json_schema=SCHEMA, temperature=0))
    assert text_of(found) == right.text
