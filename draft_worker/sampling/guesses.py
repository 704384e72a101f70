"""Hierarchical drafts: a sub-drafter guesses several draft tokens, and one step of the drafter checks them.

The drafter is fed the guesses behind the newest token, and scores the row after each. Every row is drawn from
as it would be if the tokens came one by one: from q, the draft's own distribution, with the noise of its own
position. A row counts as long as the tokens drawn before it are those that were guessed. So the tokens and
what is sent of them are those of drawing one by one, in every acceptance mode: a guess c comes true with
probability q(c), and the token that is drawn instead has the distribution q without c. Only the number of
steps depends on the guesses.

That number also depends on what is drawn. So where the target judges by ratios, the coordinator leaves out no
late proposal (coordinator/round/steps.py), and the engine sends what is drawn of one that cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch

from draft_worker.sampling.draw import Drawn
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sampling.sampler import TokenSampler
from draft_worker.sub_drafters import SubDrafter


class Guesses:
    """The sub-drafters of a worker's sequences."""

    def __init__(self, make: Callable[[], SubDrafter]) -> None:
        """`make` makes the sub-drafter of a sequence."""
        self._make = make
        self._by_sequence: dict[str, tuple[SubDrafter, int]] = {}
        """Each with the length of the ledger that it has seen."""

    def after(self, sequence_id: str, draft: PartialDraft) -> Sequence[int]:
        """Tokens that may follow the draft's newest, fewer than it lacks: the last one is never fed.

        None under a grammar, whose state follows one text at a time.
        """
        most = draft.k - len(draft.drawn) - 1
        if most <= 0 or draft.grammar is not None:
            return ()
        guesser, seen = self._by_sequence.get(sequence_id) or (self._make(), 0)
        if len(draft.ledger) < seen:  # a coordinator that takes back tokens gets a new one
            guesser = self._make()
        self._by_sequence[sequence_id] = guesser, len(draft.ledger)
        return guesser.guess(draft.ledger, draft.token_ids, most)[:most]

    def forget(self, sequence_id: str) -> None:
        """The sequence is gone, or begins anew."""
        self._by_sequence.pop(sequence_id, None)


def draw_guessed(
    sampler: TokenSampler, work: Sequence[tuple[PartialDraft, Sequence[int]]], logits: torch.Tensor
) -> list[list[Drawn | None]]:
    """The next tokens of each draft: at least one, and one more for each guess that came true.

    Args:
        sampler: draws.
        work: drafts with the G ≥ 0 guesses that each was fed.
        logits: float [sum of G + 1, vocabulary], the rows after each draft's newest token and its guesses.

    Returns:
        The tokens of each draft; None, which is the last one, for a row that is no distribution.
    """
    drawn = iter(sampler.draw([path for draft, guess in work for path in _paths(draft, guess)], logits))
    return [_confirmed([next(drawn) for _ in range(len(guess) + 1)], guess) for _, guess in work]


def _paths(draft: PartialDraft, guess: Sequence[int]) -> list[PartialDraft]:
    """The draft after each of its first 0 to G guesses, as if they had been drawn."""
    drawn = list(map(Drawn, guess))
    guessed = (replace(draft, drawn=[*draft.drawn, *drawn[:i]]) for i in range(1, len(guess) + 1))
    return [draft, *guessed]


def _confirmed(rows: Sequence[Drawn | None], guess: Sequence[int]) -> list[Drawn | None]:
    """The tokens of the rows up to the first that is not the guessed one."""
    confirmed: list[Drawn | None] = []
    for token, guessed in zip_longest(rows, guess):
        confirmed.append(token)
        if token is None or token.token_id != guessed:
            break
    return confirmed
