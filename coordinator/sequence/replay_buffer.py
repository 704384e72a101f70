"""What was emitted of one sequence, so that a client that comes back is told what it missed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from coordinator.sequence.ledger import Commit, Ledger
from paceline.core.types import TokenLogprobs, TokenOrigin

POSITIONS = 256
"""Of one commit, at most: what was missed must not make messages too large."""


@dataclass(slots=True)
class ReplayBuffer:
    """What the ledger does not keep. Origins and log-probabilities begin at token `start`."""

    start: int = 0
    origins: list[TokenOrigin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_logprobs: int = 0
    """Log-probabilities that it keeps, those of the likeliest tokens included."""

    def add(self, commit: Commit) -> None:
        """Keep what is emitted."""
        self.origins.extend(commit.origins)
        self.logprobs.extend(commit.logprobs)
        self.prompt_logprobs.extend(commit.prompt_logprobs)
        for each in (*commit.logprobs, *commit.prompt_logprobs):
            self.num_logprobs += 1 + len(each.top_logprobs)

    def covers(self, resume_from: int, ledger: Ledger) -> bool:
        """True where all that follows `resume_from` tokens is here."""
        return self.start <= resume_from <= ledger.num_generated

    def missed(self, resume_from: int, ledger: Ledger, fresh: Ledger) -> Iterator[Commit]:
        """All that was emitted after the first `resume_from` tokens, from the start if there are none.

        `fresh` is a ledger of the same sequence with nothing but the prompt. It takes the tokens in as
        `ledger` did: which text goes with which token follows from the tokens alone. What is emitted from
        now on is not of it, and it may be read in another thread.
        """
        tokens, origins = ledger.token_ids[ledger.prompt_length :], self.origins[resume_from - self.start :]
        prompt = tuple(self.prompt_logprobs) if resume_from == 0 else ()
        logprobs = self.logprobs[resume_from - self.start :]
        return self._replayed(resume_from, fresh, tokens, origins, logprobs, prompt)

    @staticmethod
    def _replayed(
        resume_from: int,
        fresh: Ledger,
        tokens: Sequence[int],
        origins: Sequence[TokenOrigin],
        logprobs: Sequence[TokenLogprobs],
        prompt: Sequence[TokenLogprobs],
    ) -> Iterator[Commit]:
        fresh.replay(tokens[:resume_from])
        tokens = tokens[resume_from:]
        for at in range(0, len(prompt), POSITIONS):
            part = tuple(prompt[at : at + POSITIONS])
            yield Commit(0, (), (), "", choice=fresh.choice, prompt_logprobs=part)
        if resume_from and fresh.ended:
            yield ending(fresh)
        for at in range(0, len(origins), POSITIONS):
            mine = slice(at, at + POSITIONS)
            pairs = list(zip(tokens[mine], origins[mine], strict=True))
            yield fresh.commit(pairs, logprobs[mine])


def ending(ledger: Ledger) -> Commit:
    """The end of a sequence for a client that has all of its tokens, and with them all of its text."""
    return Commit(ledger.num_generated, (), (), "", ledger.finish, ledger.choice)
