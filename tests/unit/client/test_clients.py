"""Both clients against a scripted server."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from harness.refusals import refused

import paceline
from paceline import AcceptanceMode, Client, SamplingParams, SpeculationParams, TokenOrigin
from paceline.client import WorkerState
from paceline.core import errors
from paceline.core.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from paceline.rpc import codec

WAIT = 30
"""Seconds after which a test hangs; never waited for otherwise."""
DEADLINES = (0.3, 3.0, float(WAIT))
"""A busy machine may take longer than the first to begin a call."""

FAILURES = [
    InvalidArgumentError("top_p", "must be in (0, 1], got 3"),
    errors.TokenizerMismatchError("tokenizer", "differs"),
    errors.AlreadyExistsError("request_id", "is running already"),
    errors.NotFoundError("no such model"),
    errors.FailedPreconditionError("behind"),
    errors.StaleEpochError("taken over"),
    ResourceExhaustedError("queue is full"),
    UnavailableError("no target worker", 41),
    DeadlineExceededError("too late"),
    CancelledError("drained"),
    InternalError("the model gave NaN"),
]


def test_generate_returns_the_whole_result(client: Any) -> None:
    result = client.generate("Say hello")
    assert result.text == "Hello!"
    assert result.token_ids == (11, 12, 13, 14)
    assert result.origins == (
        TokenOrigin.TARGET,
        TokenOrigin.ACCEPTED,
        TokenOrigin.CORRECTION,
        TokenOrigin.TARGET,
    )
    assert (result.finish_reason, result.stop_reason) == ("stop", "END")
    assert (result.request_id, result.seed, result.acceptance) == ("r-1", 7, AcceptanceMode.BLOCK)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (
        3,
        4,
        7,
    )
    assert result.speculative_decoding.mean_acceptance_length == 2.5
    assert result.speculative_decoding.acceptance_histogram == (0, 1, 1)
    assert result.timings.draft == 1.0
    assert result.timings.coordinator == 5e-6


def test_stream_yields_chunks_of_the_result(client: Any) -> None:
    stream = client.stream("Say hello")
    chunks = list(stream)
    assert [(c.index, c.token_ids, c.text) for c in chunks] == [
        (0, (11,), "He"),
        (1, (12, 13), ""),
        (3, (14,), "llo"),
        (4, (), "!"),
    ]
    assert chunks[1].origins == (TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION)
    assert [c.finish_reason for c in chunks] == [None, None, None, "stop"]
    assert [c.result for c in chunks[:-1]] == [None] * 3
    assert "".join(c.text for c in chunks) == chunks[-1].result.text == "Hello!"
    assert stream.result is chunks[-1].result
    assert stream.request_id == "r-1"
    assert list(stream) == []


def test_the_request_carries_the_users_parameters(server: Any, client: Any) -> None:
    sampling = SamplingParams(temperature=0.5, seed=3, stop="END", max_tokens=None)
    client.generate(
        [1, 2, 3],
        sampling,
        speculation=SpeculationParams(num_speculative_tokens=2, acceptance="rejection"),
        request_id="mine",
        cache_salt="tenant",
    )
    call = codec.generate_request_from_proto(server.requests[0])
    assert call.prompt == (1, 2, 3)
    assert (call.request_id, call.cache_salt) == ("mine", "tenant")
    assert call.sampling == sampling
    assert call.speculation.num_speculative_tokens == 2
    assert call.speculation.mode is AcceptanceMode.REJECTION


def test_parameters_may_be_dictionaries(server: Any, client: Any) -> None:
    client.generate("x", {"temperature": 0, "max_tokens": 5}, speculation={"num_speculative_tokens": 0})
    call = codec.generate_request_from_proto(server.requests[0])
    assert call.sampling == SamplingParams(temperature=0, max_tokens=5)
    assert call.speculation == SpeculationParams(num_speculative_tokens=0)


def test_default_parameters_are_those_of_the_classes(server: Any, client: Any) -> None:
    client.generate("x")
    call = codec.generate_request_from_proto(server.requests[0])
    assert (call.sampling, call.speculation, call.request_id) == (SamplingParams(), SpeculationParams(), "")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "x", "sampling": {"temprature": 1}}, "temprature"),
        ({"prompt": "x", "speculation": {"k": 1}}, "k"),
        ({"prompt": "x", "sampling": {"top_p": 2}}, "top_p"),
        ({"prompt": "x", "sampling": {"top_k": 2**40}}, "top_k"),
        ({"prompt": "x", "sampling": {"stop_token_ids": [2**32]}}, "stop_token_ids"),
        ({"prompt": "x", "sampling": {"logit_bias": {2**32: 1.0}}}, "logit_bias"),
        ({"prompt": "x", "sampling": {"stop": ["\ud800"]}}, "stop"),
        ({"prompt": "x", "sampling": 3}, "sampling"),
        ({"prompt": "x", "speculation": "coupled"}, "speculation"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": b"bytes"}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2**32]}, "prompt"),
        ({"prompt": [1, 2.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "x", "request_id": 5}, "request_id"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "x", "timeout": 0}, "timeout"),
        ({"prompt": "x", "timeout": float("nan")}, "timeout"),
        ({"prompt": "x", "timeout": float("inf")}, "timeout"),
        ({"prompt": "x", "timeout": 1e18}, "timeout"),
        ({"prompt": "x", "timeout": "5"}, "timeout"),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_invalid_arguments_are_refused_before_sending(
    server: Any, client: Any, method: str, arguments: dict[str, Any], field: str
) -> None:
    with refused(field):
        getattr(client, method)(**arguments)
    assert server.requests == []


@pytest.mark.parametrize("error", FAILURES, ids=lambda e: type(e).__name__)
def test_every_failure_is_a_paceline_error(server: Any, client: Any, error: Any) -> None:
    server.play_and_fail(error)
    with pytest.raises(errors.PacelineError) as caught:
        client.generate("x")
    assert type(caught.value) is type(error)
    assert caught.value.message == error.message
    assert getattr(caught.value, "field", None) == getattr(error, "field", None)
    assert getattr(caught.value, "last_index", None) == getattr(error, "last_index", None)


@pytest.mark.parametrize("error", FAILURES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("method", "arguments"),
    [("tokenize", ["x"]), ("detokenize", [[65]]), ("models", []), ("status", []), ("chat", [[]])],
)
def test_unary_failures_are_paceline_errors(
    server: Any, client: Any, method: str, arguments: list[Any], error: Any
) -> None:
    server.error = error
    with pytest.raises(errors.PacelineError) as caught:
        getattr(client, method)(*arguments)
    assert type(caught.value) is type(error)
    assert caught.value.message == error.message


def test_an_error_midway_follows_the_earlier_tokens(server: Any, client: Any, messages: Any) -> None:
    server.play_and_fail(UnavailableError("target lost"), *messages.good[:3])
    stream = client.stream("x")
    assert next(stream).token_ids == (11,)
    assert next(stream).token_ids == (12, 13)
    with pytest.raises(UnavailableError, match="target lost") as caught:
        next(stream)
    assert caught.value.last_index == 2
    assert list(stream) == []


def test_a_truncated_stream_names_the_last_index(server: Any, client: Any, messages: Any) -> None:
    server.play(*messages.good[:4])
    with pytest.raises(UnavailableError) as caught:
        client.generate("x")
    assert caught.value.last_index == 3


def test_an_empty_stream_is_unavailable(server: Any, client: Any) -> None:
    server.play()
    with pytest.raises(UnavailableError) as caught:
        client.generate("x")
    assert caught.value.last_index is None


def test_a_skipped_index_ends_the_call(server: Any, client: Any, messages: Any) -> None:
    server.play_and_block(messages.good[0], messages.good[1], messages.good[3])
    with pytest.raises(InternalError, match="index 3 instead of 1"):
        client.generate("x")
    assert server.ended.wait(WAIT)


def test_an_error_after_the_result_changes_nothing(server: Any, client: Any, messages: Any) -> None:
    server.play_and_fail(InternalError("late"), *messages.good)
    assert client.generate("x").text == "Hello!"
    assert len(list(client.stream("x"))) == 4


def test_chunks_do_not_wait_for_the_streams_end(server: Any, client: Any, messages: Any) -> None:
    server.play_and_block(*messages.good)
    stream = client.stream("x")
    last = [next(stream) for _ in range(4)][-1]
    assert last.result.text == "Hello!"
    assert not server.ended.is_set()
    stream.close()


def test_closing_a_stream_cancels_it_on_the_server(server: Any, client: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    stream = client.stream("x")
    assert next(stream).text == "He"
    assert not server.ended.is_set()
    stream.close()
    assert server.ended.wait(WAIT)
    assert list(stream) == []
    assert stream.result is None


@pytest.mark.usefixtures("no_gc")
def test_dropping_a_stream_cancels_it_on_the_server(server: Any, client: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    for chunk in client.stream("x"):
        assert chunk.text == "He"
        break
    assert server.ended.wait(WAIT)


def test_an_unread_stream_is_cancelled_too(server: Any, client: Any, messages: Any) -> None:
    server.play_and_block(messages.good[0])
    stream = client.stream("x")
    assert server.blocked.wait(WAIT)
    del stream
    assert server.ended.wait(WAIT)


def test_the_deadline_covers_the_whole_call(server: Any, client: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    for timeout in DEADLINES:
        with pytest.raises(DeadlineExceededError):
            client.generate("x", timeout=timeout)
        if server.blocked.is_set():
            break
    assert server.blocked.is_set()
    assert server.ended.wait(WAIT)


def test_a_huge_timeout_is_accepted(client: Any) -> None:
    assert client.generate("x", timeout=1e9).text == "Hello!"


def test_a_missing_server_is_unavailable(connect: Any) -> None:
    with socket.socket() as bound_but_deaf:
        bound_but_deaf.bind(("127.0.0.1", 0))
        client = connect(f"127.0.0.1:{bound_but_deaf.getsockname()[1]}")
        for call in (lambda: client.generate("x"), lambda: client.tokenize("x"), client.status):
            with pytest.raises(UnavailableError):
                call()


def test_a_closed_client_refuses_calls(client: Any) -> None:
    assert client.generate("x").text == "Hello!"
    client.close()
    client.close()
    for call in (lambda: client.generate("x"), lambda: client.stream("x"), lambda: client.tokenize("x")):
        with pytest.raises(UnavailableError, match="closed"):
            call()


def test_closing_the_client_cancels_its_streams(server: Any, client: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    stream = client.stream("x")
    assert next(stream).text == "He"
    client.close()
    with pytest.raises(CancelledError):
        next(stream)
    assert server.ended.wait(WAIT)


class Interrupted(weakref.WeakSet[Any]):
    """While it is copied, another thread does something, if it may."""

    def __init__(self, of: Iterable[Any], action: Callable[[], Any]) -> None:
        super().__init__(of)
        self.action = action

    def __iter__(self) -> Iterator[Any]:
        for i, item in enumerate(super().__iter__()):
            if i == 0:
                # It waits for the lock: then there is nothing to wait for here.
                acting = threading.Thread(target=self.action)
                acting.start()
                acting.join(0.05)
            yield item


def test_a_stream_begun_during_close_is_closed_or_refused(
    server: Any, messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins in another thread. The connection is closed in any case."""
    server.play_and_block(*messages.good[:2])
    client = Client(server.address, resume_seconds=0)
    streams, outcome = [client.stream("x") for _ in range(2)], SimpleQueue[Any]()

    def begin() -> None:
        try:
            streams.append(client.stream("x"))
        except UnavailableError as error:
            outcome.put(error)
        else:
            outcome.put(None)

    monkeypatch.setattr(client, "_streams", Interrupted(streams, begin))
    client.close()
    refusal = outcome.get(timeout=WAIT)
    assert refusal is None or "closed" in refusal.message
    for stream in streams:
        with pytest.raises(CancelledError):
            list(stream)
    with pytest.raises(UnavailableError, match="closed"):
        client.tokenize("x")


def test_many_buffered_chunks_are_all_read(server: Any, client: Any, messages: Any) -> None:
    """The end of the stream may arrive long before the client reads; nothing before it is lost."""
    count = 500
    chunks = [messages.chunk(i, [i], "a", [messages.target]) for i in range(count)]
    server.play(messages.started(), *chunks, messages.finished(count))
    stream = client.stream("x")
    assert server.ended.wait(WAIT)
    assert [chunk.index for chunk in stream] == list(range(count + 1))
    assert stream.result.usage.completion_tokens == count


def test_tokenize_and_detokenize_round_trip(client: Any) -> None:
    assert client.tokenize("Hé") == (72, 195, 169)
    assert client.detokenize([72, 195, 169]) == "Hé"
    assert client.tokenize("") == ()
    with refused("text"):
        client.tokenize(5)
    with refused("token_ids"):
        client.detokenize("ab")


def test_models_are_listed(client: Any) -> None:
    (model,) = client.models()
    assert (model.id, model.max_model_len, model.vocabulary_size) == ("tiny", 64, 256)


def test_status_mirrors_the_message(client: Any) -> None:
    status = client.status()
    assert status.coordinator.acceptance_mode is AcceptanceMode.COUPLED
    assert status.coordinator.finished_requests == 5
    target, draft = status.workers
    assert (target.role, target.state, target.info.eos_token_ids) == ("target", WorkerState.READY, (1, 2))
    assert target.info.cache.free_blocks == 7
    assert (draft.state, draft.reason, draft.info) == (WorkerState.LOST, "gone", None)


@pytest.mark.parametrize("address", ["", None, 5])
def test_an_address_is_required(address: Any) -> None:
    for kind in (paceline.Client, paceline.AsyncClient):
        with refused("address"):
            kind(address)
