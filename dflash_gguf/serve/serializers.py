"""Response formats: OpenAI's chat and text completions, llama-server's completions."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from ..config import DecodeConfig
from ..sampling.noise import TokenLogprobs
from ..text.reasoning import OutputPart
from ..text.tokenizer import Tokenizer
from ..text.tools.calls import message_call
from .completion_choice import CompletionChoice, Event, meta_info, progressed, timings_of, usage
from .messages import ResultStats, Stepped
from .schemas import SAMPLERS
from .wire_format import WireFormat

FINGERPRINT = "b1-dflash-gguf"
"""Value of `system_fingerprint`; clients expect a "b" and a number, as of llama-server builds."""
SAME_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_last_n", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "ignore_eos", "post_sampling_probs"),
    *("reasoning_format", "draft"),
)
"""Fields of DecodeConfig with the same name in llama-server's generation settings."""
LOWEST_LOGPROB = -9999.0
"""Log-probability that stands for minus infinity, which JSON cannot express."""


@dataclass
class ResponseContext:
    """Parts of a response that all formats share: model name, tokenizer, optional fields."""

    model: str
    tokenizer: Tokenizer | None
    include_usage: bool = False
    return_tokens: bool = False
    verbose: Event = field(default_factory=dict)
    """Prompt text for the field `__verbose`, or empty."""

    def tokens(self, tokens: Sequence[int]) -> Event:
        """Returns a `tokens` field with token ids if return_tokens is set, else an empty object."""
        return {"tokens": tokens} if self.return_tokens else {}

    def named(self, token: int) -> Event:
        """Returns id, text and bytes of a token for a list of log-probabilities."""
        tokenizer, data = self.tokenizer, b""
        if tokenizer is not None and token < tokenizer.n_tokens:
            data = tokenizer.piece(token, special=True)
        return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data)}

    def logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Event]:
        """Returns the log-probability of each token, with those of the most probable tokens."""
        return [
            {
                **self.named(token),
                "logprob": _finite(chance.log_prob),
                "top_logprobs": [
                    {**self.named(other), "logprob": _finite(value)} for other, value in chance.top
                ],
            }
            for token, chance in zip(tokens, logprobs, strict=True)
        ]


class OpenAIFormat(WireFormat):
    """Base class of OpenAI's two formats."""

    DONE = b"data: [DONE]\n\n"
    KIND, CHUNK_KIND, ID_PREFIX = "", "", ""
    SILENT: ClassVar[Event]
    """Choice object of a stream chunk that adds no text."""
    END: ClassVar[Event]
    """Choice object of the last stream chunk of an answer."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._id = f"{self.ID_PREFIX}-{secrets.token_urlsafe(18)}"
        self._created = int(time.time())

    def progress(self, choice: CompletionChoice, progress: Event) -> Event:
        """Returns a chunk that reports the progress of a prompt."""
        return self._chunk(choice, self.SILENT) | progressed(choice, progress)

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """Yields the last chunk of an answer, with finish_reason."""
        chunk = self._chunk(choice, self.END | {"finish_reason": choice.finish_reason})
        yield chunk | _timings(choice.stats) | self._context.verbose

    def finish(self, choices: Sequence[CompletionChoice]) -> Iterator[Event]:
        """Yields the last chunk of a stream, with `usage`, if include_usage is set."""
        if self._context.include_usage:
            yield self._head(self.CHUNK_KIND) | {"choices": [], "usage": usage(choices)}

    def _whole(self, choices: Sequence[CompletionChoice], parts: Sequence[Event]) -> Event:
        for part, choice in zip(parts, choices, strict=True):
            part |= {"index": choice.index, "finish_reason": choice.finish_reason}
            part |= self._context.tokens(choice.tokens)
        response = self._head(self.KIND) | {"choices": parts, "usage": usage(choices)}
        return response | _timings(choices[0].stats) | self._context.verbose

    def _chunk(self, choice: CompletionChoice, part: Event) -> Event:
        part = {"index": choice.index, "finish_reason": None, **part}
        return self._head(self.CHUNK_KIND) | {"choices": [part]}

    def _head(self, kind: str) -> Event:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._context.model,
            "system_fingerprint": FINGERPRINT,
        }


class ChatFormat(OpenAIFormat):
    """Format of OpenAI's chat completions."""

    KIND, CHUNK_KIND, ID_PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"
    SILENT: ClassVar[Event] = {"delta": {"role": "assistant", "content": None}}
    END: ClassVar[Event] = {"delta": {}}

    def __init__(self, context: ResponseContext, *, has_meta_info: bool = False) -> None:
        """has_meta_info: adds SGLang's `meta_info` with drafting statistics to a whole response."""
        super().__init__(context)
        self._has_meta_info = has_meta_info

    def whole(self, choices: Sequence[CompletionChoice]) -> Event:
        """Returns the whole chat response."""
        response = self._whole(choices, [self._part(choice) for choice in choices])
        if self._has_meta_info:
            response["meta_info"] = meta_info(choices)
        return response

    def _part(self, choice: CompletionChoice) -> Event:
        calls = choice.tool_calls
        message: Event = {"role": "assistant", "content": choice.text or (None if calls else "")}
        if thoughts := choice.reasoning:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message,
            "logprobs": self._logprobs(choice.config, choice.tokens, choice.logprobs),
        }

    def _logprobs(
        self, config: DecodeConfig, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Event | None:
        if config.n_probs is None:
            return None
        return {"content": self._context.logprobs(tokens, logprobs), "refusal": None}

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:
        """Yields the chunks of one round: role (first round only), a chunk for each part."""
        if is_first:
            yield self._chunk(choice, self.SILENT)
        deltas = [self._delta(choice, part) for part in step.parts]
        if not deltas and (step.logprobs or self._context.return_tokens):
            deltas.append({"content": ""})  # tokens of an incomplete character bring no text yet
        for delta in deltas[:-1]:
            yield self._chunk(choice, {"delta": delta})
        for delta in deltas[-1:]:
            logprobs = self._logprobs(choice.config, step.tokens, step.logprobs)
            part = {"delta": delta, "logprobs": logprobs, **self._context.tokens(step.tokens)}
            yield self._chunk(choice, part) | _timings(step.stats)

    def _delta(self, choice: CompletionChoice, part: OutputPart) -> Event:
        if part.kind == "text":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        call: Event = {"index": part.call, "function": {"arguments": part.text}}
        if part.kind == "call":
            id_ = choice.call_id(part.call, part.text)
            call = {"index": part.call} | message_call(part.text, "", id_)
        return {"tool_calls": [call]}

    def finish(self, choices: Sequence[CompletionChoice]) -> Iterator[Event]:
        """Yields the last chunk of a stream, `usage` and `timings`, if include_usage is set."""
        for chunk in super().finish(choices):
            yield chunk | _timings(choices[0].stats)


class CompletionFormat(OpenAIFormat):
    """Format of OpenAI's text completions."""

    KIND, CHUNK_KIND, ID_PREFIX = "text_completion", "text_completion", "cmpl"
    SILENT: ClassVar[Event] = {"text": "", "logprobs": None}
    END = SILENT

    def __init__(self, context: ResponseContext, echoes: Sequence[str] | None) -> None:
        """echoes: text of each prompt, put before its answers; None without echo."""
        super().__init__(context)
        self._echoes = echoes

    def whole(self, choices: Sequence[CompletionChoice]) -> Event:
        """Returns the whole response of a text completion."""
        parts = [
            {
                "text": self._echo(choice) + choice.text,
                "logprobs": self._whole_logprobs(choice),
            }
            for choice in choices
        ]
        return self._whole(choices, parts)

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:
        """Yields the chunk of one round, if it brings text, log-probabilities or token ids."""
        text = (self._echo(choice) if is_first else "") + step.text
        if not (text or step.logprobs or self._context.return_tokens):
            return
        before = choice.tokens[: len(choice.tokens) - len(step.tokens)]
        offset = len(self._echo(choice)) + sum(
            len(self._context.named(token)["token"]) for token in before
        )
        logprobs = self._logprobs(choice, step.tokens, step.logprobs, offset)
        part = {"text": text, "logprobs": logprobs, **self._context.tokens(step.tokens)}
        yield self._chunk(choice, part) | _timings(step.stats)

    def _echo(self, choice: CompletionChoice) -> str:
        return "" if self._echoes is None else self._echoes[choice.prompt_index]

    def _whole_logprobs(self, choice: CompletionChoice) -> Event | None:
        """Returns the log-probabilities of an answer, after those of an echoed prompt."""
        found = self._logprobs(choice, choice.tokens, choice.logprobs, len(self._echo(choice)))
        if found is None or not choice.config.prompt_logprobs:
            return found
        prompt = choice.prompt.tokens
        first = self._context.named(prompt[0])["token"]  # no row of logits is for this token
        echoed = self._logprobs(choice, prompt[1:], choice.prompt_logprobs, len(first))
        start: Event = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None]}
        start |= {"text_offset": [0], "content": []}
        return {name: start[name] + (echoed or {})[name] + found[name] for name in found}

    def _logprobs(
        self,
        choice: CompletionChoice,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        offset: int,
    ) -> Event | None:
        """Returns log-probabilities of tokens. offset: characters of the text before them."""
        if choice.config.n_probs is None:
            return None
        entries = self._context.logprobs(tokens, logprobs)
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
            "text_offset": offsets,
            "content": entries,
        }


class LlamaServerFormat(WireFormat):
    """Format of llama-server's completions."""

    def __init__(
        self,
        context: ResponseContext,
        prompts: Sequence[str],
        stop_tokens: Sequence[int],
        fields: Sequence[str] | None,
    ) -> None:
        """prompts: texts as evaluated. fields: names of response fields to return; None: all."""
        self._context = context
        self._prompts = prompts
        self._stop_tokens = stop_tokens
        self._fields = fields

    def whole(self, choices: Sequence[CompletionChoice]) -> Any:
        """Returns the whole response: an object, or a list of objects for several choices."""
        entries = []
        for choice in choices:
            entry = self._final(choice)
            entry["content"] = choice.text
            entry["tokens"] = choice.tokens if self._context.return_tokens else []
            if choice.config.n_probs:
                entry["completion_probabilities"] = self._probabilities(
                    choice.config, choice.tokens, choice.logprobs
                )
            entries.append(select_fields(entry, self._fields))
        return entries if len(entries) > 1 else entries[0]

    def progress(self, choice: CompletionChoice, progress: Event) -> Event:
        """Returns an event that reports the progress of a prompt."""
        return self._event(choice, "", []) | progressed(choice, progress)

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:  # noqa: ARG002
        """Yields one event per token; the text of a round comes with the round's last token."""
        for number, token in enumerate(step.tokens):
            is_last = number == len(step.tokens) - 1
            chunk = self._event(choice, step.text if is_last else "", [token])
            if choice.config.n_probs:
                chunk["completion_probabilities"] = self._probabilities(
                    choice.config, [token], step.logprobs[number : number + 1]
                )
            yield chunk | _timings(step.stats)

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """Yields the last event of an answer: all fields of a whole response except its text."""
        yield select_fields(self._final(choice) | {"content": "", "tokens": []}, self._fields)

    def _event(self, choice: CompletionChoice, text: str, tokens: Sequence[int]) -> Event:
        return {
            "index": choice.index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": choice.slot,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(choice.prompt.tokens),
        }

    def _probabilities(
        self, config: DecodeConfig, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[msgspec.Raw]:
        """Returns entries as JSON text: 1024 objects a token would slow the garbage collector."""
        entries = []
        for token, chance in zip(tokens, logprobs, strict=True):
            (entry,) = self._context.logprobs([token], [chance])
            if config.post_sampling_probs:
                entry["prob"] = math.exp(entry.pop("logprob"))
                entry["top_probs"] = entry.pop("top_logprobs")
                for top in entry["top_probs"]:
                    top["prob"] = math.exp(top.pop("logprob"))
            entries.append(msgspec.Raw(msgspec.json.encode(entry)))
        return entries

    def _final(self, choice: CompletionChoice) -> Event:
        stats = choice.stats
        assert stats is not None
        kinds = {"token": "eos", "text": "word", "length": "limit", "context": "limit"}
        return {
            "index": choice.index,
            "content": "",
            "tokens": [],
            "id_slot": choice.slot,
            "stop": True,
            "model": self._context.model,
            "tokens_predicted": stats.n_tokens,
            "tokens_evaluated": stats.n_prompt,
            "generation_settings": settings_of(choice.config, stats.seed, self._stop_tokens),
            "prompt": self._prompts[choice.prompt_index],
            "has_new_line": "\n" in choice.text,
            "truncated": stats.stop_reason == "context",
            "stop_type": kinds.get(stats.stop_reason, "none"),
            "stopping_word": stats.stop_text or "",
            "tokens_cached": stats.n_prompt + max(stats.n_tokens - 1, 0),
            **timings_of(stats),
        }


def settings_of(config: DecodeConfig, seed: int, stop_tokens: Sequence[int]) -> Event:
    """Returns the settings of a request with llama-server's names."""
    n_predict = -1 if config.max_tokens is None else config.max_tokens
    bans = [{"bias": None, "token": token} for token in stop_tokens] if config.ignore_eos else []
    return {
        "seed": seed,
        **{name: getattr(config, name) for name in SAME_NAMES},
        "stop": list(config.stop_texts),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "logit_bias": bans
        + [
            {"bias": bias if math.isfinite(bias) else None, "token": token}
            for token, bias in config.logit_bias.items()
        ],
        "n_probs": config.n_probs or 0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "samplers": list(SAMPLERS),
    }


def select_fields(answer: Event, fields: Sequence[str] | None) -> Event:
    """Returns the named fields of a response; "a/b" is field b of object a."""
    if not fields:
        return answer
    chosen = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            chosen[path] = value
    return chosen


def _timings(stats: ResultStats | None) -> Event:
    return {} if stats is None else timings_of(stats)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST_LOGPROB
