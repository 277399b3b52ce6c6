"""Renders chat templates: the Jinja dialect of Hugging Face, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .reasoning import Format

Message = Mapping[str, Any]


class ChatPrompt(list[int]):
    """Token ids of a conversation up to where the answer begins."""

    def __init__(self, tokens: Iterable[int], reasoning: Format | None) -> None:
        """reasoning: how an answer marks its thoughts; None if the template marks none."""
        super().__init__(tokens)
        self.reasoning = reasoning


class _Generation(jinja2.ext.Extension):
    """Lets `{% generation %}` blocks through, which mark text for training only."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """The nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    enable_thinking: bool | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that a template makes of messages.

    special_tokens: "bos_token", "eos_token" and so on, texts that templates refer to.
    enable_thinking: passed on unless None; templates that do not know it ignore it.
    Errors: ValueError for a template that cannot be parsed, fails, or refuses the messages.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    values: dict[str, Any] = dict(special_tokens)
    if enable_thinking is not None:
        values["enable_thinking"] = enable_thinking
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **values,
        )
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is broken in line {error.lineno}: {error}") from None
    except _RefusedError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from None
    except RecursionError:
        raise ValueError("the chat template nests too deeply") from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the chat template fails: {error}") from None


class _RefusedError(Exception):
    """What a template's raise_exception() raises."""


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent} | settings)
