"""Renders chat templates: the Jinja dialect of Hugging Face, in a sandbox."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .reasoning import Format

Message = Mapping[str, Any]

MAX_PROMPT_CHARACTERS = 1 << 26
MAX_RENDER_S = 10.0
"""Most seconds of CPU time to render a prompt, against endless templates. Most take under 1 s."""


class ChatPrompt(list[int]):
    """Token ids of a conversation, up to where the answer begins."""

    def __init__(
        self, tokens: Iterable[int], reasoning: Format | None, turn_boundaries: Iterable[int] = ()
    ) -> None:
        """turn_boundaries: positions where a later prompt of the conversation may diverge."""
        super().__init__(tokens)
        self.reasoning = reasoning
        self.turn_boundaries = tuple(turn_boundaries)


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
    Errors: ValueError for a template that cannot be parsed, fails, refuses the messages, exceeds
        MAX_PROMPT_CHARACTERS or takes longer than MAX_RENDER_S.
    """
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    values: dict[str, Any] = {**(variables or {}), **special_tokens}
    if enable_thinking is not None:
        values["enable_thinking"] = enable_thinking
    try:
        values |= {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return environment.text_of(environment.from_string(template).generate(values))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is broken in line {error.lineno}: {error}") from None
    except _RefusedError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from None
    except RecursionError:
        raise ValueError("the chat template nests too deeply") from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the chat template fails: {error}") from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja sandbox with a time limit, checked in methods that every turn of a loop calls."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._ends_at = time.thread_time() + MAX_RENDER_S

    def text_of(self, pieces: Iterable[str]) -> str:
        parts: list[str] = []
        n_characters = 0
        for piece in pieces:
            self._check_time()
            n_characters += len(piece)
            if n_characters > MAX_PROMPT_CHARACTERS:
                raise ValueError(f"it makes more than {MAX_PROMPT_CHARACTERS} characters")
            parts.append(piece)
        return "".join(parts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_time()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_time()
        return super().call(context, obj, *args, **kwargs)

    def _check_time(self) -> None:
        if time.thread_time() > self._ends_at:
            raise ValueError(f"it takes longer than {MAX_RENDER_S:g} s")


class _RefusedError(Exception):
    """Raised by raise_exception() of a template."""


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent} | settings)


def last_asked(messages: Sequence[Message]) -> str:
    """Returns the text of the last user turn, "" if there is none."""
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            return content.strip() if isinstance(content, str) else ""
    return ""
