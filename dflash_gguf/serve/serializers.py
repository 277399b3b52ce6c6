"""What an answer looks like: OpenAI's forms and llama-server's own, whole or as events."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..config import DecodeConfig
from ..sampling.noise import TokenLogprobs
from ..text.tokenizer import Tokenizer
from .completion_choice import CompletionChoice, Event, meta_info, progressed, timings_of, usage
from .messages import ResultStats, Stepped

FINGERPRINT = "b1-dflash-gguf"
"""llama-server's begin with a b and a number, which clients look for."""
LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON has not."""


class WireFormat(Protocol):
    """A way to write answers."""

    is_openai: bool

    def whole(self, choices: Sequence[CompletionChoice]) -> Any:
        """All of it in one."""

    def progress(self, choice: CompletionChoice, progress: Event) -> Event:
        """An event about the prompt."""

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:
        """The events of a round."""

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """The events when an answer is over."""

    def finish(self, choices: Sequence[CompletionChoice]) -> Iterator[Event]:
        """The events when all are over."""


@dataclass
class ResponseContext:
    """What every form knows."""

    model: str
    tokenizer: Tokenizer | None
    include_usage: bool = False
    timings_per_token: bool = False
    return_tokens: bool = False
    verbose_prompt: str | None = None
    """The prompt as it was evaluated, where that is asked for."""

    def piece(self, token: int) -> bytes:
        """The bytes of a token, the names of control tokens among them."""
        if self.tokenizer is None or token >= self.tokenizer.n_tokens:
            return b""
        return self.tokenizer.piece(token, special=True)

    def named(self, token: int) -> dict[str, Any]:
        """A token as lists of probabilities have it."""
        data = self.piece(token)
        return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data)}

    def logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Event]:
        """Log-probabilities of tokens, and of the best beside them."""
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


class ChatFormat:
    """OpenAI's chat completions."""

    is_openai = True

    def __init__(self, context: ResponseContext, *, has_meta_info: bool = False) -> None:
        """has_meta_info: the whole answer says how it was drafted, as SGLang's does."""
        self._context = context
        self._has_meta_info = has_meta_info
        self._id = f"chatcmpl-{secrets.token_urlsafe(18)}"
        self._created = int(time.time())

    def whole(self, choices: Sequence[CompletionChoice]) -> Event:
        """One object."""
        response = self._head("chat.completion")
        response["choices"] = [self._choice(choice) for choice in choices]
        response["usage"] = usage(choices)
        if choices[0].stats is not None:
            response |= timings_of(choices[0].stats)
        if self._has_meta_info:
            response["meta_info"] = meta_info(choices)
        return response | _verbose(self._context)

    def _choice(self, choice: CompletionChoice) -> Event:
        message: Event = {"role": "assistant", "content": choice.text}
        if thoughts := choice.reasoning:
            message["reasoning_content"] = thoughts
        entry: Event = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.config, choice.tokens, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        if self._context.return_tokens:
            entry["tokens"] = choice.tokens
        return entry

    def _logprobs(
        self, config: DecodeConfig, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Event | None:
        if config.n_probs is None:
            return None
        return {"content": self._context.logprobs(tokens, logprobs), "refusal": None}

    def progress(self, choice: CompletionChoice, progress: Event) -> Event:
        """A chunk without words."""
        chunk = self._chunk(choice, {"role": "assistant", "content": None})
        return chunk | progressed(choice, progress)

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:
        """A chunk for the thoughts and one for the words; before all, one for the role."""
        if is_first:
            yield self._chunk(choice, {"role": "assistant", "content": None})
        deltas: list[Event] = []
        if step.reasoning:
            deltas.append({"reasoning_content": step.reasoning})
        if step.text:
            deltas.append({"content": step.text})
        if not deltas and (step.logprobs or self._context.return_tokens):
            deltas.append({"content": ""})  # tokens whose text is not certain yet have chances
        for number, delta in enumerate(deltas):
            chunk = self._chunk(choice, delta)
            if number == len(deltas) - 1:
                logprobs = self._logprobs(choice.config, step.tokens, step.logprobs)
                chunk["choices"][0]["logprobs"] = logprobs
                if self._context.return_tokens:
                    chunk["choices"][0]["tokens"] = step.tokens
                if self._context.timings_per_token and step.stats is not None:
                    chunk |= timings_of(step.stats)
            yield chunk

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """The chunk with the reason."""
        chunk = self._chunk(choice, {})
        chunk["choices"][0]["finish_reason"] = choice.finish_reason
        if choice.stats is not None:
            chunk |= timings_of(choice.stats)
        yield chunk | _verbose(self._context)

    def finish(self, choices: Sequence[CompletionChoice]) -> Iterator[Event]:
        """The counts, where they are asked for."""
        if self._context.include_usage:
            chunk = self._head("chat.completion.chunk")
            chunk |= {"choices": [], "usage": usage(choices)}
            if choices[0].stats is not None:
                chunk |= timings_of(choices[0].stats)
            yield chunk

    def _chunk(self, choice: CompletionChoice, delta: Event) -> Event:
        chunk = self._head("chat.completion.chunk")
        part: Event = {"index": choice.index, "delta": delta, "finish_reason": None}
        return chunk | {"choices": [part]}

    def _head(self, kind: str) -> Event:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._context.model,
            "system_fingerprint": FINGERPRINT,
        }


class CompletionFormat:
    """OpenAI's text completions."""

    is_openai = True

    def __init__(self, context: ResponseContext, echoes: Sequence[str] | None) -> None:
        """echoes: the prompts, where the answer is to begin with its own."""
        self._context = context
        self._echoes = echoes
        self._id = f"cmpl-{secrets.token_urlsafe(18)}"
        self._created = int(time.time())

    def whole(self, choices: Sequence[CompletionChoice]) -> Event:
        """One object."""
        response = self._head() | {
            "choices": [
                self._part(
                    choice,
                    self._echo(choice) + choice.text,
                    choice.finish_reason,
                    self._logprobs(choice, choice.tokens, choice.logprobs, 0),
                )
                for choice in choices
            ],
            "usage": usage(choices),
        }
        if self._context.return_tokens:
            for part, choice in zip(response["choices"], choices, strict=True):
                part["tokens"] = choice.tokens
        if choices[0].stats is not None:
            response |= timings_of(choices[0].stats)
        return response | _verbose(self._context)

    def progress(self, choice: CompletionChoice, progress: Event) -> Event:
        """A chunk without words."""
        chunk = self._head() | {"choices": [self._part(choice, "", None, None)]}
        return chunk | progressed(choice, progress)

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:
        """A chunk."""
        text = (self._echo(choice) if is_first else "") + step.text
        if not (text or step.logprobs or self._context.return_tokens):
            return
        n_before = len(choice.tokens) - len(step.tokens)
        logprobs = self._logprobs(choice, step.tokens, step.logprobs, n_before)
        chunk = self._head() | {"choices": [self._part(choice, text, None, logprobs)]}
        if self._context.return_tokens:
            chunk["choices"][0]["tokens"] = step.tokens
        if self._context.timings_per_token and step.stats is not None:
            chunk |= timings_of(step.stats)
        yield chunk

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """The chunk with the reason."""
        chunk = self._head() | {"choices": [self._part(choice, "", choice.finish_reason, None)]}
        if choice.stats is not None:
            chunk |= timings_of(choice.stats)
        yield chunk | _verbose(self._context)

    def finish(self, choices: Sequence[CompletionChoice]) -> Iterator[Event]:
        """The counts, where they are asked for."""
        if self._context.include_usage:
            yield self._head() | {"choices": [], "usage": usage(choices)}

    def _echo(self, choice: CompletionChoice) -> str:
        return "" if self._echoes is None else self._echoes[choice.prompt]

    def _part(
        self, choice: CompletionChoice, text: str, reason: str | None, logprobs: Event | None
    ) -> Event:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _logprobs(
        self,
        choice: CompletionChoice,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        n_before: int,
    ) -> Event | None:
        """Offsets count characters of the tokens' own texts."""
        if choice.config.n_probs is None:
            return None
        entries = self._context.logprobs(tokens, logprobs)
        offset = len(self._echo(choice)) + sum(
            len(self._context.named(token)["token"]) for token in choice.tokens[:n_before]
        )
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

    def _head(self) -> Event:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._context.model,
            "system_fingerprint": FINGERPRINT,
        }


class LlamaServerFormat:
    """llama-server's own completions."""

    is_openai = False

    def __init__(
        self,
        context: ResponseContext,
        prompts: Sequence[str],
        stop_tokens: Sequence[int],
        fields: Sequence[str] | None,
    ) -> None:
        """prompts: their text as it is evaluated. fields: those of an answer that are wanted."""
        self._context = context
        self._prompts = prompts
        self._stop_tokens = stop_tokens
        self._fields = fields

    def whole(self, choices: Sequence[CompletionChoice]) -> Any:
        """One object, or a list of several."""
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
        """An event without words."""
        chunk = self._event(choice, "", [])
        return chunk | progressed(choice, progress)

    def step(self, choice: CompletionChoice, step: Stepped, *, is_first: bool) -> Iterator[Event]:  # noqa: ARG002
        """An event a token; text that became certain with a round comes with its last one."""
        for number, token in enumerate(step.tokens):
            is_last = number == len(step.tokens) - 1
            chunk = self._event(choice, step.text if is_last else "", [token])
            if choice.config.n_probs:
                chunk["completion_probabilities"] = self._probabilities(
                    choice.config, [token], step.logprobs[number : number + 1]
                )
            if self._context.timings_per_token and step.stats is not None:
                chunk |= timings_of(step.stats)
            yield chunk

    def end(self, choice: CompletionChoice) -> Iterator[Event]:
        """Everything but the words."""
        yield select_fields(self._final(choice) | {"content": "", "tokens": []}, self._fields)

    def finish(self, choices: Sequence[CompletionChoice]) -> Iterator[Event]:  # noqa: ARG002
        """Nothing."""
        return iter(())

    def _event(self, choice: CompletionChoice, text: str, tokens: Sequence[int]) -> Event:
        return {
            "index": choice.index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": choice.slot,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(choice.run.tokens),
        }

    def _probabilities(
        self, config: DecodeConfig, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[Event]:
        entries = self._context.logprobs(tokens, logprobs)
        if not config.post_sampling_probs:
            return entries
        for entry in entries:
            entry["prob"] = math.exp(entry.pop("logprob"))
            entry["top_probs"] = entry.pop("top_logprobs")
            for top in entry["top_probs"]:
                top["prob"] = math.exp(top.pop("logprob"))
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
            "generation_settings": self._settings(choice, stats),
            "prompt": self._prompts[choice.prompt],
            "has_new_line": "\n" in choice.text,
            "truncated": stats.stop_reason == "context",
            "stop_type": kinds.get(stats.stop_reason, "none"),
            "stopping_word": stats.stop_text or "",
            "tokens_cached": stats.n_prompt + max(stats.n_tokens - 1, 0),
            **timings_of(stats),
        }

    def _settings(self, choice: CompletionChoice, stats: ResultStats) -> Event:
        return settings_of(choice.config, stats.seed, self._stop_tokens)


def settings_of(config: DecodeConfig, seed: int, stop_tokens: Sequence[int]) -> Event:
    """How answers are drawn, by llama-server's names."""
    n_predict = -1 if config.max_tokens is None else config.max_tokens
    bans = [{"bias": None, "token": token} for token in stop_tokens] if config.ignore_eos else []
    return {
        "seed": seed,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "repeat_last_n": config.repeat_last_n,
        "repeat_penalty": config.repeat_penalty,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "stop": list(config.stop_texts),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "ignore_eos": config.ignore_eos,
        "logit_bias": bans
        + [
            {"bias": bias if math.isfinite(bias) else None, "token": token}
            for token, bias in config.logit_bias.items()
        ],
        "n_probs": config.n_probs or 0,
        "post_sampling_probs": config.post_sampling_probs,
        "reasoning_format": config.reasoning_format,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
        "draft": config.draft,
    }


def select_fields(answer: Event, fields: Sequence[str] | None) -> Event:
    """The fields wanted of an answer; "a/b" is field b of field a, by that name."""
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


def _verbose(context: ResponseContext) -> Event:
    prompt = context.verbose_prompt
    return {} if prompt is None else {"__verbose": {"prompt": prompt}}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST_LOGPROB
