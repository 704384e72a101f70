"""Broken connections: the client gets the tokens and text of a run without faults, each once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import pytest
from harness.cutting import CuttingProxy
from harness.history import validate
from harness.refusals import ends_with
from harness.resumed import history_of
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator
from harness.unread import NARROW, until_it_stands_still
from harness.waiting import HANG, until
from harness.web import Http

from paceline.client import AsyncClient, Client, GenerationChunk, GenerationResult, links, sync_calls
from paceline.client.channel import CHANNEL_OPTIONS
from paceline.client.requests import generate_request
from paceline.core.errors import (
    AlreadyExistsError,
    CancelledError,
    NotFoundError,
    PacelineError,
    UnavailableError,
)
from paceline.core.limits import MAX_UNREAD_TOKENS
from paceline.rpc.codec.status import from_rpc_error
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc

PROMPT = "def main("
TOKENS = 240
FIRST_CUT = 300
"""Bytes: what a connection begins with and a few tokens."""
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "seed": 1, "max_tokens": TOKENS, "ignore_eos": True}
COUPLED: Mapping[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": TOKENS, "ignore_eos": True}
EVERYTHING: Mapping[str, Any] = {
    **COUPLED,
    "n": 3,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_tokens": 20,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "echo": True,
    "bad_words": ["self"],
}
CASES = {"greedy": GREEDY, "coupled": COUPLED, "everything": EVERYTHING}
K = {"num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def forgetful(stack: RunningStack) -> Iterator[OwnCoordinator]:
    """A coordinator that holds nothing: every resumption opens the request again from what was received."""
    targets, drafts = ([stack.stack.address_of(role)] for role in ("target", "draft"))
    with own_coordinator(stack.pair, targets, drafts, resume_seconds=0.0) as own:
        yield own


@pytest.fixture(scope="module")
def hasty(stack: RunningStack) -> Iterator[OwnCoordinator]:
    """A coordinator that holds requests for half a second."""
    targets, drafts = ([stack.stack.address_of(role)] for role in ("target", "draft"))
    with own_coordinator(stack.pair, targets, drafts, resume_seconds=0.5) as own:
        yield own


def limits() -> Iterator[int]:
    """How many bytes come before each cut: far fewer than a stream has, twice as many each time.

    However few messages the tokens come in, some connection carries the whole of the next.
    """
    limit = FIRST_CUT
    while True:
        yield limit
        limit *= 2


def read_with_cuts(
    address: str, sampling: Mapping[str, Any], **speculation: Any
) -> tuple[list[GenerationChunk], GenerationResult, int]:
    """The chunks of a stream whose connection is reset again and again, perhaps before it has begun."""
    with CuttingProxy(address, limits()) as proxy, Client(proxy.address, resume_seconds=HANG) as client:
        stream = client.stream(PROMPT, sampling, speculation={**K, **speculation}, timeout=HANG)
        chunks = list(stream)
        assert stream.result is not None
        return chunks, stream.result, stream.num_resumes


def check_same(chunks: Sequence[GenerationChunk], result: GenerationResult, whole: GenerationResult) -> None:
    """The result, and what the chunks add up to, is that of the run without faults."""
    for got, want in zip(result.outputs, whole.outputs, strict=True):
        assert got.token_ids == want.token_ids
        assert got.text == want.text
        assert (got.finish_reason, got.stop_reason, got.seed) == (
            want.finish_reason,
            want.stop_reason,
            want.seed,
        )
        mine = [chunk for chunk in chunks if chunk.choice == got.choice]
        assert "".join(chunk.text for chunk in mine) == want.text
        assert [token for chunk in mine for token in chunk.token_ids] == list(want.token_ids)
        validate(history_of(mine), want.token_ids)
        if want.logprobs is not None:
            assert [list(p) for p in got.logprobs or ()] == [list(p) for p in want.logprobs]
            assert sum(len(chunk.logprobs) for chunk in mine) == len(want.token_ids)
    assert result.usage == whole.usage
    assert (result.prompt_token_ids, result.seed) == (whole.prompt_token_ids, whole.seed)
    if whole.prompt_logprobs is not None:
        told = [position for chunk in chunks for position in chunk.prompt_logprobs]
        assert [list(p) for p in told] == [list(p) for p in whole.prompt_logprobs if p is not None]


@pytest.mark.parametrize("case", CASES)
def test_a_held_request_resumes_where_it_was(stack: RunningStack, case: str) -> None:
    whole = stack.client.generate(PROMPT, CASES[case], speculation=K, timeout=HANG)
    chunks, result, resumes = read_with_cuts(stack.address, CASES[case])
    check_same(chunks, result, whole)
    assert resumes >= 2
    # Held, not opened again: the rounds of all calls are counted.
    for output in result.outputs:
        stats = output.speculative_decoding
        assert stats.num_rounds + stats.num_accepted_draft_tokens >= len(output.token_ids)
    stack.check_pools_whole()


@pytest.mark.parametrize("case", CASES)
def test_a_request_no_longer_held_is_reopened(
    stack: RunningStack, forgetful: OwnCoordinator, case: str
) -> None:
    whole = stack.client.generate(PROMPT, CASES[case], speculation=K, timeout=HANG)
    chunks, result, resumes = read_with_cuts(forgetful.address, CASES[case])
    check_same(chunks, result, whole)
    assert resumes >= 2
    stack.check_pools_whole()


async def test_the_async_client_resumes_too(stack: RunningStack) -> None:
    whole = stack.client.generate(PROMPT, COUPLED, speculation=K, timeout=HANG)
    with CuttingProxy(stack.address, limits()) as proxy:
        async with AsyncClient(proxy.address, resume_seconds=HANG) as client:
            stream = client.stream(PROMPT, COUPLED, speculation=K, timeout=HANG)
            chunks = [chunk async for chunk in stream]
            assert stream.result is not None
            check_same(chunks, stream.result, whole)
            assert stream.num_resumes >= 2


def test_a_resumed_request_keeps_the_servers_seed(stack: RunningStack, forgetful: OwnCoordinator) -> None:
    sampling = {**COUPLED, "seed": None}
    _, result, resumes = read_with_cuts(forgetful.address, sampling)
    assert resumes > 0
    again = stack.client.generate(PROMPT, {**sampling, "seed": result.seed}, timeout=HANG)
    assert again.token_ids == result.token_ids


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_ratio_modes_resume_too(stack: RunningStack, forgetful: OwnCoordinator, mode: str) -> None:
    """Held requests are the same run; reopened ones are another draw of the same distribution."""
    for address in (stack.address, forgetful.address):
        chunks, result, resumes = read_with_cuts(address, COUPLED, acceptance=mode)
        assert resumes >= 2
        validate(history_of(chunks))
        assert len(result.token_ids) == TOKENS


# ---- every border, by hand -----------------------------------------------------------------------------


def resumption(
    sampling: Mapping[str, Any], received: Sequence[int], name: str, **changes: Any
) -> pb.GenerateRequest:
    request = generate_request(PROMPT, dict(sampling), {"num_speculative_tokens": 3}, name)
    request.resume_from.append(len(received))
    request.received.add(ids=received)
    for field, value in changes.items():
        setattr(request, field, value)
    return request


def play(address: str, request: pb.GenerateRequest) -> tuple[tuple[int, ...], str, pb.GenerateFinished]:
    with grpc.insecure_channel(address) as channel:
        messages = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=HANG))
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    due = request.resume_from[0]
    for chunk in chunks:
        assert chunk.index == due
        due += len(chunk.token_ids)
    finished = messages[-1].finished
    return tokens, "".join(chunk.text for chunk in chunks) + finished.text, finished


@pytest.mark.parametrize("extra", [{}, {"include_stop_str_in_output": True}], ids=["cut", "kept"])
def test_resuming_works_at_every_border_of_a_stop_string(
    stack: RunningStack, forgetful: OwnCoordinator, extra: Mapping[str, Any]
) -> None:
    """Wherever the client was cut, also inside the stop string and after the last token."""
    free = stack.client.generate(PROMPT, {**COUPLED, "max_tokens": 30}, timeout=HANG)
    stop = free.text[len(free.text) // 2 :][:6]
    sampling = {**COUPLED, "max_tokens": 30, "stop": [stop], **extra}
    stream = stack.client.stream(PROMPT, sampling, speculation={"num_speculative_tokens": 0}, timeout=HANG)
    shown = {0: ""}
    count, text = 0, ""
    for chunk in stream:
        count, text = count + len(chunk.token_ids), text + chunk.text
        shown[count] = text
    whole = stream.result
    assert whole.stop_reason == stop
    assert sorted(shown) == list(range(len(whole.token_ids) + 1))
    for at in range(len(whole.token_ids) + 1):
        tokens, text, finished = play(
            forgetful.address, resumption(sampling, whole.token_ids[:at], f"border-{at}")
        )
        assert tokens == whole.token_ids[at:], at
        assert shown[at] + text == whole.text, at
        assert finished.stop_string == stop
        assert finished.usage.completion_tokens == len(whole.token_ids)
    stack.check_pools_whole()


def refusal(address: str, request: pb.GenerateRequest) -> PacelineError:
    with pytest.raises(grpc.RpcError) as caught:
        play(address, request)
    return from_rpc_error(caught.value)


def test_an_impossible_resumption_is_refused(stack: RunningStack, forgetful: OwnCoordinator) -> None:
    address = forgetful.address
    without_tokens = resumption(COUPLED, (5, 6), "r")
    del without_tokens.received[:]
    assert isinstance(refusal(address, without_tokens), NotFoundError)
    two = resumption(COUPLED, (5, 6), "r")
    two.resume_from.append(0)
    short = resumption(COUPLED, (5, 6), "r")
    short.resume_from[0] = 3
    lonely = generate_request(PROMPT, None, None, "r")
    lonely.received.add(ids=[5])
    nameless = generate_request(PROMPT, None, None, None)
    nameless.resumable = True
    for field, request in (
        ("seed", resumption({**COUPLED, "seed": None}, (5, 6), "r")),
        ("request_id", resumption(COUPLED, (5, 6), "")),
        ("request_id", nameless),
        ("resume_from", two),
        ("received", short),
        ("received", lonely),
        ("received", resumption(COUPLED, (5, 2**31), "r")),
        ("received", resumption({**COUPLED, "max_tokens": 2}, (5, 6, 7), "r")),
    ):
        assert refusal(address, request).field == field
    stack.good_request()


# ---- who holds what, and for how long ------------------------------------------------------------------

LONG: Mapping[str, Any] = {**COUPLED, "max_tokens": 1500}
SHORTER: Mapping[str, Any] = {**COUPLED, "max_tokens": 300}


def running(client: Client) -> int:
    return client.status().coordinator.running


def begin(address: str, name: str, sampling: Mapping[str, Any] = LONG) -> tuple[grpc.Channel, Any]:
    """A raw resumable stream with its first tokens read."""
    channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    request = generate_request(PROMPT, sampling, K, name)
    request.resumable = True
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=HANG)
    while not next(call).chunk.token_ids:
        pass
    return channel, call


def test_a_client_that_never_returns_frees_everything(stack: RunningStack, hasty: OwnCoordinator) -> None:
    finished = hasty.client.status().coordinator.finished_requests
    channel, _ = begin(hasty.address, "gone")
    assert running(hasty.client) == 1
    channel.close()
    until(lambda: running(hasty.client) == 0, "the end of what was held", timeout=10.0)
    assert hasty.client.status().coordinator.finished_requests == finished
    stack.check_pools_whole()


def test_a_held_request_pauses_at_the_unread_bound(stack: RunningStack, http: Http) -> None:
    """Unread, it neither finishes nor fails until it is cancelled by id."""

    def generated() -> float:
        return http.total("paceline:generation_tokens_total") - before

    before = http.total("paceline:generation_tokens_total")
    # Sooner there than what is sampled, for its text repeats itself and is foreseen.
    channel, _ = begin(stack.address, "held", {**GREEDY, "max_tokens": 1500})
    channel.close()
    assert MAX_UNREAD_TOKENS <= until_it_stands_still(generated) < LONG["max_tokens"]
    assert running(stack.client) == 1
    with stack.stub() as stub:
        with ends_with(grpc.StatusCode.ALREADY_EXISTS) as caught:
            list(stub.Generate(generate_request(PROMPT, LONG, K, "held"), timeout=HANG))
        error = from_rpc_error(caught.value)
        assert isinstance(error, AlreadyExistsError)
        assert error.field == "request_id"
        stub.Cancel(pb.CancelRequest(request_id="held"), timeout=HANG)
        assert running(stack.client) == 0
        with ends_with(grpc.StatusCode.NOT_FOUND):
            stub.Cancel(pb.CancelRequest(request_id="held"), timeout=HANG)
    stack.check_pools_whole()


def test_cancelling_by_id_ends_a_stream_being_read(stack: RunningStack) -> None:
    channel, call = begin(stack.address, "read")
    with stack.stub() as stub:
        stub.Cancel(pb.CancelRequest(request_id="read"), timeout=HANG)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert isinstance(from_rpc_error(caught.value), CancelledError)
    channel.close()
    stack.check_pools_whole()


def test_a_stream_being_read_can_be_taken_over(stack: RunningStack) -> None:
    """The client may notice a lost connection before the server does."""
    channel, call = begin(stack.address, "taken", SHORTER)
    request = generate_request(PROMPT, SHORTER, K, "taken")
    request.resumable = True
    request.resume_from.append(0)
    other, taken = grpc.insecure_channel(stack.address), []
    for message in generation_pb2_grpc.GenerationServiceStub(other).Generate(request, timeout=HANG):
        taken.extend(message.chunk.token_ids)
    with ends_with(grpc.StatusCode.ABORTED):
        list(call)
    whole = stack.client.generate(PROMPT, SHORTER, timeout=HANG)
    assert tuple(taken) == whole.token_ids
    channel.close()
    other.close()


def test_an_exhausted_resume_budget_names_the_last_index(
    stack: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (links, sync_calls):
        monkeypatch.setattr(module, "CANCEL_SECONDS", HANG)
    cuts = itertools.chain([20 * FIRST_CUT], itertools.repeat(0))
    with CuttingProxy(stack.address, cuts) as proxy, Client(proxy.address, resume_seconds=0.5) as client:
        stream = client.stream(PROMPT, LONG, speculation=K, timeout=HANG)
        received = []

        def read() -> None:
            for chunk in stream:
                received.extend(chunk.token_ids)

        with pytest.raises(UnavailableError) as caught:
            read()
        assert caught.value.last_index == len(received) - 1 > 0
        assert stream.num_resumes >= 1
    with stack.stub() as stub:  # the client's own word of it did not come through either
        stub.Cancel(pb.CancelRequest(request_id=stream.request_id or ""), timeout=HANG)
    stack.check_pools_whole()


def test_a_cut_reader_resumes_when_it_reads_again(
    stack: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are free meanwhile. The window is small and messages fill the buffers."""
    monkeypatch.setattr(links, "CHANNEL_OPTIONS", (*CHANNEL_OPTIONS, *NARROW))
    sampling = {**COUPLED, "max_tokens": 1500, "logprobs": 20}
    targets, drafts = ([stack.stack.address_of(role)] for role in ("target", "draft"))
    with (
        own_coordinator(stack.pair, targets, drafts, unread_timeout=0.2) as own,
        Client(own.address) as client,
    ):
        stream = client.stream(PROMPT, sampling, timeout=HANG)
        chunks = [next(stream)]
        until(lambda: running(own.client) == 0, "the end of the sequence that nobody reads")
        assert own.client.status().coordinator.failed_requests == 1
        stack.check_pools_whole()
        chunks.extend(stream)
        assert stream.num_resumes == 1
        whole = own.client.generate(PROMPT, {**sampling, "logprobs": None}, timeout=HANG)
        validate(history_of(chunks), whole.token_ids)
        assert stream.result.text == whole.text
