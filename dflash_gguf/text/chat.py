"""Conversations, and chat templates: the Jinja dialect of Hugging Face, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .reasoning import Format
from .tools.parser import ToolFormat

Message = Mapping[str, Any]

REASONING_NAMES = ("thinking", "thought", "reasoning")
"""Names of reasoning in messages, besides reasoning_content, that chat templates read."""
TEXT_PARTS = ("text", "input_text", "output_text")
SET_BY_CONVERSATION = ("messages", "tools", "documents", "add_generation_prompt")


class ChatPrompt(list[int]):
    """Token ids of a conversation, up to where the answer begins."""

    def __init__(
        self,
        tokens: Iterable[int],
        reasoning: Format | None,
        turn_boundaries: Iterable[int] = (),
        tools: ToolFormat | None = None,
        asked: str = "",
    ) -> None:
        """turn_boundaries: positions where a later prompt of the conversation may diverge.

        reasoning, tools: how the answer marks reasoning and tool calls; None for no such parts.
        asked: text of the last user turn.
        """
        super().__init__(tokens)
        self.reasoning = reasoning
        self.turn_boundaries = tuple(turn_boundaries)
        self.tools = tools
        self.asked = asked

    def __add__(self, tokens: list[int]) -> ChatPrompt:  # type: ignore[override]
        """Returns the prompt with the tokens of a text that begins the answer."""
        joined = super().__add__(tokens)
        return ChatPrompt(joined, self.reasoning, self.turn_boundaries, self.tools, self.asked)


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object, and JSON where a template prints it as a text."""

    def __init__(self, values: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return _to_json(self) if self._text is None else self._text

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class WrittenArguments(Arguments):
    """Arguments as a model wrote them: the same JSON wherever a template prints them."""


def conversation(messages: object) -> list[dict[str, Any]]:
    """Returns messages in the form of chat templates, which all have a role and a text.

    The role developer becomes system, text parts are joined, and null beside tool calls or
    reasoning becomes "". Arguments of tool calls become objects, and stay texts if they are not the
    JSON of an object.
    Errors: ValueError for other messages, and for content that is not text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise ValueError(f"messages is {messages!r:.60}, must be a list of messages")
    normalised = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    if not normalised:
        raise ValueError("messages is empty, must hold at least one message")
    return normalised


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} is {message!r:.60}, must be an object with role and content")
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    thoughts = message.get("reasoning_content")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{name}: role is missing or no text, give system, user, assistant or tool"
        )
    if thoughts is not None and not isinstance(thoughts, str):
        raise ValueError(f"{name}: reasoning_content must be a text, not {type(thoughts).__name__}")
    if message.get("function_call"):
        raise ValueError(f"{name}: function_call is not supported, give tool_calls")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_part(part, name) for part in content)
    elif content is None and role == "assistant" and (calls or thoughts):
        content = ""
    elif not isinstance(content, str):
        raise ValueError(
            f"{name}: content must be a text or a list of parts, not {type(content).__name__}"
        )
    normalised = {**message, "role": "system" if role == "developer" else role, "content": content}
    normalised.pop("tool_calls", None)  # templates may take an empty list for tool calls
    return normalised | {"tool_calls": _tool_calls(calls, name)} if calls else normalised


def _part(part: object, name: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and "image" in kind:
        raise ValueError(f"{name}: image input is not supported, give parts of type text")
    if kind in ("tool_use", "tool_result"):
        raise ValueError(
            f"{name}: a part of type {kind} is not supported, give tool_calls or a message of "
            "role tool"
        )
    raise ValueError(f"{name}: each part of content must have type text and a text")


def _tool_calls(calls: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"{name}: tool_calls must be a list, not {type(calls).__name__}")
    normalised = []
    for place, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{name}: tool_calls[{place}] must have a function with a name")
        arguments = call_arguments(function.get("arguments"), f"{name}: tool_calls[{place}]")
        function = {**function, "arguments": arguments}
        normalised.append({**call, "function": function} if "function" in call else function)
    return normalised


def call_arguments(given: object, name: str = "call") -> Arguments | str:
    """Returns the arguments of a call: an object, or a text that is not the JSON of one.

    name: of the call, for errors.
    Errors: ValueError for a value that is neither text nor object.
    """
    if isinstance(given, Mapping):
        return given if isinstance(given, Arguments) else Arguments(given)
    if given is not None and not isinstance(given, str):
        raise ValueError(f"{name}: arguments must be a JSON text, not {type(given).__name__}")
    text = given if given and not given.isspace() else "{}"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    return Arguments(values, text) if isinstance(values, dict) else text


def with_reasoning_names(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Returns messages with reasoning_content under the name that a template reads it by, too.

    Of an answer with text and calls gpt-oss's template refuses the reasoning, which is left out.
    """
    names = [name for name in REASONING_NAMES if f".{name}" in template]
    if "reasoning_content" in template or not names:
        return [dict(message) for message in messages]
    refuses = "Cannot pass both content and thinking" in template
    found = []
    for message in messages:
        text = message.get("reasoning_content")
        is_refused = refuses and message.get("content") and message.get("tool_calls")
        found.append({**dict.fromkeys(names if text and not is_refused else (), text), **message})
    return found


def template_values(given: object, name: str) -> dict[str, Any]:
    """Returns the template variables in `given`. name: of the flag or request field, for errors.

    Errors: ValueError for a value that is no object, for names in SET_BY_CONVERSATION, and for a
        switch that is not a boolean: any text, "no" too, is true for a template.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be a JSON object, not {type(given).__name__}")
    for key in given:
        if key in SET_BY_CONVERSATION:
            raise ValueError(f"{name} holds {key}, which the conversation sets: leave it out")
    for key in ("enable_thinking", "thinking"):
        if not isinstance(given.get(key), (bool, type(None))):
            raise ValueError(
                f"{name}: {key} must be true or false, not {type(given[key]).__name__}"
            )
    return dict(given)


def check_template(template: str) -> None:
    """Raises ValueError for a text that is no Jinja template."""
    if "{%" not in template and "{{" not in template:
        raise ValueError("the chat template holds neither {% nor {{: it is not Jinja")
    try:
        _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        raise _broken(error) from None
    except RecursionError:
        raise ValueError("the chat template nests too deeply") from None


def check_tools_shown(
    messages: Sequence[Message], text: str, text_of: Callable[[Sequence[Message]], str]
) -> None:
    """Raises ValueError if a template drops tool calls or results: same prompt without them.

    text: prompt that the template makes of the messages. text_of: makes it of other messages.
    """
    no_calls = [{k: v for k, v in one.items() if k != "tool_calls"} for one in messages]
    no_results = [
        {**one, "content": ""} if one.get("role") == "tool" else dict(one) for one in messages
    ]
    for what, bare in (("tool_calls", no_calls), ("messages of role tool", no_results)):
        try:
            is_dropped = bare != messages and text_of(bare) == text
        except ValueError:
            is_dropped = False
        if is_dropped:
            raise ValueError(
                f"the chat template does not show {what}: leave them out, or give a template that "
                "does"
            )


class _Generation(jinja2.ext.Extension):
    """Lets `{% generation %}` blocks through, which mark text for training only."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    enable_thinking: bool | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the prompt that a Jinja template makes of messages.

    special_tokens: texts of special tokens by their names in templates, such as "bos_token".
    enable_thinking, tools, variables: values for the template; None for enable_thinking omits it.
    Errors: ValueError for a template that cannot be parsed, fails or refuses the messages. Any
        other exception, and no end, for a malicious one: TemplateProcess calls this function.
    """
    # Templates written for llama.cpp use these names; transformers does not define them.
    values: dict[str, Any] = {
        "date_string": _strftime_now("%d %b %Y"),
        "datetime": _strftime_now("%b %d %Y"),
        "functions": _to_json([] if tools is None else list(tools), indent=2),
        **(variables or {}),
        **special_tokens,
    }
    if enable_thinking is not None:
        values["enable_thinking"] = enable_thinking
    try:
        values |= {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _compiled(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise _broken(error) from None
    except _RefusedError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from None
    except RecursionError:
        raise ValueError("the chat template nests too deeply") from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the chat template fails: {error}{_unparsed(messages)}") from None


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _broken(error: jinja2.TemplateSyntaxError) -> ValueError:
    return ValueError(f"the chat template is broken in line {error.lineno}: {error}")


def _unparsed(messages: Sequence[Message]) -> str:
    """Returns a note for a failed template about arguments of tool calls that are no object."""
    for place, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("function", call)["arguments"], str):
                return f"; messages[{place}] has a tool call whose arguments are no JSON object"
    return ""


class _RefusedError(Exception):
    """Raised by raise_exception() of a template."""


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
    if isinstance(value, WrittenArguments):
        return str(value)
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent} | settings)


def last_asked(messages: Sequence[Message]) -> str:
    """Returns the text of the last user turn, "" if there is none."""
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            return content.strip() if isinstance(content, str) else ""
    return ""
