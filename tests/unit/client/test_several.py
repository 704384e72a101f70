"""Clients of several coordinators: where calls go, and what happens when one is lost."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from paceline import AsyncClient, Client, Tls
from paceline.cli import app as cli
from paceline.client import links
from paceline.client.resuming import ResumeBackoff
from paceline.core.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.rpc import codec
from paceline.v1 import generation_pb2

WAIT = 30
DEAD = "127.0.0.1:1"
"""Nobody listens there."""
PARAMETERS = {"max_tokens": 4}
CUT = UnavailableError("the coordinator is stopping")
Script = Callable[[Any, grpc.ServicerContext], Iterator[Any]]


@pytest.fixture
def join(connect: Callable[..., Any]) -> Callable[..., Any]:
    """A client of either kind that begins at the first address and resumes at once."""

    def make(*addresses: str, **options: Any) -> Any:
        client = connect(addresses, **options)
        inner = client if isinstance(client, Client | AsyncClient) else client._client
        inner._calls.coordinators._first = lambda _count: 0
        inner._backoff = ResumeBackoff(options.get("resume_seconds", 30.0), first=0.0)
        return client

    return make


def resumed(messages: Any, count: int, end: Callable[[grpc.ServicerContext], None] | None = None) -> Script:
    """The messages that the client lacks, up to so many of them, and this end."""

    def script(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        have = request.resume_from[0] if request.resume_from else 0
        rest = [m for m in messages.good[1:] if not m.HasField("chunk") or m.chunk.index >= have]
        yield from [messages.good[0], *rest][:count]
        if end is not None:
            end(context)

    return script


def aborts(code: grpc.StatusCode, text: str) -> Callable[[grpc.ServicerContext], None]:
    """As a proxy does, without the details of a coordinator."""

    def end(context: grpc.ServicerContext) -> None:
        context.abort(code, text)

    return end


def check_whole(stream: Any) -> None:
    chunks = list(stream)
    assert [(c.index, c.token_ids) for c in chunks] == [(0, (11,)), (1, (12, 13)), (3, (14,)), (4, ())]
    assert "".join(chunk.text for chunk in chunks) == stream.result.text == "Hello!"


def test_requests_begin_at_the_coordinators_in_turn(servers: Any, join: Callable[..., Any]) -> None:
    client = join(*(server.address for server in servers))
    for _ in range(4):
        client.generate("x", PARAMETERS)
    assert [len(server.requests) for server in servers] == [2, 2]


def test_a_broken_stream_goes_on_at_another_one(
    servers: Any, join: Callable[..., Any], messages: Any
) -> None:
    """It brings the seed, the mode and the tokens. The first, which may hold the request, is told."""
    one, other = servers
    one.script = resumed(messages, 3, lambda context: messages.abort(context, CUT))
    other.script = resumed(messages, 9)
    stream = join(one.address, other.address).stream("x", PARAMETERS)
    check_whole(stream)
    assert stream.num_resumes == 1
    (request,) = other.requests
    call = codec.generate_request_from_proto(request)
    assert call.resumption == codec.Resumption((3,), ((11, 12, 13),))
    assert (call.sampling.seed, request.speculation.acceptance_mode) == (
        7,
        messages.good[0].started.acceptance_mode,
    )
    assert request.request_id == one.requests[0].request_id == one.cancelled.get(timeout=WAIT)
    assert other.cancelled.empty()


def test_a_stream_that_is_resumed_stays_there(servers: Any, join: Callable[..., Any], messages: Any) -> None:
    """Also in its next break, while the first coordinator is passed over."""
    one, other = servers
    one.script = resumed(messages, 2, lambda context: messages.abort(context, CUT))
    other.script = resumed(messages, 2, lambda context: messages.abort(context, CUT))
    client = join(one.address, other.address)
    stream = client.stream("x", PARAMETERS)
    assert [next(stream).index for _ in range(3)] == [0, 1, 3]
    assert len(one.requests) + len(other.requests) == 3
    one.script = other.script = resumed(messages, 9)
    assert next(stream).finish_reason == "stop"


BREAKS = [
    (grpc.StatusCode.INTERNAL, "The actor died unexpectedly before finishing this task."),
    (grpc.StatusCode.CANCELLED, "Received RST_STREAM with error code 8"),
    (grpc.StatusCode.UNAVAILABLE, "upstream connect error or disconnect/reset before headers"),
    (grpc.StatusCode.UNKNOWN, "Stream removed"),
    (grpc.StatusCode.NOT_FOUND, "Application 'paceline' not found."),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "the proxy's own deadline"),
    (grpc.StatusCode.ABORTED, "no healthy replica"),
]


@pytest.mark.parametrize(("code", "text"), BREAKS, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("empty", [False, True], ids=["", "after an empty message"])
def test_a_foreign_status_is_a_broken_transport(
    servers: Any, join: Callable[..., Any], messages: Any, code: grpc.StatusCode, text: str, empty: bool
) -> None:
    one, other = servers
    cut, whole = resumed(messages, 3), resumed(messages, 9)

    def script(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from cut(request, context)
        if empty:
            yield generation_pb2.GenerateResponse()
        aborts(code, text)(context)

    one.script, other.script = script, whole
    stream = join(one.address, other.address).stream("x", PARAMETERS, timeout=WAIT)
    check_whole(stream)
    assert stream.num_resumes == 1


ANSWERS = [
    (grpc.StatusCode.UNIMPLEMENTED, NotFoundError),
    (grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError),
    (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
    (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
]


@pytest.mark.parametrize(("code", "kind"), ANSWERS, ids=lambda x: getattr(x, "name", ""))
def test_a_foreign_refusal_is_not_retried(
    servers: Any, join: Callable[..., Any], messages: Any, code: grpc.StatusCode, kind: type[PacelineError]
) -> None:
    one, other = servers
    one.script = resumed(messages, 2, aborts(code, "no"))
    client = join(one.address, other.address)
    with pytest.raises(kind):
        client.generate("x", PARAMETERS)
    assert other.requests == []


def test_a_foreign_status_is_reported_as_unavailable(
    server: Any, connect: Callable[..., Any], messages: Any
) -> None:
    """The caller did nothing wrong, and no coordinator has failed as far as anybody knows."""
    server.script = resumed(messages, 3, aborts(grpc.StatusCode.INTERNAL, "The actor died"))
    with pytest.raises(UnavailableError, match=r"broke \(INTERNAL: The actor died\)") as caught:
        connect(server.address, resume_seconds=0).generate("x", PARAMETERS)
    assert caught.value.last_index == 2


def test_an_error_after_an_empty_message_is_that_error(server: Any, client: Any, messages: Any) -> None:
    """Before anything else, and in the middle."""
    for count in (0, 3):
        server.play_and_fail(
            InvalidArgumentError("top_p", "no"), *messages.good[:count], generation_pb2.GenerateResponse()
        )
        with pytest.raises(InvalidArgumentError, match="top_p"):
            client.generate("x", PARAMETERS)


@pytest.mark.parametrize("after", [0, 2, 5])
def test_an_empty_message_and_no_error_break_the_protocol(
    server: Any, client: Any, messages: Any, after: int
) -> None:
    empty = generation_pb2.GenerateResponse()
    server.play(*messages.good[:after], empty, *messages.good[after:])
    stream = client.stream("x", PARAMETERS)
    if after == 5:
        list(stream)
        assert stream.result is not None, "what is complete stays so"
        return
    with pytest.raises(InternalError, match="empty message"):
        list(stream)


def test_an_empty_last_message_breaks_the_protocol(server: Any, client: Any, messages: Any) -> None:
    server.play(*messages.good[:4], generation_pb2.GenerateResponse())
    with pytest.raises(InternalError, match="empty message"):
        client.generate("x", PARAMETERS)


@pytest.mark.parametrize("resume_seconds", [0, 30])
def test_a_request_begins_where_a_coordinator_listens(
    server: Any, join: Callable[..., Any], resume_seconds: int
) -> None:
    """To begin elsewhere is no resumption: no coordinator knew the request."""
    client = join(DEAD, server.address, resume_seconds=resume_seconds)
    stream = client.stream("x", PARAMETERS)
    check_whole(stream)
    assert stream.num_resumes == 0
    assert list(server.requests[0].resume_from) == []
    client.generate("x", PARAMETERS)
    assert len(server.requests) == 2


def test_other_calls_are_made_where_a_coordinator_listens(server: Any, join: Callable[..., Any]) -> None:
    assert join(DEAD, server.address).tokenize("ab") == (97, 98)
    server.error = InvalidArgumentError("text", "no")
    client = join(DEAD, server.address)
    with pytest.raises(InvalidArgumentError):
        client.tokenize("ab")
    assert len(server.requests) == 2


def test_a_refused_call_is_made_once(servers: Any, join: Callable[..., Any]) -> None:
    one, other = servers
    one.error = InternalError("a defect")
    with pytest.raises(InternalError):
        join(one.address, other.address).tokenize("ab")
    assert other.requests == []


def test_if_nobody_listens_the_error_says_so(join: Callable[..., Any]) -> None:
    client = join(DEAD, "127.0.0.2:1")
    stream = client.stream("x", PARAMETERS)
    with pytest.raises(UnavailableError, match=r"no server is listening at .* of 2 addresses tried"):
        list(stream)
    assert stream.num_resumes == 0
    with pytest.raises(UnavailableError, match="of 2 addresses tried"):
        client.models()


def test_a_lost_coordinator_gets_no_new_requests(
    servers: Any, join: Callable[..., Any], messages: Any
) -> None:
    one, other = servers
    one.play_and_block(*messages.good[:3])
    other.script = resumed(messages, 9)
    client = join(one.address, other.address)
    stream = client.stream("x", PARAMETERS)
    assert [next(stream).index, next(stream).index] == [0, 1]
    one.stop()
    assert [chunk.index for chunk in stream] == [3, 4]
    for _ in range(3):
        assert client.stream("x", PARAMETERS).num_resumes == 0
    assert len(client.models()) == 1


def test_the_deadline_covers_every_coordinator(servers: Any, join: Callable[..., Any], messages: Any) -> None:
    for server in servers:
        server.script = resumed(messages, 1, lambda context: messages.abort(context, CUT))
    client = join(*(server.address for server in servers))
    with pytest.raises(DeadlineExceededError):
        client.generate("x", PARAMETERS, timeout=0.5)
    assert all(server.requests for server in servers)


def test_a_full_coordinator_may_be_left_for_another(
    servers: Any, join: Callable[..., Any], messages: Any
) -> None:
    """A resumption may be refused for lack of room, through a proxy after an empty message."""
    one, other = servers
    cuts = [2, 9]

    def script(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from resumed(messages, cuts.pop(0))(request, context)
        if cuts:
            messages.abort(context, CUT)

    one.script = script
    other.play_and_fail(ResourceExhaustedError("the queue is full"), generation_pb2.GenerateResponse())
    stream = join(one.address, other.address).stream("x", PARAMETERS)
    check_whole(stream)
    assert stream.num_resumes == 2


def test_closing_a_moved_stream_cancels_where_it_is(
    servers: Any, join: Callable[..., Any], messages: Any
) -> None:
    one, other = servers
    one.script = resumed(messages, 2, lambda context: messages.abort(context, CUT))
    other.play_and_block(messages.good[0], messages.good[2])
    client = join(one.address, other.address)
    stream = client.stream("x", PARAMETERS)
    assert [next(stream).index, next(stream).index] == [0, 1]
    stream.close()
    client.close()
    told = [server.cancelled.get(timeout=WAIT) for server in servers]
    assert told == [one.requests[0].request_id] * 2
    assert one.cancelled.empty()
    assert other.cancelled.empty()


# ---- the command line ----------------------------------------------------------------------------------


def run(*words: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return int(end.value.code or 0)


def test_the_status_of_each_coordinator_is_shown(servers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    address = ",".join(server.address for server in servers)
    run("status", "--address", address, "--json")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["coordinator"]["address"] for each in told] == ["c:1", "c:1"]
    assert [len(server.requests) for server in servers] == [1, 1]
    run("status", "--address", address)
    assert capsys.readouterr().out.count("coordinator  c:1") == 2


def test_the_status_shows_the_others_of_a_dead_one(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--address", f"{DEAD},{server.address}") == 1
    out, err = capsys.readouterr()
    assert "coordinator  c:1" in out
    assert f"error: no server is listening at {DEAD}" in err


def test_a_command_takes_several_addresses(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run("generate", "x", "--address", f"{DEAD},{server.address}")
    assert capsys.readouterr().out == "Hello!\nHello!\n"
    assert run("generate", "x", "--address", "a:1,a:1") == 2
    assert "--address" in capsys.readouterr().err


# ---- names ---------------------------------------------------------------------------------------------


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Sequence[str]]:
    """The names that the resolver knows."""
    known: dict[str, Sequence[str]] = {}
    asks = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(host).endswith(".test"):
            return asks(host, *args, **kwargs)
        if host not in known:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def place(server: Any) -> tuple[str, str]:
    host, _, port = server.address.partition(":")
    return host, port


def test_requests_spread_over_the_addresses_of_a_name(
    servers: Any, join: Callable[..., Any], hosts: dict[str, Sequence[str]]
) -> None:
    hosts["c.test"] = [place(server)[0] for server in servers]
    client = join(f"dns:c.test:{place(servers[0])[1]}")
    for _ in range(4):
        client.generate("x", PARAMETERS)
    assert [len(server.requests) for server in servers] == [2, 2]
    assert len(client.models()) == 1


def test_a_lost_connection_asks_the_name_again(
    servers: Any, join: Callable[..., Any], messages: Any, hosts: dict[str, Sequence[str]]
) -> None:
    one, other = servers
    hosts["c.test"] = [place(one)[0]]
    one.play_and_block(*messages.good[:2])
    other.script = resumed(messages, 9)
    stream = join(f"dns:c.test:{place(one)[1]}").stream("x", PARAMETERS, timeout=WAIT)
    assert next(stream).index == 0
    hosts["c.test"] = [place(other)[0]]
    one.stop()
    assert [chunk.index for chunk in stream] == [1, 3, 4]


def test_an_unknown_name_is_reported_at_once(
    join: Callable[..., Any], hosts: dict[str, Sequence[str]]
) -> None:
    client = join("dns:nobody.test:5")
    for call in (client.models, lambda: client.generate("x", PARAMETERS)):
        with pytest.raises(UnavailableError, match=r"host name of dns:nobody.test:5 cannot be resolved"):
            call()


def test_an_unknown_name_does_not_hide_an_address(
    server: Any, join: Callable[..., Any], hosts: dict[str, Sequence[str]]
) -> None:
    assert join("dns:nobody.test:5", server.address).generate("x", PARAMETERS).text == "Hello!"


def test_a_certificate_is_checked_against_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not against the address that it has just now."""
    opened = []

    def note(address: str, options: Any, tls: Tls | None) -> Any:
        opened.append((address, dict(options).get("grpc.default_authority"), tls))
        return grpc.insecure_channel(address)

    monkeypatch.setattr(links, "open_channel", note)
    for tls in (None, Tls(), Tls(server_name="other")):
        links.SyncLink.to("10.0.0.1:5", "c.test", tls, ())
    links.SyncLink.to("a:5", "", Tls(), ())
    assert opened == [
        ("10.0.0.1:5", "c.test", None),
        ("10.0.0.1:5", "c.test", Tls(server_name="c.test")),
        ("10.0.0.1:5", "c.test", Tls(server_name="other")),
        ("a:5", None, Tls()),
    ]
