"""Drafting ahead changes when a proposal comes, never its tokens."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from harness.tiers import mostly_full

from draft_worker.lookahead.fanout import MARGINS, MAX_RANK, WORTH_DRAFTING, FanOut
from paceline.core.clock import ManualClock
from paceline.core.errors import ResourceExhaustedError
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
)
from paceline.core.types import AcceptanceMode, Outcome, Proposal, SamplingParams, SequenceParams
from paceline.engine.cancel import CancelToken
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine

VOCAB = 6
MODEL = ToyModel(VOCAB, seed=4)
PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0, seed=1)
WARM = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=3)
PLAIN = SamplingParams(temperature=0.9, seed=3)
"""Warm, with nothing but noise or draws between the logits and each token."""
SAMPLINGS = {"greedy": GREEDY, "warm": WARM, "plain": PLAIN}
ON_CPU, ON_GPU = ChainSkills(max_feed=16), ChainSkills(max_feed=2)
K = 3
VERDICTS = tuple(itertools.product(range(K + 1), range(VOCAB)))
"""How many tokens are accepted, and the one after them."""


class Worker:
    """A drafter that may look ahead, one sequence."""

    def __init__(
        self,
        branches: int,
        num_blocks: int = 60,
        max_model_len: int = 60,
        max_sequences: int = 4,
        skills: ChainSkills | None = None,
        lookahead_sequences: int = 4,
        **settings: int,
    ) -> None:
        self.runner = ToyRunner(MODEL, num_blocks, 4)
        self.runner.chain_skills = skills
        config = draft_config(
            support_mass=0.9,
            lookahead_branches=branches,
            lookahead_sequences=lookahead_sequences,
            max_sequences=max_sequences,
            **settings,
        )
        self.it = draft_engine(
            self.runner, config, vocabulary_size=VOCAB, max_model_len=max_model_len, clock=ManualClock()
        )

    def open(
        self,
        sampling: SamplingParams = GREEDY,
        mode: AcceptanceMode = AcceptanceMode.COUPLED,
        name: str = "s",
    ) -> None:
        assert not self.it.handle(OpenSequence(name, 1, PROMPT, SequenceParams(sampling, mode, 3)), 0.0)

    def ask(
        self, number: int, base: int, tail: tuple[int, ...] = (), k: int = K, name: str = "s"
    ) -> list[Any]:
        return list(self.it.handle(DraftRound(name, 1, number, base, tail, k), 0.0))

    def follow(self, number: int, base: int, tail: tuple[int, ...], k: int = K) -> list[Any]:
        """Tell of a continuation that came true."""
        return list(self.it.handle(DraftRound("s", 1, number, base, tail, k, proposal_known=True), 0.0))

    def end(self, how: str) -> None:
        """Its sequence is over, or begins anew: nothing of it is left."""
        match how:
            case "close":
                self.it.handle(CloseSequence("s", 1), 0.0)
            case "drop":
                self.it.drop("s")
            case "reopen":
                params = SequenceParams(GREEDY, AcceptanceMode.COUPLED, 3)
                self.it.handle(OpenSequence("s", 2, PROMPT, params), 0.0)
            case _:
                raise ValueError(how)
        assert self.runner.pool.used_blocks == 0

    def run(self, steps: int | None = None) -> list[Any]:
        """Until there is nothing left to do, or for some steps."""
        events: list[Any] = []
        for _ in itertools.count() if steps is None else range(steps):
            if not self.it.has_work:
                break
            events += self.it.step()
        return events

    def first_round(self) -> Proposal:
        events = self.ask(1, 3)
        while not events:
            events = self.run(1)
        (proposal,) = [e.proposal for e in events if isinstance(e, DraftProposal)]
        assert isinstance(proposal, Proposal)
        return proposal


def teach(worker: Worker, sampling: SamplingParams) -> None:
    """That everything is accepted, however unsure the draft was, and its best guess right."""
    kind = AcceptanceMode.COUPLED, sampling.greedy
    fan_out = worker.it.lookahead._fan_outs.setdefault(kind, FanOut())
    for _ in range(200):
        for margin in (*MARGINS, 0.0):
            fan_out.observe(K, [margin] * K, 0)


def answer(events: list[Any]) -> Proposal:
    (proposal,) = [e.proposal for e in events if isinstance(e, DraftProposal)]
    assert isinstance(proposal, Proposal)
    return proposal


def second_round(worker: Worker, tail: tuple[int, ...], k: int) -> Proposal:
    """Its proposal, once the ledger is the prompt and `tail`."""
    events = worker.ask(2, 3 + len(tail), tail, k)
    proposal = answer(events + ([] if events else worker.run(k)))
    held = worker.it.sequences.find("s")
    assert held is not None
    assert worker.runner.read(held.table)[: 3 + len(tail)] == [*PROMPT, *tail]
    return proposal


@functools.cache
def without_lookahead(
    name: str, mode: AcceptanceMode, k: int
) -> tuple[Proposal, dict[tuple[int, int], Proposal]]:
    """The first proposal, and the second one by the verdict: how many tokens were accepted, and the next."""
    worker, sampling = Worker(0), SAMPLINGS[name]
    worker.open(sampling, mode)
    first = worker.first_round()
    return first, {
        (accepted, token): second_round(copy.deepcopy(worker), (*first.token_ids[:accepted], token), k)
        for accepted, token in VERDICTS
    }


def check_every_outcome(name: str, mode: AcceptanceMode, steps: int | None, k: int, ahead: Worker) -> int:
    """Whatever the verdict, the proposal is the one without lookahead; how many verdicts were foreseen."""
    expected_first, expected = without_lookahead(name, mode, k)
    ahead.open(SAMPLINGS[name], mode)
    first = ahead.first_round()
    assert first == expected_first
    ahead.run(steps)
    hits = 0
    for accepted, token in VERDICTS:
        # The original outlives its copies: what they know by its identity stays what it is.
        worker = copy.deepcopy(ahead)
        assert second_round(worker, (*first.token_ids[:accepted], token), k) == expected[accepted, token]
        hits += worker.it.lookahead.hits
    return hits


@pytest.mark.parametrize("no_lookahead", [False, True])
def test_a_draft_whose_continuations_are_of_no_use_makes_none(no_lookahead: bool) -> None:
    """One draft of several, whose next round is asked for as usual."""
    worker = Worker(24)
    worker.open()
    events = list(worker.it.handle(DraftRound("s", 1, 1, 3, (), K, no_lookahead=no_lookahead), 0.0))
    events += worker.run()
    first, expected = without_lookahead("greedy", AcceptanceMode.COUPLED, K)
    assert answer(events) == first
    assert any(isinstance(event, Continuations) for event in events) is not no_lookahead
    assert second_round(worker, (*first.token_ids[:1], 0), K) == expected[1, 0]


@pytest.mark.parametrize("sampling", ["greedy", "warm"])
@pytest.mark.parametrize("mode", AcceptanceMode)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, None], ids=lambda s: f"{s} steps ahead")
@pytest.mark.parametrize("k", mostly_full([1, 3, 2, 5], count=2))
def test_every_outcome_gets_its_ordinary_proposal(
    sampling: str, mode: AcceptanceMode, steps: int | None, k: int
) -> None:
    """For any verdict, any state of the branches and any number of tokens."""
    hits = check_every_outcome(sampling, mode, steps, k, Worker(8))
    assert (hits > 0) == (steps != 0), "branches exist once dK was fed"


@pytest.mark.parametrize("sampling", ["greedy", "plain"])
@pytest.mark.parametrize("mode", AcceptanceMode)
@pytest.mark.parametrize("skills", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("stopped", [False, True], ids=["whole", "stopped"])
@pytest.mark.parametrize("k", mostly_full([3, 2], count=1))
def test_chained_branches_give_the_ordinary_proposals(
    sampling: str, mode: AcceptanceMode, skills: ChainSkills, stopped: bool, k: int
) -> None:
    """For any number of calls, interrupted anywhere."""
    hits = 0
    for steps in (1, 3, None):
        worker = Worker(8, skills=skills)
        worker.runner.stops = lambda cancel: bool(cancel.flag[0]) or stopped
        hits += check_every_outcome(sampling, mode, steps, k, worker)
    assert hits > 6


def drafts_for(sampling: SamplingParams, verdicts: list[tuple[int, ...]]) -> list[Proposal]:
    """The proposals of a draft that does not look ahead, after each of these verdicts."""
    worker, base = Worker(0), 3
    worker.open(sampling)
    made = [worker.first_round()]
    for number, tail in enumerate(verdicts, 2):
        base += len(tail)
        events = worker.ask(number, base, tail)
        made.append(answer(events + ([] if events else worker.run())))
    return made


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "plain"])
@pytest.mark.parametrize("stopped", [False, True], ids=["whole", "stopped"])
def test_a_repeatedly_right_branch_is_ready_before_its_round(
    sampling: SamplingParams, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens beyond it are pushed at once and equal those without lookahead."""
    worker, base = Worker(8, skills=ON_CPU), 3
    worker.runner.stops = lambda cancel: stopped
    teach(worker, sampling)
    worker.open(sampling)
    proposal, told = worker.first_round(), worker.run()
    verdicts: list[tuple[int, ...]] = []
    followed = [proposal]
    for number in range(2, 7):
        bonus = next(token for accepted, token, _ in pushed(told) if accepted == K)
        proposal = pushed(told)[Outcome(K, bonus)]
        verdicts.append((*followed[-1].token_ids, bonus))
        base += K + 1
        assert worker.follow(number, base, verdicts[-1]) == [], "no answer is wanted"
        with monkeypatch.context() as patched:
            patched.setattr(worker.runner, "forward_chains", None)
            (first,) = worker.run(1)
        assert pushed([first]), "before anything more is drawn"
        followed.append(proposal)
        told = [first, *worker.run()]
        worker.runner.pool.check_integrity()
    assert followed == drafts_for(sampling, verdicts)
    held = worker.it.sequences.find("s")
    assert held is not None
    assert worker.runner.read(held.table)[:base] == held.session.tokens
    worker.it.handle(CloseSequence("s", 1), 0.0)
    assert worker.runner.pool.used_blocks == 0


def pushed(events: list[Any]) -> dict[tuple[int, int], Proposal]:
    """All continuations among the events; what is sent again is longer and begins with what was sent."""
    proposals: dict[tuple[int, int], Proposal] = {}
    for event in events:
        if isinstance(event, Continuations):
            for outcome, proposal in event.proposals.items():
                before = proposals.get(outcome, Proposal()).token_ids
                assert len(proposal.token_ids) > len(before)
                assert proposal.token_ids[: len(before)] == before
            proposals.update(event.proposals)
    return proposals


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_pushed_branches_equal_the_next_rounds_proposals(sampling: SamplingParams) -> None:
    worker = Worker(3)
    worker.open(sampling)
    first = worker.first_round()
    events = worker.run()
    assert len(events) > 1, "pushed as they are finished, not when all are"
    assert {(e.round, e.base_length) for e in events} == {(1, 3)}
    foreseen = pushed(events)
    assert len(foreseen) > 3, "finished ones make room for others"
    assert {K} < {accepted for accepted, _, _ in foreseen}
    for (accepted, token, _), proposal in foreseen.items():
        fresh = Worker(0)
        fresh.open(sampling)
        assert fresh.first_round() == first
        tail = (*first.token_ids[:accepted], token)
        assert answer(fresh.ask(2, 3 + len(tail), tail) + fresh.run()) == proposal


def test_branches_in_progress_are_bounded_by_the_setting() -> None:
    worker = Worker(3)
    worker.open()
    worker.first_round()
    before = len(worker.runner.passes)
    worker.run()
    ahead = worker.runner.passes[before:]
    assert max(ahead) == 3
    assert min(ahead) >= 1


@pytest.mark.parametrize("most", [1, 2])
def test_sequences_above_the_setting_draft_no_branches(most: int) -> None:
    worker = Worker(3, lookahead_sequences=most)
    worker.open()
    worker.first_round()
    assert worker.it.lookahead.has_work
    worker.run()
    worker.open(name="another")
    before = len(worker.runner.passes)
    assert answer(worker.ask(1, 3, name="another") + worker.run()).num_draft_tokens == K
    assert (len(worker.runner.passes) - before > K) is (most == 2), "branches take passes"


def order(fan_out: FanOut, margins: list[float], bonus: float | None = None) -> list[tuple[int, int]]:
    ranked = fan_out.ranked(margins, bonus)
    assert [o.likelihood for o in ranked] == sorted((o.likelihood for o in ranked), reverse=True)
    assert all(WORTH_DRAFTING <= o.likelihood < 1 for o in ranked)
    assert sum(o.likelihood for o in ranked) <= 1
    outcomes = [(o.accepted, o.rank) for o in ranked]
    for accepted in range(len(margins) + 1):
        ranks = [rank for a, rank in outcomes if a == accepted]
        assert ranks == list(range(len(ranks))), "a likelier guess before the next one"
    return outcomes


def test_likely_outcomes_come_first() -> None:
    fan_out = FanOut()
    assert order(fan_out, [1.2] * K)[0] == (K, 0), "the bonus, as the draft foresees it"
    for _ in range(200):
        fan_out.observe(4, [1.2] * 4, 0)
    assert fan_out.acceptance(1.2) > 0.95
    assert {a for a, _ in order(fan_out, [1.2] * 4)} == {4}
    for _ in range(400):
        fan_out.observe(0, [1.2] * 4, 0)
    assert fan_out.acceptance(1.2) < 0.25
    assert order(fan_out, [1.2] * 4)[0] == (0, 0)
    assert max(rank for _, rank in order(fan_out, [1.2] * 4)) < MAX_RANK
    assert fan_out.acceptance(0.1) == FanOut().acceptance(0.1), "of other margins nothing was learned"


def test_a_verdict_is_expected_to_stop_at_unsure_tokens() -> None:
    fan_out = FanOut()
    assert order(fan_out, [4.0, 0.1, 4.0, 4.0])[:2] == [(4, 0), (1, 0)]
    assert order(fan_out, [4.0, 0.1, 0.1, 4.0])[0] == (1, 0)
    assert (2, 0) not in order(fan_out, [4.0, 0.1, 4.0, 4.0])
    assert order(fan_out, [0.1, 0.1, 0.1, 0.1])[0] == (0, 0)


def test_an_unsure_bonus_is_expected_to_be_another_token() -> None:
    fan_out, margins = FanOut(), [4.0, 4.0, 4.0]
    sure, unsure = order(fan_out, margins, 4.0), order(fan_out, margins, 0.1)
    assert sure == [(K, 0)]
    assert unsure[:3] == [(K, 0), (K, 1), (K, 2)]
    by_outcome = {(o.accepted, o.rank): o.likelihood for o in fan_out.ranked(margins, 0.1)}
    assert by_outcome[K, 0] == pytest.approx(fan_out.acceptance(4.0) ** 3 * fan_out.acceptance(0.1))


def test_no_branch_begins_when_others_arrive() -> None:
    worker = Worker(2)
    worker.open(name="a")
    worker.ask(1, 3, name="a")
    worker.run(K)
    for name in "bc":
        worker.open(name=name)
    before = len(worker.runner.passes)
    worker.run()
    assert worker.runner.passes[before:] == [3, 1, 3], "two prompts, the entry of dK, and no branch"


def test_a_hit_is_answered_at_once_and_drafted_ahead_again() -> None:
    worker = Worker(6)
    worker.open()
    first = worker.first_round()
    accepted, token, _ = next(iter(pushed(worker.run())))
    tail = (*first.token_ids[:accepted], token)
    (event,) = worker.ask(2, 3 + len(tail), tail)
    assert isinstance(event, DraftProposal)
    assert event.num_computed_tokens == event.base_length + K - 1
    assert {again.round for again in worker.run()} == {2}


def test_proposals_with_distributions_are_not_pushed() -> None:
    worker = Worker(6)
    worker.open(WARM, AcceptanceMode.REJECTION)
    worker.first_round()
    assert worker.run() == []
    assert worker.it.lookahead.regions


def test_a_round_takes_precedence_over_branches() -> None:
    worker = Worker(8)
    worker.open(name="a")
    worker.open(name="b")
    worker.ask(1, 3, name="a")
    worker.run(K + 2)
    worker.ask(1, 3, name="b")
    events = worker.run(K)
    assert [e.sequence_id for e in events if isinstance(e, DraftProposal)] == ["b"]


def test_branches_free_blocks_before_a_round_fails() -> None:
    worker = Worker(8, num_blocks=10)
    worker.open(name="a")
    worker.ask(1, 3, name="a")
    worker.run()
    assert worker.runner.pool.free_blocks < 3
    long = tuple([1] * 20)
    assert not worker.it.handle(
        OpenSequence("b", 1, long, SequenceParams(GREEDY, AcceptanceMode.COUPLED, 20)), 0.0
    )
    worker.ask(1, 20, name="b")
    assert answer([e for e in worker.run() if e.sequence_id == "b"]).num_draft_tokens == K


def test_a_proposal_is_answered_before_branches_are_prepared() -> None:
    worker = Worker(8)
    worker.open()
    worker.first_round()
    used = worker.runner.pool.used_blocks
    assert not worker.it.lookahead.regions
    assert worker.it.has_work
    worker.it.step()
    assert worker.it.lookahead.regions
    assert worker.runner.pool.used_blocks > used


@pytest.mark.parametrize("same", [True, False])
def test_grown_branches_are_sent_after_an_arriving_command(same: bool) -> None:
    """Another sequence's round goes first."""
    worker = Worker(8, skills=ON_CPU)
    worker.open()
    worker.open(name="another")
    worker.run()
    first = worker.first_round()
    worker.runner.stops = lambda cancel: cancel.cancel() or True
    assert worker.run(1) == []
    assert worker.it.has_work
    grown = worker.it.lookahead._by_sequence["s"].branches
    assert any(branch.draft.drawn for branch in grown.values())
    worker.runner.stops = lambda cancel: False
    if same:
        told = worker.ask(2, 4 + K, (*first.token_ids, 0)) + worker.run()
        assert isinstance(told[0], DraftProposal)
        assert {event.round for event in told} == {2}
    else:
        told = worker.ask(1, 3, name="another") + worker.run()
        assert isinstance(told[0], DraftProposal)
        assert told[0].sequence_id == "another"
        assert any(isinstance(event, Continuations) and event.sequence_id == "s" for event in told)


def test_a_failing_lookahead_costs_only_its_branches(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(8, skills=ON_CPU)
    worker.open()
    worker.first_round()

    def fail(*args: object) -> Any:
        raise MemoryError

    worker.runner.forward_chains = fail  # type: ignore[method-assign]
    assert worker.run(1) == []
    assert "continuing without them" in caplog.text
    assert not worker.it.lookahead.regions


@pytest.mark.parametrize("skills", [None, ON_CPU], ids=["by steps", "chains"])
def test_lookahead_passes_respect_the_row_budget(skills: ChainSkills | None) -> None:
    most, names = 33, [f"s{i}" for i in range(10)]
    worker = Worker(256, 900, 60, len(names), skills, len(names), max_batch_tokens=most)
    rows: list[int] = []
    draw = worker.runner.forward_chains

    def counted(inputs: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        rows.append(len(inputs))
        return draw(inputs, cancel)

    worker.runner.forward_chains = counted  # type: ignore[method-assign]
    for name in names:
        worker.open(PLAIN, name=name)
        worker.ask(1, 3, name=name)
    events = worker.run()
    assert sum(isinstance(event, DraftProposal) for event in events) == len(names)
    assert max(rows or worker.runner.passes) == most
    told = [outcome for event in events if isinstance(event, Continuations) for outcome in event.proposals]
    assert len(told) > most, "what waited for the next pass was drafted as well"


FAILURES = [RuntimeError("out of memory"), ResourceExhaustedError("no blocks")]


def failing(error: Exception) -> Any:
    def fail(*_args: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", FAILURES)
def test_a_branch_that_cannot_be_adopted_costs_only_itself(error: Exception) -> None:
    """As when a copy fails on its device."""
    worker = Worker(8, skills=ON_CPU)
    worker.open()
    first = worker.first_round()
    accepted, token, _ = next(iter(pushed(worker.run())))
    tail = (*first.token_ids[:accepted], token)
    worker.runner.adopt = failing(error)  # type: ignore[method-assign]
    assert [first, second_round(worker, tail, K)] == drafts_for(GREEDY, [tail])
    worker.run()
    worker.runner.pool.check_integrity()
    worker.end("close")


@pytest.mark.parametrize("error", FAILURES)
def test_a_branch_that_cannot_be_adopted_is_drawn_again(error: Exception) -> None:
    worker = Worker(8, skills=ON_CPU)
    worker.open()
    teach(worker, GREEDY)
    first = worker.first_round()
    told = pushed(worker.run())
    bonus = next(token for accepted, token, _ in told if accepted == K)
    tail = (*first.token_ids, bonus)
    worker.follow(2, 3 + len(tail), tail)
    copied = worker.runner.copy_slots
    worker.runner.copy_slots = failing(error)  # type: ignore[method-assign]
    worker.run(1)
    worker.runner.copy_slots = copied  # type: ignore[method-assign]
    worker.run()
    second = (*told[Outcome(K, bonus)].token_ids[:1], 5)
    events = worker.ask(3, 3 + len(tail) + 2, second)
    third = answer(events + ([] if events else worker.run()))
    assert [first, told[Outcome(K, bonus)], third] == drafts_for(GREEDY, [tail, second])
    worker.runner.pool.check_integrity()
    worker.end("close")


@pytest.mark.parametrize("ending", ["close", "drop", "reopen", "miss", "memory"])
def test_an_adopted_branch_is_freed_in_any_case(ending: str) -> None:
    """Tokens beyond it are kept for the next round, which may never draft ahead."""
    worker = Worker(8, skills=ON_CPU)
    worker.open()
    teach(worker, GREEDY)
    first = worker.first_round()
    told = pushed(worker.run())
    (outcome,) = [o for o in told if o[0] == K][:1]
    tail = (*first.token_ids, outcome[1])
    assert not worker.follow(2, 3 + len(tail), tail)
    assert worker.it.lookahead._adopted
    assert worker.it.lookahead.regions, "its blocks are known to be in use"
    match ending:
        case "miss":
            worker.ask(5, 16, (5,) * (16 - 3 - len(tail)))
        case "memory":
            assert worker.it.lookahead.free()
            assert not worker.it.lookahead.free()
        case _:
            worker.end(ending)
    assert not worker.it.lookahead.regions
    worker.run()
    worker.runner.pool.check_integrity()


def test_all_grown_branches_are_sent_under_steady_commands() -> None:
    """Also those of the last call, after which nothing is left to draft."""
    told = []
    for interrupted in (False, True):
        worker = Worker(8, skills=ON_CPU)
        worker.runner.stops = lambda cancel, interrupted=interrupted: bool(interrupted and cancel.cancel())
        worker.open()
        worker.first_round()
        told.append(pushed(worker.run()))
    assert told[0]
    assert told[0] == told[1]


@pytest.mark.parametrize("ending", ["close", "drop", "reopen"])
def test_an_ending_sequence_is_not_drafted_ahead(ending: str) -> None:
    worker = Worker(8)
    worker.open()
    worker.first_round()
    worker.end(ending)
    assert worker.run() == []
    worker.it.drop("s")
    assert worker.runner.pool.used_blocks == 0


@pytest.mark.parametrize("ending", ["close", "drop", "reopen", "miss"])
def test_no_block_outlives_its_sequence(ending: str) -> None:
    worker = Worker(8)
    worker.open()
    worker.first_round()
    worker.run(3)
    assert worker.it.lookahead.regions
    if ending == "miss":
        # The ledger grew by a round of which the draft knows nothing.
        worker.ask(5, 12, (5, 5, 5, 5, 5, 5, 5, 5, 5))
    else:
        worker.end(ending)
    assert not worker.it.lookahead.regions
    worker.runner.pool.check_integrity()


def test_with_many_sequences_nothing_is_drafted_ahead() -> None:
    worker = Worker(2)
    for name in "abc":
        worker.open(name=name)
        worker.ask(1, 3, name=name)
    worker.run()
    assert not worker.it.lookahead.regions


@pytest.mark.parametrize("length", range(3 + 2 * K, 3 + 4 * K + 4))
def test_no_branch_is_longer_than_the_model(length: int) -> None:
    worker = Worker(8, skills=ON_CPU, max_model_len=length)
    teach(worker, GREEDY)
    worker.open()
    worker.first_round()
    worker.run()
    assert worker.runner.longest_branch <= length
    assert (worker.runner.longest_branch > 3 + 2 * K) == (length >= 3 + 3 * K + 2), "where it fits it grows"


def test_no_branch_reaches_beyond_the_models_length() -> None:
    worker = Worker(8, max_model_len=3 + 2 * K)
    worker.open()
    worker.first_round()
    assert not worker.it.has_work


def test_an_early_command_ends_a_chain_after_one_step() -> None:
    """A chain must not forget the command as it begins."""
    worker = Worker(8, skills=ON_CPU)
    worker.open()
    worker.first_round()
    worker.it.reset_cancel()
    worker.it.notify([])
    worker.runner.passes.clear()
    assert worker.run(1) == []
    branches = worker.it.lookahead._by_sequence["s"].branches.values()
    assert {len(branch.draft.drawn) for branch in branches} <= {0, 1}
    worker.it.reset_cancel()
    assert pushed(worker.run())
