"""Token ids to text, piece by piece, and the search for stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer

CONTEXT_TOKENS = 6
"""Number of prompt tokens that a decoder needs so that the first piece joins the prompt correctly."""
LOOKED_AT = 64
"""Number of last prompt tokens among which to look for these: special tokens have no text."""
UNFINISHED_TOKENS = 3
"""Maximum tokens of an unfinished character, which has at most four bytes."""
BROKEN_TOKENS = 16
"""Maximum held-back tokens that can never become whole characters, which bounds the cost of a step."""
CONTINUATIONS = frozenset(f"<0x{byte:02X}>" for byte in range(0x80, 0xC0))
"""Byte tokens that cannot begin a character."""
REPLACEMENT = "\ufffd"
"""The decoding of bytes that are no whole character, yet or ever."""


class Detokenizer(Protocol):
    """Turns a sequence of tokens into text incrementally."""

    def push(self, token_id: int) -> str:
        """The text that is complete now. It never ends inside a character."""

    def finish(self) -> str:
        """The text that was held back: bytes that will never become a whole character, shown as U+FFFD."""


@lru_cache(maxsize=4)
def special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """The tokens that decoding leaves out."""
    added = tokenizer.get_added_tokens_decoder().values()
    return frozenset(token.content for token in added if token.special)


class StreamDetokenizer:
    """Incremental decoding: the text that each token adds to the tokens before it.

    The joined pieces equal the library's decoding of all tokens, with one exception. For a run of byte tokens
    that is invalid as a whole, the library replaces each with U+FFFD, also those already emitted. Here,
    characters before the fault stay. A run that stays faulty for more than BROKEN_TOKENS is decoded afresh
    from there on.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._special = special_tokens(tokenizer) if skip_special_tokens else frozenset[str]()
        self._context: list[int] = []
        """The last emitted tokens; they begin at a character boundary."""
        self._before = ""
        """Their text, as far as it was emitted."""
        self._pending: list[int] = []
        """The tokens after the context; their text ends inside a character."""
        self._in_prompt = ""
        """Text of the pending tokens that the prompt already shows."""
        for token_id in self._end(prompt):
            self.push(token_id)
        self._in_prompt = self._added(self._pending, self._text(self._context + self._pending))

    def push(self, token_id: int) -> str:
        """The text that is complete now."""
        if not self._has_text(token_id):
            return ""
        self._pending.append(token_id)
        count, whole = len(self._pending), self._text(self._context + self._pending)
        if whole.endswith(REPLACEMENT):
            count -= UNFINISHED_TOKENS
            if count <= BROKEN_TOKENS:
                return ""
            # The text has to be cut here. An unfinished rest may still become a character.
            whole = self._text(self._context + self._pending[:count])
            return self._give(count, whole, unfinished=whole.endswith(REPLACEMENT))
        return self._give(count, whole)

    def finish(self) -> str:
        """The text of what is still pending."""
        return self._give(len(self._pending), self._text(self._context + self._pending))

    def _give(self, count: int, whole: str, *, unfinished: bool = False) -> str:
        """Turn the first pending tokens into context; `whole` is the text of both.

        An `unfinished` last character is not emitted.
        """
        given, self._pending = self._pending[:count], self._pending[count:]
        piece = self._added(given, whole)
        self._context, self._before = given, self._text(given)
        if unfinished:
            piece, self._before = piece.removesuffix(REPLACEMENT), self._before.removesuffix(REPLACEMENT)
        # The prompt shows the beginning, unless a character was completed.
        shown, self._in_prompt = self._in_prompt, ""
        while not piece.startswith(shown):
            shown = shown[:-1]
        return piece[len(shown) :]

    def _added(self, token_ids: Sequence[int], whole: str) -> str:
        """The text that tokens add after the context; `whole` is the text of both."""
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        # The bytes make the context's own bytes invalid, which were already emitted as characters.
        return self._text(token_ids)

    def _end(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that have text, from a character boundary on."""
        end: list[int] = []
        for token_id in filter(self._has_text, reversed(prompt[-LOOKED_AT:])):
            end.insert(0, token_id)
            inside = self._tokenizer.id_to_token(token_id) in CONTINUATIONS
            if len(end) >= CONTEXT_TOKENS + (UNFINISHED_TOKENS if inside else 0):
                break
        return end

    def _has_text(self, token_id: int) -> bool:
        """False for ids that decoding leaves out everywhere: special tokens, and ids without a token.

        As context, such an id would make a decoder strip the space of the next token.
        """
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and token not in self._special

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skips))


class StopSearch:
    """Finds the first stop string in text that arrives in pieces.

    Text that could be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._skipped = 0
        """Number of held characters that a stop string has to end after."""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that may be shown, and the stop string that was found or None.

        If a stop string is found, the text is what precedes it, and no further call is allowed.
        """
        if not self._stops:
            return piece, None
        self._held += piece
        found = [(start, stop) for stop in self._stops if (start := self._find(stop)) >= 0]
        if found:
            # The stop string that is completed first, as in a search by character; the longest of equals.
            start, stop = min(found, key=lambda item: (item[0] + len(item[1]), item[0]))
            text, self._held, self._skipped = self._held[:start], "", 0
            return text, stop
        return self._show(), None

    def skip(self, piece: str) -> str:
        """Add text in which a stop string may begin but not end; returns the text that may be shown."""
        self._held += piece
        self._skipped = len(self._held)
        return self._show()

    def _find(self, stop: str) -> int:
        """First position of `stop` in the held text that ends after the skipped part; else -1."""
        return self._held.find(stop, max(0, self._skipped - len(stop) + 1))

    def _show(self) -> str:
        """Release the text that can no longer be part of a stop string."""
        keep = max((self._partial(stop) for stop in self._stops), default=0)
        given = len(self._held) - keep
        text, self._held = self._held[:given], self._held[given:]
        self._skipped = max(0, self._skipped - given)
        return text

    def _partial(self, stop: str) -> int:
        """Length of the longest suffix of the held text that is a prefix of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """No more text will come; returns the text that was held back."""
        text, self._held = self._held, ""
        return text
