"""Token ids of the prompts of a request: given prompts, or conversations by a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..text.chat import ChatPrompt, last_asked
from ..text.tokenizer import Tokenizer
from .schemas import MAX_CHOICES, BadRequestError, ChatBody, TemplateBody, thinking

TEXT_PARTS = ("text", "input_text", "output_text")


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
        """Text of the model's own chat template; empty if there is none."""
        return (self.tokenizer.templates.get("") or "") if self.tokenizer else ""

    def prompts(self, value: Any, add_special: bool = True) -> list[list[int]]:
        """Returns the token ids of each prompt in a `prompt` field.

        A prompt is a text, a list of token ids and texts, or an object with a prompt_string.
        add_special: True to begin texts with the BOS token if the model asks for it. Raises
        BadRequestError for other values.
        """
        if value is None:
            raise BadRequestError(
                "prompt is missing, must be a text, token ids, or a list of these"
            )
        if not isinstance(value, list) or not value or not _is_many(value):
            return [self._prompt(value, add_special)]
        if len(value) > MAX_CHOICES:
            raise BadRequestError(f"prompt holds {len(value)} prompts, the limit is {MAX_CHOICES}")
        return [self._prompt(one, add_special) for one in value]

    def _prompt(self, value: Any, add_special: bool) -> list[int]:
        if isinstance(value, dict):
            if value.get("multimodal_data"):
                raise BadRequestError("prompt: multimodal_data is not supported, leave it out")
            value = value.get("prompt_string")
            if not isinstance(value, str):
                raise BadRequestError("prompt is an object, its prompt_string must be a text")
        if isinstance(value, str):
            return self.require_tokenizer().tokenize(value, add_special=add_special)
        if not isinstance(value, list):
            raise BadRequestError(
                f"prompt must be a text, token ids, or a list of these, not {type(value).__name__}"
            )
        tokens: list[int] = []
        for place, part in enumerate(value):
            if isinstance(part, str):
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

    def chat_text(self, body: ChatBody | TemplateBody) -> str:
        """Returns the prompt text of a conversation.

        An assistant message at the end is continued. With thinking off, an open block of thoughts
        at the end is closed. Raises BadRequestError for malformed messages.
        """
        tokenizer = self.require_tokenizer()
        messages = [message_of(message, place) for place, message in enumerate(body.messages)]
        if not messages:
            raise BadRequestError("messages is empty, must hold at least one message")
        begins = _begins(body, messages)
        last = messages.pop() if begins else None
        think, variables = thinking(body, self._think)
        text = tokenizer.chat_text(
            messages,
            template=self.template,
            enable_thinking=think,
            add_generation_prompt=begins or body.add_generation_prompt is not False,
            tools=body.tools if isinstance(body, TemplateBody) and body.tools else None,
            variables=self._variables | variables,
        )
        if thoughts := _thoughts(last):
            return text + self._begun(text, thoughts, _words_of(last))
        text = self._closed(text, is_off=think is False or bool(_words_of(last)))
        return text + _words_of(last)

    def _begun(self, text: str, thoughts: str, words: str) -> str:
        """Returns the begun answer, thoughts and text, with the template's marks of reasoning."""
        marks = self.require_tokenizer().chat_format(text, template=self.template)
        if marks is None or not marks.opening:
            raise BadRequestError(
                "reasoning_content of the last message cannot be continued: "
                "the chat template has no reasoning"
            )
        begun = thoughts if marks.is_open else f"{marks.opening}\n{thoughts}"
        return f"{begun}\n{marks.closing}\n\n{words}" if words else begun

    def _closed(self, text: str, *, is_off: bool) -> str:
        """Returns the prompt, with its block of thoughts closed if is_off (thinking is off)."""
        marks = self.require_tokenizer().chat_format(text, template=self.template)
        if not is_off or marks is None:
            return text
        if marks.is_open:
            return text + marks.closing
        has_no_switch = marks.name == "cohere" and not text.rstrip().endswith(marks.closing)
        return text + marks.opening + marks.closing if has_no_switch else text

    def chat(self, body: ChatBody) -> ChatPrompt:
        """Returns token ids, format of thoughts and turn boundaries of a conversation."""
        text = self.chat_text(body)
        messages = [message_of(message, place) for place, message in enumerate(body.messages)]
        asked = last_asked(messages)
        return self.require_tokenizer().chat_tokens(text, template=self.template, asked=asked)


def message_of(message: dict[str, Any], place: int) -> dict[str, Any]:
    """Returns a message in the form of chat templates: content is one text, developer is system."""
    role, content = message.get("role"), message.get("content")
    name = f"messages[{place}]"
    if not isinstance(role, str) or not role:
        raise BadRequestError(
            f"{name}: role is missing or no text, give system, user, assistant or tool"
        )
    normalised = dict(message)
    normalised["role"] = "system" if role == "developer" else role
    if isinstance(content, list):
        normalised["content"] = "\n".join(_part(part, name) for part in content)
    elif isinstance(content, str):
        normalised["content"] = content
    elif content is None and (
        role == "assistant" and ("tool_calls" in message or _thoughts(normalised))
    ):
        normalised["content"] = ""
    else:
        raise BadRequestError(
            f"{name}: content must be a text or a list of parts, not {type(content).__name__}"
        )
    thoughts = message.get("reasoning_content")
    if thoughts is not None and not isinstance(thoughts, str):
        raise BadRequestError(
            f"{name}: reasoning_content must be a text, not {type(thoughts).__name__}"
        )
    return normalised


def _part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and "image" in kind:
        raise BadRequestError(f"{name}: image input is not supported, give parts of type text")
    raise BadRequestError(f"{name}: each part of content must have type text and a text")


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


def _words_of(message: dict[str, Any] | None) -> str:
    return "" if message is None else str(message["content"])


def _is_many(value: list[Any]) -> bool:
    """True if a list holds several prompts; a list with a token id is a single prompt."""
    return not any(isinstance(part, int) and not isinstance(part, bool) for part in value)
