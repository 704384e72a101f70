"""A draft worker hangs beside another one: its sequences move there."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from harness.history import validate
from harness.mid_stream import mid_stream
from harness.oracle import Ids
from harness.pair import Pair
from harness.stacks import RunningStack, own_coordinator, own_worker
from harness.waiting import until
from harness.wire import Proxy

from paceline.core.messages import DraftProposal, DraftRound
from tests.fault.streams import COUPLED, DRAFT_TIMEOUT, GREEDY, record, without_fault


@pytest.fixture(scope="module")
def second_draft(pair_paths: Pair) -> Iterator[str]:
    """The address of a draft worker beside the stack's own."""
    with own_worker("draft", pair_paths.draft) as address:
        yield address


def proposals(proxy: Proxy) -> int:
    return sum(isinstance(event, DraftProposal) for event in list(proxy.events))


def rounds_asked(proxy: Proxy) -> int:
    return sum(isinstance(command, DraftRound) for command in list(proxy.commands))


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_a_stopped_drafts_sequences_move_to_another(
    faulty: RunningStack, second_draft: str, prompt: Ids, sampling: Mapping[str, Any]
) -> None:
    """SIGSTOP, and no SIGCONT before the stream has ended."""
    expected = without_fault(faulty, prompt, sampling)
    targets, stopped = [faulty.stack.address_of("target")], faulty.stack.address_of("draft")
    with (
        Proxy(second_draft, "draft") as sound,
        own_coordinator(faulty.pair, targets, [stopped, sound.address], draft_timeout=DRAFT_TIMEOUT) as own,
    ):
        try:
            with mid_stream(faulty, lambda: [record(own, prompt, sampling)], 20) as (stream,):
                assert rounds_asked(sound) == 0
                faulty.stack.kill("draft", signal.SIGSTOP)
            history = stream.result()
            validate(history, expected)
            assert own.log.find("did not answer in time")
            assert proposals(sound) > 0
            # The first round, two that waited in vain, and those that left the draft alone meanwhile.
            what = history.finished.speculative_decoding
            assert what.num_rounds - what.num_spec_steps < what.num_spec_steps
            # It is not ready before its engine answers, so nobody new waits for it.
            validate(record(own, prompt, sampling, length=20).result(), expected[:20])
        finally:
            faulty.stack.kill("draft", signal.SIGCONT)


def test_a_silent_draft_gets_trial_sequences_only(
    faulty: RunningStack, second_draft: str, prompt: Ids
) -> None:
    """It answers GetInfo, so its link is ready again at once."""
    expected = without_fault(faulty, prompt, GREEDY)
    targets = [faulty.stack.address_of("target")]
    with (
        Proxy(faulty.stack.address_of("draft"), "draft") as mute,
        Proxy(second_draft, "draft") as sound,
        own_coordinator(
            faulty.pair, targets, [mute.address, sound.address], draft_timeout=DRAFT_TIMEOUT
        ) as own,
    ):
        mute.mangle = lambda _: None
        validate(record(own, prompt, GREEDY).result(), expected)
        assert proposals(sound) > 0
        until(lambda: len(own.log.find(f"{mute.address} is ready")) > 1, "the link of the mute one ready")
        # One request after the other goes to the one that answers.
        asked = rounds_asked(mute)
        for _ in range(2):
            validate(record(own, prompt, GREEDY, length=20).result(), expected[:20])
        assert rounds_asked(mute) == asked
        # Of two at a time one tries the other draft, and finds that it answers again.
        mute.mangle = lambda frame: frame
        streams = [record(own, prompt, GREEDY) for _ in range(2)]
        for stream in streams:
            validate(stream.result(), expected)
        assert proposals(mute) > 0
