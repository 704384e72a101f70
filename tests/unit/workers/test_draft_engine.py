"""The draft worker without sockets: a round's cache, and failures of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draft_worker.drafters.model import warm_up
from draft_worker.sampling.draw import Drawn, NoiseTape
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sampling.sampler import TokenSampler
from paceline.core.clock import ManualClock
from paceline.core.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from paceline.core.messages import DraftEvent, DraftProposal, DraftRound, OpenSequence, SequenceFailed
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import SequenceInput
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills
from tests.sim.reference import check_slow_proposal
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine, own_choice

VOCAB = 6
MODEL = ToyModel(VOCAB, seed=4)
PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0, seed=1)


class Worker:
    """A draft engine and short words for what is asked of it."""

    def __init__(self, num_blocks: int = 50, max_model_len: int = 60, **config: Any) -> None:
        self.runner = ToyRunner(MODEL, num_blocks, 4)
        self.it = draft_engine(
            self.runner,
            draft_config(support_mass=0.9, **config),
            vocabulary_size=VOCAB,
            max_model_len=max_model_len,
            clock=ManualClock(),
        )

    def open(
        self,
        name: str = "s",
        tokens: tuple[int, ...] = PROMPT,
        sampling: SamplingParams = GREEDY,
        mode: AcceptanceMode = AcceptanceMode.COUPLED,
    ) -> list[Any]:
        return list(self.it.handle(OpenSequence(name, 1, tokens, SequenceParams(sampling, mode, 3)), 0.0))

    def ask(
        self, k: int, name: str = "s", number: int = 1, base: int = 3, tail: tuple[int, ...] = ()
    ) -> list[Any]:
        return list(self.it.handle(DraftRound(name, 1, number, base, tail, k), 0.0))

    def run(self) -> list[Any]:
        events: list[Any] = []
        while self.it.has_work:
            events += self.it.step()
        return events

    def cached(self, name: str = "s") -> list[int]:
        held = self.it.sequences.find(name)
        assert held is not None
        return self.runner.read(held.table)


def best(n: int, ledger: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    tokens = list(ledger)
    for _ in range(n):
        tokens.append(own_choice(MODEL, tokens, GREEDY, 3))
    return tuple(tokens[len(ledger) :])


def test_the_last_draft_token_is_not_fed() -> None:
    worker = Worker()
    worker.open()
    worker.ask(3)
    (event,) = worker.run()
    assert isinstance(event, DraftProposal)
    assert event.proposal.token_ids == best(3)
    assert event.num_computed_tokens == 3 + 3 - 1
    assert worker.cached() == [*PROMPT, *best(2)]
    assert worker.runner.passes == [3, 1, 1]


def test_the_last_entry_is_fed_after_full_acceptance() -> None:
    worker = Worker()
    worker.open()
    worker.ask(3)
    (first,) = worker.run()
    chain = first.proposal.token_ids
    worker.runner.passes.clear()
    worker.ask(2, number=2, base=7, tail=(*chain, 0))
    (second,) = worker.run()
    # dK and the bonus in one pass, then one token.
    assert worker.runner.passes == [2, 1]
    assert second.proposal.token_ids == best(2, (*PROMPT, *chain, 0))
    assert worker.cached() == [*PROMPT, *chain, 0, second.proposal.token_ids[0]]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_rejected_entries_are_cut_and_right_ones_kept(accepted: int) -> None:
    worker = Worker()
    worker.open()
    worker.ask(3)
    (first,) = worker.run()
    chain = first.proposal.token_ids
    wrong = (chain[accepted] + 1) % VOCAB
    worker.runner.passes.clear()
    tail = (*chain[:accepted], wrong)
    worker.ask(1, number=2, base=3 + len(tail), tail=tail)
    (second,) = worker.run()
    assert worker.runner.passes == [1], "only the correction is new"
    assert worker.cached() == [*PROMPT, *tail]
    assert second.proposal.token_ids == best(1, (*PROMPT, *tail))


@pytest.mark.parametrize("mode", AcceptanceMode)
def test_sequences_at_different_steps_share_passes(mode: AcceptanceMode) -> None:
    worker = Worker()
    cases = {}
    for i, k in enumerate((1, 4, 2)):
        sampling = SamplingParams(temperature=(0.0, 1.0, 0.7)[i], seed=i)
        this = mode if i else AcceptanceMode.COUPLED
        worker.open(f"s{i}", PROMPT, sampling, this)
        worker.ask(k, f"s{i}")
        cases[f"s{i}"] = (SequenceParams(sampling, this, 3), k)
    events = worker.run()
    assert [event.sequence_id for event in events] == ["s0", "s2", "s1"]
    assert worker.runner.passes == [9, 2, 1, 1]
    for event in events:
        params, k = cases[event.sequence_id]
        assert event.proposal.num_draft_tokens == k
        check_slow_proposal(MODEL, PROMPT, params, event.proposal, 0.9)


def spoilt(mode: AcceptanceMode, length: int) -> tuple[Worker, DraftEvent]:
    """One of two sequences is without logits after so many tokens: what becomes of its round."""
    worker = Worker()
    sampling = SamplingParams(seed=3)
    worker.open("bad", PROMPT, sampling, mode)
    worker.open("good", (3, 2, 1), sampling, mode)
    worker.runner.spoil = lambda prefix: prefix[0] == 1 and len(prefix) == length
    for name in ("bad", "good"):
        worker.ask(3, name)
    bad, good = sorted(worker.run(), key=lambda event: event.sequence_id)
    assert isinstance(good, DraftProposal)
    check_slow_proposal(MODEL, (3, 2, 1), SequenceParams(sampling, mode, 3), good.proposal, 0.9)
    return worker, bad


def check_goes_on(worker: Worker) -> None:
    worker.runner.spoil = lambda prefix: False
    worker.ask(3, "bad", number=2, base=len(PROMPT) + 1, tail=(5,))
    (again,) = worker.run()
    assert isinstance(again, DraftProposal)
    assert again.proposal.num_draft_tokens == 3


@pytest.mark.parametrize(
    ("mode", "length"),
    [*((mode, len(PROMPT)) for mode in AcceptanceMode), (AcceptanceMode.COUPLED, len(PROMPT) + 1)],
)
def test_nan_logits_end_only_their_round(mode: AcceptanceMode, length: int) -> None:
    worker, bad = spoilt(mode, length)
    assert isinstance(bad, SequenceFailed)
    assert isinstance(bad.error, InternalError)
    assert worker.cached("bad") == list(PROMPT[:2] if length > len(PROMPT) else ())
    check_goes_on(worker)


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
@pytest.mark.parametrize("drawn", [1, 2])
def test_an_interrupted_proposal_holds_what_was_drawn(mode: AcceptanceMode, drawn: int) -> None:
    """What is proposed must not depend on what follows it."""
    worker, bad = spoilt(mode, len(PROMPT) + drawn)
    assert isinstance(bad, DraftProposal)
    assert bad.proposal.num_draft_tokens == drawn
    check_slow_proposal(
        MODEL, PROMPT, SequenceParams(SamplingParams(seed=3), mode, len(PROMPT)), bad.proposal, 0.9
    )
    assert worker.cached("bad") == list(PROMPT[:2])
    check_goes_on(worker)


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_a_proposal_ends_where_no_permitted_token_is_possible(
    mode: AcceptanceMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target would refuse an empty distribution."""
    worker = Worker()
    worker.open("s", PROMPT, SamplingParams(seed=3, allowed_token_ids=[2, 3]), mode)
    forward = worker.runner.forward

    def ruled_out(inputs: Sequence[SequenceInput]) -> torch.Tensor:
        logits = forward(inputs)
        if inputs[0].table.length == len(PROMPT) + 1:
            logits[:, 2:4] = -torch.inf
        return logits

    monkeypatch.setattr(worker.runner, "forward", ruled_out)
    worker.ask(3)
    (event,) = worker.run()
    assert isinstance(event, DraftProposal)
    assert event.proposal.num_draft_tokens == len(event.proposal.distributions) == 1


@pytest.mark.parametrize("mode", [AcceptanceMode.COUPLED, AcceptanceMode.BLOCK])
def test_the_younger_yields_when_a_proposal_lacks_blocks(mode: AcceptanceMode) -> None:
    worker = Worker(num_blocks=2)
    worker.open("a")
    worker.open("b", (3, 2, 1), GREEDY if mode is AcceptanceMode.COUPLED else SamplingParams(seed=3), mode)
    worker.ask(3, "b")
    worker.ask(3, "a")
    events = {event.sequence_id: event for event in worker.run()}
    assert isinstance(events["b"].error, ResourceExhaustedError)
    assert events["a"].proposal.token_ids == best(3)
    assert worker.cached("b") == []
    assert worker.it.sequences.num_preemptions == 1
    worker.it.drop("a")
    worker.ask(3, "b")
    (event,) = worker.run()
    assert event.proposal.num_draft_tokens == 3
    assert mode is AcceptanceMode.BLOCK or event.proposal.token_ids == best(3, (3, 2, 1))


def test_branches_are_dropped_before_any_sequence() -> None:
    worker = Worker(num_blocks=5, lookahead_branches=8)
    for name in ("a", "b"):
        worker.open(name)
    worker.ask(3, "a")
    while not worker.it.lookahead.regions:
        worker.it.step()
    worker.ask(3, "b")
    events: list[Any] = []
    while not events:
        events = [e for e in worker.it.step() if isinstance(e, DraftProposal | SequenceFailed)]
    assert isinstance(events[0], DraftProposal)
    assert worker.it.sequences.num_preemptions == 0


def test_a_second_sequence_drafts_from_cached_entries() -> None:
    worker = Worker()
    prompt = tuple(i % 5 for i in range(9))
    proposals = []
    for name in ("a", "b"):
        worker.open(name, prompt)
        worker.ask(3, name, base=9)
        (event,) = worker.run()
        proposals.append(event.proposal)
    assert proposals[0] == proposals[1]
    # Two full blocks were there: one row is left of the prompt, then two draft tokens are fed.
    assert worker.runner.passes == [9, 1, 1, 1, 1, 1]


def test_a_proposal_beyond_the_models_length_is_refused() -> None:
    worker = Worker(max_model_len=5)
    worker.open()
    (event,) = worker.ask(4)
    assert isinstance(event.error, InvalidArgumentError)
    assert worker.ask(3) == []
    assert len(worker.run()[0].proposal.token_ids) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1, logit_bias={VOCAB: 1.0}),
        SamplingParams(seed=1, stop_token_ids=[VOCAB], min_tokens=2),
    ],
)
def test_a_sequence_that_cannot_be_sampled_is_refused(sampling: SamplingParams) -> None:
    """Ids beyond the vocabulary in logit_bias or stop_token_ids."""
    worker = Worker()
    (event,) = worker.open("s", PROMPT, sampling)
    assert isinstance(event.error, InvalidArgumentError)
    assert not worker.it.holds("s")


# ---- tokens that the model draws by itself -------------------------------------------------------------

COUPLED = SamplingParams(temperature=0.7, seed=5)
LOOKED_AT = {
    "a penalty": (SamplingParams(temperature=0.0, seed=1, presence_penalty=0.5), AcceptanceMode.COUPLED),
    "a bias": (SamplingParams(temperature=0.0, seed=1, logit_bias={2: 1.0}), AcceptanceMode.COUPLED),
    "top_k": (SamplingParams(temperature=0.7, seed=1, top_k=2), AcceptanceMode.COUPLED),
    "min_p": (SamplingParams(temperature=0.7, seed=1, min_p=0.2), AcceptanceMode.COUPLED),
    "top_p and a distribution": (
        SamplingParams(temperature=0.7, seed=1, top_p=0.9),
        AcceptanceMode.REJECTION,
    ),
}


def chaining(**config: Any) -> Worker:
    worker = Worker(**config)
    worker.runner.chain_skills = ChainSkills(max_feed=16)
    return worker


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        (GREEDY, AcceptanceMode.COUPLED),
        (GREEDY, AcceptanceMode.BLOCK),
        (COUPLED, AcceptanceMode.COUPLED),
        (COUPLED, AcceptanceMode.REJECTION),
        (COUPLED, AcceptanceMode.BLOCK),
        (SamplingParams(temperature=1.0, seed=4), AcceptanceMode.BLOCK),
    ],
)
def test_a_chain_equals_single_steps(sampling: SamplingParams, mode: AcceptanceMode) -> None:
    """Tokens, and the bits of what they were drawn from."""
    answers, steps = [], []
    for worker in (Worker(), chaining()):
        for name, tokens in (("a", PROMPT), ("b", (4, 4, 1, 0))):
            worker.open(name, tokens, sampling, mode)
        worker.ask(5, "a")
        worker.ask(3, "b", base=4)
        events, count = [], 0
        while worker.it.has_work:
            events += worker.it.step()
            count += 1
        steps.append(count)
        answers.append({e.sequence_id: (e.proposal, e.num_computed_tokens) for e in events})
        assert worker.cached("a") == [*PROMPT, *answers[-1]["a"][0].token_ids[:-1]]
    assert answers[0] == answers[1]
    assert steps == [5, 2]
    params = SequenceParams(sampling, mode, 3)
    check_slow_proposal(MODEL, PROMPT, params, answers[1]["a"][0], 0.9)


@pytest.mark.parametrize("why", LOOKED_AT)
def test_requests_needing_inspection_go_step_by_step(why: str) -> None:
    answers = []
    for worker in (Worker(), chaining()):
        worker.open("s", PROMPT, *LOOKED_AT[why])
        worker.open("simple", PROMPT)
        worker.ask(4)
        worker.ask(4, "simple")
        first = [*worker.it.step(), *worker.it.step()]
        assert [event.sequence_id for event in first] == (["simple"] if worker.runner.chain_skills else [])
        answers.append({e.sequence_id: e.proposal for e in [*first, *worker.run()]})
    assert answers[0] == answers[1]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_a_chain_gives_the_beginnings_of_branches(sampling: SamplingParams) -> None:
    """Proposals, branches and what they begin with are those of single steps."""
    made, margins = [], []
    for skills in (None, ChainSkills(max_feed=2), ChainSkills(max_feed=16)):
        worker = Worker(lookahead_branches=4)
        worker.runner.chain_skills = skills
        worker.open("s", PROMPT, sampling)
        worker.ask(3)
        first: list[Any] = []
        while not first:
            first = worker.it.step()
        branches: dict[tuple[int, int], Any] = {}
        for event in worker.it.step():
            branches.update(event.proposals)
        drawn = [(d.token_id, d.others) for d in worker.it.lookahead._by_sequence["s"].drawn]
        assert all(others for _, others in drawn)
        margins.append([d.margin for d in worker.it.lookahead._by_sequence["s"].drawn])
        assert all(margin > 0 for margin in margins[-1]), "the best tokens were chosen"
        for event in worker.run():
            branches.update(event.proposals)
        assert branches
        made.append((first[0].proposal, drawn, branches))
    assert made[0] == made[1] == made[2]
    assert margins[1:] == [pytest.approx(margins[0], abs=1e-5)] * 2


def test_a_drawn_token_below_the_best_has_negative_margin() -> None:
    row = torch.from_numpy(MODEL.rows(list(PROMPT), 1))[0].double() / 2.0
    signs = set()
    for seed in range(12):
        worker = Worker(lookahead_branches=4)
        worker.open(sampling=SamplingParams(temperature=2.0, seed=seed), mode=AcceptanceMode.REJECTION)
        worker.ask(3)
        while "s" not in worker.it.lookahead._by_sequence:
            worker.it.step()
        first = worker.it.lookahead._by_sequence["s"].drawn[0]
        others = torch.cat([row[: first.token_id], row[first.token_id + 1 :]])
        assert first.margin == pytest.approx(float(row[first.token_id] - others.max()), abs=1e-5)
        signs.add(first.margin > 0)
    assert signs == {True, False}


def test_chains_together_respect_the_pass_budget() -> None:
    """Also when many sequences catch up at once."""
    most, tail = 33, (1, 2, 3, 4, 5, 1, 2, 3, 4, 5)
    worker = chaining(num_blocks=200, max_batch_tokens=most)
    fed: list[int] = []
    draw = worker.runner.forward_chains

    def counted(inputs: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        fed.append(sum(len(item.token_ids) for item in inputs))
        return draw(inputs, cancel)

    worker.runner.forward_chains = counted  # type: ignore[method-assign]
    names = [f"s{i}" for i in range(8)]
    for name in names:
        worker.open(name)
        worker.ask(2, name)
    worker.run()
    fed.clear()
    worker.runner.passes.clear()
    for name in names:
        worker.ask(3, name, number=2, base=3 + len(tail), tail=tail)
    events = worker.run()
    assert {event.sequence_id: event.proposal.token_ids for event in events} == dict.fromkeys(
        names, best(3, (*PROMPT, *tail))
    )
    assert 0 < max(fed) <= most
    assert max(worker.runner.passes) <= most


def test_a_failing_chain_continues_step_by_step(caplog: pytest.LogCaptureFixture) -> None:
    worker = chaining()
    worker.open()
    worker.ask(3)
    crashes = [RuntimeError("a chain")]
    worker.runner.crash_on = lambda tokens: crashes.pop() if tokens == [best(1)[0]] and crashes else None
    (event,) = worker.run()
    assert event.proposal.token_ids == best(3)
    assert worker.cached() == [*PROMPT, *best(2)]
    assert "token by token" in caplog.text


def test_a_chain_without_blocks_continues_step_by_step() -> None:
    """A step that lacks a block is preempted as usual."""
    worker = chaining(num_blocks=1)
    worker.open()
    worker.ask(3)
    (event,) = worker.run()
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, ResourceExhaustedError)
    assert worker.runner.pool.used_blocks == 0


def test_a_single_chain_without_rows_does_not_end_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has no recording yet, or its first logits are NaN."""
    worker = chaining()
    worker.open()
    worker.ask(4)
    chains = worker.runner.forward_chains
    monkeypatch.setattr(worker.runner, "forward_chains", lambda inputs: [Chain(())] * len(inputs))
    (event,) = worker.run()
    assert event.proposal.token_ids == best(4)
    monkeypatch.setattr(worker.runner, "forward_chains", chains)
    worker = chaining()
    worker.open()
    worker.runner.spoil = lambda prefix: prefix == [*PROMPT, *best(1)]
    worker.ask(4)
    (event,) = worker.run()
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, InternalError)


def test_nan_logits_end_one_chain() -> None:
    worker = chaining()
    worker.open()
    worker.open("t", (5, 5, 5))
    worker.runner.spoil = lambda prefix: prefix == [*PROMPT, *best(2)]
    worker.ask(4)
    worker.ask(4, "t")
    events = {event.sequence_id: event for event in worker.run()}
    assert isinstance(events["s"].error, InternalError)
    assert len(events["t"].proposal.token_ids) == 4
    # Cut back to the ledger, whose last token the next round feeds.
    assert worker.cached() == list(PROMPT[:-1])


@pytest.mark.parametrize(("skills", "chains"), [(None, 0), (ChainSkills(max_feed=16), 1)])
def test_chains_are_compiled_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, skills: ChainSkills | None, chains: int
) -> None:
    """With and without lookahead; nothing is left to the engine thread."""
    runner, called = ToyRunner(MODEL), list[int]()
    runner.chain_skills = skills
    draw = runner.forward_chains
    monkeypatch.setattr(runner, "forward_chains", lambda inputs: called.append(len(inputs)) or draw(inputs))
    warm_up(runner)
    assert len(called) == chains
    assert runner.pool.free_blocks == runner.pool.num_blocks


def drawn_of(row: list[float], **sampling: Any) -> Drawn | None:
    """What is drawn from one row of logits, of all that it permits."""
    params = SequenceParams(SamplingParams(seed=1, **sampling), AcceptanceMode.REJECTION, 3)
    draft = PartialDraft(params, PROMPT, 1, NoiseTape.record(params, 3, 1))
    sampler = TokenSampler(draft_config(support_mass=1.0, support_bound=8), (), num_others=0)
    (drawn,) = sampler.draw([draft], torch.tensor([row]))
    return drawn


def test_a_row_with_a_zero_first_probability_is_sound() -> None:
    """A support is in the order of ids."""
    drawn = drawn_of([-103.0, -36.6415, -36.4367, -36.2668, 0.0, 0.0])
    assert drawn is not None
    assert drawn.distribution is not None
    assert np.frombuffer(drawn.distribution.probabilities, "<f4")[0] == 0
    assert drawn.token_id > 0


def test_a_row_without_a_drawable_token_is_not_sound() -> None:
    assert drawn_of([0.0, torch.nan, 0.0]) is None
    assert drawn_of([0.0, -torch.inf, 0.0], allowed_token_ids=[1]) is None
