"""Errors as gRPC statuses and back: canonical codes with details that name the field.

| error | code |
|---|---|
| InvalidArgumentError | INVALID_ARGUMENT with BadRequest |
| NotFoundError | NOT_FOUND |
| FailedPreconditionError | FAILED_PRECONDITION |
| StaleEpochError | ABORTED |
| ResourceExhaustedError | RESOURCE_EXHAUSTED |
| UnavailableError | UNAVAILABLE with the last index |
| DeadlineExceededError | DEADLINE_EXCEEDED |
| CancelledError | CANCELLED |
| anything else | INTERNAL, without its text |
"""

from __future__ import annotations

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline.core import errors

DOMAIN = "paceline"

_CODES: dict[type[errors.PacelineError], int] = {
    errors.InvalidArgumentError: code_pb2.INVALID_ARGUMENT,
    errors.TokenizerMismatchError: code_pb2.INVALID_ARGUMENT,
    errors.NotFoundError: code_pb2.NOT_FOUND,
    errors.FailedPreconditionError: code_pb2.FAILED_PRECONDITION,
    errors.StaleEpochError: code_pb2.ABORTED,
    errors.ResourceExhaustedError: code_pb2.RESOURCE_EXHAUSTED,
    errors.UnavailableError: code_pb2.UNAVAILABLE,
    errors.DeadlineExceededError: code_pb2.DEADLINE_EXCEEDED,
    errors.CancelledError: code_pb2.CANCELLED,
    errors.InternalError: code_pb2.INTERNAL,
}


def to_status(error: BaseException) -> status_pb2.Status:
    """The status a peer may see. An unexpected exception's text stays in the log."""
    known = isinstance(error, errors.PacelineError)
    code = _CODES.get(type(error), code_pb2.INTERNAL) if known else code_pb2.INTERNAL
    status = status_pb2.Status(code=code, message=error.message if known else "internal error")
    reason = type(error).__name__.removesuffix("Error") if known else "Internal"
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    if isinstance(error, errors.UnavailableError) and error.last_index is not None:
        info.metadata["last_index"] = str(error.last_index)
    if isinstance(error, errors.InvalidArgumentError):
        info.metadata["field"] = error.field
        violation = error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.description)
            ]
        )
        status.details.add().Pack(violation)
    status.details.add().Pack(info)
    return status


def from_status(status: status_pb2.Status, known_length: int = 0) -> errors.PacelineError:
    """The error a peer meant."""
    field, reason, last_index, description = "", "", None, status.message
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason
            last_index = int(info.metadata["last_index"]) if "last_index" in info.metadata else None
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field, description = bad.field_violations[0].field, bad.field_violations[0].description
    match status.code:
        case code_pb2.INVALID_ARGUMENT:
            mismatch = reason == "TokenizerMismatch"
            return (errors.TokenizerMismatchError if mismatch else errors.InvalidArgumentError)(
                field or "request", description
            )
        case code_pb2.FAILED_PRECONDITION:
            return errors.FailedPreconditionError(status.message, known_length)
        case code_pb2.UNAVAILABLE:
            return errors.UnavailableError(status.message, last_index)
        case code_pb2.INTERNAL | code_pb2.UNKNOWN:
            return errors.InternalError(status.message)
    simple: dict[int, type[errors.PacelineError]] = {
        code_pb2.NOT_FOUND: errors.NotFoundError,
        code_pb2.ABORTED: errors.StaleEpochError,
        code_pb2.RESOURCE_EXHAUSTED: errors.ResourceExhaustedError,
        code_pb2.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
        code_pb2.CANCELLED: errors.CancelledError,
        code_pb2.UNIMPLEMENTED: errors.NotFoundError,
    }
    return simple.get(status.code, errors.InternalError)(status.message)


def from_rpc_error(error: grpc.RpcError) -> errors.PacelineError:
    """The error behind a failed call, with its details where the peer gave them."""
    if isinstance(error, grpc.aio.AioRpcError):
        code, text = error.code(), error.details()
        metadata = error.trailing_metadata()
    else:
        assert isinstance(error, grpc.Call)
        code, text = error.code(), error.details()
        metadata = error.trailing_metadata()
    for key, value in metadata or ():
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY and isinstance(value, bytes):
            return from_status(status_pb2.Status.FromString(value))
    return from_status(status_pb2.Status(code=code.value[0], message=text or code.name))


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> None:
    """End a call with the status of `error`."""
    status = to_status(error)
    await context.abort_with_status(rpc_status.to_status(status))
