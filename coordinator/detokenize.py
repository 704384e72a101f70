"""Token ids to text, piece by piece, and the search for stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 6
"""Tokens of the prompt a decoder needs to see, so that the first piece joins the prompt as text would."""
REPLACEMENT = "\ufffd"
"""What bytes decode to that are no whole character, yet or ever."""


class Detokenizer(Protocol):
    """Turns a sequence of tokens into text incrementally."""

    def push(self, token_id: int) -> str:
        """The text that is complete now; it never ends inside a character."""

    def finish(self) -> str:
        """What was held back: bytes that will never become a whole character, shown as U+FFFD."""


class StreamDetokenizer:
    """Incremental decoding by the tokenizers library."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT_TOKENS:])
        self._pending: list[int] = []
        # A stream that starts inside a character would give the whole context out with its end.
        whole = self._text(self._context)
        while self._context and self._text(self._context).endswith(REPLACEMENT):
            self._pending.insert(0, self._context.pop())
        self._in_prompt = whole[len(self._text(self._context)) :]
        self._stream = DecodeStream(ids=list(self._context), skip_special_tokens=True)
        for token_id in self._pending:
            self._stream.step(tokenizer, token_id)

    def push(self, token_id: int) -> str:
        """The text that is complete now."""
        piece: str | None = self._stream.step(self._tokenizer, token_id)
        self._pending.append(token_id)
        if piece is None:
            return ""
        self._context = (self._context + self._pending)[-CONTEXT_TOKENS:]
        self._pending = []
        return self._without_prompt(piece)

    def finish(self) -> str:
        """Decode what the stream still waits to complete."""
        if not self._pending:
            return ""
        before, whole = self._text(self._context), self._text(self._context + self._pending)
        self._pending = []
        return self._without_prompt(whole[len(before) :]) if whole.startswith(before) else ""

    def _without_prompt(self, piece: str) -> str:
        """The first piece begins with what the prompt ended in, unless a character became whole."""
        shown, self._in_prompt = self._in_prompt, ""
        while not piece.startswith(shown):
            shown = shown[:-1]
        return piece[len(shown) :]

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class StopSearch:
    """Finds the first stop string in text that arrives in pieces.

    Text that could be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that was found or None).

        After a stop string was found the text in front of it is returned and nothing may follow.
        """
        if not self._stops:
            return piece, None
        self._held += piece
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            # The one completed first, as character after character would have shown; the longest of equals.
            start, stop = min(found, key=lambda item: (item[0] + len(item[1]), item[0]))
            text, self._held = self._held[:start], ""
            return text, stop
        keep = max(self._partial(stop) for stop in self._stops)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text, None

    def _partial(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """Nothing more will come: what was held back is text after all."""
        text, self._held = self._held, ""
        return text
