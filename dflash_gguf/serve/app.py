"""Routes of dflash-serve, and those that answer at once: models, texts, state."""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..text.tokenizer import Tokenizer
from .anthropic_request import MessagesBody, chat_from_messages
from .bodies import Bodies
from .engine_client import BusyError, EngineClient, NotReadyError
from .errors import error_answer, error_body, error_response, json_answer
from .generation import Generation, left, text_of
from .metrics import Metrics
from .models import ModelRegistry, ServedModel
from .prompts import PromptBuilder
from .schemas import BadRequestError, ChatBody, DetokenizeBody, TemplateBody, TokenizeBody
from .serializers import settings_of
from .settings import Settings
from .slots import Slots
from .threads import aside

VERSION = "dflash-gguf"


class App:
    """HTTP application with all routes; methods for those that need neither decoder nor slots."""

    def __init__(self, models: ModelRegistry, settings: Settings, metrics: Metrics) -> None:
        self._models = models
        self._settings = settings
        self._metrics = metrics
        self._bodies = Bodies(settings)
        self._generation = Generation(models, settings, self._bodies)
        self._slots = Slots(models, settings, self._bodies)

    def asgi(self) -> Starlette:
        """Returns the Starlette application; most routes exist with and without the prefix /v1."""
        generation = self._generation
        both = (
            ("/health", "GET", self.health),
            ("/models", "GET", self.list_models),
            ("/models/{name:path}", "GET", self.one_model),
            ("/chat/completions", "POST", generation.chat),
            ("/chat/completions/input_tokens", "POST", self.input_tokens),
            ("/responses", "POST", generation.responses),
            ("/messages", "POST", generation.messages),
            ("/messages/count_tokens", "POST", self.count_tokens),
            ("/props", "GET", self.props),
            ("/slots", "GET", self._slots.show),
            ("/slots/{slot:int}", "POST", self._slots.act),
            ("/metrics", "GET", self.metrics),
            ("/completion", "POST", generation.completion),
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
            Route("/completions", _guarded(generation.completion), methods=["POST"]),
            Route(
                "/v1/completions", _guarded(self._generation.openai_completion), methods=["POST"]
            ),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        app.router.redirect_slashes = False
        return app

    async def input_tokens(self, request: Request) -> Response:
        """Answers POST /chat/completions/input_tokens with the token count of a conversation."""
        scope, client = request.scope["tenant"], request.scope["asker"]
        async with self._bodies.read(request, ChatBody) as (body, _):
            model, _, prompt_builder = await self._take(request, body.model)
            prompt = await model.in_thread(lambda: prompt_builder.chat(body, scope=scope), client)
        return json_answer({"object": "response.input_tokens", "input_tokens": len(prompt)})

    async def count_tokens(self, request: Request) -> Response:
        """Answers POST /v1/messages/count_tokens with the token count of a conversation."""
        scope, client = request.scope["tenant"], request.scope["asker"]
        async with self._bodies.read(request, MessagesBody) as (body, _):
            model, _, prompt_builder = await self._take(request, body.model)
            prompt = await model.in_thread(
                lambda: prompt_builder.chat(
                    chat_from_messages(body), deferred=body.deferred_tools, scope=scope
                ),
                client,
            )
        return json_answer({"input_tokens": len(prompt)})

    async def tokenize(self, request: Request) -> Response:
        """Answers POST /tokenize with the token ids of a text; with_pieces adds their texts."""
        async with self._bodies.read(request, TokenizeBody) as (body, n_bytes):
            _, _, prompt_builder = await self._take(request, body.model)
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
                return json_answer({"tokens": tokens})

            return await aside(answer, n_bytes)

    async def detokenize(self, request: Request) -> Response:
        """Answers POST /detokenize with the text of token ids."""
        async with self._bodies.read(request, DetokenizeBody) as (body, n_bytes):
            _, _, prompt_builder = await self._take(request, body.model)
            text = await aside(lambda: text_of(prompt_builder, body.tokens), n_bytes)
        return json_answer({"content": text})

    async def apply_template(self, request: Request) -> Response:
        """Answers POST /apply-template with the prompt text of a conversation."""
        async with self._bodies.read(request, TemplateBody) as (body, _):
            model, _, prompt_builder = await self._take(request, body.model)
            text = await model.in_thread(
                lambda: prompt_builder.chat_text(body), request.scope["asker"]
            )
        return json_answer({"prompt": text})

    async def _take(
        self, request: Request, name: str | None
    ) -> tuple[ServedModel, EngineClient, PromptBuilder]:
        client = request.scope["asker"]
        return await self._models.take(name, client=client, gone=partial(left, request))

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Answers GET /health: 200, or 503 while the only model is not loaded."""
        engines = list(self._models.engines)
        n_restarts = sum(engine.n_deaths for engine in engines)
        is_ready = any(engine.state == "ready" for engine in engines)
        if self._models.is_one and not is_ready and not self._models.all[0].is_asleep:
            engine = engines[0] if engines else None
            why = (engine.refusal if engine else None) or "Loading model"
            more = {"progress": engine.progress if engine else 0.0, "restarts": n_restarts}
            return json_answer(error_body(503, why) | more, 503)
        return json_answer({"status": "ok", "restarts": n_restarts})

    async def list_models(self, request: Request) -> Response:  # noqa: ARG002
        """Answers GET /models with all models that the server can load."""
        models = [self._listed(model) for model in self._models.all]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return json_answer({"object": "list", "data": models, "has_more": False, **ends})

    async def one_model(self, request: Request) -> Response:
        """Answers GET /models/NAME with the description of one model, or 404."""
        name = request.path_params["name"]
        for model in self._models.all:
            if name in model.names:
                return json_answer(self._listed(model))
        return error_answer(
            404, f"model {name!r} is not served: /v1/models lists all", "not_found_error"
        )

    def _listed(self, model: ServedModel) -> dict[str, Any]:
        ready = model.engine.ready if model.engine else None
        tokenizer = model.prompt_builder.tokenizer if model.prompt_builder else None
        created = datetime.datetime.fromtimestamp(model.created, datetime.timezone.utc)
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            # names of Anthropic's API
            "type": "model",
            "display_name": model.name,
            "created_at": created.isoformat(),
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
        decode = model.settings.defaults(ready.recommended)
        seed = decode.seed if decode.seed is not None else (1 << 32) - 1
        return json_answer(
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

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """Answers GET /metrics with counters and gauges in the text format of Prometheus."""
        if not self._settings.has_metrics:
            return error_answer(501, "/metrics is switched off: start the server with --metrics")
        headers = {"Process-Start-Time-Unix": str(int(self._metrics.started))}
        data = self._metrics.text(self._models.engines)
        return Response(data, 200, headers, "text/plain; version=0.0.4")


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


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Returns the text of a token, or the list of its bytes if they are incomplete UTF-8."""
    data = tokenizer.piece(token, special=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
