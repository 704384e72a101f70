"""Keeps the commits of one sequence, for a client that resumes and needs those it missed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from coordinator.sequence.ledger import Commit, Ledger
from paceline.core.types import TokenLogprobs, TokenOrigin

POSITIONS = 256
"""Positions in one replayed commit, which bounds the size of messages."""


@dataclass(slots=True)
class ReplayBuffer:
    """Emitted data that the ledger does not keep. Origins and log-probabilities begin at token `start`."""

    start: int = 0
    origins: list[TokenOrigin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_logprobs: int = 0
    """Number of log-probabilities kept, including those of the likeliest tokens."""

    def add(self, commit: Commit) -> None:
        """Keep an emitted commit."""
        self.origins.extend(commit.origins)
        self.logprobs.extend(commit.logprobs)
        self.prompt_logprobs.extend(commit.prompt_logprobs)
        for each in (*commit.logprobs, *commit.prompt_logprobs):
            self.num_logprobs += 1 + len(each.top_logprobs)

    def covers(self, resume_from: int, ledger: Ledger) -> bool:
        """True if everything after `resume_from` tokens is here."""
        return self.start <= resume_from <= ledger.num_generated

    def missed(self, resume_from: int, ledger: Ledger, fresh: Ledger) -> Iterator[Commit]:
        """Yield the commits after the first `resume_from` tokens, or all of them if it is 0.

        `fresh` is a ledger of the same sequence with only the prompt. It takes in the tokens as `ledger` did,
        because the text of each token follows from the tokens alone. Commits emitted from now on are not
        included, and the iterator may be read in another thread.
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
    """The end of a sequence, for a client that has all of its tokens and text."""
    return Commit(ledger.num_generated, (), (), "", ledger.finish, ledger.choice)
