"""Token ids of the prompts of a request: given prompts, or conversations by a chat template."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from ..text.chat import ChatPrompt, conversation, last_asked
from ..text.reasoning import Format
from ..text.tokenizer import Tokenizer
from ..text.tools.input_grammar import input_grammars
from ..text.tools.offer import strict_names, tools_of
from .answer_memory import AnswerMemory
from .schemas import (
    MAX_CHOICES,
    BadRequestError,
    ChatBody,
    TemplateBody,
    thinking,
    tool_choice,
)

USERS = ("user", "system")
"""Roles that become one user's turn if the chat template has no place for inner system messages."""
MAX_TOOLS = 2000
"""Most tools of a request. The context bounds those that are shown, not those that are deferred:
the grammar of 20,000 took 20 s, in which other clients waited."""
TOO_LONG = "exceed_context_size_error"
"""Type of the error for a prompt that the context cannot hold."""


class PromptBuilder:
    """Builds prompts with a model's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        think: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """template: replaces the model's chat template. think, variables: defaults of requests."""
        self.tokenizer = tokenizer
        self.template = template
        self._think = think
        self._variables = dict(variables or {})
        self.answers = AnswerMemory()

    def require_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises BadRequestError if the model has none."""
        if self.tokenizer is None:
            raise BadRequestError("the model file has no tokenizer: give token ids, not texts")
        return self.tokenizer

    @property
    def has_template(self) -> bool:
        """True if there is a chat template, without which conversations cannot be answered."""
        tokenizer = self.tokenizer
        return tokenizer is not None and bool(self.template or tokenizer.templates.get(""))

    @property
    def template_text(self) -> str:
        """Text of the chat template in use, or the name of a built-in one; empty if none is."""
        if self.tokenizer is None or not self.has_template:
            return ""
        return self.tokenizer.jinja(self.template) or self.template or ""

    def prompts(self, value: Any, n_ctx: int, add_special: bool = True) -> list[list[int]]:
        """Returns the token ids of each prompt in a `prompt` field.

        A prompt is a text, a list of token ids and texts, or an object with a prompt_string.
        n_ctx: tokens of the context. add_special: True to begin texts with the BOS token if the
        model asks for it. Raises BadRequestError for other values, and for texts that are too long.
        """
        if value is None:
            raise BadRequestError(
                "prompt is missing, must be a text, token ids, or a list of these"
            )
        if not isinstance(value, list) or not value or not _is_many(value):
            return [self._prompt(value, n_ctx, add_special)]
        if len(value) > MAX_CHOICES:
            raise BadRequestError(f"prompt holds {len(value)} prompts, the limit is {MAX_CHOICES}")
        return [self._prompt(one, n_ctx, add_special) for one in value]

    def _prompt(self, value: Any, n_ctx: int, add_special: bool) -> list[int]:
        if isinstance(value, dict):
            if value.get("multimodal_data"):
                raise BadRequestError("prompt: multimodal_data is not supported, leave it out")
            value = value.get("prompt_string")
            if not isinstance(value, str):
                raise BadRequestError("prompt is an object, its prompt_string must be a text")
        if isinstance(value, str):
            self._check_length(value, n_ctx)
            return self.require_tokenizer().tokenize(value, add_special=add_special)
        if not isinstance(value, list):
            raise BadRequestError(
                f"prompt must be a text, token ids, or a list of these, not {type(value).__name__}"
            )
        tokens: list[int] = []
        for place, part in enumerate(value):
            if isinstance(part, str):
                self._check_length(part, n_ctx)
                is_first = add_special and place == 0
                tokens += self.require_tokenizer().tokenize(part, add_special=is_first)
            elif isinstance(part, int) and not isinstance(part, bool):
                tokens.append(part)
            else:
                raise BadRequestError(
                    f"prompt must be a text, token ids, or a list of these; its part {place} is "
                    f"of type {type(part).__name__}"
                )
        return tokens

    def _check_length(self, text: str, n_ctx: int) -> None:
        """Raises BadRequestError if a text is too long, however few tokens it has."""
        least = len(text) // self.require_tokenizer().max_token_bytes
        if least > n_ctx:
            raise too_long(least, n_ctx, "at least ")

    def chat_text(self, body: ChatBody | TemplateBody) -> str:
        """Returns the prompt text of a conversation.

        An assistant message at the end is continued. With thinking off, an open block of thoughts
        at the end is closed. Raises BadRequestError or ValueError for malformed messages.
        """
        return self._text(body, conversation(body.messages), tools_of(body.tools or ()))

    def _text(
        self,
        body: ChatBody | TemplateBody,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> str:
        tokenizer = self.require_tokenizer()
        begins = _begins(body, messages)
        last = messages[-1] if begins else None
        messages = self._placed(messages[:-1] if begins else messages)
        words = _words_of(body.messages[-1]) if begins else ""
        think, variables = thinking(body, self._think)
        text = tokenizer.chat_text(
            messages,
            template=self.template,
            enable_thinking=think,
            add_generation_prompt=begins or body.add_generation_prompt is not False,
            tools=tools or None,
            variables=self._variables | variables,
        )
        if thoughts := _thoughts(last):
            return text + self._begun(self._marks(text, tools), thoughts, words)
        is_off = think is False or bool(words)
        return (self._closed(text, self._marks(text, tools)) if is_off else text) + words

    def _placed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages; system messages that the template would drop join the user's."""
        is_system = [one["role"] == "system" for one in messages]
        if not any(is_system[1:]) or self._shows_inner_system:
            return messages
        n_leading = [*is_system, False].index(False)
        placed = [merged(messages[:n_leading], "system")] if n_leading else []
        for is_users, run in groupby(messages[n_leading:], lambda one: one["role"] in USERS):
            turn = list(run)
            has_system = any(one["role"] == "system" for one in turn)
            placed += [merged(turn, "user")] if is_users and has_system else turn
        return placed

    @cached_property
    def _shows_inner_system(self) -> bool:
        """True if the chat template shows a system message behind a user's, where it stands."""
        roles = {"before": "user", "inner": "system", "behind": "assistant", "next": "user"}
        probe = [{"role": role, "content": content} for content, role in roles.items()]
        try:
            text = self.require_tokenizer().chat_text(probe, template=self.template)
        except ValueError:
            return False
        return re.search("before.*inner.*behind", text, re.DOTALL) is not None

    def _marks(self, text: str, tools: Sequence[dict[str, Any]]) -> Format | None:
        tokenizer = self.require_tokenizer()
        return tokenizer.chat_format(text, template=self.template, has_tools=bool(tools))

    def _begun(self, marks: Format | None, thoughts: str, words: str) -> str:
        """Returns the begun answer, thoughts and text, with the template's marks of reasoning."""
        if marks is None or not marks.opening:
            raise BadRequestError(
                "reasoning_content of the last message cannot be continued: "
                "the chat template has no reasoning"
            )
        begun = thoughts if marks.is_open else f"{marks.opening}\n{thoughts}"
        return f"{begun}\n{marks.closing}\n\n{words}" if words else begun

    def _closed(self, text: str, marks: Format | None) -> str:
        """Returns a prompt without thoughts: its block of thoughts is closed."""
        if marks is None:
            return text
        if marks.is_open:
            return text + marks.closing
        has_no_switch = marks.name == "cohere" and not text.rstrip().endswith(marks.closing)
        return text + marks.opening + marks.closing if has_no_switch else text

    def chat(
        self,
        body: ChatBody,
        n_ctx: int | None = None,
        deferred: Collection[str] = (),
        scope: str = "",
    ) -> ChatPrompt:
        """Returns the prompt of a conversation: token ids, and the form of the answer.

        Routes of other protocols translate messages and tools to those of OpenAI's chat, in a
        ChatBody of `messages`, `tools`, `tool_choice` and `parallel_tool_calls`, and call this
        method. The returned prompt carries the form of reasoning and tool calls to the engine,
        which sends the answer as parts: `Stepped.parts` of a round, `CompletionChoice.parts` of
        all.
        n_ctx: tokens of the context, None if the conversation may be longer. deferred: names of
        tools that can be called but are not shown, as the conversation tells of them. scope: whose
        earlier answers are put back as the model wrote them.
        Raises BadRequestError or ValueError for a request that cannot be answered.
        """
        if (n := len(body.tools or ())) > MAX_TOOLS:
            raise BadRequestError(f"tools holds {n} tools, the limit is {MAX_TOOLS}")
        tokenizer, tools = self.require_tokenizer(), tools_of(body.tools or ())
        messages = self.answers.restored(scope, conversation(body.messages))
        choice = tool_choice(body)
        shown = [one for one in tools if one["function"]["name"] not in deferred]
        text = self._text(body, messages, shown)
        if n_ctx is not None:
            self._check_length(text, n_ctx)
        form = tokenizer.tool_format(
            tools,
            messages,
            template=self.template,
            is_parallel=body.parallel_tool_calls is not False and not choice.is_single,
            strict=strict_names(body.tools or ()),
            allowed=choice.allowed,
            inputs=input_grammars(body.tools or ()),
        )
        asked = last_asked(messages)
        return tokenizer.chat_tokens(text, template=self.template, asked=asked, tools=form)


def merged(messages: Sequence[Mapping[str, Any]], role: str) -> dict[str, Any]:
    """Returns one message with the texts of several."""
    return {"role": role, "content": "\n\n".join(one["content"] for one in messages)}


def too_long(n_tokens: int, n_ctx: int, count: str = "") -> BadRequestError:
    """Returns the error for a prompt of more tokens than the context holds.

    Clients compact a conversation for the words "exceeds the available context size".
    """
    return BadRequestError(
        f"the prompt has {count}{n_tokens} tokens, which exceeds the available context size, the "
        f"maximum of {n_ctx}: shorten the prompt",
        kind=TOO_LONG,
        n_prompt_tokens=n_tokens,
        n_ctx=n_ctx,
    )


def _begins(body: ChatBody | TemplateBody, messages: Sequence[dict[str, Any]]) -> bool:
    """True if the last message is an assistant message that the answer continues."""
    is_assistant = messages[-1]["role"] == "assistant"
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise BadRequestError(
                "continue_final_message and add_generation_prompt are both true: leave one out"
            )
        if not is_assistant:
            raise BadRequestError(
                "continue_final_message is true, but the last message has role "
                f"{messages[-1]['role']!r:.40}, must be assistant"
            )
    if not is_assistant:
        return False
    if body.continue_final_message is False:
        return False
    if body.add_generation_prompt and isinstance(body, ChatBody):
        raise BadRequestError(
            "add_generation_prompt is true, but the last message is the assistant's and would be "
            "continued: set continue_final_message to false"
        )
    if "tool_calls" in messages[-1]:
        raise BadRequestError(
            "messages ends with tool_calls, which cannot be continued: add the result as a message "
            "of role tool, or set continue_final_message to false"
        )
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise BadRequestError(
            "messages ends with two assistant messages: only one can be continued, join them"
        )
    if len(messages) == 1:
        raise BadRequestError(
            "messages holds one assistant message only: add a user message before it"
        )
    return True


def _thoughts(message: dict[str, Any] | None) -> str:
    thoughts = (message or {}).get("reasoning_content")
    return thoughts if isinstance(thoughts, str) else ""


def _words_of(message: Mapping[str, Any]) -> str:
    """Returns the text of a message to continue; its parts are joined as llama-server does."""
    content = message["content"]
    parts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    return "\n\n".join(parts)


def _is_many(value: list[Any]) -> bool:
    """True if a list holds several prompts; a list with a token id is a single prompt."""
    return not any(isinstance(part, int) and not isinstance(part, bool) for part in value)
