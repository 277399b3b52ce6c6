"""Checks of every HTTP request: API key, host and origin; writes the log, catches exceptions."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .clients import address_of
from .errors import error_answer
from .pages import PageChecks
from .settings import Settings

PUBLIC = ("/health", "/v1/health")
MAX_NAMED = 256
"""Most names of unknown fields that the log mentions, so that random names cannot fill memory."""
MAX_LINES_S = 200
"""Most lines about requests that the log takes in a second, so that a flood cannot fill a disk."""
QUOTED = re.compile(r"""(?<!\w)'.*?(?:'(?!\w)|$)|"[^"]*(?:"|$)|[\[{].*""", re.DOTALL)
"""Quotations in an error message, which may hold the request's text: the log leaves them out."""
ENDING = "the server is being shut down: send the request again when it is back"


@dataclass(eq=False)
class _Running:
    """A request in flight. status: 0 until the response has begun. error: why it was refused."""

    task: asyncio.Task[Any] | None
    status: int = 0
    error: str = ""


class Guard:
    """ASGI middleware around the routes: API keys, CORS headers, request log, crashes."""

    def __init__(self, app: ASGIApp, settings: Settings, log: Callable[[str], None]) -> None:
        self._app = app
        self._settings = settings
        self._keys = [key.encode() for key in settings.keys]
        self._pages = PageChecks(settings.cors_origins, settings.allowed_hosts)
        self._log = log
        self._running: set[_Running] = set()
        self._ignored: set[str] = set()
        self._second, self._n_lines = 0, 0
        self._is_ending = False

    @property
    def n_running(self) -> int:
        """Number of requests in flight."""
        return len(self._running)

    def end_requests(self) -> None:
        """Answers requests with 503 if their responses have not begun; the server is ending."""
        self._is_ending = True
        for request in self._running:
            if request.status == 0 and request.task is not None:
                request.task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        scope["path"] = _path(scope["path"])
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        is_readable = bool(origin) and self._pages.may_read(origin or "")
        wanted = headers.get("access-control-request-headers")
        scope["address"] = address_of(scope, headers, self._settings.trusted_proxies)
        running = _Running(asyncio.current_task())
        self._running.add(running)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                running.status = message["status"]
                if ignored := scope.get("ignored"):
                    headers_sent = MutableHeaders(raw=message.setdefault("headers", []))
                    headers_sent["X-Ignored-Fields"] = ", ".join(ignored)
                    self._warn(ignored)
                if origin is not None and is_readable:
                    allow(MutableHeaders(raw=message.setdefault("headers", [])), origin, wanted)
            elif running.status >= 400 and not running.error:
                running.error = _reason(message.get("body", b""))
            await send(message)

        try:
            refusal = self._refusal(scope, headers)
            await (refusal or self._app)(scope, receive, sending)
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            if running.status == 0:
                await error_answer(503, ENDING)(scope, receive, sending)
        except Exception:
            traceback.print_exc()
            if running.status == 0:
                answer = error_answer(500, "the server failed: its log holds the error")
                await answer(scope, receive, sending)
        finally:
            self._running.discard(running)
            self._write(scope, running, time.monotonic() - began)

    def _warn(self, ignored: Sequence[str]) -> None:
        """Writes a line to the log about each unknown field that has not been named before."""
        for name in ignored:
            if name not in self._ignored and len(self._ignored) < MAX_NAMED:
                self._ignored.add(name)
                self._log(f"warning: the field {name} of a request is unknown and ignored")

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] == "OPTIONS":
            return Response(status_code=200)
        key = self._key(headers)
        name = hashlib.sha256(key).hexdigest()[:16] if key else ""
        is_separate = len(self._keys) > 1 and not self._settings.shares_prefixes
        scope["tenant"] = name if is_separate else ""
        scope["asker"] = name or scope["address"]
        if scope["path"] in PUBLIC:
            return None
        if self._keys and key is None:
            return error_answer(
                401,
                "the key is not one of this server's"
                if "authorization" in headers or "x-api-key" in headers
                else "a key is needed: send Authorization: Bearer KEY or X-Api-Key: KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if (encoding := headers.get("content-encoding", "identity")) != "identity":
            return error_answer(
                415, f"Content-Encoding is {encoding!r:.40}: send the body without compression"
            )
        # With an API key no check of the page is needed: a page of another site lacks the key.
        sentence = None if self._keys else self._pages.refusal(scope["method"], headers)
        return None if sentence is None else error_answer(403, sentence)

    def _key(self, headers: Headers) -> bytes | None:
        """Returns a request's API key if it is valid; compares in constant time."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", "").encode()]
        if kind.lower() == "bearer":
            given.append(bearer.strip().encode())
        same = [key for key in self._keys for one in given if hmac.compare_digest(key, one)]
        return same[0] if same else None

    def _write(self, scope: Scope, request: _Running, seconds: float) -> None:
        """Writes a line to the log; the query of the URL is left out, as it may hold secrets."""
        if (now := int(time.monotonic())) != self._second:
            if (n_left := self._n_lines - MAX_LINES_S) > 0:
                self._log(
                    f"{n_left} requests are not in the log, which takes {MAX_LINES_S} a second"
                )
            self._second, self._n_lines = now, 0
        self._n_lines += 1
        if self._n_lines > MAX_LINES_S:
            return
        about: Sequence[str] = [
            f"{_printable(scope['address'])} {scope['method']} {_printable(scope['path'])} "
            f"{request.status or '-'} {1e3 * seconds:.0f} ms"
        ]
        if (of_answer := scope.get("log")) is not None:
            about = [*about, of_answer()]
        if outcome := scope.get("outcome"):
            about = [*about, outcome]
        if request.error:
            about = [*about, request.error]
        self._log(", ".join(about))


def allow(headers: MutableHeaders, origin: str, wanted: str | None) -> None:
    """Adds the CORS headers that let web pages of an origin read the response.

    wanted: the headers that a preflight asks for. A "*" in place of their names would not cover
    Authorization, and counts as the name of a header if credentials are allowed.
    """
    headers["Access-Control-Allow-Origin"] = origin
    headers["Access-Control-Allow-Credentials"] = "true"
    headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE, OPTIONS"
    headers["Access-Control-Allow-Headers"] = wanted or "Authorization, Content-Type, X-Api-Key"
    headers.add_vary_header("Origin")


def _path(target: str) -> str:
    """Returns the path of a request target: without scheme and host, and without a last slash."""
    path = re.sub(r"^https?://[^/?]*", "", target, flags=re.IGNORECASE)
    return path.rstrip("/") or "/"


def _reason(body: bytes) -> str:
    """Returns the sentence of an error without its quotations, which may be of a prompt."""
    try:
        sentence = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
    return _printable(QUOTED.sub("...", sentence))


def _printable(path: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in path[:200])
