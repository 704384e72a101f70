"""The position of one sequence in its grammar, and the masks of the next tokens.

Every call passes the tokens, and the state moves forward or back to them. So it cannot disagree with a ledger
and needs no rollback after a rejected proposal or a dead end. Branches of a sequence share it in the same
way.

Matchers of the library only move forward here: after the library's own rollback, a cached mask of another
text with the same number of tokens may be returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from paceline.core import limits
from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.grammar.prototype import Prototype, reason_of

T = TypeVar("T")
Mask = npt.NDArray[np.bool_]
"""[rows, V]: True for allowed tokens."""
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""The library's stop reasons if neither a token nor the end is allowed."""
_PART = 32
"""Tokens of a long text between masks and checks of the clock. The library's limit per step accumulates until
a mask is computed, so without masks a long text would exceed it although it was generated within it."""
_LAG = 32
"""Tokens by which `_base` lags behind the path, because branches go back to different places near its end."""
_SLOW = "takes too long to follow"
_STUCK = "leaves no token that may come next"
_USED_UP = "exceeded the limits for following it"


class _UsedUpError(Exception):
    """The limits shared by all copies of a prototype are exceeded, perhaps by other sequences."""


@dataclass(slots=True, eq=False)
class GrammarState:
    """One sequence's position in its grammar. Not thread-safe."""

    prototype: Prototype
    field_name: str
    """The field named in errors."""
    vocabulary_size: int
    known_ids: int
    """Number of ids in the matcher's tokenizer; at least V."""
    ends: tuple[int, ...]
    """The end-of-sequence tokens below V; allowed exactly if the text is complete."""
    clock: Callable[[], float] = time.thread_time
    """Processor time of the calling thread, in seconds."""
    _matcher: LLMatcher = field(init=False)
    _path: list[int] = field(init=False)
    """The tokens consumed by the matcher; never contains end-of-sequence tokens."""
    _base: LLMatcher = field(init=False)
    """A matcher after a prefix of the path, from which going back starts."""
    _base_length: int = 0
    _renewals: int = field(init=False)
    """The prototype's `renewals` when the matchers were created."""
    _moved: bool = False
    """Whether the state has already restarted because others exceeded the shared limits."""
    _alone: bool = False
    """Whether the prototype's lexer has seen only the current text."""
    _bits: npt.NDArray[np.int32] = field(init=False)
    _dead_end: list[int] | None = None
    """Tokens after which the library last gave up. Cached, because reaching them again takes the whole
    text."""
    _reason: str = ""
    _budget: float = limits.MAX_STRUCTURE_SECONDS
    """Processor time left for masks; each computed mask adds its allowance."""

    def __post_init__(self) -> None:
        self._bits = np.zeros((1, -(-self.known_ids // 32)), dtype=np.int32)
        self._start_over()

    def _start_over(self) -> None:
        self._base, self._base_length = self.prototype.copy(), 0
        self._matcher, self._path = self._base.deep_copy(), []
        self._renewals = self.prototype.renewals

    def _with_fair_limits(self, ask: Callable[[], T]) -> T:
        """The result of `ask`. If shared limits are exceeded, it is repeated with a separate lexer, so that
        the result does not depend on other texts."""
        begun = self.clock()
        try:
            if self._renewals != self.prototype.renewals:
                if self._moved:
                    self._use_own_prototype()
                self._moved = True
                self._start_over()
            try:
                return ask()
            except _UsedUpError:
                self._use_own_prototype()
            self._alone = True
            return ask()
        finally:
            self._alone = False
            self.prototype.seconds += self.clock() - begun

    def _use_own_prototype(self) -> None:
        self.prototype = self.prototype.another()
        self._start_over()

    def masks(
        self,
        generated: Sequence[int],
        drafts: Sequence[int] = (),
        seconds: float = limits.MAX_STRUCTURE_SECONDS,
    ) -> Mask:
        """The allowed tokens after the generated tokens, and after each following draft token.

        Args:
            generated: the ledger's tokens after the prompt.
            drafts: N draft tokens, not necessarily allowed.
            seconds: processor time after which only the first row is still computed.

        Returns:
            bool [M, V], M at most N + 1. If the continuation is unique, a row may allow only the tokenizer's
            token for it, not each of its prefixes. A row that no text can reach (after a forbidden draft
            token or after the end) allows everything: no token drawn there is committed. With M < N + 1 rows,
            the grammar gave up or took too long after the M-th draft token. M depends only on the draft
            tokens up to that one, and the last row says whether that one is allowed, so the chain can be
            verified up to it.

        Raises:
            InvalidArgumentError: the grammar exceeds its limits, leaves no token, or takes too long, for
            newly
                consumed generated tokens or for the first row.
            InternalError: the generated tokens violate the grammar.
        """
        if self._budget < 0:
            # Not retried, because other sequences of the worker wait for every mask.
            raise InvalidArgumentError(self.field_name, _SLOW)
        followed = self._length_before_dead_end([*generated, *drafts]) - len(generated)
        if followed <= 0:
            raise InvalidArgumentError(self.field_name, self._reason)
        return self._with_fair_limits(lambda: self._masks(generated, drafts, followed, seconds))

    def _masks(self, generated: Sequence[int], drafts: Sequence[int], most: int, seconds: float) -> Mask:
        rows = np.ones((len(drafts) + 1, self.vocabulary_size), dtype=np.bool_)
        if not self._go_to(generated):
            return rows
        begun = self.clock()
        try:
            return rows[: self._fill_rows(rows, drafts, most, seconds)]
        finally:
            self._budget -= self.clock() - begun

    def _length_before_dead_end(self, tokens: Sequence[int]) -> int:
        """The number of tokens before the last dead end; one more than all without a dead end."""
        end = self._dead_end
        return len(end) if end is not None and tokens[: len(end)] == end else len(tokens) + 1

    def _fill_rows(self, rows: Mask, drafts: Sequence[int], most: int, seconds: float) -> int:
        """Compute up to `most` rows; returns the number of valid rows."""
        begun = self.clock()
        for i in range(most):
            try:
                if i > 0 and not self._take(drafts[i - 1]):
                    if drafts[i - 1] in self.ends:
                        return len(rows)
                    # The previous row allows it, so the lexer has exceeded its limits.
                    self._give_up(_USED_UP, drafts[i - 1])
                self._fill(rows[i])
            except InvalidArgumentError:
                if i == 0:
                    raise
                return i
            if i < len(drafts) and not rows[i, drafts[i]]:
                return len(rows)
            spent = self.clock() - begun
            if i == 0 and spent > limits.MAX_STRUCTURE_SECONDS:
                raise InvalidArgumentError(self.field_name, _SLOW)
            if spent >= seconds:
                return i + 1
        return most

    def forced(self, generated: Sequence[int]) -> tuple[int, ...]:
        """Tokens that follow the generated ones in every valid text, in the tokenizer's spelling.

        Empty at the end of the text, and before a token that may continue in several ways.

        Raises PacelineError: the grammar fails here, as `masks` then does too.
        """
        if self._length_before_dead_end(list(generated)) <= len(generated):
            return ()
        return self._with_fair_limits(lambda: self._forced(generated))

    def _forced(self, generated: Sequence[int]) -> tuple[int, ...]:
        if not self._go_to(generated):
            return ()
        tokens = self._matcher.compute_ff_tokens()
        self._refuse_if_broken()
        return tuple(tokens)

    def follows(self, generated: Sequence[int], until: float) -> bool:
        """Whether the tokens are a valid text or prefix.

        Raises InvalidArgumentError if the grammar exceeds its limits or the clock passes `until`.
        """
        return self._with_fair_limits(lambda: self._follows(generated, until))

    def _follows(self, generated: Sequence[int], until: float) -> bool:
        self._start_over()
        for count, token_id in enumerate(generated):
            if token_id in self.ends:
                return True
            if not self._take(token_id):
                self._raise_if_lexer_failed()
                return False
            self._after_token(count, until)
        return True

    def _raise_if_lexer_failed(self) -> None:
        """After a refused token: raises if a failed lexer refused it instead of the grammar."""
        if not self._alone and not self.prototype.is_sound:
            self._give_up(_USED_UP)

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Move to the position after `tokens`; False if the text ends within them.

        Usually this consumes a few tokens. For a reopened sequence it consumes the whole text, with the same
        time limit as in the coordinator.
        """
        agreed = self._common_length(tokens)
        if agreed < len(self._path):
            self._go_back(agreed)
        until = self.clock() + limits.MAX_FOLLOW_SECONDS
        for count, token_id in enumerate(tokens[agreed:]):
            if token_id in self.ends:
                return False
            if count and len(tokens) - len(self._path) == _LAG:
                # Set the base for later moves back.
                self._base, self._base_length = self._matcher.deep_copy(), len(self._path)
            if not self._take(token_id):
                self._raise_if_lexer_failed()
                raise InternalError("the sequence's tokens violate its structured_outputs")
            self._after_token(count, until)
        return True

    def _after_token(self, count: int, until: float) -> None:
        """After token number `count`: compute a mask at the end of a part, check the clock at its start."""
        if count % _PART == _PART - 1:
            self._matcher.compute_bitmask()
            self._refuse_if_broken()
        if count % _PART == 0 and self.clock() > until:
            raise InvalidArgumentError(self.field_name, _SLOW)

    def _common_length(self, tokens: Sequence[int]) -> int:
        """Length of the common prefix of `tokens` and the path."""
        bound = min(len(self._path), len(tokens))
        if self._path[:bound] == list(tokens[:bound]):
            return bound
        return next(i for i in range(bound) if self._path[i] != tokens[i])

    def _go_back(self, length: int) -> None:
        """Move back to the first `length` tokens of the path, with a copy of the base."""
        if length < self._base_length:
            self._base, self._base_length = self.prototype.copy(), 0
        while self._base_length < length - _LAG:
            part = self._path[self._base_length : min(self._base_length + _PART, length - _LAG)]
            if self._base.try_consume_tokens(part) < len(part):
                self._give_up(_USED_UP)
            self._base_length += len(part)
            if len(part) == _PART:
                self._base.compute_bitmask()
        self._matcher = self._base.deep_copy()
        rest = self._path[self._base_length : length]
        if self._matcher.try_consume_tokens(rest) < len(rest):
            self._give_up(_USED_UP)
        del self._path[length:]

    def _take(self, token_id: int) -> bool:
        """Consume one token. False, without moving, for a forbidden token or an end."""
        if token_id in self.ends:
            return False
        if self._matcher.try_consume_tokens([token_id]) == 1:
            self._path.append(token_id)
            return True
        self._refuse_if_broken(token_id)
        return False

    def _fill(self, row: Mask) -> None:
        """Compute the mask at the current position."""
        fill_next_token_bitmask(self._matcher, self._bits)
        self._refuse_if_broken()
        row[:] = np.unpackbits(self._bits[0].view(np.uint8), count=self.vocabulary_size, bitorder="little")
        row[list(self.ends)] = self._matcher.is_accepting()
        self._budget = min(self._budget + limits.MAX_MASK_SECONDS, limits.MAX_STRUCTURE_SECONDS)
        if not row.any():
            raise InvalidArgumentError(self.field_name, _STUCK)

    def _refuse_if_broken(self, *taken: int) -> None:
        """Raise if the library gave up, because the grammar exceeded its limits or cannot be completed. That
        may happen while consuming a token (`taken`)."""
        if not self._matcher.is_error():
            return
        reason = reason_of(self._matcher.get_error())
        if reason not in _DEAD_ENDS:
            self._give_up(reason, *taken)
        self._set_dead_end(_STUCK, *taken)
        # A matcher keeps its error, but later calls may pass other tokens.
        self._start_over()
        raise InvalidArgumentError(self.field_name, self._reason)

    def _give_up(self, reason: str, *taken: int) -> NoReturn:
        """The lexer exceeded its limits and is unusable for all copies."""
        self.prototype.drop()
        if not self._alone:
            raise _UsedUpError
        self._set_dead_end(reason, *taken)
        raise InvalidArgumentError(self.field_name, self._reason)

    def _set_dead_end(self, reason: str, *taken: int) -> None:
        self._reason, self._dead_end = reason, [*self._path, *taken]
