"""Routes that generate: check a request, build its prompts, choose the response format."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..config import DecodeConfig
from ..text.chat import ChatPrompt
from .anthropic_format import MessagesFormat
from .anthropic_request import MessagesBody, chat_from_messages
from .bodies import Bodies
from .completion_choice import CompletionChoice
from .engine_client import EngineClient
from .errors import error_response
from .foreign_fields import listed
from .messages import Ask, AskedPrompt, Run
from .models import ModelRegistry, ServedModel
from .prompts import TOO_LONG, PromptBuilder, too_long
from .responses_format import CONTEXT_EXCEEDED, ResponsesFormat
from .responses_request import ResponsesBody, chat_from_responses
from .schemas import (
    BadRequestError,
    Body,
    ChatBody,
    CompletionBody,
    LlamaServerBody,
    biases,
    chat_n_probs,
    completion_n_probs,
    config_of,
    keep_alive_s,
    n_choices,
    reasoning_format,
    tool_choice,
)
from .serializers import (
    ChatFormat,
    CompletionFormat,
    LlamaServerFormat,
    ResponseContext,
)
from .settings import Settings
from .sse import STREAM_HEADERS, GenerationResponse, OnEnd
from .threads import aside
from .wire_format import WireFormat

MAX_CHANCES = 1 << 21
"""Most log-probabilities of a response that is no stream, about 300 bytes each while it is made."""
CHATS = (ChatBody, MessagesBody, ResponsesBody)
"""Kinds of bodies whose prompts a chat template makes."""
BodyT = TypeVar("BodyT", bound=Body)
Prepared = tuple[Sequence[list[int]], DecodeConfig, Callable[[ResponseContext], WireFormat]]
"""Prepared request: token ids of each prompt, sampling settings, response format constructor."""
Prepare = Callable[[BodyT, EngineClient, PromptBuilder, str], Prepared]
"""Prepares the request of a body; the last argument is the scope of its texts."""


class Generation:
    """Routes of chats and completions."""

    def __init__(self, models: ModelRegistry, settings: Settings, bodies: Bodies) -> None:
        self._models = models
        self._settings = settings
        self._bodies = bodies

    async def chat(self, request: Request) -> Response:
        """Answers POST /v1/chat/completions, OpenAI's chat route."""
        return await self._generate(request, ChatBody, self._chat)

    async def messages(self, request: Request) -> Response:
        """Answers POST /v1/messages, Anthropic's route."""
        return await self._generate(request, MessagesBody, self._messages, _too_long_message)

    async def responses(self, request: Request) -> Response:
        """Answers POST /v1/responses, OpenAI's route for agents."""
        return await self._generate(request, ResponsesBody, self._responses, _too_long_response)

    async def openai_completion(self, request: Request) -> Response:
        """Answers POST /v1/completions, OpenAI's text route."""
        return await self._generate(request, CompletionBody, self._openai_completion)

    async def completion(self, request: Request) -> Response:
        """Answers POST /completion and POST /completions, llama-server's text routes."""
        return await self._generate(request, LlamaServerBody, self._completion)

    async def _generate(
        self,
        request: Request,
        kind: type[BodyT],
        prepare: Prepare[BodyT],
        too_long: Callable[[BodyT, ServedModel, BadRequestError], Response] | None = None,
    ) -> Response:
        """too_long: makes the response if the prompt is too long; None: error 400."""
        scope, client = request.scope["tenant"], request.scope["asker"]
        async with self._bodies.read(request, kind) as (body, n_bytes):
            model, engine, prompt_builder = await self._models.take(
                body.model, generates=True, client=client, gone=partial(left, request)
            )
            with engine.held():
                engine.check_room(client)

                def prepared() -> tuple[Ask, list[CompletionChoice], WireFormat, OnEnd]:
                    prompts, config, format_of = prepare(body, engine, prompt_builder, scope)
                    ask = self._ask(body, engine, prompts, config, scope, client)
                    choices = [
                        CompletionChoice(
                            i, ask.prompts[run.prompt], config, run.prompt, engine.settings.n_batch
                        )
                        for i, run in enumerate(ask.runs)
                    ]
                    context = self._context(body, model, prompt_builder, prompts[0])
                    on_end = _on_end(prompt_builder, prompts[0], config, scope)
                    return ask, choices, format_of(context), on_end

                request.scope["ignored"] = listed([*request.scope["ignored"], *body.left_out])
                try:
                    if kind in CHATS:
                        ask, choices, wire_format, on_end = await model.in_thread(prepared, client)
                    else:
                        ask, choices, wire_format, on_end = await aside(prepared, n_bytes)
                except BadRequestError as error:
                    if too_long is None or error.kind != TOO_LONG:
                        raise
                    return too_long(body, model, error)
        return GenerationResponse(
            engine,
            wire_format,
            ask,
            choices,
            is_stream=bool(body.stream),
            wants_progress=bool(body.return_progress),
            timeout_s=self._settings.timeout_s,
            keep_alive_s=keep_alive_s(body, self._settings.keep_alive_s),
            on_end=on_end,
        )

    def _chat(
        self,
        body: ChatBody,
        engine: EngineClient,
        prompt_builder: PromptBuilder,
        scope: str,
        deferred: Collection[str] = (),
    ) -> Prepared:
        n_probs = chat_n_probs(body)
        format_ = reasoning_format(body.reasoning_format, engine.settings.decode.reasoning_format)
        config = replace(
            self._config(body, engine, prompt_builder, n_probs), reasoning_format=format_
        )
        chat_format = partial(ChatFormat, has_meta_info=bool(body.return_meta_info))
        is_required = tool_choice(body).is_required
        prompt = prompt_builder.chat(body, engine.require_ready().n_ctx, deferred, scope)
        if prompt.tools is not None:
            tokenizer = prompt_builder.require_tokenizer()
            config, prompt.tools = tokenizer.with_calls(
                config, prompt.tools, is_required=is_required
            )
        return [prompt], config, chat_format

    def _messages(
        self, body: MessagesBody, engine: EngineClient, prompt_builder: PromptBuilder, scope: str
    ) -> Prepared:
        _require_one(body)
        with _in_words_of(MessagesFormat):
            prompts, config, _ = self._chat(
                chat_from_messages(body), engine, prompt_builder, scope, body.deferred_tools
            )
        return prompts, config, MessagesFormat

    def _responses(
        self, body: ResponsesBody, engine: EngineClient, prompt_builder: PromptBuilder, scope: str
    ) -> Prepared:
        _require_one(body)
        with _in_words_of(ResponsesFormat):
            chat = chat_from_responses(body)
            prompts, config, _ = self._chat(chat, engine, prompt_builder, scope)
        return prompts, config, partial(ResponsesFormat, body=body)

    def _openai_completion(
        self, body: CompletionBody, engine: EngineClient, prompt_builder: PromptBuilder, _: str
    ) -> Prepared:
        if body.echo and body.logprobs is not None and body.stream:
            raise BadRequestError(
                "echo, logprobs and stream are given: the prompt's log-probabilities come in a "
                "whole response only, leave out stream"
            )
        if body.best_of is not None and body.best_of > n_choices(body):
            raise BadRequestError(
                f"best_of is {body.best_of}, must be at most n, {n_choices(body)}"
            )
        config = self._config(body, engine, prompt_builder, completion_n_probs(body))
        if body.echo and config.n_probs is not None:
            config = replace(config, prompt_logprobs=True, cache_prompt=False)
        n_ctx = engine.require_ready().n_ctx
        prompts = prompt_builder.prompts(body.prompt, n_ctx, body.add_special is not False)
        echoes = [text_of(prompt_builder, prompt) for prompt in prompts] if body.echo else None
        return prompts, config, partial(CompletionFormat, echoes=echoes)

    def _completion(
        self, body: LlamaServerBody, engine: EngineClient, prompt_builder: PromptBuilder, _: str
    ) -> Prepared:
        n_probs = body.n_probs if body.n_probs is not None else body.logprobs
        config = self._config(body, engine, prompt_builder, n_probs or None)
        n_ctx = engine.require_ready().n_ctx
        prompts = prompt_builder.prompts(body.prompt, n_ctx, body.add_special is not False)
        tokenizer = prompt_builder.tokenizer
        stops = sorted(tokenizer.stop_tokens) if tokenizer else []
        shown = [text_of(prompt_builder, prompt) for prompt in prompts]
        llama_format = partial(
            LlamaServerFormat, prompts=shown, stop_tokens=stops, fields=body.response_fields
        )
        return prompts, config, llama_format

    def _config(
        self, body: Body, engine: EngineClient, prompt_builder: PromptBuilder, n_probs: int | None
    ) -> DecodeConfig:
        ready = engine.require_ready()
        if body.id_slot is not None and not -1 <= body.id_slot < ready.n_parallel:
            raise BadRequestError(
                f"id_slot is {body.id_slot}, must be -1 (any) to {ready.n_parallel - 1}"
            )
        config = config_of(body, engine.settings.defaults(ready.recommended), ready.n_ctx, n_probs)

        def tokenize(text: str) -> list[int]:
            return prompt_builder.require_tokenizer().tokenize(
                text, add_special=False, parse_special=True
            )

        own_biases = biases(body, tokenize, ready.n_vocab)
        return (
            replace(config, logit_bias={**config.logit_bias, **own_biases})
            if own_biases
            else config
        )

    def _ask(
        self,
        body: Body,
        engine: EngineClient,
        prompts: Sequence[list[int]],
        config: DecodeConfig,
        scope: str,
        client: str,
    ) -> Ask:
        """Returns the request for n answers to each prompt; answer i has the seed `seed` + i.

        scope: requests of the same scope may reuse the texts. client: who asks.
        """
        n, ready, limit = n_choices(body), engine.require_ready(), self._settings.max_answers
        if n * len(prompts) > limit:
            raise BadRequestError(
                f"the request asks for {n * len(prompts)} answers, n for each prompt, the limit of "
                f"--max-answers is {limit}"
            )
        asked: list[AskedPrompt] = []
        for prompt in prompts:
            _check_prompt(prompt, ready.n_ctx, ready.n_vocab)
            if not isinstance(prompt, ChatPrompt):
                asked.append(AskedPrompt(prompt))
                continue
            marks = prompt.reasoning
            reasoning = None if marks is None else (marks.name, marks.is_open)
            asked.append(AskedPrompt(prompt, reasoning, list(prompt.turn_boundaries), prompt.tools))
        n_prompt = [len(prompt) for prompt in prompts]
        _check_chances(body, config, n, [ready.n_ctx - x for x in n_prompt], n_prompt)
        runs = [
            Run(
                engine.new_id(),
                index,
                secrets.randbits(32) if config.seed is None else config.seed + nth,
            )
            for index in range(len(asked))
            for nth in range(n)
        ]
        # dataclasses.asdict would copy every value, which takes as long as tokenizing the prompt.
        settings = {name: getattr(config, name) for name in DecodeConfig.__slots__}
        slot = -1 if body.id_slot is None else body.id_slot
        return Ask(runs, asked, settings, bool(body.timings_per_token), scope, client, slot)

    def _context(
        self,
        body: Body,
        model: ServedModel,
        prompt_builder: PromptBuilder,
        tokens: Sequence[int],
    ) -> ResponseContext:
        options = body.stream_options
        is_verbose = body.verbose or (body.verbose is None and model.settings.verbose)
        prompt = text_of(prompt_builder, tokens) if is_verbose else ""
        return ResponseContext(
            model=model.name,
            tokenizer=prompt_builder.tokenizer,
            include_usage=bool(options and options.include_usage),
            return_tokens=bool(body.return_tokens),
            verbose={"__verbose": {"prompt": prompt}} if is_verbose else {},
        )


def _on_end(
    prompt_builder: PromptBuilder, prompt: list[int], config: DecodeConfig, scope: str
) -> OnEnd:
    """Returns the function that is called with each answer that has ended."""
    if isinstance(prompt, ChatPrompt) and config.cache_prompt:
        return partial(prompt_builder.answers.add, scope, prompt.asked)
    return lambda _: None


@contextmanager
def _in_words_of(wire_format: type[WireFormat]) -> Iterator[None]:
    """Names fields in errors as a format does."""
    try:
        yield
    except (BadRequestError, ValueError) as error:
        error.args = (wire_format.in_own_words(str(error)),)
        raise


def _too_long_message(_: MessagesBody, __: ServedModel, error: BadRequestError) -> Response:
    n, n_ctx = error.more["n_prompt_tokens"], error.more["n_ctx"]
    # Clients compact the conversation if they find these words.
    return error_response(BadRequestError(f"prompt is too long: {n} tokens > {n_ctx} maximum"))


def _too_long_response(body: ResponsesBody, model: ServedModel, error: BadRequestError) -> Response:
    if not body.stream:
        error.more["code"] = CONTEXT_EXCEEDED
        return error_response(error)
    context = ResponseContext(model.name, None)
    response = Response(ResponsesFormat(context, body).too_long(str(error)))
    response.raw_headers += STREAM_HEADERS
    return response


def _require_one(body: Body) -> None:
    """Raises BadRequestError if a request asks for several answers where a response has one."""
    if (n := n_choices(body)) > 1:
        raise BadRequestError(f"n is {n}, must be 1: a message or a response is one answer")


def _check_prompt(prompt: Sequence[int], n_ctx: int, n_vocab: int) -> None:
    if not prompt:
        raise BadRequestError("the prompt is empty, must hold at least one token")
    if len(prompt) > n_ctx:
        raise too_long(len(prompt), n_ctx)
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= n_vocab:
        bad = low if low < 0 else high
        raise BadRequestError(f"prompt: token id {bad} is outside the vocabulary of {n_vocab}")


def _check_chances(
    body: Body, config: DecodeConfig, n: int, n_left: Sequence[int], n_prompt: Sequence[int]
) -> None:
    """Raises BadRequestError if a whole answer could hold too many log-probabilities.

    n_left: tokens that the context has left behind each prompt, of n_prompt tokens. n: answers to
    each.
    """
    limits = [x if config.max_tokens is None else min(x, config.max_tokens) for x in n_left]
    limits += n_prompt if config.prompt_logprobs else []
    n_chances = n * sum(limits) * (config.n_probs or 0)
    if n_chances > MAX_CHANCES and not body.stream:
        raise BadRequestError(
            f"the answers may hold {n_chances} log-probabilities (n x max_tokens x those of a "
            f"token), the limit is {MAX_CHANCES} without stream: ask for fewer, or stream"
        )


async def left(request: Request) -> None:
    """Returns when the client of a request whose body was read closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def text_of(prompt_builder: PromptBuilder, tokens: Sequence[int]) -> str:
    """Returns the text of token ids, with control tokens as their names."""
    tokenizer = prompt_builder.tokenizer
    return "" if tokenizer is None else tokenizer.detokenize(tokens, special=True)
