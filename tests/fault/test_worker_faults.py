"""Killed, stopped and faulty workers: clients get the tokens of a run without faults, each once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

from harness.history import History, validate
from harness.mid_stream import failovers, mid_stream
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.stacks import RunningStack, own_coordinator, together
from harness.waiting import HANG, until
from harness.wire import Mangle, Proxy

from paceline.client import Client, WorkerState
from paceline.core.errors import DeadlineExceededError, UnavailableError
from paceline.v1 import common_pb2, draft_pb2
from tests.fault.streams import (
    COUPLED,
    DRAFT_TIMEOUT,
    GREEDY,
    ITEMS,
    PENALISED,
    SAMPLINGS,
    STRUCTURED,
    record,
    without_fault,
)


def rounds_without_proposal(history: History) -> int:
    what = history.finished.speculative_decoding
    return what.num_rounds - what.num_spec_steps


# ---- the draft worker --------------------------------------------------------------------------------


def test_a_killed_draft_worker_costs_no_token(faulty: RunningStack, prompt: Ids, oracle: Oracle) -> None:
    """SIGKILL in mid-stream, for every K and sampling at once; drafting resumes when it is back."""
    asked = [("greedy", 4), *(("coupled", k) for k in (0, 2, 5)), ("penalised", 4), ("structured", 4)]
    expected = {name: without_fault(faulty, prompt, each) for name, each in SAMPLINGS.items()}
    ids = oracle.encode(SOURCE)
    crowd = [record(faulty, ids[i : 40 + 3 * i], {**PENALISED, "seed": i}, i % 6, 60) for i in range(16)]
    lost = failovers(faulty, "draft")
    with mid_stream(
        faulty, lambda: [record(faulty, prompt, SAMPLINGS[s], k) for s, k in asked], 10
    ) as streams:
        killed = faulty.stack.kill("draft", signal.SIGKILL)
    for stream, (name, _) in zip(streams, asked, strict=True):
        validate(stream.result(), expected[name])
    assert len(json.loads(streams[-1].result().text)) == ITEMS
    for stream in crowd:
        validate(stream.result())
    assert failovers(faulty, "draft") > lost
    faulty.stack.wait_for_restart("draft", after=killed, timeout=HANG)
    faulty.wait_for_worker("draft")
    history = record(faulty, prompt, GREEDY, length=40).result()
    validate(history, expected["greedy"][:40])
    assert history.finished.speculative_decoding.num_draft_tokens > 0


def test_streams_go_on_without_a_stopped_draft(faulty: RunningStack, prompt: Ids) -> None:
    """SIGSTOP: after the draft timeout the stream goes on at K=0. SIGCONT: late answers harm nobody."""
    expected = without_fault(faulty, prompt, COUPLED)
    short = without_fault(faulty, prompt, GREEDY, 40)
    targets, drafts = ([faulty.stack.address_of(role)] for role in ("target", "draft"))
    with own_coordinator(faulty.pair, targets, drafts, draft_timeout=DRAFT_TIMEOUT) as own:
        try:
            with mid_stream(faulty, lambda: [record(own, prompt, COUPLED)], 20) as (stream,):
                faulty.stack.kill("draft", signal.SIGSTOP)
            stream.wait_for_tokens(60)
            validate(record(own, prompt, GREEDY, length=20).result(), short[:20])
        finally:
            faulty.stack.kill("draft", signal.SIGCONT)
        history = stream.result()
        validate(history, expected)
        assert rounds_without_proposal(history) > 1
        until(
            lambda: all(w.state is WorkerState.READY for w in own.client.status().workers), "the draft back"
        )
        after = record(own, prompt, GREEDY, length=40).result()
        validate(after, short)
        assert after.finished.speculative_decoding.num_draft_tokens > 0


# ---- the target worker -------------------------------------------------------------------------------


def test_killing_the_target_changes_no_token(faulty: RunningStack, prompt: Ids) -> None:
    """SIGKILL in mid-stream: after the restart all streams go on where they were."""
    samplings = (GREEDY, COUPLED, STRUCTURED)
    expected = [without_fault(faulty, prompt, sampling) for sampling in samplings]
    lost = failovers(faulty, "target")
    with mid_stream(faulty, lambda: [record(faulty, prompt, s) for s in samplings], 40) as streams:
        killed = faulty.stack.kill("target", signal.SIGKILL)
    faulty.stack.wait_for_restart("target", after=killed, timeout=HANG)
    for stream, tokens in zip(streams, expected, strict=True):
        validate(stream.result(), tokens)
    assert failovers(faulty, "target") - lost >= len(streams)


def test_eight_streams_survive_a_killed_target_worker(
    faulty: RunningStack, prompt: Ids, oracle: Oracle
) -> None:
    """Also one that is queued meanwhile, and one whose draft dies at the same moment."""
    ids = oracle.encode(SOURCE)
    asked = [
        (ids[i : 40 + 7 * i], GREEDY if i % 2 else {**COUPLED, "seed": i}, (0, 2, 4, 8)[i % 4])
        for i in range(8)
    ]
    # With K=8 a stream may need a ninth of the rounds of K=0, and is not to end before that has its tokens.
    expected = together([lambda p=p, s=s: without_fault(faulty, p, s, 100) for p, s, _ in asked])
    lost = failovers(faulty, "target")
    with mid_stream(faulty, lambda: [record(faulty, p, s, k, 100) for p, s, k in asked], 5) as streams:
        killed = {role: faulty.stack.kill(role, signal.SIGKILL) for role in ("target", "draft")}
    late = record(faulty, prompt, GREEDY, length=30)
    for role, pid in killed.items():
        faulty.stack.wait_for_restart(role, after=pid, timeout=HANG)
    for stream, tokens in zip(streams, expected, strict=True):
        validate(stream.result(), tokens)
    validate(late.result(), without_fault(faulty, prompt, GREEDY, 30))
    assert failovers(faulty, "target") - lost >= len(streams)


def test_streams_wait_for_a_stopped_target(faulty: RunningStack, prompt: Ids) -> None:
    """SIGSTOP: after the target timeout its line is given up; SIGCONT: the stream goes on, gapless."""
    expected = without_fault(faulty, prompt, COUPLED)
    targets, drafts = ([faulty.stack.address_of(role)] for role in ("target", "draft"))
    with own_coordinator(faulty.pair, targets, drafts, target_timeout=3.0, recovery_timeout=HANG) as own:
        with mid_stream(faulty, lambda: [record(own, prompt, COUPLED)], 30) as (stream,):
            until(lambda: own.log.find("did not answer in time"), "the target's line given up")
        validate(stream.result(), expected)


def test_a_target_that_stays_away_is_an_error_with_last_index(faulty: RunningStack, prompt: Ids) -> None:
    """The error comes after the recovery deadline and names the last index; new requests are told as much."""
    targets = [faulty.stack.address_of("target")]
    with own_coordinator(faulty.pair, targets, target_timeout=3.0, recovery_timeout=1.0) as own:
        with mid_stream(faulty, lambda: [record(own, prompt, GREEDY, length=1000)], 10) as (stream,):
            history = stream.result()
        validate(history, complete=False)
        assert isinstance(history.error, UnavailableError)
        assert history.error.last_index == len(history.token_ids) - 1
        # Served again once it is back.
        until(
            lambda: all(w.state is WorkerState.READY for w in own.client.status().workers), "the target back"
        )
        again = own.client.generate(prompt, {"max_tokens": 10, "ignore_eos": True, **GREEDY}, timeout=HANG)
        assert again.token_ids == history.token_ids[:10]


# ---- SIGTERM -----------------------------------------------------------------------------------------


def test_sigterm_drains_the_coordinator(faulty: RunningStack, prompt: Ids) -> None:
    """Running streams end as if nothing had happened; new ones are refused; then it is gone, and back."""
    expected = without_fault(faulty, prompt, COUPLED, 80)

    def refused() -> bool:
        try:
            with Client(faulty.address, resume_seconds=0) as fresh:
                fresh.generate("x", {"max_tokens": 1}, timeout=1.0)
        except UnavailableError:
            return True
        except DeadlineExceededError:
            pass  # accepted before the signal arrived
        return False

    with mid_stream(faulty, lambda: [record(faulty, prompt, COUPLED, length=80)], 10) as (stream,):
        ended = faulty.stack.kill("coordinator", signal.SIGTERM)
        until(refused, "the end of new requests")
        assert not stream.over
    validate(stream.result(), expected)
    faulty.stack.wait_for_restart("coordinator", after=ended, timeout=HANG)
    faulty.wait_until_ready()
    assert without_fault(faulty, prompt, COUPLED, 80) == expected


def test_sigterm_of_both_workers_costs_no_token(faulty: RunningStack, prompt: Ids) -> None:
    """Streams that run while the workers drain, and while they are gone and come back."""
    expected = without_fault(faulty, prompt, COUPLED)
    lost_before = len(faulty.log.find("the target worker at"))
    with mid_stream(faulty, lambda: [record(faulty, prompt, COUPLED)], 30) as (stream,):
        ended = {role: faulty.stack.kill(role, signal.SIGTERM) for role in ("target", "draft")}
    validate(stream.result(), expected)
    until(lambda: len(faulty.log.find("the target worker at")) > lost_before, "the loss of the target")
    late = record(faulty, prompt, COUPLED, length=40)
    for role, pid in ended.items():
        faulty.stack.wait_for_restart(role, after=pid, timeout=HANG)
    validate(late.result(), expected[:40])


# ---- answers that make no sense ----------------------------------------------------------------------


def send_distributions(proposal: common_pb2.Proposal) -> None:
    for _ in proposal.token_ids:
        proposal.distributions.add(token_ids=b"\x05\0\0\0", probabilities=b"\0\0\xc0\x7f")


def guess_wrong(proposal: common_pb2.Proposal) -> None:
    proposal.token_ids[:] = [(token + 1) % 200 for token in proposal.token_ids]


PROPOSALS: dict[str, Callable[[common_pb2.Proposal], object]] = {
    "ids that do not exist": lambda p: p.token_ids.__setitem__(slice(0, 1), [4_000_000_000]),
    "too many tokens": lambda p: p.token_ids.extend([5] * 40),
    "a tree": lambda p: p.parents.extend([-1] * len(p.token_ids)),
    "NaN as probability": send_distributions,
    "always wrong": guess_wrong,
}
"""Lies by what is proposed."""


def name_another_round(frame: draft_pb2.DraftResponse) -> draft_pb2.DraftResponse:
    for event in frame.events:
        if event.HasField("proposal"):
            event.proposal.round += 1
    return frame


def answer_twice(frame: draft_pb2.DraftResponse) -> draft_pb2.DraftResponse:
    frame.events.extend(list(frame.events))
    return frame


def propose(change: Callable[[common_pb2.Proposal], object]) -> Mangle:
    """Lie in every proposal."""

    def lie(frame: draft_pb2.DraftResponse) -> draft_pb2.DraftResponse:
        for event in frame.events:
            if event.HasField("proposal"):
                change(event.proposal.proposal)
        return frame

    return lie


LIES: dict[str, Mangle] = {
    **{name: propose(change) for name, change in PROPOSALS.items()},
    "another round": name_another_round,
    "everything twice": answer_twice,
    "nothing": lambda _frame: None,
}


class Liar:
    """Tells a lie, and knows whether it did: a lie that no proposal came for would prove nothing."""

    def __init__(self, lie: Mangle) -> None:
        self.told = 0
        """Frames with a proposal."""
        self._lie = lie

    def has_lied(self) -> bool:
        return self.told > 0

    def __call__(self, frame: draft_pb2.DraftResponse) -> draft_pb2.DraftResponse | None:
        self.told += any(event.HasField("proposal") for event in frame.events)
        return self._lie(frame)


def test_a_draft_sending_nonsense_costs_speed_only(faulty: RunningStack, prompt: Ids) -> None:
    samplings = (GREEDY, COUPLED)
    expected = [without_fault(faulty, prompt, s, 24) for s in samplings]
    with (
        Proxy(faulty.stack.address_of("draft"), "draft") as draft,
        own_coordinator(
            faulty.pair, [faulty.stack.address_of("target")], [draft.address], draft_timeout=DRAFT_TIMEOUT
        ) as own,
    ):
        for name, lie in LIES.items():
            # A lie may have cost the line, which is there again before the next one.
            until(lambda: all(w.state is WorkerState.READY for w in own.client.status().workers), "the draft")
            draft.mangle = liar = Liar(lie)
            streams = [record(own, prompt, sampling, length=24) for sampling in samplings]
            for stream, tokens in zip(streams, expected, strict=True):
                validate(stream.result(), tokens)
            # On a busy machine the first proposal may be too late for all of this.
            until(liar.has_lied, f"a proposal for {name}", timeout=30.0)
        assert own.client.status().coordinator.failed_requests == 0
    # Of one that tells the truth proposals are taken, by whoever does not know it as a liar.
    with (
        Proxy(faulty.stack.address_of("draft"), "draft") as draft,
        own_coordinator(faulty.pair, [faulty.stack.address_of("target")], [draft.address]) as own,
    ):
        history = record(own, prompt, GREEDY, length=24).result()
        validate(history, expected[0])
        assert history.finished.speculative_decoding.num_draft_tokens > 0
