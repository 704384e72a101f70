"""A compiled structure, of which every sequence that asks for it has a copy. Not thread-safe."""

from __future__ import annotations

from collections.abc import Callable

from llguidance import LLMatcher

_MAX_REASON_CHARACTERS = 300


class Prototype:
    """Stands at the beginning of a text, and stays there.

    Copies share the library's lexer. What it meets in any of their texts counts against its limits for as
    long as it lives, and once these are met it takes nothing more, of nobody. Then it is dropped: copies that
    are made from then on share another one. Who sees that `renewals` changed begins again with that, and the
    next time with one for itself, as who used it up does at once: together they would use up each in turn.
    """

    def __init__(self, compile_: Callable[[], LLMatcher]) -> None:
        """Compile it; raises what `compile_` raises."""
        self._compile = compile_
        self._matcher: LLMatcher | None = compile_()
        self.renewals = 0
        """Times that it was dropped."""
        self.seconds = 0.0
        """Processor time of compiling it and of all that copies were asked: its memory grows with that."""

    def copy(self) -> LLMatcher:
        """A matcher at the beginning of a text."""
        if self._matcher is None:
            self._matcher = self._compile()
        return self._matcher.deep_copy()

    def another(self) -> Prototype:
        """Of the same structure, with a lexer of its own."""
        return Prototype(self._compile)

    @property
    def is_sound(self) -> bool:
        """False once the lexer gave up."""
        matcher = self.copy()
        matcher.compute_bitmask()
        return not matcher.is_error()

    def drop(self) -> None:
        """Its lexer is of no use any more; the next copy is of one that is compiled anew."""
        self._matcher = None
        self.seconds = 0.0
        self.renewals += 1


def reason_of(message: str) -> str:
    """A message of the library, on one line and bounded."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text[:_MAX_REASON_CHARACTERS] or "cannot be compiled"
