"""Replay for a returning client: exactly the parts that it misses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import coordinator.sequence.replay_buffer as record_module
from coordinator.sequence.ledger import Commit, Ledger
from coordinator.sequence.replay_buffer import ReplayBuffer, ending
from paceline.core.types import FinishReason, TokenLogprobs, TokenOrigin
from tests.sim.reference import LetterDetokenizer
from tests.unit.coordinator.machines import make_ledger

ORIGINS = list(TokenOrigin)


def ledger_of(**sampling: Any) -> Ledger:
    return make_ledger(eos=[25], max_model_len=50, **({"max_tokens": 12} | sampling))


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -float(token_id), 1)


def emitted(rounds: list[list[int]], ledger: Ledger, record: ReplayBuffer, *, logprobs: bool) -> list[Commit]:
    commits = []
    for number, tokens in enumerate(rounds):
        if ledger.ended:
            break
        pairs = [(token, ORIGINS[(number + i) % 4]) for i, token in enumerate(tokens)]
        commit = ledger.commit(pairs, [logprob(token) for token in tokens] if logprobs else ())
        record.add(commit)
        commits.append(commit)
    return commits


def joined(commits: list[Commit]) -> tuple[Any, ...]:
    """What a client has in the end, however it was cut into commits."""
    last = commits[-1].finish if commits else None
    return (
        [t for c in commits for t in c.token_ids],
        [o for c in commits for o in c.origins],
        [entry for c in commits for entry in c.logprobs],
        "".join(c.text for c in commits),
        last,
    )


rounds_of_tokens = st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=4), max_size=8)


@settings(max_examples=300, deadline=None)
@given(rounds=rounds_of_tokens, cut=st.integers(0, 8), logprobs=st.booleans(), data=st.data())
def test_missed_and_read_parts_make_the_whole(
    rounds: list[list[int]], cut: int, logprobs: bool, data: Any
) -> None:
    """Also where a stop string or held-back text lies across the cut."""
    sampling = {
        "stop": data.draw(st.lists(st.text("abcdexyz", min_size=1, max_size=3), max_size=2)),
        "min_tokens": data.draw(st.integers(0, 4)),
        "include_stop_str_in_output": data.draw(st.booleans()),
    }
    ledger, record = ledger_of(**sampling), ReplayBuffer()
    whole = emitted(rounds, ledger, record, logprobs=logprobs)
    read = whole[:cut]
    count = sum(len(commit.token_ids) for commit in read)
    assert record.covers(count, ledger)
    missed = list(record.missed(count, ledger, ledger_of(**sampling)))
    assert joined([*read, *missed]) == joined(whole)
    due = count
    for commit in missed:
        assert commit.index == due
        due += len(commit.token_ids)


def test_a_commit_may_be_cut_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "POSITIONS", 2)
    ledger, record = ledger_of(max_tokens=7), ReplayBuffer()
    (whole,) = emitted([[4, 5, 6, 7, 8, 9, 10]], ledger, record, logprobs=True)
    missed = list(record.missed(2, ledger, ledger_of(max_tokens=7)))
    assert [commit.token_ids for commit in missed] == [(6, 7), (8, 9), (10,)]
    assert [commit.finish is not None for commit in missed] == [False, False, True]
    assert joined(missed)[1:3] == (list(whole.origins[2:]), list(whole.logprobs[2:]))


def test_later_commits_are_not_missed() -> None:
    """They reach the returning client in the ordinary way."""
    ledger, record = ledger_of(prompt_logprobs=0), ReplayBuffer()
    for report in (ledger.report_prompt(1, [logprob(2)]), ledger.report_prompt(2, [logprob(3)])):
        missed = record.missed(0, ledger, ledger_of())
        record.add(report)
        assert [c.prompt_logprobs for c in missed] == [(logprob(2),)] * (
            report.prompt_logprobs[0].token_id - 2
        )
    emitted([[4, 5]], ledger, record, logprobs=True)
    missed = record.missed(1, ledger, ledger_of())
    emitted([[6, 7]], ledger, record, logprobs=True)
    assert [c.token_ids for c in missed] == [(5,)]


def test_a_fresh_ledger_ends_at_the_same_place() -> None:
    """Also where another target now serves longer or shorter sequences."""
    ledger = ledger_of(max_tokens=None, stop=["zz"])
    emitted([[4] * 46, [4]], ledger, ReplayBuffer(), logprobs=False)
    assert ledger.ended
    fresh = ledger.fresh(LetterDetokenizer())
    assert (fresh.num_generated, fresh.remaining) == (0, 47)
    fresh.replay([4] * 47)
    assert fresh.finish == ledger.finish
    with_end = ledger_of().fresh(LetterDetokenizer())
    with_end.replay([25])
    assert with_end.ended


def test_the_prompts_report_is_replayed_before_any_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "POSITIONS", 1)
    ledger, record = ledger_of(prompt_logprobs=0), ReplayBuffer()
    report = ledger.report_prompt(1, [logprob(2), logprob(3)])
    assert report is not None
    record.add(report)
    fresh = ledger_of(prompt_logprobs=0)
    assert [c.prompt_logprobs for c in record.missed(0, ledger, fresh)] == [(logprob(2),), (logprob(3),)]
    emitted([[4, 5]], ledger, record, logprobs=False)
    assert [c.token_ids for c in record.missed(1, ledger, ledger_of(prompt_logprobs=0))] == [(5,)]
    assert [c.token_ids for c in record.missed(0, ledger, ledger_of(prompt_logprobs=0))][2:] == [(4,), (5,)]


def test_a_late_record_covers_later_tokens_only() -> None:
    ledger, record = ledger_of(), ReplayBuffer(start=3)
    ledger.replay([4, 5, 6])
    emitted([[7, 8]], ledger, record, logprobs=False)
    assert [record.covers(count, ledger) for count in range(7)] == [False] * 3 + [True] * 3 + [False]
    (missed,) = record.missed(4, ledger, ledger_of())
    assert (missed.index, missed.token_ids) == (4, (8,))


def test_replayed_tokens_end_the_sequence_the_same() -> None:
    ledger = ledger_of(max_tokens=3)
    ledger.replay([4, 5, 6])
    commit = ending(ledger)
    assert (commit.index, commit.token_ids, commit.text) == (3, (), "")
    assert commit.finish.reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="ended"):
        ledger.replay([7])
    with pytest.raises(ValueError, match="ended"):
        ledger_of().replay([4, 25, 6])


def test_replayed_tokens_need_no_prompt_report() -> None:
    ledger = ledger_of(prompt_logprobs=1)
    ledger.replay(())
    assert ledger.lacks_prompt_logprobs
    ledger.replay([4])
    assert not ledger.lacks_prompt_logprobs
