"""Calls that SmolLM2-135M is required to make are valid by the schemas of their tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from typing import Any

import pytest
from serving import Served

N_AT_ONCE = 4
CITIES = ("Oslo", "Lagos", "Lima", "Kyoto", "Perth", "Quito", "Riga", "Cairo", "Accra", "Turin")
TASKS = (
    "What is the weather in {}?",
    "Book a table for four in {} on Friday evening; two of us are vegetarians.",
    "Tell Anna that I am late in {}.",
    "Plan three days in {} for two people who like museums and food.",
    "Find the cheapest way to {} for two adults in May.",
)


def text(most: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": most}


def integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def some(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


def object_of(n_required: int, **properties: Any) -> dict[str, Any]:
    """Returns the schema of an object whose first properties are required, and no others known."""
    required = list(properties)[:n_required]
    shape = {"properties": properties, "required": required, "additionalProperties": False}
    return {"type": "object", **shape}


SCHEMAS = {
    "get_weather": object_of(
        2, city=text(40), unit={"enum": ["celsius", "fahrenheit"]}, days=integer(1, 7)
    ),
    "book_table": object_of(
        4,
        city=text(40),
        people=integer(1, 20),
        time={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        diets=some({"enum": ["none", "vegetarian", "vegan"]}),
    ),
    "send_message": object_of(2, to=text(40), text=text(120), urgent={"type": "boolean"}),
    "plan_trip": object_of(
        2,
        stops=some(object_of(2, day=integer(1, 9), places=some(text(30)))),
        budget={"anyOf": [{"type": "number"}, {"type": "null"}]},
    ),
}
"""Schemas without unbounded texts, in which a model of this size writes on to the token limit."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with closing(Served("-m", "smollm2", "-t", "2", "-c", "8192", "-np", str(N_AT_ONCE))) as found:
        yield found


@pytest.mark.full
def test_fifty_required_calls_are_valid_and_the_same_without_drafts(served: Served) -> None:
    import jsonschema

    def asked(case: tuple[int, str, str]) -> dict[str, Any]:
        seed, content, draft = case
        tools = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
        answer = served.answer(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": content}],
            tools=[{"type": "function", "function": tool} for tool in tools],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=500,
            seed=seed,
            draft=draft,
        )
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls", choice
        function: dict[str, Any] = call["function"]
        return function

    prompts = [task.format(city) for city, task in product(CITIES, TASKS)]
    cases = list(enumerate(prompts))
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        drafted = list(pool.map(asked, [(*case, "auto") for case in cases]))
        plain = list(pool.map(asked, [(*case, "none") for case in cases]))
    assert len(drafted) == 50
    assert drafted == plain
    for function in drafted:
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    assert len({function["name"] for function in drafted}) > 2
