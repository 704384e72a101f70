"""Where one sequence stands in its grammar, and what may come next.

The state is derived from the tokens it is asked about: it is moved to where they lead, back and forth, so it
cannot disagree with a ledger, and nobody has to roll it back when a proposal is rejected, or leads where the
grammar gives up. Branches of one sequence share it in the same way.

A matcher of the library only ever moves forward here. Its own rollback keeps the mask that it gave last, and
gives it again at as many tokens of another text.
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
"""[rows, V]: True where a token may come."""
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""What the library says where neither a token nor the end may come."""
_PART = 32
"""Tokens of a long text between two masks, and two looks at the clock. What the library may use up for a
token adds up until a mask is taken: a text that was followed token by token could not be followed at once."""
_LAG = 32
"""Tokens by which the base stays behind: branches of a text go back to different places near its end."""
_SLOW = "takes too long to follow"
_STUCK = "leaves no token that may come next"
_USED_UP = "met the limits of what may be followed"


class _UsedUpError(Exception):
    """What all copies of a prototype may use together is used up, perhaps by others."""


@dataclass(slots=True, eq=False)
class GrammarState:
    """One sequence's place in its grammar. Not thread-safe."""

    prototype: Prototype
    field_name: str
    """What errors name."""
    vocabulary_size: int
    known_ids: int
    """Ids that the matcher's tokenizer knows; at least V."""
    ends: tuple[int, ...]
    """The end-of-sequence tokens below V: allowed exactly where the text is complete."""
    clock: Callable[[], float] = time.thread_time
    """Processor time of the calling thread, in seconds."""
    _matcher: LLMatcher = field(init=False)
    _path: list[int] = field(init=False)
    """The tokens the matcher stands behind, end-of-sequence tokens never among them."""
    _base: LLMatcher = field(init=False)
    """Behind the first tokens of the path; where the path goes back, it begins there."""
    _base_length: int = 0
    _renewals: int = field(init=False)
    """Of the prototype, when the matchers were made."""
    _moved: bool = False
    """It has begun again once because others used up what they shared."""
    _alone: bool = False
    """The prototype's lexer has met nothing but what is asked now."""
    _bits: npt.NDArray[np.int32] = field(init=False)
    _dead_end: list[int] | None = None
    """Tokens behind which the library gave up last, and why: going there again takes the whole text."""
    _reason: str = ""
    _budget: float = limits.MAX_STRUCTURE_SECONDS
    """Processor time that masks may still take; each that is filled in adds to it what it may take."""

    def __post_init__(self) -> None:
        self._bits = np.zeros((1, -(-self.known_ids // 32)), dtype=np.int32)
        self._start_over()

    def _start_over(self) -> None:
        self._base, self._base_length = self.prototype.copy(), 0
        self._matcher, self._path = self._base.deep_copy(), []
        self._renewals = self.prototype.renewals

    def _surely(self, ask: Callable[[], T]) -> T:
        """The answer, if need be of a lexer that has met this text alone: what it gives up then depends on no
        other text."""
        begun = self.clock()
        try:
            if self._renewals != self.prototype.renewals:
                if self._moved:
                    self._part_with_others()
                self._moved = True
                self._start_over()
            try:
                return ask()
            except _UsedUpError:
                self._part_with_others()
            self._alone = True
            return ask()
        finally:
            self._alone = False
            self.prototype.seconds += self.clock() - begun

    def _part_with_others(self) -> None:
        self.prototype = self.prototype.another()
        self._start_over()

    def masks(
        self,
        generated: Sequence[int],
        drafts: Sequence[int] = (),
        seconds: float = limits.MAX_STRUCTURE_SECONDS,
    ) -> Mask:
        """What may come after the generated tokens, and after each draft token that follows them.

        Args:
            generated: the ledger's tokens after the prompt.
            drafts: N draft tokens; they may be anything.
            seconds: processor time after which no row but the first is filled in.

        Returns:
            bool [M, V], M at most N + 1. Where the text can go on in one way only, it may be that only the
            token is allowed that the tokenizer would make of it, and not each of its beginnings. A row that
            no text can reach (behind a draft token that is forbidden, or behind the end) allows everything:
            nothing that is drawn there is ever committed. Fewer than N + 1 rows: the grammar gave up behind
            the M-th draft token, or took too long up to there. Which M depends on the draft tokens up to
            that one alone, and whether it may come is told: a chain may be judged up to there.

        Raises:
            InvalidArgumentError: the grammar met its limits, leaves no token, or takes too long: for the
                generated tokens that the state is not behind yet, or for the first row.
            InternalError: the generated tokens do not keep to the grammar.
        """
        if self._budget < 0:
            # Not tried again: other sequences of the worker wait for every mask.
            raise InvalidArgumentError(self.field_name, _SLOW)
        followed = self._followed([*generated, *drafts]) - len(generated)
        if followed <= 0:
            raise InvalidArgumentError(self.field_name, self._reason)
        return self._surely(lambda: self._masks(generated, drafts, followed, seconds))

    def _masks(self, generated: Sequence[int], drafts: Sequence[int], most: int, seconds: float) -> Mask:
        rows = np.ones((len(drafts) + 1, self.vocabulary_size), dtype=np.bool_)
        if not self._go_to(generated):
            return rows
        begun = self.clock()
        try:
            return rows[: self._fill_rows(rows, drafts, most, seconds)]
        finally:
            self._budget -= self.clock() - begun

    def _followed(self, tokens: Sequence[int]) -> int:
        """How many of the tokens can be taken before the last dead end is met; one more than all if none."""
        end = self._dead_end
        return len(end) if end is not None and tokens[: len(end)] == end else len(tokens) + 1

    def _fill_rows(self, rows: Mask, drafts: Sequence[int], most: int, seconds: float) -> int:
        """Fill the rows in, up to `most`; how many there are in the end."""
        begun = self.clock()
        for i in range(most):
            try:
                if i > 0 and not self._take(drafts[i - 1]):
                    if drafts[i - 1] in self.ends:
                        return len(rows)
                    # The row before allows it.
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

    def follows(self, generated: Sequence[int], until: float) -> bool:
        """Whether a text may go so, or so far.

        Raises InvalidArgumentError: the grammar met its limits, or the clock passes `until` over it.
        """
        return self._surely(lambda: self._follows(generated, until))

    def _follows(self, generated: Sequence[int], until: float) -> bool:
        self._start_over()
        for count, token_id in enumerate(generated):
            if token_id in self.ends:
                return True
            if not self._take(token_id):
                self._make_sure_of_refusal()
                return False
            self._rest(count, until)
        return True

    def _make_sure_of_refusal(self) -> None:
        """A token was not taken. Was it the grammar? A lexer that has given up takes none either."""
        if not self._alone and not self.prototype.is_sound:
            self._give_up(_USED_UP)

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Stand behind `tokens`; False if the text has ended among them.

        Mostly it is a few tokens on. Of a sequence that was opened late it is the whole text, which has the
        time that the coordinator gives it.
        """
        agreed = self._agreed(tokens)
        if agreed < len(self._path):
            self._go_back(agreed)
        until = self.clock() + limits.MAX_FOLLOW_SECONDS
        for count, token_id in enumerate(tokens[agreed:]):
            if token_id in self.ends:
                return False
            if count and len(tokens) - len(self._path) == _LAG:
                # Of a text that is followed anew: the way back need not be followed again.
                self._base, self._base_length = self._matcher.deep_copy(), len(self._path)
            if not self._take(token_id):
                self._make_sure_of_refusal()
                raise InternalError("the sequence's tokens do not keep to its structured_outputs")
            self._rest(count, until)
        return True

    def _rest(self, count: int, until: float) -> None:
        """Behind the token of that number: at a part's end a mask, at its beginning a look at the clock."""
        if count % _PART == _PART - 1:
            self._matcher.compute_bitmask()
            self._refuse_if_broken()
        if count % _PART == 0 and self.clock() > until:
            raise InvalidArgumentError(self.field_name, _SLOW)

    def _agreed(self, tokens: Sequence[int]) -> int:
        """How many of the first `tokens` the matcher has taken."""
        bound = min(len(self._path), len(tokens))
        if self._path[:bound] == list(tokens[:bound]):
            return bound
        return next(i for i in range(bound) if self._path[i] != tokens[i])

    def _go_back(self, length: int) -> None:
        """Stand behind the first `length` tokens of the path, by a copy of one that went there directly."""
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
        """Move on by one token; False, and no move, for one that cannot be: forbidden, or an end."""
        if token_id in self.ends:
            return False
        if self._matcher.try_consume_tokens([token_id]) == 1:
            self._path.append(token_id)
            return True
        self._refuse_if_broken(token_id)
        return False

    def _fill(self, row: Mask) -> None:
        """What may come where the matcher stands."""
        fill_next_token_bitmask(self._matcher, self._bits)
        self._refuse_if_broken()
        row[:] = np.unpackbits(self._bits[0].view(np.uint8), count=self.vocabulary_size, bitorder="little")
        row[list(self.ends)] = self._matcher.is_accepting()
        self._budget = min(self._budget + limits.MAX_MASK_SECONDS, limits.MAX_STRUCTURE_SECONDS)
        if not row.any():
            raise InvalidArgumentError(self.field_name, _STUCK)

    def _refuse_if_broken(self, *taken: int) -> None:
        """The library gives a grammar up that meets its limits, or that can never be completed; it may do so
        while it takes a token."""
        if not self._matcher.is_error():
            return
        reason = reason_of(self._matcher.get_error())
        if reason not in _DEAD_ENDS:
            self._give_up(reason, *taken)
        self._ends_here(_STUCK, *taken)
        # An error stays, but the next tokens asked about may lead elsewhere.
        self._start_over()
        raise InvalidArgumentError(self.field_name, self._reason)

    def _give_up(self, reason: str, *taken: int) -> NoReturn:
        """The lexer met its limits, and is of no use to anybody any more."""
        self.prototype.drop()
        if not self._alone:
            raise _UsedUpError
        self._ends_here(reason, *taken)
        raise InvalidArgumentError(self.field_name, self._reason)

    def _ends_here(self, reason: str, *taken: int) -> None:
        self._reason, self._dead_end = reason, [*self._path, *taken]
