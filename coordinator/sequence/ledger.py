"""The ledger: the committed tokens of one sequence, and the only place where the sequence may end.

A verdict is clipped at EOS, stop tokens, stop strings and `max_tokens` before it is committed. Only committed
tokens are emitted. All other state can be rebuilt from the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.text.detokenizer import Detokenizer, StopSearch
from paceline.core.types import FinishReason, SamplingParams, TokenLogprobs, TokenOrigin


@dataclass(frozen=True, slots=True)
class Finish:
    """The reason for a sequence's end. An end-of-sequence token is not named."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens added by one verdict. `index` is the position of the first one among the generated tokens.

    A commit without tokens reports part of the prompt: its text or its log-probabilities.
    """

    index: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    text: str
    finish: Finish | None = None
    choice: int = 0
    """Index of the completion within the request."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry a token, if the request asks for log-probabilities."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's next tokens, in order; its first token has none."""


class Ledger:
    """Prompt and committed tokens of one sequence."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        detokenizer: Detokenizer,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        choice: int = 0,
    ) -> None:
        self.choice = choice
        self.token_ids: list[int] = list(prompt)
        self.prompt_length = len(prompt)
        self.finish: Finish | None = None
        self._prompt_logprobs_due = self.prompt_length - 1 if sampling.prompt_logprobs is not None else 0
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._search = StopSearch(sampling.stop)
        self._eos = frozenset() if sampling.ignore_eos else eos_token_ids
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._max_model_len = max_model_len
        room = max_model_len - len(prompt)
        self._max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)

    def fresh(self, detokenizer: Detokenizer) -> Ledger:
        """A ledger of the same sequence with only the prompt and the same end conditions."""
        return Ledger(
            self.token_ids[: self.prompt_length],
            self._sampling,
            detokenizer=detokenizer,
            eos_token_ids=self._eos,
            max_model_len=self._max_model_len,
            choice=self.choice,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def ended(self) -> bool:
        """True if no more tokens may be committed."""
        return self.finish is not None

    @property
    def num_generated(self) -> int:
        """Committed tokens after the prompt."""
        return len(self.token_ids) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be committed."""
        return self._max_tokens - self.num_generated

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True while requested log-probabilities of the prompt are missing."""
        return self._prompt_logprobs_due > 0

    def report_prompt(self, start: int, logprobs: Sequence[TokenLogprobs]) -> Commit | None:
        """Add log-probabilities of prompt tokens from position `start` on; known ones are skipped.

        Returns None if they leave a gap, belong to other tokens, or were not asked for.
        """
        due = self.prompt_length - self._prompt_logprobs_due
        told = self.token_ids[start : min(start + len(logprobs), self.prompt_length)]
        if self._sampling.prompt_logprobs is None or not 1 <= start <= due:
            return None
        if [entry.token_id for entry in logprobs] != told:
            return None
        new = tuple(logprobs[due - start :])
        self._prompt_logprobs_due -= len(new)
        return Commit(0, (), (), "", choice=self.choice, prompt_logprobs=new)

    def commit(
        self, tokens: Sequence[tuple[int, TokenOrigin]], logprobs: Sequence[TokenLogprobs] = ()
    ) -> Commit:
        """Add a verdict, clipped at the first condition that ends the sequence.

        `logprobs` has one entry a token or is empty, and is clipped with the tokens.
        """
        self._refuse_if_ended()
        index = self.num_generated
        text: list[str] = []
        for token_id, _ in tokens:
            self.token_ids.append(token_id)
            text.append(self._take(token_id))
            if self.ended:
                break
        kept = tokens[: self.num_generated - index]
        if self.finish is not None and self.finish.stop_string is None:
            text.append(self._flush())
        return Commit(
            index,
            tuple(token_id for token_id, _ in kept),
            tuple(origin for _, origin in kept),
            "".join(text),
            self.finish,
            self.choice,
            tuple(logprobs[: len(kept)]),
        )

    def replay(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the client already has, with their text and the prompt's report.

        Raises ValueError if a token follows the end.
        """
        for token_id in token_ids:
            self._refuse_if_ended()
            self.token_ids.append(token_id)
            self._take(token_id)
        if self.finish is not None and self.finish.stop_string is None:
            self._flush()  # the client has the text, but a stop string may be found in it
        if token_ids:
            self._prompt_logprobs_due = 0

    def _refuse_if_ended(self) -> None:
        if self.ended:
            raise ValueError("the sequence has ended")

    def _take(self, token_id: int) -> str:
        """The text that one token adds. Sets `finish` if the token ends the sequence."""
        if token_id in self._eos or token_id in self._stop_ids:
            named = token_id if token_id in self._stop_ids else None
            self.finish = Finish(FinishReason.STOP, stop_token_id=named)
            # The end-of-sequence token has text only if special tokens are shown.
            has_text = token_id in self._stop_ids or not self._sampling.skip_special_tokens
            shown = self._sampling.include_stop_str_in_output and has_text
            if not shown:
                return ""
            text, stop = self._look_for_stops(self._detokenizer.push(token_id))
            return text + (stop or "")
        text, stop = self._look_for_stops(self._detokenizer.push(token_id))
        if stop is not None:
            return self._stop_behind(text, stop)
        if self.num_generated >= self._max_tokens:
            self.finish = Finish(FinishReason.LENGTH)
        return text

    def _look_for_stops(self, piece: str) -> tuple[str, str | None]:
        """Like `StopSearch.push`. Up to `min_tokens` tokens, a stop string may begin but not end."""
        if self.num_generated <= self._sampling.min_tokens:
            return self._search.skip(piece), None
        return self._search.push(piece)

    def _flush(self) -> str:
        """Text that was held back and can no longer change. A stop string in it also ends the sequence."""
        text, stop = self._look_for_stops(self._detokenizer.finish())
        return text + self._search.finish() if stop is None else self._stop_behind(text, stop)

    def _stop_behind(self, text: str, stop: str) -> str:
        """End the sequence with a stop string after `text`; returns the text to show."""
        self.finish = Finish(FinishReason.STOP, stop_string=stop)
        return text + stop if self._sampling.include_stop_str_in_output else text
