"""Conversion between errors and gRPC statuses: canonical codes, with details that name the field.

| error | code |
|---|---|
| InvalidArgumentError | INVALID_ARGUMENT with BadRequest |
| AlreadyExistsError | ALREADY_EXISTS with BadRequest |
| NotFoundError | NOT_FOUND |
| FailedPreconditionError | FAILED_PRECONDITION |
| StaleEpochError | ABORTED |
| ResourceExhaustedError | RESOURCE_EXHAUSTED, with RetryInfo if the time is known |
| UnauthenticatedError | UNAUTHENTICATED |
| PermissionDeniedError | PERMISSION_DENIED |
| UnavailableError | UNAVAILABLE with the last index |
| DeadlineExceededError | DEADLINE_EXCEEDED |
| CancelledError | CANCELLED |
| anything else | INTERNAL, without its text |

`FailedPreconditionError.known_length` is a separate field of `SequenceError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from paceline.core import errors

DOMAIN = "paceline"
DETAILS_KEY = "grpc-status-details-bin"
"""Metadata key of the status in gRPC's rich error model."""

_CODES: dict[type[errors.PacelineError], int] = {
    errors.InvalidArgumentError: code_pb2.INVALID_ARGUMENT,
    errors.TokenizerMismatchError: code_pb2.INVALID_ARGUMENT,
    errors.AlreadyExistsError: code_pb2.ALREADY_EXISTS,
    errors.NotFoundError: code_pb2.NOT_FOUND,
    errors.FailedPreconditionError: code_pb2.FAILED_PRECONDITION,
    errors.StaleEpochError: code_pb2.ABORTED,
    errors.ResourceExhaustedError: code_pb2.RESOURCE_EXHAUSTED,
    errors.UnauthenticatedError: code_pb2.UNAUTHENTICATED,
    errors.PermissionDeniedError: code_pb2.PERMISSION_DENIED,
    errors.UnavailableError: code_pb2.UNAVAILABLE,
    errors.DeadlineExceededError: code_pb2.DEADLINE_EXCEEDED,
    errors.CancelledError: code_pb2.CANCELLED,
    errors.InternalError: code_pb2.INTERNAL,
}


def code_name(error: BaseException) -> str:
    """The canonical code of an error, such as `INVALID_ARGUMENT`."""
    known = next((cls for cls in type(error).__mro__ if cls in _CODES), errors.InternalError)
    name: str = code_pb2.Code.Name(_CODES[known])
    return name


def to_status(error: BaseException) -> status_pb2.Status:
    """The status for a peer. The text of an unexpected exception is not included."""
    status = status_pb2.Status(code=code_pb2.INTERNAL, message="internal error")
    info = error_details_pb2.ErrorInfo(reason="Internal", domain=DOMAIN)
    if isinstance(error, errors.PacelineError):
        known = next((cls for cls in type(error).__mro__ if cls in _CODES), errors.InternalError)
        status.code, status.message = _CODES[known], error.message
        info.reason = known.__name__.removesuffix("Error")
    if isinstance(error, errors.UnavailableError) and error.last_index is not None:
        info.metadata["last_index"] = str(error.last_index)
    if isinstance(error, errors.InvalidArgumentError):
        info.metadata["field"] = error.field
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.description
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.ResourceExhaustedError) and error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after * 1e9))
        status.details.add().Pack(retry)
    status.details.add().Pack(info)
    return status


def _read_details(details: Iterable[AnyMessage]) -> tuple[error_details_pb2.ErrorInfo, Any]:
    """Paceline's ErrorInfo and the first field violation; other details are ignored."""
    info, violation = error_details_pb2.ErrorInfo(), None
    for detail in details:
        try:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                given = error_details_pb2.ErrorInfo()
                detail.Unpack(given)
                if given.domain == DOMAIN:
                    info = given
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad = error_details_pb2.BadRequest()
                detail.Unpack(bad)
                violation = next(iter(bad.field_violations), None)
        except DecodeError:
            continue
    return info, violation


def from_status(status: status_pb2.Status, known_length: int = 0) -> errors.PacelineError:
    """The error for a peer's status. Never raises; invalid details are ignored."""
    info, violation = _read_details(status.details)
    match status.code:
        case code_pb2.INVALID_ARGUMENT | code_pb2.ALREADY_EXISTS as code:
            return _field_error(code, info.reason)(
                violation.field if violation and violation.field else "request",
                violation.description if violation and violation.description else status.message,
            )
        case code_pb2.FAILED_PRECONDITION:
            return errors.FailedPreconditionError(status.message, known_length)
        case code_pb2.RESOURCE_EXHAUSTED:
            return errors.ResourceExhaustedError(status.message, _retry_after(status.details))
        case code_pb2.UNAVAILABLE:
            return errors.UnavailableError(status.message, _index(info.metadata.get("last_index", "")))
    simple: dict[int, type[errors.PacelineError]] = {
        code_pb2.NOT_FOUND: errors.NotFoundError,
        code_pb2.ABORTED: errors.StaleEpochError,
        code_pb2.UNAUTHENTICATED: errors.UnauthenticatedError,
        code_pb2.PERMISSION_DENIED: errors.PermissionDeniedError,
        code_pb2.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
        code_pb2.CANCELLED: errors.CancelledError,
        code_pb2.UNIMPLEMENTED: errors.NotFoundError,
    }
    return simple.get(status.code, errors.InternalError)(status.message)


def _retry_after(details: Iterable[AnyMessage]) -> float | None:
    for detail in details:
        retry = error_details_pb2.RetryInfo()
        try:
            if detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry) and retry.HasField("retry_delay"):
                return max(0.0, float(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9))
        except DecodeError:
            continue
    return None


def _field_error(code: int, reason: str) -> type[errors.InvalidArgumentError]:
    if code == code_pb2.ALREADY_EXISTS:
        return errors.AlreadyExistsError
    return errors.TokenizerMismatchError if reason == "TokenizerMismatch" else errors.InvalidArgumentError


def _index(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None


def from_rpc_error(error: grpc.RpcError) -> errors.PacelineError:
    """The error for a failed call of the synchronous or asyncio API, with the peer's details if present."""
    code, text = error.code(), error.details()
    status = _detailed(error) or status_pb2.Status(code=code.value[0], message=text or code.name)
    return from_status(status)


def is_ours(error: grpc.RpcError) -> bool:
    """True if Paceline ended the call, false for the status of a proxy, another server or gRPC itself."""
    status = _detailed(error)
    return status is not None and _read_details(status.details)[0].domain == DOMAIN


def _detailed(error: grpc.RpcError) -> status_pb2.Status | None:
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """End a call with the status of `error`."""
    status = to_status(error)
    await context.abort_with_status(rpc_status.to_status(status))
