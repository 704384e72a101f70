"""gRPC and HTTP of a coordinator behind one gate: keys, rates and sizes, on real ports without a model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.certificates import says_nothing
from harness.faces import TOKEN, Faces, Raw, asks, find_target, gate, key, serving
from harness.refusals import ends_with, refused
from harness.waiting import HANG, until

from coordinator.api.grpc.auth import make_gate, reload_on_hangup, warn_if_open
from coordinator.api.grpc.calls import UNKNOWN
from coordinator.auth import ANYBODY, Gate, Principal, principal
from coordinator.text.vocabulary import Vocabulary
from paceline.core import limits
from paceline.core.clock import ManualClock
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from paceline.core.security.keyfile import write_keys
from paceline.core.security.keys import KeyRing, digest
from paceline.telemetry import logs
from paceline.v1 import generation_pb2, generation_pb2_grpc

METHODS = [
    *(f"/paceline.v1.GenerationService/{m.name}" for m in generation_pb2._GENERATIONSERVICE.methods),
    "/paceline.v1.GenerationService/NoSuchMethod",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/nobody.Knows/This",
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load("embedded:target")


Serve = Callable[[Gate | None], contextlib.AbstractAsyncContextManager[Faces]]


@pytest.fixture
def serve(vocabulary: Vocabulary) -> Serve:
    """Serve with a gate."""
    return partial(serving, vocabulary)


# ---- no key, wrong key ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer pl-wrong"),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization", TOKEN),),
        (("authorization", f"Bearer {digest(TOKEN)}"),),
        (("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer pl-wrong")),
        (("x-api-key", TOKEN),),
    ],
)
async def test_every_method_requires_a_key(metadata: Any, serve: Serve) -> None:
    async with serve(gate()) as faces, grpc.aio.insecure_channel(faces.grpc_address) as channel:
        for method in METHODS:
            for make in (channel.unary_stream, channel.stream_stream):
                request: Any = b"" if make == channel.unary_stream else iter([])
                with ends_with(grpc.StatusCode.UNAUTHENTICATED) as failure:
                    await anext(aiter(make(method)(request, metadata=metadata, timeout=HANG)))
                assert failure.value.details() == "a valid API key is required"
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=HANG
        )
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("token", [None, "pl-wrong", TOKEN.upper()])
async def test_every_path_requires_a_key(token: str | None, serve: Serve) -> None:
    async with serve(gate()) as faces, faces.web(token) as web:
        assert len(faces.routes) >= 10
        for path in [*faces.routes, "/", "/nobody/knows", "/health/", "//health", "/ping/", "/docs"]:
            for method in ("GET", "POST", "OPTIONS"):
                answer = await web.request(method, path)
                if path in ("/health", "/ping"):
                    assert answer.status_code in (503, 405)
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                says_nothing(answer.text, *filter(None, [token]))


async def test_refused_calls_are_counted_and_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Under the names of our methods only: what a client makes up is no label of a metric."""
    caplog.set_level("INFO")
    mine, made_up = "/paceline.v1.GenerationService/ListModels", "/paceline.v1.GenerationService/Mine"
    known = mine.removeprefix("/")
    async with serve(gate()) as faces, grpc.aio.insecure_channel(faces.grpc_address) as channel:
        for method in (mine, made_up):
            for metadata in ((), (("authorization", f"Bearer {TOKEN}"),)):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await channel.unary_unary(method)(b"", metadata=metadata, timeout=HANG)
        counted = faces.coordinator.metrics.grpc_calls
        async with asyncio.timeout(HANG):
            while sum(counted.values()) < 4:  # noqa: ASYNC110 - what is waited for tells nobody
                await asyncio.sleep(0)
        assert counted == {
            (known, "UNAUTHENTICATED"): 1,
            (known, "UNAVAILABLE"): 1,  # no target is there
            (UNKNOWN, "UNAUTHENTICATED"): 1,
            (UNKNOWN, "UNIMPLEMENTED"): 1,
        }
    ended = [record for record in caplog.records if record.getMessage() == "call ended"]
    assert len(ended) == 4


class Lines(logging.Handler):
    """The fields of lines that end calls, those of the call's context among them."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "call ended":
            self.fields.append({**(logs.context.get() or {}), **getattr(record, "fields", {})})


@pytest.fixture
def ended(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[int], Awaitable[list[dict[str, Any]]]]]:
    """Wait for the lines of so many calls."""
    caplog.set_level("INFO")
    handler = Lines()
    logging.getLogger("coordinator.telemetry.call_log").addHandler(handler)

    async def lines(count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(HANG):
            while len(handler.fields) < count:  # noqa: ASYNC110 - what is waited for tells nobody
                await asyncio.sleep(0)
        return handler.fields

    yield lines
    logging.getLogger("coordinator.telemetry.call_log").removeHandler(handler)


async def test_call_log_lines_name_the_tenant(serve: Serve, ended: Any) -> None:
    """Also the line of a call that is refused for the key's rate; that of a wrong key names nobody."""
    async with serve(gate(key(requests_per_minute=2))) as faces:
        for _ in range(2):
            for token in (TOKEN, "pl-wrong"):
                async with faces.sdk(token) as client, faces.web(token) as web:
                    with contextlib.suppress(UnauthenticatedError, ResourceExhaustedError):
                        await client.detokenize([5])
                    await web.post("/detokenize", json={"tokens": [5]})
        lines = await ended(8)
    told = [(line["face"], line["code"], line.get("tenant")) for line in lines]
    assert sorted(told, key=str) == sorted(
        [
            ("grpc", "OK", "alice"),
            ("http", "200", "alice"),
            ("grpc", "RESOURCE_EXHAUSTED", "alice"),
            ("http", "429", "alice"),
            *[("grpc", "UNAUTHENTICATED", None), ("http", "401", None)] * 2,
        ],
        key=str,
    )


async def test_a_grpc_clients_request_id_is_the_calls_id(serve: Serve, ended: Any) -> None:
    async with serve(None) as faces, grpc.aio.insecure_channel(faces.grpc_address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Detokenize
        request = generation_pb2.DetokenizeRequest(token_ids=[5])
        await call(request, metadata=(("x-request-id", "front-1"),), timeout=HANG)
        for metadata in ((("x-request-id", "a b"),), (("x-request-id", "a"), ("x-request-id", "b"))):
            with ends_with(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
                await call(request, metadata=metadata, timeout=HANG)
            assert "x-request-id" in str(refusal.value.details())
        good, *bad = await ended(3)
    assert good["request_id"] == "front-1"
    assert [line["field"] for line in bad] == ["x-request-id"] * 2
    assert not [line for line in bad if "request_id" in line]


async def test_a_refused_grpc_calls_log_line_names_the_field(serve: Serve, ended: Any) -> None:
    async with serve(None) as faces, faces.sdk(None) as client:
        with pytest.raises(InvalidArgumentError):
            await client.detokenize([2**31])
        (line,) = await ended(1)
    assert line["field"] == "token_ids"


async def test_the_principal_is_known_where_requests_begin(serve: Serve) -> None:
    bob = key("bob", "pl-bob", max_sequences=7)
    async with serve(gate(key(), bob)) as faces:
        for token, caller in ((TOKEN, Principal("alice")), ("pl-bob", Principal("bob", 7))):
            async with faces.sdk(token) as client, faces.web(token) as web:
                await client.detokenize([5])
                # One connection, several requests: no caller is taken for the one before.
                for _ in range(2):
                    answer = await web.post("/detokenize", json={"tokens": [5]})
                    assert answer.status_code == 200
            assert faces.callers == [caller] * 3
            faces.callers.clear()
    assert principal.get() is ANYBODY


async def test_without_keys_no_caller_is_authenticated(serve: Serve) -> None:
    async with serve(None) as faces, faces.sdk(None) as client, faces.web(None) as web:
        await client.detokenize([5])
        assert (await web.get("/metrics")).status_code == 200
        assert faces.callers == [ANYBODY]


# ---- too many requests ----------------------------------------------------------------------------


async def test_grpc_and_http_share_one_rate(serve: Serve) -> None:
    clock = ManualClock()
    limited = gate(key(requests_per_minute=2), clock=clock)
    async with serve(limited) as faces, faces.sdk(TOKEN) as client, faces.web(TOKEN) as web:
        await client.detokenize([5])
        assert (await web.get("/version")).status_code == 200
        with pytest.raises(ResourceExhaustedError) as failure:
            await client.detokenize([5])
        assert failure.value.retry_after == pytest.approx(30.0)
        says_nothing(failure.value.message, TOKEN, "alice")
        answer = await web.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "30"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        says_nothing(answer.text, TOKEN, "alice")
        assert (await web.get("/health")).status_code == 503  # open, and takes nothing
        clock.advance(30.0)
        await client.detokenize([5])


async def test_a_key_over_its_rate_can_still_resume_and_cancel(serve: Serve) -> None:
    """Otherwise its broken streams would be lost and its cancelled requests held."""
    limited = gate(key(requests_per_minute=1))
    async with serve(limited) as faces, grpc.aio.insecure_channel(faces.grpc_address) as channel:
        find_target(faces.coordinator)
        raw = Raw(channel)
        first = await raw.begins(asks("r"))
        await raw.is_refused(asks("another"))
        await raw.begins(asks("r", again=True))
        with ends_with(grpc.StatusCode.ABORTED):
            await first.read()
        await raw.cancel("r")
        assert len(faces.coordinator.requests) == 0
        await raw.is_refused(asks("r", again=True))


async def test_resuming_an_unknown_request_counts_as_a_new_one(serve: Serve) -> None:
    clock = ManualClock()
    limited = gate(key(requests_per_minute=1), clock=clock)
    async with serve(limited) as faces, grpc.aio.insecure_channel(faces.grpc_address) as channel:
        find_target(faces.coordinator)
        raw = Raw(channel)
        await raw.begins(asks("r", 7, again=True))
        await raw.is_refused(asks("another"))
        # One that is here, of which the client has other tokens, would begin anew.
        await raw.is_refused(asks("r", 8, again=True))
        clock.advance(60.0)
        await raw.begins(asks("r", 8, again=True))
        await raw.is_refused(asks("another"))
        # Nothing of it is looked at before.
        for broken in ({}, {"resume_from": [1], "request_id": "another"}):
            await raw.is_refused(generation_pb2.GenerateRequest(**broken))


# ---- one key's requests are not another's -----------------------------------------------------------


async def test_requests_of_two_keys_are_independent(serve: Serve) -> None:
    """Under one name, with one prompt and one salt: found, resumed, cancelled and cached apart."""
    keys = gate(key(), key("bob", "pl-bob", requests_per_minute=2))
    async with serve(keys) as faces, grpc.aio.insecure_channel(faces.grpc_address) as channel:
        find_target(faces.coordinator)
        alice, bob = Raw(channel), Raw(channel, "pl-bob")
        here = faces.coordinator.requests
        hers = await alice.begins(asks("r"))
        # He goes on with nothing of hers: without a request of his own this one is charged, and begins.
        await bob.begins(asks("r", 7, again=True))
        await alice.begins(asks("only hers"))
        with ends_with(grpc.StatusCode.NOT_FOUND):
            await bob.cancel("only hers")
        await bob.begins(asks("his other"))
        await bob.is_refused(asks("only hers", again=True))
        assert len(here) == 4
        await bob.cancel("r")
        assert len(here) == 3
        # Hers is here still, and she is the one who can resume it.
        await alice.begins(asks("r", again=True))
        with ends_with(grpc.StatusCode.ABORTED):
            await hers.read()
        running = [each for request in here._requests.values() for each in request.choices]
        salts = {each.state.params.cache_salt for each in running}
        assert len(running) == 3
        assert len(salts) == 2, "one of each tenant"


async def test_two_simultaneous_resumes_share_one_request(serve: Serve) -> None:
    """The request is not held: the second call finds it when its own is about to begin."""
    async with serve(gate()) as faces, grpc.aio.insecure_channel(faces.grpc_address) as channel:
        find_target(faces.coordinator)
        prepared, both = faces.coordinator._prepared, asyncio.Barrier(2)

        async def at_once(*of: Any) -> Any:
            made = await prepared(*of)
            await both.wait()
            return made

        faces.coordinator._prepared = at_once  # type: ignore[method-assign]
        raw = Raw(channel)
        async with asyncio.timeout(HANG):
            calls = await asyncio.gather(*(raw.begins(asks("r", 7, again=True)) for _ in range(2)))
            assert len(faces.coordinator.requests) == 1
            await raw.cancel("r")
        codes = set()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            codes.add(failure.value.code())
        assert codes == {grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED}


# ---- sizes ----------------------------------------------------------------------------------------


async def test_requests_waiting_for_a_target_count_for_their_key(serve: Serve) -> None:
    """No target ever comes: waiting requests take the key's room and give it back."""
    room = gate(key(max_sequences=2))
    async with serve(room) as faces, faces.sdk(TOKEN) as client:

        async def held(wanted: dict[str, int]) -> None:
            await asyncio.to_thread(until, lambda: room._held == wanted, f"{wanted} held")

        async def refused(n: int) -> None:
            with pytest.raises(ResourceExhaustedError):
                await client.generate("a", {"n": n}, timeout=HANG)

        await refused(3)
        for numbers in ((1, 1), (2,)):
            waiting = [asyncio.create_task(client.generate("a", {"n": n}, timeout=HANG)) for n in numbers]
            await held({"alice": 2})
            await refused(1)
            for task in waiting:
                task.cancel()
            await held({})


async def test_all_prompts_of_a_request_fit_or_none_begins(serve: Serve) -> None:
    """A request that never fits must not be told to retry."""
    room = gate(key(max_sequences=4))
    async with serve(room) as faces, faces.web(TOKEN) as web:
        find_target(faces.coordinator)
        dispatcher, begun = faces.coordinator.dispatcher, []
        submit = dispatcher.submit
        dispatcher.submit = lambda *of: begun.append(of) or submit(*of)  # type: ignore[method-assign, func-returns-value]

        async def ask(number: int) -> httpx2.Response:
            values = {"prompt": ["a"] * number, "max_tokens": 4}
            return await web.post("/v1/completions", json=values)

        async def held(wanted: dict[str, int], number: int) -> None:
            there = lambda: room._held == wanted and len(begun) == number  # noqa: E731
            await asyncio.to_thread(until, there, f"{wanted} held")

        never = await ask(8)
        assert (never.status_code, "retry-after" in never.headers) == (429, False)
        await held({}, 0)
        waiting = asyncio.create_task(ask(2))
        await held({"alice": 2}, 2)
        later = await ask(3)
        assert (later.status_code, later.headers["retry-after"]) == (429, "1")
        await held({"alice": 2}, 2)
        waiting.cancel()
        await held({}, 2)


async def test_a_message_above_the_bound_is_refused(serve: Serve) -> None:
    unbounded = [("grpc.max_send_message_length", -1)]
    async with serve(None) as faces:
        async with grpc.aio.insecure_channel(faces.grpc_address, options=unbounded) as channel:
            call = channel.unary_unary("/paceline.v1.GenerationService/Tokenize")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call(b"\x0a" + b"x" * limits.MAX_MESSAGE_BYTES, timeout=HANG)
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        says_nothing(failure.value.details() or "")
        async with faces.web(None) as web:
            answer = await web.post("/tokenize", content=b" " * (limits.MAX_HTTP_BODY_BYTES + 1))
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        async with faces.sdk(None) as client:
            with pytest.raises(ResourceExhaustedError):
                await client.tokenize("x" * limits.MAX_MESSAGE_BYTES)
            with refused("text"):
                await client.tokenize("x" * (limits.MAX_PROMPT_CHARACTERS + 1))


async def test_a_message_too_large_for_the_model_is_refused(serve: Serve) -> None:
    async with serve(None) as faces, grpc.aio.insecure_channel(faces.grpc_address) as channel:
        find_target(faces.coordinator)
        most = faces.coordinator.max_request_bytes
        assert most < 2 * 2**20
        call = channel.unary_unary("/paceline.v1.GenerationService/Tokenize")
        for more, code in ((0, "max_model_len"), (1, f"at most {most} bytes")):
            with ends_with(grpc.StatusCode.INVALID_ARGUMENT) as failure:
                await call(b"\x0a\xff\xff\x7f" + b"x" * (most - 4 + more), timeout=HANG)
            assert more == 0 or code in (failure.value.details() or "")


async def test_an_unauthenticated_body_is_not_read(serve: Serve) -> None:
    async with serve(gate()) as faces, faces.web("pl-wrong") as web:
        answer = await web.post("/v1/completions", content=b"{" * 100_000)
        assert answer.status_code == 401


# ---- the file of keys -----------------------------------------------------------------------------


def config(file: Path | str, **more: Any) -> CoordinatorConfig:
    return CoordinatorConfig(targets=("a:1",), tokenizer="t", api_keys=str(file), **more)


async def test_sighup_reloads_the_keys(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "keys.json"
    write_keys(file, KeyRing([key()]))
    own = make_gate(config(file))
    async with serve(own) as faces, faces.web(TOKEN) as alice, faces.web("pl-bob") as bob:
        reload_on_hangup(own, config(file))
        assert (await alice.get("/version")).status_code == 200
        assert (await bob.get("/version")).status_code == 401
        write_keys(file, KeyRing([key("bob", "pl-bob")]))
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await bob.get("/version")).status_code == 200
        assert (await alice.get("/version")).status_code == 401
        file.write_text("{")
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await bob.get("/version")).status_code == 200
    assert "1 API keys are in use" in caplog.text
    assert "the API keys are unchanged" in caplog.text
    assert "pl-bob" not in caplog.text


def test_a_missing_key_file_prevents_the_start(tmp_path: Path) -> None:
    with refused("api_keys"):
        make_gate(config(tmp_path / "none"))
    assert not make_gate(config("")).asks_for_keys


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"host": "127.0.0.1"}, None),
        ({"host": "[::1]"}, None),
        ({"host": "localhost"}, None),
        ({"host": "0.0.0.0"}, "TLS and API keys"),
        ({"host": "10.0.0.1", "tls_certificate": "c", "tls_key": "k"}, "API keys"),
        ({"host": "0.0.0.0", "api_keys": "f"}, "TLS"),
        ({"host": "0.0.0.0", "api_keys": "f", "tls_certificate": "c", "tls_key": "k"}, None),
    ],
)
def test_missing_protection_is_warned_of(
    values: dict[str, str], missing: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(CoordinatorConfig(targets=("a:1",), tokenizer="t", **values))  # type: ignore[arg-type]
    if missing is None:
        assert not caplog.records
    else:
        assert f"without {missing}:" in caplog.text
