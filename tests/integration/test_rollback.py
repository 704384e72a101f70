"""Each worker rolls its cache back: entries and blocks after every round follow the ledger."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE, id_prompts
from harness.stacks import RunningStack, own_coordinator, own_worker, together
from harness.tiers import mostly_full
from harness.waiting import HANG, until
from harness.wire import Line, Proxy

from paceline.core.messages import (
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import Proposal

BLOCK = 16


def blocks(entries: int) -> int:
    return -(-entries // BLOCK)


@pytest.mark.parametrize("seed", mostly_full(range(3), count=1))
def test_target_truncates_to_the_ledger_less_one(stack: RunningStack, oracle: Oracle, seed: int) -> None:
    """Proposals that are right for a while and then wrong, of every length: generate's tokens come out."""
    rng = random.Random(seed)
    prompt = oracle.encode(SOURCE)[: 30 + seed]
    want = oracle.greedy(prompt, 60, ignore_eos=True)
    with Line(stack.stack.address_of("target"), "target") as line:
        sequence = line.open(prompt)
        outcomes = set()
        while (done := len(sequence.ledger) - len(prompt)) < 40:
            k = rng.choice((0, 1, 2, 5, 8, 17))
            right = rng.randint(0, k)
            proposal = list(want[done : done + k])
            if right < k:
                proposal[right] = (proposal[right] + 1 + rng.randrange(100)) % oracle.vocabulary_size
            verdict = sequence.step(proposal)
            assert verdict.num_accepted == right
            outcomes.add((k > 0, right == k))
            # Invariant 1, and no block more than those entries need; the newest token may be fed ahead.
            assert verdict.num_computed_tokens == len(sequence.ledger) - 1
            assert line.used_blocks() in {blocks(len(sequence.ledger) - ahead) for ahead in (0, 1)}
        assert outcomes >= {(True, False), (True, True)}
        oracle.check_greedy(prompt, sequence.ledger[len(prompt) :][:40], 40, ignore_eos=True)
        sequence.end()
        # Closing has no answer.
        until(lambda: line.used_blocks() == 0, "free blocks after the end")


@pytest.fixture(scope="module")
def plain_draft(stack: RunningStack) -> Iterator[str]:
    """A draft worker that does not look ahead: every block it uses belongs to a proposal."""
    with own_worker("draft", stack.pair.draft, lookahead_branches=0) as address:
        yield address


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "looking ahead"])
@pytest.mark.parametrize("seed", mostly_full(range(3), count=1))
def test_draft_truncates_to_the_agreed_tokens(
    stack: RunningStack, plain_draft: str, oracle: Oracle, seed: int, ahead: bool
) -> None:
    """After every verdict the draft proposes what one with a fresh cache proposes."""
    rng = random.Random(seed)
    prompt = oracle.encode(SOURCE)[: 30 + seed]
    address = stack.stack.address_of("draft") if ahead else plain_draft
    with Line(address, "draft") as line:
        sequence = line.open(prompt)
        for _ in range(12):
            k = rng.choice((1, 2, 5, 8, 17))
            answer = line.ask(sequence.draft(k))
            proposed = answer.proposal.token_ids
            assert len(proposed) == k
            # The last draft token is never fed.
            assert answer.num_computed_tokens == len(sequence.ledger) + k - 1
            if ahead:
                assert line.used_blocks() >= blocks(answer.num_computed_tokens)
            else:
                assert line.used_blocks() == blocks(answer.num_computed_tokens)
            fresh = line.open(sequence.ledger)
            again = line.ask(fresh.draft(k))
            assert (again.proposal, again.num_computed_tokens) == (
                answer.proposal,
                answer.num_computed_tokens,
            )
            fresh.end()
            # Step 4: all accepted (the entry of dK is missing), some, or none; then the target's token.
            accepted = rng.choice((k, rng.randint(0, k), 0))
            sequence.ledger += [*proposed[:accepted], rng.randrange(oracle.vocabulary_size)]
        sequence.end()
        # Closing has no answer.
        until(lambda: line.used_blocks() == 0, "free blocks after the end")


def test_continuations_equal_a_later_rounds_proposal(stack: RunningStack, oracle: Oracle) -> None:
    """Drafting ahead may change when a token comes, never which: a fresh cache proposes the same."""
    prompt = oracle.encode(SOURCE)[:37]
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 4}]
    with Line(stack.stack.address_of("draft"), "draft") as line:
        for sampling in samplings:
            sequence = line.open(prompt, **sampling)
            proposed = line.ask(sequence.draft(4)).proposal.token_ids
            pushed = line.wait_for_continuations(sequence.id)
            assert (pushed.round, pushed.base_length) == (1, len(prompt))
            assert pushed.proposals
            sequence.end()
            for (accepted, token, _), proposal in pushed.proposals.items():
                fresh = line.open([*prompt, *proposed[:accepted], token], prompt=len(prompt), **sampling)
                answer = line.ask(fresh.draft(proposal.num_draft_tokens))
                assert answer.proposal.token_ids == proposal.token_ids, (accepted, token)
                fresh.end()
        until(lambda: line.used_blocks() == 0, "free blocks after the end")


def test_draft_follows_a_shortened_ledger(stack: RunningStack, oracle: Oracle) -> None:
    """Positions are absolute: a shorter ledger with another end is obeyed like any other."""
    prompt = list(oracle.encode(SOURCE)[:50])
    with Line(stack.stack.address_of("draft"), "draft") as line:
        sequence = line.open(prompt)
        line.ask(sequence.draft(8))
        for length in (40, 17, 16, 1, 33):
            sequence.ledger = [*prompt[: length - 1], 9]
            answer = line.ask(sequence.draft(3, tail=1))
            fresh = line.open(sequence.ledger)
            assert line.ask(fresh.draft(3)).proposal == answer.proposal
            fresh.end()
            assert answer.num_computed_tokens == length + 2
            sequence.ledger = list(prompt)
            line.ask(sequence.draft(8, tail=len(prompt) - length + 1))


def check_invariants(log: list[Any]) -> dict[str, int]:
    """Replay what passed between coordinator and one worker; every answer's numbers fit the ledger."""
    ledgers: dict[str, list[int]] = {}
    asked: dict[tuple[str, int], Any] = {}
    ahead: dict[tuple[str, int], dict[tuple[int, int], Proposal]] = {}
    seen = {"rounds": 0, "accepted": 0, "rejected": 0, "proposals": 0}
    for item in log:
        match item:
            case OpenSequence():
                ledgers[item.sequence_id] = list(item.token_ids)
            case VerifyRound() | DraftRound():
                ledger = ledgers[item.sequence_id]
                start = item.base_length - len(item.committed_tail)
                assert start <= len(ledger), "the coordinator left a gap"
                ledger[start:] = item.committed_tail
                assert len(ledger) == item.base_length
                asked[item.sequence_id, item.round] = item
            case VerifyAhead():
                ahead.setdefault((item.sequence_id, item.round), {}).update(item.proposals)
            case RoundVerdict():
                command, verdict = asked[item.sequence_id, item.round], item.verdict
                ledger = ledgers[item.sequence_id]
                ledger.extend(verdict.token_ids)
                if verdict.went_on_with is not None:
                    told = ahead[item.sequence_id, item.round]
                    following = told.get((verdict.num_accepted, ledger[-1]), Proposal())
                    proposal = Proposal(following.token_ids[: verdict.went_on_with])
                    address = (item.sequence_id, item.epoch, item.round + 1)
                    asked[item.sequence_id, item.round + 1] = VerifyRound(*address, len(ledger), (), proposal)
                assert verdict.num_computed_tokens == len(ledgers[item.sequence_id]) - 1
                seen["rounds"] += 1
                seen["accepted"] += verdict.num_accepted
                seen["rejected"] += command.proposal.num_draft_tokens - verdict.num_accepted
            case DraftProposal():
                command = asked[item.sequence_id, item.round]
                assert item.base_length == command.base_length
                assert item.proposal.num_draft_tokens == command.num_draft_tokens
                assert item.num_computed_tokens == item.base_length + command.num_draft_tokens - 1
                seen["proposals"] += 1
    return seen


def test_every_round_of_the_service_keeps_the_invariants(stack: RunningStack, oracle: Oracle) -> None:
    """Both links of a coordinator are recorded, with mixed requests at once."""
    with (
        Proxy(stack.stack.address_of("target"), "target") as target,
        Proxy(stack.stack.address_of("draft"), "draft") as draft,
        own_coordinator(stack.pair, [target.address], [draft.address]) as own,
    ):
        prompts: list[Ids] = id_prompts(oracle)[:12]
        calls = [
            lambda i=i, prompt=prompt: own.client.generate(
                prompt,
                {"temperature": (0.0, 0.8, 1.0)[i % 3], "max_tokens": 30, "seed": i, "ignore_eos": True},
                speculation={
                    "num_speculative_tokens": (1, 3, 5, 8)[i % 4],
                    "acceptance": ("coupled", "rejection", "block")[i % 3],
                },
                timeout=HANG,
            )
            for i, prompt in enumerate(prompts)
        ]
        results = together(calls, at_once=len(calls))
        seen = check_invariants(target.log)
        assert check_invariants(draft.log)["proposals"] > 0
        # A target may have begun one round more than its sequence had.
        rounds = sum(r.speculative_decoding.num_rounds for r in results)
        assert rounds <= seen["rounds"] <= rounds + len(results)
        assert min(seen["accepted"], seen["rejected"]) > 0
    stack.check_pools_whole()


def test_a_fixed_k_is_shortened_in_the_last_rounds_only(
    stack: RunningStack, plain_draft: str, oracle: Oracle
) -> None:
    """A round asks for K or for what is usable: the target adds one token to every proposal."""
    length = 30
    with (
        Proxy(plain_draft, "draft") as draft,
        own_coordinator(stack.pair, [stack.stack.address_of("target")], [draft.address]) as own,
    ):
        for k in (1, 3, 8):
            for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": k}):
                prompt = oracle.encode(SOURCE)[: 30 + k]
                before = len(draft.commands)
                result = own.client.generate(
                    prompt,
                    {"max_tokens": length, "ignore_eos": True, **sampling},
                    speculation={"num_speculative_tokens": k, "prompt_lookup": False},
                    timeout=HANG,
                )
                asked = [each for each in draft.commands[before:] if isinstance(each, DraftRound)]
                room = [len(prompt) + length - each.base_length - 1 for each in asked]
                assert [each.num_draft_tokens for each in asked] == [min(k, most) for most in room]
                # The first round is plain, and the last one may be for want of room.
                without = result.speculative_decoding.num_rounds - len(asked)
                assert without in (1, 2)
                assert room[0] == length - 2
