"""JSON responses, and errors in the format of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from .engine_client import BusyError, NotReadyError
from .schemas import BadRequestError

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response with a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_body(status: int, sentence: str, kind: str | None = None, **more: Any) -> dict[str, Any]:
    """Returns an error body; more: further members of the error object.

    The body has the members of OpenAI's form and of Anthropic's, which has a type outside too.
    """
    others = "invalid_request_error" if status < 500 else "server_error"
    kind = kind or KINDS.get(status, others)
    error = {"code": status, "message": sentence, "type": kind, "param": None, **more}
    return {"type": "error", "error": error}


def error_answer(
    status: int,
    sentence: str,
    kind: str | None = None,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Response:
    """Returns an error response with a JSON body; 503 says when to ask again."""
    if status == 503:
        headers = {"Retry-After": "1", **(headers or {})}
    return json_answer(error_body(status, sentence, kind, **more), status, headers)


def error_response(error: Exception, status: int = 400) -> Response:
    """Returns the response for an exception. status: used if the exception implies none."""
    if isinstance(error, BadRequestError):
        return error_answer(error.status, str(error), error.kind, **error.more)
    if isinstance(error, BusyError):
        return error_answer(429, str(error), headers={"Retry-After": str(error.retry_s)})
    if isinstance(error, NotReadyError):
        return error_answer(503, str(error), headers={"Retry-After": str(error.retry_s)})
    return error_answer(status, str(error))
