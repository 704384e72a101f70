"""What a coordinator knows of its targets, and its end when its own tasks die."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from harness.refusals import refused
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from coordinator import app as coordinator_module
from coordinator import main
from coordinator.app import Coordinator
from coordinator.text.long_texts import LongTexts
from coordinator.text.vocabulary import Vocabulary
from coordinator.workers import links
from coordinator.workers.links import Link, LinkState
from paceline.core.clock import ManualClock
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import (
    FailedPreconditionError,
    InternalError,
    ResourceExhaustedError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.structured import StructuredOutputs
from paceline.core.types import SamplingParams
from paceline.rpc.codec import PROTOCOL_VERSION, GenerateCall
from paceline.v1 import common_pb2
from tests.unit.coordinator.machines import make_call, pass_through

SECONDS = 30.0


def set_link(link: Any, model: str = "m", length: int = 100, state: LinkState = LinkState.READY) -> None:
    """It was admitted as a worker of this model, and is in this state."""
    link.known = link.admitted = common_pb2.WorkerInfo(model=model, max_model_len=length)
    link.state = state


async def test_a_refused_worker_does_not_describe_the_target(coordinator: Any) -> None:
    wrong, right = coordinator.dispatcher.workers.targets
    wrong.known, wrong.state = common_pb2.WorkerInfo(model="wrong"), LinkState.REFUSED
    with pytest.raises(UnavailableError):
        coordinator.target_info()
    set_link(right, "right")
    assert coordinator.target_info().model == "right"
    wrong.state = LinkState.LOST
    assert coordinator.target_info().model == "right"


@pytest.fixture
def told(coordinator: Coordinator) -> common_pb2.WorkerInfo:
    """What a target says of itself that fits the coordinator."""
    return common_pb2.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        role="target",
        instance_id="one process",
        tokenizer_fingerprint=coordinator.vocabulary.fingerprint,
    )


async def test_a_worker_at_two_addresses_has_one_link(
    coordinator: Any, told: common_pb2.WorkerInfo, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Also if both ask it at the same time. The other one takes over when the first is lost."""
    first, second = coordinator.dispatcher.workers.targets
    talking: asyncio.Queue[Link] = asyncio.Queue()
    ended = {first: asyncio.Event(), second: asyncio.Event()}

    async def info(*_: Any) -> common_pb2.WorkerInfo:
        await asyncio.sleep(0)
        return told

    async def converse(link: Link, *_: Any) -> None:
        talking.put_nowait(link)
        await ended[link].wait()
        link._end("it ended the stream")

    monkeypatch.setattr(type(first.protocol), "info", info)
    monkeypatch.setattr(Link, "_converse", converse)
    monkeypatch.setattr(links, "RECONNECT_SECONDS", SECONDS)
    monkeypatch.setattr(links, "REFUSED_RETRY_SECONDS", 0.0)
    tasks = [asyncio.create_task(link.run()) for link in (first, second)]
    async with asyncio.timeout(SECONDS):
        assert await talking.get() is first
        await second.settled.wait()
        assert second.reason == "it is the worker at a:1, which is connected already"
        assert f"the target worker at b:1 is refused: {second.reason}" in caplog.text
        ended[first].set()
        assert await talking.get() is second
    for task in tasks:
        task.cancel()


async def test_only_links_in_use_keep_others_from_their_worker(
    coordinator: Any, told: common_pb2.WorkerInfo
) -> None:
    first, second = coordinator.dispatcher.workers.targets
    first.instance_id, first.state = told.instance_id, LinkState.READY
    coordinator._leaving(first)
    coordinator._admit(second, told)
    first.state = LinkState.DRAINING
    with pytest.raises(FailedPreconditionError):
        coordinator._admit(second, told)
    told.instance_id = first.instance_id = ""  # unknown, not equal
    coordinator._admit(second, told)


async def test_a_coordinator_runs_throughput_and_expiry_tasks(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    throughput, certificates = asyncio.Event(), asyncio.Event()

    async def tell_throughput(of: Coordinator, seconds: float) -> None:
        assert (of, seconds) == (coordinator, coordinator.config.log_stats_seconds)
        throughput.set()

    async def watch() -> None:
        certificates.set()

    monkeypatch.setattr(coordinator_module, "tell_throughput", tell_throughput)
    monkeypatch.setattr(coordinator.certificates, "watch", watch)
    running = asyncio.create_task(coordinator.run())
    async with asyncio.timeout(SECONDS):
        await throughput.wait()
        await certificates.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_serving_target_takes_precedence_over_a_lost_one(coordinator: Any) -> None:
    old, new = coordinator.dispatcher.workers.targets
    set_link(old, "old", state=LinkState.LOST)
    assert coordinator.target_info().model == "old"
    set_link(new, "new")
    assert coordinator.target_info().model == "new"


async def test_limits_are_the_least_of_all_targets(coordinator: Any) -> None:
    """A request may be served by any of them."""
    long, short = coordinator.dispatcher.workers.targets
    set_link(long, length=100)
    set_link(short, length=50)
    assert coordinator.target_info().max_model_len == 50
    short.state = LinkState.LOST
    assert coordinator.target_info().max_model_len == 100


async def test_metrics_keep_the_model_name_without_a_target(coordinator: Any) -> None:
    assert coordinator.known_name == ""
    for state in (LinkState.READY, LinkState.LOST):
        set_link(coordinator.dispatcher.workers.targets[0], state=state)
        assert coordinator.known_name == "m"
        assert coordinator.serving is (state is LinkState.READY)


async def test_a_coordinator_with_dead_links_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its supervisor restarts it."""

    async def die(_: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Coordinator, "run", die)
    config = CoordinatorConfig(targets=("127.0.0.1:1",), tokenizer="embedded:target", port=0, http_port=0)
    with pytest.raises(InternalError):
        await main._serve(config)
    assert "ValueError: a defect" in caplog.text


def resumed(coordinator: Coordinator, received: str, **sampling: Any) -> GenerateCall:
    """A call that goes on with a request that is not here."""
    return make_call(received=coordinator.vocabulary.tokenizer.encode(received).ids, **sampling)


async def test_received_tokens_are_replayed_outside_the_loop(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests must not wait for the replay."""
    threads, replay = [], coordinator_module._replay

    def noting(*of: Any) -> None:
        threads.append(threading.get_ident())
        replay(*of)

    monkeypatch.setattr(coordinator_module, "_replay", noting)
    async with served.generating(resumed(served, "def f")) as generation:
        assert generation.machines[0].state.ledger.num_generated > 0
    assert threads
    assert threading.get_ident() not in threads


async def test_a_client_resuming_twice_takes_over_from_itself(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call may not yet be known to be lost."""
    begun, go_on = threading.Event(), threading.Event()
    replay = coordinator_module._replay

    def slow(*of: Any) -> None:
        begun.set()
        assert go_on.wait(SECONDS)
        replay(*of)

    entered = 0
    both = asyncio.Event()

    async def call() -> None:
        nonlocal entered
        async with served.generating(resumed(served, "def f")) as generation:
            entered += 1
            if entered == 2:
                both.set()
            async for _ in served.parts(generation):
                pass

    monkeypatch.setattr(coordinator_module, "_replay", slow)
    async with asyncio.timeout(SECONDS):
        calls = [asyncio.create_task(call()) for _ in range(2)]
        assert await asyncio.to_thread(begun.wait, SECONDS)
        go_on.set()
        await both.wait()
        (told,), (reading,) = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(told.exception(), StaleEpochError)
    assert len(served.requests) == 1
    reading.cancel()
    await asyncio.wait([reading])


async def test_parameters_are_not_checked_for_every_choice(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 128 choices of 32,768 allowed tokens that takes a second."""
    begun = make_call(name="n", seed=None, n=4, max_tokens=5, allowed_token_ids=range(3, 99))
    going_on = resumed(served, "def f", prompt_logprobs=1)
    checked: list[SamplingParams] = []

    def note(made: SamplingParams) -> None:
        checked.append(made)

    monkeypatch.setattr(SamplingParams, "__post_init__", note)
    async with served.generating(begun) as generation:
        assert len({machine.state.params.sampling.seed for machine in generation.machines}) == 4
    async with served.generating(going_on) as generation:
        assert generation.params.sampling.prompt_logprobs is None
    assert not checked


async def test_received_tokens_must_follow_the_structure(served: Coordinator) -> None:
    structure = StructuredOutputs(regex="[a-z]+")
    await pass_through(served, resumed(served, "abc", structured_outputs=structure))
    with refused("received"):
        await pass_through(served, resumed(served, "a1", structured_outputs=structure))
    assert len(served.requests) == 0


async def test_an_empty_text_is_valid_with_an_initial_token(served: Coordinator) -> None:
    call = make_call("", name="", max_tokens=5, echo=True)
    with refused("prompt", "has no tokens"):
        await pass_through(served, call)
    tokenizer = Tokenizer.from_str(served.vocabulary.tokenizer.to_str())
    begin = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(f"{begin} $A", f"{begin} $A $B", [(begin, 0)])
    served.vocabulary = Vocabulary(tokenizer, "fingerprint", served.vocabulary.size)
    served._texts = LongTexts(served.vocabulary)
    async with served.generating(call) as generation:
        assert generation.prompt == [0]
        assert generation.params.prompt_length == 1


async def test_more_sequences_than_the_capacity_names_n(served: Coordinator) -> None:
    served.dispatcher._admission.max_running, served.dispatcher._admission.max_waiting = 1, 1
    with refused("n"):
        await pass_through(served, make_call(n=3))


async def test_a_request_refused_by_a_full_queue_leaves_nothing(served: Coordinator) -> None:
    served.dispatcher._admission.max_running, served.dispatcher._admission.max_waiting = 1, 0
    call = make_call(name="")
    async with served.generating(call):
        with pytest.raises(ResourceExhaustedError):
            await pass_through(served, call)
        assert len(served.requests) == len(served.requests._readers) == 1
    assert len(served.requests) == len(served.requests._readers) == 0


async def test_a_call_whose_client_never_reads_is_ended(served: Coordinator) -> None:
    clock = ManualClock()
    served.requests._clock, served.requests._unread_timeout = clock, 60.0
    begun = asyncio.Event()

    async def reads_nothing() -> None:
        async with served.generating(make_call()):
            begun.set()
            await asyncio.Event().wait()  # as a face does that cannot send

    reading = asyncio.create_task(reads_nothing())
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        served.dispatcher.abort_all(UnavailableError("the client does not read"))
        served.requests.expire()
        clock.advance(59.9)
        served.requests.expire()
        await asyncio.sleep(0)
        assert not reading.done()
        clock.advance(0.1)
        served.requests.expire()
        await asyncio.wait([reading])
    assert reading.cancelled()
    assert len(served.requests) == len(served.requests._readers) == 0
