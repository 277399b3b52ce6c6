"""Chat templates: their variables, and their errors."""

from __future__ import annotations

from typing import Any

import pytest
from vocabularies import CHAT_TEMPLATE

from dflash_gguf.text.chat import conversation, render

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
        ("{{ date_string == strftime_now('%d %b %Y') }}", "True"),  # Llama 3.3 knows the day
        ("{{ datetime == strftime_now('%b %d %Y') }} {{ functions }}", "True []"),
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


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hi", "messages is 'hi', must be a list of messages"),
        (b"hi", "messages is b'hi', must be"),
        (None, "messages is None, must be"),
        (HELLO[0], "messages is .*, must be a list"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is 'hi', must be an object"),
        ([{"content": "x"}], r"messages\[0\]: role is missing"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]: role is missing or no text"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]: content must be a text .* not NoneType"),
        ([{"role": "assistant", "content": None}], "content must be"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "content must be"),
        ([{"role": "user", "content": b"x"}], "content must be .* not bytes"),
        ([{"role": "user", "content": ["x"]}], "must have type text and a text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "must have type text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image input is not supported"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], "type tool_use is not supported"),
        ([HELLO[0] | {"reasoning_content": 1}], "reasoning_content must be a text, not int"),
        ([HELLO[0] | {"function_call": {"name": "f"}}], "function_call is not supported"),
        ([HELLO[0] | {"tool_calls": "f"}], "tool_calls must be a list, not str"),
        ([HELLO[0] | {"tool_calls": [{"function": {}}]}], r"tool_calls\[0\] must have a function"),
        (
            [HELLO[0] | {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
            r"messages\[0\]: tool_calls\[0\]: arguments must be a JSON text, not list",
        ),
    ],
)
def test_messages_of_another_form_are_refused(messages: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        conversation(messages)


def test_messages_of_every_form_become_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    made = conversation(
        (
            {"role": "developer", "content": "s"},
            {"role": "user", "content": parts, "tool_calls": None},
            {"role": "assistant", "content": None, "reasoning_content": "hm"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "content": parts, "tool_call_id": "1"},
        )
    )
    assert [(m["role"], m["content"]) for m in made] == [
        *(("system", "s"), ("user", "a\nb"), ("assistant", ""), ("assistant", "")),
        ("tool", "a\nb"),
    ]
    assert ["tool_calls" in m for m in made] == [False, False, False, True, False]
    assert conversation(made) == made
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for arguments in (deep, {"a": {1, 2}}):
        with pytest.raises(ValueError, match="the chat template"):
            render(PRINT, called(arguments), special_tokens=SPECIALS)


def called(arguments: object, *, is_flat: bool = False) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = function if is_flat else {"id": "1", "type": "function", "function": function}
    return conversation([*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])


CALLS = "{% for m in messages %}{% for t in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
WALK = CALLS + "{% for k, v in t.function.arguments|items %}{{ k }}={{ v }};{% endfor %}" + END
ITEMS = CALLS + "{% for k, v in t.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}" + END
PRINT = CALLS + "{{ t.function.arguments }}" + END
JOIN = CALLS + "{{ 'a' + t.function.arguments + 'z' }}{{ 'a' ~ t.function.arguments }}" + END
ASK = (
    CALLS + "{% if t.function.arguments is string %}{{ t.function.arguments }}{% else %}"
    "{{ t.function.arguments | tojson }}{% endif %}" + END
)


@pytest.mark.parametrize(
    ("arguments", "walked", "printed", "as_json"),
    [
        ('{"a":1, "b": "é"}', "a=1;b=é;", '{"a":1, "b": "é"}', '{"a": 1, "b": "é"}'),
        ({"a": 1, "b": "é"}, "a=1;b=é;", '{"a": 1, "b": "é"}', '{"a": 1, "b": "é"}'),
        ("", "", "{}", "{}"),
        (None, "", "{}", "{}"),
        (" ", "", "{}", "{}"),
        ("{}", "", "{}", "{}"),
    ],
)
def test_arguments_are_objects_for_templates_that_walk_and_texts_for_those_that_print(
    arguments: object, walked: str, printed: str, as_json: str
) -> None:
    messages = called(arguments)
    for template, text in (
        (WALK, walked),
        (ITEMS, walked),
        (PRINT, printed),
        (JOIN, f"a{printed}za{printed}"),
        (ASK, as_json),
    ):
        assert render(template, messages, special_tokens=SPECIALS) == text
    flat = PRINT.replace(".function", "")
    assert render(flat, called(arguments, is_flat=True), special_tokens=SPECIALS) == printed


@pytest.mark.parametrize("arguments", ["ls -l", "[1]", '{"a": ', "3", "[" * 100_000])
def test_arguments_that_are_no_object_are_printed_or_refused(arguments: str) -> None:
    messages = called(arguments)
    for template in (PRINT, ASK):
        assert render(template, messages, special_tokens=SPECIALS) == arguments
    for template in (WALK, ITEMS):
        with pytest.raises(ValueError, match=r"messages\[1\] has a tool call whose arguments are"):
            render(template, messages, special_tokens=SPECIALS)
