"""Workers and clients of the last version beside those of this one, and workers of one that does not fit.

They are real ones of this version, behind a proxy that takes away what the last version does not have.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import pytest
from harness.history import History, Recording, validate
from harness.last_version import as_last_version, as_next_version
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator
from harness.waiting import HANG, until
from harness.wire import Proxy

from paceline.client import WorkerState
from paceline.client.requests import generate_request
from paceline.v1 import common_pb2, generation_pb2_grpc

PROMPT = "import os\n\n\ndef main("
SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.3, "logprobs": 1},
)
TOKENS = 40
SPECULATION = {"num_speculative_tokens": 3, "drafter": "draft"}
ROLES = ("target", "draft")
NEEDED = (
    "protocol_version",
    "role",
    "model",
    "instance_id",
    "vocabulary_size",
    "tokenizer_fingerprint",
    "eos_token_ids",
    "max_model_len",
    "max_speculative_tokens",
)
"""What a worker must say of itself."""


def parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, **sampling}


@pytest.fixture(scope="module")
def plain(stack: RunningStack) -> list[tuple[int, ...]]:
    """The tokens of a target alone."""
    return [
        stack.client.generate(
            PROMPT, parameters(each), speculation={"num_speculative_tokens": 0}, timeout=HANG
        ).token_ids
        for each in SAMPLINGS
    ]


@contextlib.contextmanager
def proxies(stack: RunningStack) -> Iterator[dict[str, Proxy]]:
    """One before each worker of the shared stack."""
    with contextlib.ExitStack() as opened:
        yield {role: opened.enter_context(Proxy(stack.stack.address_of(role), role)) for role in ROLES}


def states(own: OwnCoordinator) -> dict[str, WorkerState]:
    return {worker.address: worker.state for worker in own.client.status().workers}


def wait_for(own: OwnCoordinator, state: WorkerState, *addresses: str) -> None:
    until(lambda: all(states(own)[each] is state for each in addresses), f"{state} of {addresses}")


def check_streams(own: OwnCoordinator, plain: Sequence[tuple[int, ...]]) -> list[History]:
    """Streams at the same time, each with the tokens of plain decoding."""
    streams = [
        Recording(own.address, PROMPT, parameters(each), SPECULATION) for each in SAMPLINGS[: len(plain)]
    ]
    histories = [stream.result() for stream in streams]
    for history, tokens in zip(histories, plain, strict=True):
        validate(history, tokens)
    return histories


def check_drafted(own: OwnCoordinator, plain: Sequence[tuple[int, ...]]) -> None:
    """The same, with tokens of the draft worker."""
    for history in check_streams(own, plain):
        assert history.finished.speculative_decoding.num_accepted_draft_tokens > 0


def of_version(number: int) -> Callable[[common_pb2.WorkerInfo], common_pb2.WorkerInfo]:
    def describe(info: common_pb2.WorkerInfo) -> common_pb2.WorkerInfo:
        info.protocol_version = number
        return info

    return describe


@pytest.mark.parametrize("number", [0, 2], ids=["older", "newer"])
def test_a_worker_of_another_version_is_refused(
    stack: RunningStack, plain: list[tuple[int, ...]], number: int
) -> None:
    """By both numbers. The others serve as if it were not there, and it gets no sequence."""
    fits = {role: stack.stack.address_of(role) for role in ROLES}
    with proxies(stack) as others:
        for proxy in others.values():
            proxy.describe = of_version(number)
        addresses = [(other.address, fits[role]) for role, other in others.items()]
        with own_coordinator(stack.pair, *addresses) as own:
            wait_for(own, WorkerState.READY, *fits.values())
            wait_for(own, WorkerState.REFUSED, *(other.address for other in others.values()))
            refused = [w for w in own.client.status().workers if w.state is WorkerState.REFUSED]
            reason = f"the worker has protocol version {number}, this coordinator 1"
            assert [worker.reason for worker in refused] == [reason] * 2
            check_drafted(own, plain)
            assert own.client.status().coordinator.failed_requests == 0
            # It is asked again, and taken when it fits.
            assert [other.commands for other in others.values()] == [[], []]
            for other in others.values():
                other.describe = of_version(1)
            wait_for(own, WorkerState.READY, *(other.address for other in others.values()))
    stack.check_pools_whole()


def test_a_worker_may_come_back_in_another_version(stack: RunningStack, plain: list[tuple[int, ...]]) -> None:
    """In the middle of its streams, which go on at the others."""
    fits = [stack.stack.address_of(role) for role in ROLES]
    with proxies(stack) as others:
        changing = [other.address for other in others.values()]
        with own_coordinator(stack.pair, *zip(fits, changing, strict=True)) as own:
            wait_for(own, WorkerState.READY, *fits, *changing)
            streams = [
                Recording(own.address, PROMPT, parameters(each), SPECULATION) for each in SAMPLINGS * 4
            ]
            for role, other in others.items():
                until(lambda other=other: any(other.commands), f"a command to the {role}")
            for other in others.values():
                other.describe = of_version(2)
                other.hang_up()
            for stream, tokens in zip(streams, plain * 4, strict=True):
                validate(stream.result(), tokens)
            wait_for(own, WorkerState.REFUSED, *changing)
            check_drafted(own, plain)
            assert own.client.status().coordinator.failed_requests == 0
    stack.check_pools_whole()


def only_what_is_needed(info: common_pb2.WorkerInfo) -> common_pb2.WorkerInfo:
    for field, _ in info.ListFields():
        if field.name not in NEEDED:
            info.ClearField(field.name)
    return info


def without_measurements(frame: Any) -> Any:
    for event in frame.events:
        part = getattr(event, event.WhichOneof("event"))
        if hasattr(part, "timings"):
            part.ClearField("timings")
    return frame


def as_it_is(frame: Any) -> Any:
    return frame


grown = functools.partial(as_next_version, but=("Proposal", "SparseDistribution"))
VERSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "last": (as_last_version, as_last_version, as_last_version),
    "next": (as_next_version, grown, as_it_is),
    "least": (only_what_is_needed, without_measurements, as_it_is),
}
"""What a worker says of itself, its events, and the commands as it understands them."""


@pytest.mark.parametrize("version", VERSIONS)
def test_workers_of_other_versions_serve(
    stack: RunningStack, plain: list[tuple[int, ...]], version: str
) -> None:
    """Alone, and beside workers of this version. `least` leaves all unset that can be unset."""
    describe, events, commands = VERSIONS[version]
    fits = [(stack.stack.address_of(role),) for role in ROLES]
    with proxies(stack) as others:
        for proxy in others.values():
            proxy.describe, proxy.mangle, proxy.mangle_commands = describe, events, commands
        alone = [(other.address,) for other in others.values()]
        for addresses in (alone, [one + other for one, other in zip(alone, fits, strict=True)]):
            with own_coordinator(stack.pair, *addresses) as own:
                wait_for(own, WorkerState.READY, *sum(addresses, ()))
                check_drafted(own, plain)
        assert all(other.commands for other in others.values())
    stack.check_pools_whole()


def test_proposals_of_a_later_kind_are_not_judged(stack: RunningStack, plain: list[tuple[int, ...]]) -> None:
    """Who does not know a field of a proposal cannot judge it losslessly. Rounds go without it."""
    with proxies(stack) as others:
        others["draft"].mangle = as_next_version
        with own_coordinator(stack.pair, *((other.address,) for other in others.values())) as own:
            wait_for(own, WorkerState.READY, *(other.address for other in others.values()))
            (history,) = check_streams(own, plain[:1])
            assert history.finished.speculative_decoding.num_accepted_draft_tokens == 0
            until(lambda: any(others["draft"].commands), "a question to the draft")
    stack.check_pools_whole()


def test_a_client_of_the_last_version_is_served(stack: RunningStack, plain: list[tuple[int, ...]]) -> None:
    """Also when it resumes. What its messages do not have is decided by the server."""
    with grpc.insecure_channel(stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for number, (sampling, tokens) in enumerate(zip(SAMPLINGS, plain, strict=True)):
            for have in (0, 7):
                request = generate_request(PROMPT, parameters(sampling), None, f"last-{number}-{have}")
                if have:
                    request.resume_from.append(have)
                    request.received.add(ids=tokens[:have])
                call = stub.Generate(as_last_version(request), timeout=HANG)
                history = History([as_last_version(message) for message in call], ended=True)
                assert history.token_ids == tokens[have:]
                if not have:
                    validate(history, tokens)
    stack.good_request()
