"""Routes of dflash-serve: check a request, build its prompts, choose the response format."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..config import DecodeConfig
from ..text.chat import ChatPrompt
from ..text.tokenizer import Tokenizer
from .completion_choice import CompletionChoice
from .engine_client import BusyError, EngineClient, NotReadyError, Slot
from .errors import error_answer, error_body, error_response
from .messages import Ask, AskedPrompt, Failed, Run
from .metrics import Metrics
from .models import ModelRegistry, ServedModel
from .prompts import PromptBuilder
from .schemas import (
    BadRequestError,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LlamaServerBody,
    SlotBody,
    TemplateBody,
    TokenizeBody,
    biases,
    chat_n_probs,
    completion_n_probs,
    config_of,
    keep_alive_s,
    n_choices,
    read,
    reasoning_format,
)
from .serializers import (
    ChatFormat,
    CompletionFormat,
    LlamaServerFormat,
    ResponseContext,
    WireFormat,
    settings_of,
)
from .settings import Settings
from .sse import GenerationResponse
from .threads import aside

VERSION = "dflash-gguf"
MAX_CHANCES = 1 << 21
"""Most log-probabilities of a response that is no stream, about 300 bytes each while it is made."""
B = TypeVar("B", bound=msgspec.Struct)
BodyT = TypeVar("BodyT", bound=Body)
Prepared = tuple[Sequence[list[int]], DecodeConfig, Callable[[ResponseContext], WireFormat]]
"""Prepared request: token ids of each prompt, sampling settings, response format constructor."""
Prepare = Callable[[BodyT, EngineClient, PromptBuilder], Prepared]


class App:
    """HTTP application: holds the models, settings and metrics, with one method for each route."""

    def __init__(self, models: ModelRegistry, settings: Settings, metrics: Metrics) -> None:
        self._models = models
        self._settings = settings
        self._metrics = metrics

    def asgi(self) -> Starlette:
        """Returns the Starlette application; most routes exist with and without the prefix /v1."""
        both = (
            ("/health", "GET", self.health),
            ("/models", "GET", self.list_models),
            ("/models/{name:path}", "GET", self.one_model),
            ("/chat/completions", "POST", self.chat),
            ("/chat/completions/input_tokens", "POST", self.input_tokens),
            ("/props", "GET", self.props),
            ("/slots", "GET", self.slots),
            ("/slots/{slot:int}", "POST", self.slot_action),
            ("/metrics", "GET", self.metrics),
            ("/completion", "POST", self.completion),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
            ("/apply-template", "POST", self.apply_template),
        )
        routes = [
            Route(prefix + path, _guarded(act), methods=[method])
            for path, method, act in both
            for prefix in ("", "/v1")
        ]
        # /v1/completions is OpenAI's route, /completions is llama-server's.
        routes += [
            Route("/completions", _guarded(self.completion), methods=["POST"]),
            Route("/v1/completions", _guarded(self.openai_completion), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        app.router.redirect_slashes = False
        return app

    async def chat(self, request: Request) -> Response:
        """Answers POST /v1/chat/completions, OpenAI's chat route."""
        return await self._generate(request, ChatBody, self._chat)

    async def openai_completion(self, request: Request) -> Response:
        """Answers POST /v1/completions, OpenAI's text route."""
        return await self._generate(request, CompletionBody, self._openai_completion)

    async def completion(self, request: Request) -> Response:
        """Answers POST /completion and POST /completions, llama-server's text routes."""
        return await self._generate(request, LlamaServerBody, self._completion)

    async def _generate(
        self, request: Request, kind: type[BodyT], prepare: Prepare[BodyT]
    ) -> Response:
        body, n_bytes = await self._body(request, kind)
        model, engine, prompt_builder = await self._models.take(body.model, generates=True)
        scope, client = request.scope["tenant"], request.scope["asker"]
        engine.check_room(client)

        def prepared() -> tuple[Ask, list[CompletionChoice], WireFormat]:
            prompts, config, format_of = prepare(body, engine, prompt_builder)
            ask = self._ask(body, engine, prompts, config, scope, client)
            choices = [
                CompletionChoice(
                    i, ask.prompts[run.prompt], config, run.prompt, engine.settings.n_batch
                )
                for i, run in enumerate(ask.runs)
            ]
            return ask, choices, format_of(self._context(body, model, prompt_builder, prompts[0]))

        if kind is ChatBody:
            ask, choices, wire_format = await model.in_thread(prepared)
        else:
            ask, choices, wire_format = await aside(prepared, n_bytes)
        return GenerationResponse(
            engine,
            wire_format,
            ask,
            choices,
            is_stream=bool(body.stream),
            wants_progress=bool(body.return_progress),
            timeout_s=self._settings.timeout_s,
            keep_alive_s=keep_alive_s(body, self._settings.keep_alive_s),
        )

    def _chat(
        self, body: ChatBody, engine: EngineClient, prompt_builder: PromptBuilder
    ) -> Prepared:
        n_probs = chat_n_probs(body)
        format_ = reasoning_format(body.reasoning_format, engine.settings.decode.reasoning_format)
        config = replace(
            self._config(body, engine, prompt_builder, n_probs), reasoning_format=format_
        )
        chat_format = partial(ChatFormat, has_meta_info=bool(body.return_meta_info))
        return [prompt_builder.chat(body)], config, chat_format

    def _openai_completion(
        self, body: CompletionBody, engine: EngineClient, prompt_builder: PromptBuilder
    ) -> Prepared:
        if body.echo and body.logprobs is not None:
            raise BadRequestError(
                "echo is true and logprobs is given: this server cannot do both, leave one out"
            )
        if body.best_of is not None and body.best_of > n_choices(body):
            raise BadRequestError(
                f"best_of is {body.best_of}, must be at most n, {n_choices(body)}"
            )
        config = self._config(body, engine, prompt_builder, completion_n_probs(body))
        prompts = prompt_builder.prompts(body.prompt, body.add_special is not False)
        echoes = [_text(prompt_builder, prompt) for prompt in prompts] if body.echo else None
        return prompts, config, partial(CompletionFormat, echoes=echoes)

    def _completion(
        self, body: LlamaServerBody, engine: EngineClient, prompt_builder: PromptBuilder
    ) -> Prepared:
        n_probs = body.n_probs if body.n_probs is not None else body.logprobs
        config = self._config(body, engine, prompt_builder, n_probs or None)
        prompts = prompt_builder.prompts(body.prompt, body.add_special is not False)
        tokenizer = prompt_builder.tokenizer
        stops = sorted(tokenizer.stop_tokens) if tokenizer else []
        shown = [_text(prompt_builder, prompt) for prompt in prompts]
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
        config = config_of(body, engine.settings.decode, ready.n_ctx, n_probs)

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
            asked.append(AskedPrompt(prompt, reasoning, list(prompt.turn_boundaries)))
        _check_chances(body, config, n, [ready.n_ctx - len(prompt) for prompt in prompts])
        runs = [
            Run(
                engine.new_id(),
                index,
                secrets.randbits(32) if config.seed is None else config.seed + nth,
            )
            for index in range(len(asked))
            for nth in range(n)
        ]
        settings = asdict(replace(config, seed=None))
        return Ask(runs, asked, settings, bool(body.timings_per_token), scope, client)

    def _context(
        self,
        body: Body,
        model: ServedModel,
        prompt_builder: PromptBuilder,
        tokens: Sequence[int],
    ) -> ResponseContext:
        options = body.stream_options
        is_verbose = body.verbose or (body.verbose is None and model.settings.verbose)
        prompt = _text(prompt_builder, tokens) if is_verbose else ""
        return ResponseContext(
            model=model.name,
            tokenizer=prompt_builder.tokenizer,
            include_usage=bool(options and options.include_usage),
            return_tokens=bool(body.return_tokens),
            verbose={"__verbose": {"prompt": prompt}} if is_verbose else {},
        )

    async def input_tokens(self, request: Request) -> Response:
        """Answers POST /chat/completions/input_tokens with the token count of a conversation."""
        body, _ = await self._body(request, ChatBody)
        model, _, prompt_builder = await self._models.take(body.model)
        prompt = await model.in_thread(lambda: prompt_builder.chat(body))
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt)})

    async def tokenize(self, request: Request) -> Response:
        """Answers POST /tokenize with the token ids of a text; with_pieces adds their texts."""
        body, n_bytes = await self._body(request, TokenizeBody)
        _, _, prompt_builder = await self._models.take(body.model)
        tokenizer = prompt_builder.require_tokenizer()
        if not isinstance(body.content, str):
            raise BadRequestError(f"content must be a text, not {type(body.content).__name__}")

        def answer() -> Response:
            tokens: list[Any] = tokenizer.tokenize(
                body.content,
                add_special=bool(body.add_special),
                parse_special=body.parse_special is not False,
            )
            if body.with_pieces:
                tokens = [{"id": token, "piece": _piece(tokenizer, token)} for token in tokens]
            return _json({"tokens": tokens})

        return await aside(answer, n_bytes)

    async def detokenize(self, request: Request) -> Response:
        """Answers POST /detokenize with the text of token ids."""
        body, n_bytes = await self._body(request, DetokenizeBody)
        _, _, prompt_builder = await self._models.take(body.model)
        text = await aside(lambda: _text(prompt_builder, body.tokens), n_bytes)
        return _json({"content": text})

    async def apply_template(self, request: Request) -> Response:
        """Answers POST /apply-template with the prompt text of a conversation."""
        body, _ = await self._body(request, TemplateBody)
        model, _, prompt_builder = await self._models.take(body.model)
        text = await model.in_thread(lambda: prompt_builder.chat_text(body))
        return _json({"prompt": text})

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Answers GET /health: 200, or 503 while the only model is not loaded."""
        engines = list(self._models.engines)
        n_restarts = sum(engine.n_deaths for engine in engines)
        is_ready = any(engine.state == "ready" for engine in engines)
        if self._models.is_one and not is_ready and not self._models.all[0].is_asleep:
            engine = engines[0] if engines else None
            why = (engine.refusal if engine else None) or "Loading model"
            more = {"progress": engine.progress if engine else 0.0, "restarts": n_restarts}
            return _json(error_body(503, why) | more, 503)
        return _json({"status": "ok", "restarts": n_restarts})

    async def list_models(self, request: Request) -> Response:  # noqa: ARG002
        """Answers GET /models with all models that the server can load."""
        return _json(
            {"object": "list", "data": [self._listed(model) for model in self._models.all]}
        )

    async def one_model(self, request: Request) -> Response:
        """Answers GET /models/NAME with the description of one model, or 404."""
        name = request.path_params["name"]
        for model in self._models.all:
            if name in model.names:
                return _json(self._listed(model))
        return error_answer(
            404, f"model {name!r} is not served: /v1/models lists all", "not_found_error"
        )

    def _listed(self, model: ServedModel) -> dict[str, Any]:
        ready = model.engine.ready if model.engine else None
        tokenizer = model.prompt_builder.tokenizer if model.prompt_builder else None
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": VERSION,
            "aliases": model.names,
            "tags": list(self._settings.tags),
            "status": {
                "value": "loaded" if model.state == "ready" else model.state,
                "args": model.flags,
            },
            "last_used": None if model.last_used is None else int(model.last_used),
            "last_used_ms": int(1e3 * (model.last_used or 0.0)),
            "meta": None
            if ready is None
            else {
                "n_vocab": ready.n_vocab,
                "n_ctx": ready.n_ctx,
                "n_ctx_train": ready.n_ctx_train,
                "size": model.n_bytes,
                "drafter": ready.drafter,
                "backend": ready.backend,
                "has_chat_template": bool(
                    tokenizer and model.prompt_builder and model.prompt_builder.has_template
                ),
            },
        }

    async def props(self, request: Request) -> Response:
        """Answers GET /props with the model, its chat template and the default settings."""
        model, ready, prompt_builder = self._models.look(request.query_params.get("model"))
        decode = model.settings.decode
        seed = decode.seed if decode.seed is not None else (1 << 32) - 1
        return _json(
            {
                "default_generation_settings": {
                    "n_ctx": ready.n_ctx,
                    "is_processing": bool(model.engine and model.engine.n_processing),
                    "params": settings_of(decode, seed, []),
                },
                "total_slots": ready.n_parallel,
                "model_path": model.path.name,
                "model_alias": model.name,
                "chat_template": prompt_builder.template_text,
                "modalities": {"vision": False, "audio": False},
                "drafter": ready.drafter,
                "backend": ready.backend,
                "is_sleeping": model.is_asleep,
                "build_info": VERSION,
            }
        )

    async def slots(self, request: Request) -> Response:
        """Answers GET /slots with every slot and its current or last request.

        Requests of other API keys are left out, unless keys share prefixes.
        """
        if not self._settings.has_slots:
            return error_answer(501, "/slots is switched off: start the server with --slots")
        model, ready, _ = self._models.look(request.query_params.get("model"))
        slots = model.engine.slots if model.engine else [Slot()] * ready.n_parallel
        if request.query_params.get("fail_on_no_slot") and all(slot.run for slot in slots):
            return error_answer(
                503, "all slots are in use: ask again later, or without fail_on_no_slot"
            )
        entries = []
        for number, slot in enumerate(slots):
            entry: dict[str, Any] = {
                "id": number,
                "n_ctx": ready.n_ctx,
                "speculative": ready.drafter is not None,
                "is_processing": slot.run is not None,
            }
            run, ask = slot.run or slot.last, slot.ask
            if run is not None and ask is not None and ask.scope == request.scope["tenant"]:
                limit = ask.config["max_tokens"]
                n_left = -1 if limit is None or slot.run is None else limit - slot.n_decoded
                entry |= {
                    "id_task": run.id,
                    "params": settings_of(DecodeConfig(**ask.config), run.seed, []),
                    "next_token": [
                        {
                            "has_next_token": slot.run is not None,
                            "n_remain": n_left,
                            "n_decoded": slot.n_decoded,
                        }
                    ],
                }
            entries.append(entry)
        return _json(entries)

    async def slot_action(self, request: Request) -> Response:
        """Answers POST /slots/N: saves, restores or erases the cached prefix of a slot."""
        action = request.query_params.get("action", "")
        if action not in ("save", "restore", "erase"):
            raise BadRequestError(f"action is {action!r}, must be save, restore or erase")
        folder, slot = self._settings.slot_save_path, request.path_params["slot"]
        if folder is None:
            return error_answer(
                501, "/slots/N is switched off: start the server with --slot-save-path FOLDER"
            )
        body, _ = await self._body(request, SlotBody)
        _, engine, _ = await self._models.take(body.model)
        if slot >= engine.require_ready().n_parallel:
            raise BadRequestError(f"slot is {slot}, must be 0 to {len(engine.slots) - 1}")
        name = body.filename or ""
        if action != "erase" and (not re.fullmatch(r"[\w.-]{1,200}", name) or name.startswith(".")):
            raise BadRequestError(
                f"filename is {name[:200]!r}, must be 1 to 200 letters, digits, '_', '-' or '.', "
                "the first not a '.'"
            )
        if action == "save":
            _check_quota(folder, self._settings.max_slot_bytes)
        scope = request.scope["tenant"]
        prefix = f"{folder}/{scope and scope + '-'}"
        done = await engine.act(slot, action, "" if action == "erase" else prefix + name, scope)
        if isinstance(done, Failed):
            return error_answer(done.status, done.sentence.replace(prefix, ""))
        ms = 1e3 * done.seconds
        report: dict[str, Any] = {"id_slot": slot}
        if action == "erase":
            return _json(report | {"n_erased": done.n_tokens})
        if action == "save":
            report |= {"filename": name, "n_saved": done.n_tokens, "n_written": done.n_bytes}
            return _json(report | {"timings": {"save_ms": ms}})
        report |= {"filename": name, "n_restored": done.n_tokens, "n_read": done.n_bytes}
        return _json(report | {"timings": {"restore_ms": ms}})

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """Answers GET /metrics with counters and gauges in the text format of Prometheus."""
        if not self._settings.has_metrics:
            return error_answer(501, "/metrics is switched off: start the server with --metrics")
        headers = {"Process-Start-Time-Unix": str(int(self._metrics.started))}
        data = self._metrics.text(self._models.engines)
        return Response(data, 200, headers, "text/plain; version=0.0.4")

    async def _body(self, request: Request, kind: type[B]) -> tuple[B, int]:
        limit = self._settings.max_body_bytes
        parts: list[bytes] = []
        n_bytes = 0

        async def receive() -> None:
            nonlocal n_bytes
            async for part in request.stream():
                n_bytes += len(part)
                if n_bytes > limit:
                    raise HTTPException(413, f"the request body exceeds the limit of {limit} bytes")
                parts.append(part)

        try:
            await asyncio.wait_for(receive(), self._settings.timeout_s)
        except asyncio.TimeoutError:
            seconds = self._settings.timeout_s
            raise HTTPException(
                408, f"the request body did not arrive within {seconds:g} s"
            ) from None
        data = b"".join(parts)
        body, request.scope["ignored"] = await aside(lambda: read(data, kind), n_bytes)
        return body, n_bytes


def _guarded(
    act: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Wraps a route so that its exceptions become HTTP error responses."""

    async def answer(request: Request) -> Response:
        try:
            return await act(request)
        except ClientDisconnect:
            request.scope["outcome"] = "client left"
            return Response(status_code=400)
        except (BadRequestError, BusyError, NotReadyError, ValueError) as error:
            return error_response(error)

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    sentences = {404: f"there is no route {path}", 405: f"{path} does not take {request.method}"}
    sentence = sentences.get(error.status_code, error.detail)
    return error_answer(error.status_code, sentence, headers=dict(error.headers or {}))


def _check_prompt(prompt: Sequence[int], n_ctx: int, n_vocab: int) -> None:
    if not prompt:
        raise BadRequestError("the prompt is empty, must hold at least one token")
    if len(prompt) > n_ctx:
        raise BadRequestError(
            f"the prompt has {len(prompt)} tokens, the context holds {n_ctx}: shorten the prompt",
            kind="exceed_context_size_error",
            n_prompt_tokens=len(prompt),
            n_ctx=n_ctx,
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= n_vocab:
        bad = low if low < 0 else high
        raise BadRequestError(f"prompt: token id {bad} is outside the vocabulary of {n_vocab}")


def _check_chances(body: Body, config: DecodeConfig, n: int, n_left: Sequence[int]) -> None:
    """Raises BadRequestError if a whole answer could hold too many log-probabilities.

    n_left: tokens that the context has left behind each prompt. n: answers to each.
    """
    limits = [x if config.max_tokens is None else min(x, config.max_tokens) for x in n_left]
    n_chances = n * sum(limits) * (config.n_probs or 0)
    if n_chances > MAX_CHANCES and not body.stream:
        raise BadRequestError(
            f"the answers may hold {n_chances} log-probabilities (n x max_tokens x those of a "
            f"token), the limit is {MAX_CHANCES} without stream: ask for fewer, or stream"
        )


def _check_quota(folder: Path, limit: int) -> None:
    """Raises BadRequestError if the files of a folder hold as many bytes as may be saved there."""
    used = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    if used >= limit:
        raise BadRequestError(
            f"the folder of --slot-save-path holds {used >> 20} MiB, the limit of --slot-save-mib "
            f"is {limit >> 20}: delete files there",
            status=507,
        )


def _text(prompt_builder: PromptBuilder, tokens: Sequence[int]) -> str:
    """Returns the text of token ids, with control tokens as their names."""
    tokenizer = prompt_builder.tokenizer
    return "" if tokenizer is None else tokenizer.detokenize(tokens, special=True)


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Returns the text of a token, or the list of its bytes if they are incomplete UTF-8."""
    data = tokenizer.piece(token, special=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
