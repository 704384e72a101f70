"""Text to tokens and back within bounds.

A text that is too long is refused before it is tokenised, and only one large text is processed at a time. A
tokenizer takes up to 400 bytes of memory for a byte of text, and reports the number of tokens only at the
end. Therefore characters and bytes are checked first, and the tokens of a large text are counted in parts,
until there are more than any prompt may have. `docs/memory.md` gives the resulting bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from coordinator.text.vocabulary import LONG_TEXT, Vocabulary
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError
from paceline.rpc.codec.generation import ContextLengthError

LARGE_BYTES: Final = 64 * 1024
"""A larger text is processed alone."""
COUNTED_BYTES: Final = 512 * 1024
"""The tokens of a larger text are counted before it is tokenised as a whole."""
PART_CHARACTERS: Final = 64 * 1024
"""Size of the parts in which tokens are counted."""
SMALLER_AT_A_TIME: Final = 8
"""Concurrent texts above LONG_TEXT that are not large."""
MAX_WAITING: Final = 32
"""Maximum number of waiting large texts; another one is refused with RESOURCE_EXHAUSTED."""
RETRY_AFTER_SECONDS: Final = 1.0

Result = TypeVar("Result")


class LongTexts:
    """The texts of one coordinator that are being tokenised."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._large = asyncio.Semaphore(1)
        self._smaller = asyncio.Semaphore(SMALLER_AT_A_TIME)
        self._num_waiting = 0
        # Computed at the start, because a large vocabulary takes a good part of a second.
        tokens = vocabulary.tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max(len(token.encode()) for token in tokens)
        """Bytes of the longest token, as written in the vocabulary."""

    def check_length(self, name: str, characters: int, max_model_len: int) -> None:
        """Raise InvalidArgumentError if a text has more than `max_model_len` * longest token characters.

        Characters that a normaliser removes count as well.
        """
        if characters > limits.MAX_PROMPT_CHARACTERS:
            raise InvalidArgumentError(name, f"at most {limits.MAX_PROMPT_CHARACTERS} characters")
        if characters > max_model_len and characters > max_model_len * self._longest_token:
            raise ContextLengthError(name, max_model_len, f"{characters} characters are more")

    def max_bytes(self, max_model_len: int) -> int:
        """Maximum bytes of a text of `max_model_len` tokens."""
        return min(limits.MAX_PROMPT_BYTES, 4 * max_model_len * self._longest_token)

    async def encode(
        self, name: str, text: str, max_model_len: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The tokens of a text, which may be more than the model takes.

        Raises InvalidArgumentError naming `name` if the text is too long, ResourceExhaustedError if too many
        texts wait.
        """
        self.check_length(name, len(text), max_model_len)
        if len(text) <= LONG_TEXT:
            return self._vocabulary.encode(text, add_special_tokens=add_special_tokens)
        size = len(text.encode())
        if size > limits.MAX_PROMPT_BYTES:
            raise InvalidArgumentError(name, f"at most {limits.MAX_PROMPT_BYTES} bytes as UTF-8, got {size}")
        if size > COUNTED_BYTES:
            work = partial(self._encode_counted, name, text, add_special_tokens)
        else:
            work = partial(self._vocabulary.encode, text, add_special_tokens=add_special_tokens)
        return await self._in_turn(size > LARGE_BYTES, work)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Raises ResourceExhaustedError if too many texts wait."""
        work = partial(self._vocabulary.decode, token_ids, skip_special_tokens=skip_special_tokens)
        if len(token_ids) <= LONG_TEXT:
            return work()
        return await self._in_turn(len(token_ids) > LARGE_BYTES, work)

    def _encode_counted(self, name: str, text: str, add_special_tokens: bool) -> list[int]:
        # A cut adds a token or two.
        parts = range(0, len(text), PART_CHARACTERS)
        left = limits.MAX_PROMPT_TOKENS + 2 * len(parts)
        for begin in parts:
            part = text[begin : begin + PART_CHARACTERS]
            left -= len(self._vocabulary.encode(part, add_special_tokens=False))
            if left < 0:
                raise InvalidArgumentError(name, f"at most {limits.MAX_PROMPT_TOKENS} tokens")
        return self._vocabulary.encode(text, add_special_tokens=add_special_tokens)

    async def _in_turn(self, large: bool, work: Callable[[], Result]) -> Result:
        """Run `work` in another thread when its turn comes."""
        turns = self._large if large else self._smaller
        if turns.locked() and large and self._num_waiting >= MAX_WAITING:
            raise ResourceExhaustedError(
                "too many long texts are waiting to be tokenised", RETRY_AFTER_SECONDS
            )
        self._num_waiting += large
        try:
            await turns.acquire()
        finally:
            self._num_waiting -= large
        working = asyncio.ensure_future(asyncio.to_thread(work))

        def end(working: asyncio.Future[Any]) -> None:
            turns.release()
            if not working.cancelled():
                working.exception()  # retrieves the error, since the caller may have left

        working.add_done_callback(end)
        # The thread goes on when its caller leaves, and keeps its turn until it ends.
        return await asyncio.shield(working)
