"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the matching status.

| error | status | type | code |
|---|---|---|---|
| InvalidArgumentError | 400 | invalid_request_error | invalid_value |
| ContextLengthError | 400 | invalid_request_error | context_length_exceeded |
| UnauthenticatedError | 401 | invalid_request_error | invalid_api_key |
| PermissionDeniedError | 403 | invalid_request_error | permission_denied |
| NotFoundError | 404 | invalid_request_error | not_found |
| AlreadyExistsError, FailedPreconditionError, StaleEpochError | 409 | conflict_error | conflict |
| ResourceExhaustedError | 429 | rate_limit_error | rate_limit_exceeded |
| CancelledError | 499 | invalid_request_error | cancelled |
| UnavailableError | 503 | service_unavailable_error | service_unavailable |
| DeadlineExceededError | 504 | timeout_error | timeout |
| anything else | 500 | server_error | internal_error |

Errors specific to HTTP (an unknown model, path or parameter, a body that is too large or not JSON) are raised
as an `HttpError` with a more specific code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.http.server import encoding
from coordinator.auth import NeverFitsError
from coordinator.telemetry import call_log
from paceline.core import errors
from paceline.rpc.codec.generation import ContextLengthError

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
RETRY_AFTER_SECONDS = 1
"""Suggested wait for a client that was refused for lack of capacity or of a worker."""

_ANSWERS: dict[type[errors.PacelineError], tuple[int, str, str]] = {
    errors.InvalidArgumentError: (400, INVALID, "invalid_value"),
    ContextLengthError: (400, INVALID, "context_length_exceeded"),
    errors.UnauthenticatedError: (401, INVALID, "invalid_api_key"),
    errors.PermissionDeniedError: (403, INVALID, "permission_denied"),
    errors.AlreadyExistsError: (409, "conflict_error", "conflict"),
    errors.NotFoundError: (404, INVALID, "not_found"),
    errors.FailedPreconditionError: (409, "conflict_error", "conflict"),
    errors.StaleEpochError: (409, "conflict_error", "conflict"),
    errors.ResourceExhaustedError: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.CancelledError: (499, INVALID, "cancelled"),
    errors.UnavailableError: (503, "service_unavailable_error", "service_unavailable"),
    errors.DeadlineExceededError: (504, "timeout_error", "timeout"),
}
_INTERNAL = (500, "server_error", "internal_error")
_VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}


class HttpError(Exception):
    """An error answer. Its message is safe to show to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object, for an answer or for an event of a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The complete HTTP response."""
        return encoding.JsonResponse(self.body, self.status, self.headers)


def unknown_parameter(name: str) -> HttpError:
    """The error for an unknown parameter. Ignoring it would change what the caller asked for."""
    return HttpError(400, f"{name}: unknown parameter", param=name, code="unknown_parameter")


def unsupported_parameter(name: str, why: str = "is not supported by this server") -> HttpError:
    """The error for a parameter of OpenAI's that is not supported, with a value that would have an effect."""
    return HttpError(400, f"{name}: {why}", param=name, code="unsupported_parameter")


def from_error(error: BaseException, names: Mapping[str, str] | None = None) -> HttpError:
    """The answer to any exception. The text of an unexpected one stays in the log.

    Args:
        error: the exception.
        names: maps a core field to its name in this endpoint's request.
    """
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, errors.PacelineError):
        return HttpError(500, "internal error", kind=_INTERNAL[1], code=_INTERNAL[2])
    known = next((cls for cls in type(error).__mro__ if cls in _ANSWERS), None)
    status, kind, code = _INTERNAL if known is None else _ANSWERS[known]
    if isinstance(error, errors.InvalidArgumentError):
        param = (names or {}).get(error.field, error.field)
        return HttpError(status, f"{param}: {error.description}", kind=kind, param=param, code=code)
    return HttpError(status, error.message, kind=kind, code=code, headers=_headers_of(error))


def _headers_of(error: errors.PacelineError) -> dict[str, str]:
    match error:
        case errors.UnauthenticatedError():
            return {"www-authenticate": "Bearer"}
        case NeverFitsError():
            # Otherwise OpenAI's clients retry every 429.
            return {"x-should-retry": "false"}
        case errors.ResourceExhaustedError(retry_after=float() | int() as seconds):
            return {"retry-after": str(math.ceil(seconds))}
        case errors.ResourceExhaustedError() | errors.UnavailableError():
            return {"retry-after": str(RETRY_AFTER_SECONDS)}
    return {}


def from_validation(error: ValidationError) -> HttpError:
    """The first invalid field. The message repeats names, but no values that the client sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = parameter_path(first["loc"]) or None
    code = _VALIDATION_CODES.get(first["type"], "invalid_type")
    if first["type"] == "extra_forbidden":
        return unknown_parameter(param or "request")
    message = first["msg"].removeprefix("Value error, ")
    return HttpError(400, f"{param or 'request'}: {message}", param=param, code=code)


def parameter_path(location: tuple[int | str, ...]) -> str:
    """A path such as `messages[0].content` for pydantic's location, without tags of alternatives in <>."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{step}" if path else step
    return path


async def on_known_error(_request: Request, error: Exception) -> Response:
    """Handler for PacelineError and HttpError."""
    answer = from_error(error)
    if answer.param is not None and (call := call_log.current.get()) is not None:
        call.refused_for(answer.param)
    return answer.response()


async def on_routing_error(request: Request, error: Exception) -> Response:
    """Handler for the router's errors: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return HttpError(error.status_code, message, code=code, headers=error.headers).response()


async def on_defect(_request: Request, error: Exception) -> Response:
    """Handler for everything else; the server logs it."""
    return from_error(error).response()
