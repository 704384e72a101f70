"""Token ids to text, piece by piece, and the search for stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer

CONTEXT_TOKENS = 6
"""Tokens of the prompt a decoder needs to see, so that the first piece joins the prompt as text would."""
LOOKED_AT = 64
"""Last tokens of the prompt among which these are looked for: special tokens have no text."""
UNFINISHED_TOKENS = 3
"""Tokens an unfinished character can have: it has at most four bytes."""
BROKEN_TOKENS = 16
"""Tokens that can never become whole characters and are still held back, so that a step's cost is bounded."""
CONTINUATIONS = frozenset(f"<0x{byte:02X}>" for byte in range(0x80, 0xC0))
"""Tokens of one byte that begins no character."""
REPLACEMENT = "\ufffd"
"""What bytes decode to that are no whole character, yet or ever."""


class Detokenizer(Protocol):
    """Turns a sequence of tokens into text incrementally."""

    def push(self, token_id: int) -> str:
        """The text that is complete now; it never ends inside a character."""

    def finish(self) -> str:
        """What was held back: bytes that will never become a whole character, shown as U+FFFD."""


@lru_cache(maxsize=4)
def special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """The tokens that decoding leaves out."""
    added = tokenizer.get_added_tokens_decoder().values()
    return frozenset(token.content for token in added if token.special)


class StreamDetokenizer:
    """Incremental decoding: what tokens add to the text of those in front of them.

    The pieces join to the library's decoding of all tokens, but where that takes back what was given out: of
    byte tokens in a row that are not valid together it makes U+FFFD, one each. Characters in front of the
    fault stay; a row that remains faulty for more than BROKEN_TOKENS is decoded afresh from there on.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._special = special_tokens(tokenizer) if skip_special_tokens else frozenset[str]()
        self._context: list[int] = []
        """The tokens given out last; they begin where a character does."""
        self._before = ""
        """Their text, as far as it was given out."""
        self._pending: list[int] = []
        """The tokens behind them, whose text ends inside a character."""
        self._in_prompt = ""
        """What the prompt shows of the pending tokens."""
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
            # Somewhere there has to be a cut. What it leaves unfinished may still become a character.
            whole = self._text(self._context + self._pending[:count])
            return self._give(count, whole, unfinished=whole.endswith(REPLACEMENT))
        return self._give(count, whole)

    def finish(self) -> str:
        """The text of what is still pending."""
        return self._give(len(self._pending), self._text(self._context + self._pending))

    def _give(self, count: int, whole: str, *, unfinished: bool = False) -> str:
        """Turn the first pending tokens into context; `whole` is the text of both.

        A last character that is `unfinished` is not given out.
        """
        given, self._pending = self._pending[:count], self._pending[count:]
        piece = self._added(given, whole)
        self._context, self._before = given, self._text(given)
        if unfinished:
            piece, self._before = piece.removesuffix(REPLACEMENT), self._before.removesuffix(REPLACEMENT)
        # The prompt shows the beginning, unless a character became whole.
        shown, self._in_prompt = self._in_prompt, ""
        while not piece.startswith(shown):
            shown = shown[:-1]
        return piece[len(shown) :]

    def _added(self, token_ids: Sequence[int], whole: str) -> str:
        """What tokens behind the context add to its text; `whole` is the text of both."""
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        # They are bytes that make the context's own bytes invalid, which were given out as characters.
        return self._text(token_ids)

    def _end(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that have text, from the beginning of a character on."""
        end: list[int] = []
        for token_id in filter(self._has_text, reversed(prompt[-LOOKED_AT:])):
            end.insert(0, token_id)
            inside = self._tokenizer.id_to_token(token_id) in CONTINUATIONS
            if len(end) >= CONTEXT_TOKENS + (UNFINISHED_TOKENS if inside else 0):
                break
        return end

    def _has_text(self, token_id: int) -> bool:
        """False for what decoding leaves out wherever it stands: special tokens, and ids that are no token.

        Such a one as context would make a decoder strip the space of the next token.
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
        """Characters at the beginning of the held text behind which a stop string has to end."""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that was found or None).

        After a stop string was found the text in front of it is returned and nothing may follow.
        """
        if not self._stops:
            return piece, None
        self._held += piece
        found = [(start, stop) for stop in self._stops if (start := self._find(stop)) >= 0]
        if found:
            # The one completed first, as character after character would have shown; the longest of equals.
            start, stop = min(found, key=lambda item: (item[0] + len(item[1]), item[0]))
            text, self._held, self._skipped = self._held[:start], "", 0
            return text, stop
        return self._show(), None

    def skip(self, piece: str) -> str:
        """Text in which a stop string may begin, but not end; returns what may be shown."""
        self._held += piece
        self._skipped = len(self._held)
        return self._show()

    def _find(self, stop: str) -> int:
        """Where the held text has it first, ending behind what is skipped; else -1."""
        return self._held.find(stop, max(0, self._skipped - len(stop) + 1))

    def _show(self) -> str:
        """Let go what can be no part of a stop string any more."""
        keep = max((self._partial(stop) for stop in self._stops), default=0)
        given = len(self._held) - keep
        text, self._held = self._held[:given], self._held[given:]
        self._skipped = max(0, self._skipped - given)
        return text

    def _partial(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """Nothing more will come: what was held back is text after all."""
        text, self._held = self._held, ""
        return text
