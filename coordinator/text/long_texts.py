"""Text to tokens and back within bounds: what is too long is refused before it is tokenised, and one large
text is in work at a time.

A tokenizer takes up to 400 bytes of memory for a byte of text, and says how many tokens there are at the end.
So characters and bytes are judged before. Of a large text the tokens are counted part by part, until there
are more than any prompt may have. `docs/memory.md` says what that comes to.
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
"""A text of more is in work alone."""
COUNTED_BYTES: Final = 512 * 1024
"""The tokens of a text of more are counted before it is tokenised as a whole."""
PART_CHARACTERS: Final = 64 * 1024
"""They are counted in parts of so many."""
SMALLER_AT_A_TIME: Final = 8
"""Texts above LONG_TEXT that are not large."""
MAX_WAITING: Final = 32
"""Large texts that wait; one more is refused with RESOURCE_EXHAUSTED."""
RETRY_AFTER_SECONDS: Final = 1.0

Result = TypeVar("Result")


class LongTexts:
    """The texts of one coordinator that are being tokenised."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._large = asyncio.Semaphore(1)
        self._smaller = asyncio.Semaphore(SMALLER_AT_A_TIME)
        self._num_waiting = 0
        # Here, where nobody waits yet: a large vocabulary takes a good part of a second.
        tokens = vocabulary.tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max(len(token.encode()) for token in tokens)
        """Bytes of the longest token, as the vocabulary writes it."""

    def check_length(self, name: str, characters: int, max_model_len: int) -> None:
        """Raises InvalidArgumentError for a text with more characters than `max_model_len` times the longest
        token.

        What a normaliser leaves out counts as well.
        """
        if characters > limits.MAX_PROMPT_CHARACTERS:
            raise InvalidArgumentError(name, f"at most {limits.MAX_PROMPT_CHARACTERS} characters")
        if characters > max_model_len and characters > max_model_len * self._longest_token:
            raise ContextLengthError(name, max_model_len, f"{characters} characters are more")

    def max_bytes(self, max_model_len: int) -> int:
        """The most bytes of a text of so many tokens."""
        return min(limits.MAX_PROMPT_BYTES, 4 * max_model_len * self._longest_token)

    async def encode(
        self, name: str, text: str, max_model_len: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The tokens of a text, of which there may be more than the model takes.

        Raises InvalidArgumentError naming `name` for a text that is too long, ResourceExhaustedError where
        too many wait.
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
        """The text of tokens. Raises ResourceExhaustedError where too many wait."""
        work = partial(self._vocabulary.decode, token_ids, skip_special_tokens=skip_special_tokens)
        if len(token_ids) <= LONG_TEXT:
            return work()
        return await self._in_turn(len(token_ids) > LARGE_BYTES, work)

    def _encode_counted(self, name: str, text: str, add_special_tokens: bool) -> list[int]:
        # A cut makes a token or two more.
        parts = range(0, len(text), PART_CHARACTERS)
        left = limits.MAX_PROMPT_TOKENS + 2 * len(parts)
        for begin in parts:
            part = text[begin : begin + PART_CHARACTERS]
            left -= len(self._vocabulary.encode(part, add_special_tokens=False))
            if left < 0:
                raise InvalidArgumentError(name, f"at most {limits.MAX_PROMPT_TOKENS} tokens")
        return self._vocabulary.encode(text, add_special_tokens=add_special_tokens)

    async def _in_turn(self, large: bool, work: Callable[[], Result]) -> Result:
        """What `work` gives, in another thread."""
        turns = self._large if large else self._smaller
        if turns.locked() and large and self._num_waiting >= MAX_WAITING:
            raise ResourceExhaustedError("too many long texts wait for being tokenised", RETRY_AFTER_SECONDS)
        self._num_waiting += large
        try:
            await turns.acquire()
        finally:
            self._num_waiting -= large
        working = asyncio.ensure_future(asyncio.to_thread(work))

        def end(working: asyncio.Future[Any]) -> None:
            turns.release()
            if not working.cancelled():
                working.exception()  # its caller may have left

        working.add_done_callback(end)
        # A thread goes on when its caller leaves, and has its turn until it ends.
        return await asyncio.shield(working)
