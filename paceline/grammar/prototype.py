"""A compiled structure, copied for every sequence that uses it. Not thread-safe."""

from __future__ import annotations

from collections.abc import Callable

from llguidance import LLMatcher

_MAX_REASON_CHARACTERS = 300


class Prototype:
    """A matcher that always stays at the beginning of a text.

    Copies share the library's lexer, whose limits count the texts of all copies for its whole life. Once they
    are exceeded, the lexer refuses every text. Then it is dropped (`renewals` increases), and later copies
    share a new lexer. A state that sees a renewal restarts once with the new shared lexer, and after that
    with a separate prototype. The state that exceeded the limits gets a separate prototype at once. Otherwise
    states would exhaust every shared lexer in turn.
    """

    def __init__(self, compile_: Callable[[], LLMatcher]) -> None:
        """Compile the structure; raises the errors of `compile_`."""
        self._compile = compile_
        self._matcher: LLMatcher | None = compile_()
        self.renewals = 0
        """Number of times that the lexer was dropped."""
        self.seconds = 0.0
        """Processor time of compilation and of all uses; memory grows with it."""

    def copy(self) -> LLMatcher:
        """A matcher at the beginning of a text."""
        if self._matcher is None:
            self._matcher = self._compile()
        return self._matcher.deep_copy()

    def another(self) -> Prototype:
        """A prototype of the same structure with a separate lexer."""
        return Prototype(self._compile)

    @property
    def is_sound(self) -> bool:
        """False after the lexer has exceeded its limits."""
        matcher = self.copy()
        matcher.compute_bitmask()
        return not matcher.is_error()

    def drop(self) -> None:
        """Drop an exhausted lexer; the next copy compiles the structure again."""
        self._matcher = None
        self.seconds = 0.0
        self.renewals += 1


def reason_of(message: str) -> str:
    """A message of the library on one line, truncated."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text[:_MAX_REASON_CHARACTERS] or "cannot be compiled"
