"""Errors over the wire: every class arrives as itself, and internal details are withheld."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from paceline.core import errors
from paceline.rpc.codec.status import DETAILS_KEY, abort, from_rpc_error, from_status, to_status
from paceline.v1 import generation_pb2, generation_pb2_grpc

EXAMPLES: list[tuple[errors.PacelineError, int]] = [
    (errors.InvalidArgumentError("top_p", "must be in (0, 1]"), code_pb2.INVALID_ARGUMENT),
    (errors.TokenizerMismatchError("tokenizer", "1 is not 2"), code_pb2.INVALID_ARGUMENT),
    (errors.AlreadyExistsError("request_id", "is running already"), code_pb2.ALREADY_EXISTS),
    (errors.NotFoundError("no such sequence"), code_pb2.NOT_FOUND),
    (errors.FailedPreconditionError("behind", 17), code_pb2.FAILED_PRECONDITION),
    (errors.StaleEpochError("taken over"), code_pb2.ABORTED),
    (errors.ResourceExhaustedError("no blocks"), code_pb2.RESOURCE_EXHAUSTED),
    (errors.ResourceExhaustedError("too many", 0.25), code_pb2.RESOURCE_EXHAUSTED),
    (errors.UnauthenticatedError("a key is required"), code_pb2.UNAUTHENTICATED),
    (errors.PermissionDeniedError("not for you"), code_pb2.PERMISSION_DENIED),
    (errors.UnavailableError("target lost", 0), code_pb2.UNAVAILABLE),
    (errors.UnavailableError("target lost"), code_pb2.UNAVAILABLE),
    (errors.DeadlineExceededError("too late"), code_pb2.DEADLINE_EXCEEDED),
    (errors.CancelledError("gone"), code_pb2.CANCELLED),
    (errors.InternalError("NaN logits"), code_pb2.INTERNAL),
]
each_error = pytest.mark.parametrize(
    ("error", "code"), EXAMPLES, ids=[type(error).__name__ for error, _ in EXAMPLES]
)


def test_every_error_class_has_an_example() -> None:
    tree = {cls for cls in vars(errors).values() if isinstance(cls, type) and cls is not errors.PacelineError}
    assert tree == {type(error) for error, _ in EXAMPLES}


@each_error
def test_errors_round_trip(error: errors.PacelineError, code: int) -> None:
    status = status_pb2.Status.FromString(to_status(error).SerializeToString())
    assert status.code == code
    back = from_status(status, getattr(error, "known_length", 0))
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)


def test_the_field_follows_googles_error_model() -> None:
    status = to_status(errors.InvalidArgumentError("top_p", "must be in (0, 1]"))
    bad, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(bad)
    assert status.details[1].Unpack(info)
    assert bad.field_violations[0].field == "top_p"
    assert bad.field_violations[0].description == "must be in (0, 1]"
    assert (info.reason, info.domain) == ("InvalidArgument", "paceline")


@pytest.mark.parametrize(
    "error", [kind("secret") for kind in (ValueError, KeyError, AssertionError, BaseException)]
)
def test_an_unexpected_exceptions_text_is_withheld(error: BaseException) -> None:
    status = to_status(error)
    assert status.code == code_pb2.INTERNAL
    assert status.message == "internal error"
    assert b"secret" not in status.SerializeToString()
    assert type(error).__name__.encode() not in status.SerializeToString()


def test_a_subclass_arrives_as_its_known_class() -> None:
    class NoBlocksError(errors.ResourceExhaustedError):
        pass

    assert type(from_status(to_status(NoBlocksError("full")))) is errors.ResourceExhaustedError
    assert type(from_status(to_status(errors.PacelineError("plain")))) is errors.InternalError


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (code_pb2.UNIMPLEMENTED, errors.NotFoundError),
        (code_pb2.UNKNOWN, errors.InternalError),
        (code_pb2.DATA_LOSS, errors.InternalError),
        (code_pb2.OK, errors.InternalError),
        (99, errors.InternalError),
        (-1, errors.InternalError),
    ],
)
def test_codes_of_other_servers_become_our_errors(code: int, expected: type[errors.PacelineError]) -> None:
    error = from_status(status_pb2.Status(code=code, message="m"))
    assert type(error) is expected
    assert error.message == "m"


def packed(*messages: Any) -> list[any_pb2.Any]:
    details = []
    for message in messages:
        detail = any_pb2.Any()
        detail.Pack(message)
        details.append(detail)
    return details


def info(**metadata: str) -> Any:
    return error_details_pb2.ErrorInfo(domain="paceline", metadata=metadata)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "\u0663", "9" * 5000])
def test_an_invalid_last_index_is_absent(text: str) -> None:
    status = status_pb2.Status(code=code_pb2.UNAVAILABLE, details=packed(info(last_index=text)))
    error = from_status(status)
    assert isinstance(error, errors.UnavailableError)
    assert error.last_index is None


def test_invalid_or_foreign_details_are_ignored() -> None:
    broken = any_pb2.Any(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff\xff")
    foreign = error_details_pb2.ErrorInfo(domain="envoy", reason="TokenizerMismatch")
    details = [broken, *packed(error_details_pb2.BadRequest(), foreign, error_details_pb2.RetryInfo())]
    error = from_status(status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="m", details=details))
    assert type(error) is errors.InvalidArgumentError
    assert (error.field, error.description) == ("request", "m")


class Failing(generation_pb2_grpc.GenerationServiceServicer):
    """An asynchronous server whose every method fails with `error`."""

    error: BaseException

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        await abort(context, self.error)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield generation_pb2.GenerateResponse()
        await abort(context, self.error)


@pytest.fixture
async def failing() -> AsyncIterator[tuple[Failing, Any]]:
    """The service, and a stub of it."""
    service, server = Failing(), grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service, generation_pb2_grpc.GenerationServiceStub(channel)
    await server.stop(None)


@each_error
async def test_an_aio_error_equals_the_servers(failing: Any, error: errors.PacelineError, code: int) -> None:
    service, stub = failing
    service.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(generation_pb2.TokenizeRequest())
    assert caught.value.code().value[0] == code
    assert_same(from_rpc_error(caught.value), error)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [message async for message in stub.Generate(generation_pb2.GenerateRequest())]
    assert_same(from_rpc_error(caught.value), error)


async def test_abort_reveals_nothing(failing: Any) -> None:
    service, stub = failing
    service.error = RuntimeError("secret prompt")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(generation_pb2.TokenizeRequest())
    assert "secret" not in repr(caught.value)
    assert "secret" not in repr(caught.value.trailing_metadata())


class SyncFailing(generation_pb2_grpc.GenerationServiceServicer):
    """The same over the synchronous API."""

    error: BaseException

    def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        context.abort_with_status(rpc_status.to_status(to_status(self.error)))

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield generation_pb2.GenerateResponse()
        context.abort_with_status(rpc_status.to_status(to_status(self.error)))


@pytest.fixture(scope="module")
def sync_failing() -> Iterator[tuple[SyncFailing, Any]]:
    service = SyncFailing()
    with ThreadPoolExecutor(2) as executor:
        server = grpc.server(executor)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield service, generation_pb2_grpc.GenerationServiceStub(channel)
        server.stop(None).wait()


@each_error
def test_a_sync_error_equals_the_servers(sync_failing: Any, error: errors.PacelineError, code: int) -> None:
    service, stub = sync_failing
    service.error = error
    with pytest.raises(grpc.RpcError) as caught:
        stub.Tokenize(generation_pb2.TokenizeRequest())
    assert_same(from_rpc_error(caught.value), error)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(generation_pb2.GenerateRequest()))
    assert_same(from_rpc_error(caught.value), error)


def test_an_unknown_method_is_not_found(sync_failing: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        sync_failing[1].Detokenize(generation_pb2.DetokenizeRequest())
    assert type(from_rpc_error(caught.value)) is errors.NotFoundError


def assert_same(got: errors.PacelineError, meant: errors.PacelineError) -> None:
    """Equal but for `known_length`, which travels beside a status (SequenceError), not in it."""
    assert type(got) is type(meant)
    assert vars(got) | {"known_length": None} == vars(meant) | {"known_length": None}


def aio_error(metadata: Any, details: str | None = "d") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, None, metadata, details)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        grpc.aio.Metadata(),
        grpc.aio.Metadata((DETAILS_KEY, b"\xff\xff")),
        grpc.aio.Metadata(("other", "x")),
    ],
)
def test_without_details_code_and_text_remain(metadata: Any) -> None:
    error = from_rpc_error(aio_error(metadata))
    assert isinstance(error, errors.UnavailableError)
    assert (error.message, error.last_index) == ("d", None)


def test_without_a_text_the_codes_name_remains() -> None:
    assert from_rpc_error(aio_error(None, None)).message == "UNAVAILABLE"


def test_before_the_first_token_there_is_no_last_index() -> None:
    info = error_details_pb2.ErrorInfo()
    assert to_status(errors.UnavailableError("target lost", -1)).details[0].Unpack(info)
    assert "last_index" not in info.metadata
    assert errors.UnavailableError("target lost", -1).last_index is None
