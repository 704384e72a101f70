"""Compiling what requests ask for, within bounds: one object for each tokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from paceline.core import limits
from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.core.structured import FIELD, StructuredOutputs
from paceline.grammar.prototype import Prototype, reason_of
from paceline.grammar.spelling import added_ids, plain, without_names
from paceline.grammar.state import GrammarState

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Half of the library's own bounds or less: tens of milliseconds to compile, and a few for a mask. Verbose
errors would put the text so far into messages."""
_WHITESPACE = r"(\r?\n)?[ \t]{0,40}"
"""Between the parts of JSON: enough to indent, and no way to go on with nothing else for ever."""
_OWN_OPTIONS = '"x-guidance"'
"""Where a schema says for itself how it is compiled."""
_KEPT_SECONDS = 4.0
"""Processor time that went into all that is kept: compiling it, and whatever was asked of it. It stands for
the memory, which the library does not tell: some 250 MB for a second at most."""
_MUCH_SECONDS = _KEPT_SECONDS / 4
"""What took more than this is not kept once others are asked for."""
_UNKNOWN_NAME = "unknown special token"
"""What the library says of a grammar that names a token it does not know."""
_TRIAL_TOKENS = 8
"""How far a structure is followed before a request is taken on: some meet their bounds only behind the
first tokens."""


class Grammars:
    """The grammars of one model's tokenizer.

    Not thread-safe, but for `compiled` and `holds`: one thread starts and uses the states.
    """

    def __init__(
        self,
        tokenizer: str | None,
        vocabulary_size: int,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """A tokenizer that cannot be used is no error before a request asks for a structure.

        Args:
            tokenizer: the content of its tokenizer.json; None when it has none.
            vocabulary_size: V, the ids that a text may hold; padding above it is never allowed.
            eos_token_ids: the tokens that end a text.
            clock: processor time of the calling thread, in seconds.
        """
        self.vocabulary_size = vocabulary_size
        self.ends = tuple(sorted(token_id for token_id in set(eos_token_ids) if token_id < vocabulary_size))
        self._clock = clock
        self._compiled: dict[tuple[str, StructuredOutputs], Prototype] = {}
        """By salt: how fast a sequence begins must not tell what others ask for. The one that was asked for
        last is the last."""
        self._unusable = ""
        self._naming = ""
        """The tokenizer.json in which special tokens have their names, for grammars that name some."""
        self._named: LLTokenizer | None = None
        self._tokenizer = self._load(tokenizer)

    def _load(self, tokenizer: str | None) -> LLTokenizer | None:
        if tokenizer is None:
            self._unusable = "the model has no tokenizer.json"
        elif not self.ends:
            self._unusable = "the model has no end-of-sequence token, which a finished text needs"
        else:
            try:
                text = plain(tokenizer)
                known = self._known(text)
                special = [token_id for token_id in added_ids(text) if known.is_special_token(token_id)]
                if special:
                    self._naming = without_names(text, self.ends)
                    known = self._known(without_names(text, special))
            except ValueError as error:
                self._unusable = f"the model's tokenizer cannot be used for it: {reason_of(str(error))}"
            else:
                return known
        return None

    def _known(self, text: str) -> LLTokenizer:
        known = LLTokenizer(text, eos_token=list(self.ends))
        if known.vocab_size < self.vocabulary_size:
            known = LLTokenizer(text, n_vocab=self.vocabulary_size, eos_token=list(self.ends))
        return known

    def start(self, wanted: StructuredOutputs, salt: str = "") -> GrammarState:
        """A state at the beginning of a text. What is compiled is kept, for others of the same salt that ask
        for the same.

        Raises InvalidArgumentError: `structured_outputs` when the tokenizer cannot be used, else the
        constraint's own field.
        """
        known = self._compiled.pop((salt, wanted), None)
        if known is not None and known.seconds > _KEPT_SECONDS:
            known = None
        begun = self._clock()
        state = self._state(wanted, known)
        state.prototype.seconds += self._clock() - begun
        self._make_room(state.prototype.seconds)
        self._compiled[salt, wanted] = state.prototype
        return state

    def holds(self, wanted: StructuredOutputs, salt: str = "") -> bool:
        """True if `start` need not compile it. Called from any thread."""
        return (salt, wanted) in self._compiled

    def compiled(self, wanted: StructuredOutputs) -> Prototype:
        """One to `keep`; it stays here only then. Called from any thread; raises as `start`."""
        tokenizer = self._usable()
        begun = self._clock()
        prototype = Prototype(lambda: self._compile(wanted, tokenizer))
        prototype.seconds = self._clock() - begun
        return prototype

    def keep(self, wanted: StructuredOutputs, salt: str, prototype: Prototype) -> None:
        """Keep what was compiled, as the one that was asked for last."""
        if not self.holds(wanted, salt):
            self._make_room(prototype.seconds)
            self._compiled[salt, wanted] = prototype

    def alone(self, wanted: StructuredOutputs) -> GrammarState:
        """A state at the beginning of a text, of which nothing stays when it goes. Raises as `start`."""
        return self._state(wanted)

    def _state(self, wanted: StructuredOutputs, prototype: Prototype | None = None) -> GrammarState:
        tokenizer = self._usable()
        return GrammarState(
            prototype or Prototype(lambda: self._compile(wanted, tokenizer)),
            wanted.field,
            self.vocabulary_size,
            tokenizer.vocab_size,
            self.ends,
            self._clock,
        )

    def _usable(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise InvalidArgumentError(FIELD, self._unusable)
        return self._tokenizer

    def _make_room(self, seconds: float) -> None:
        """Forget others until one more, of so many seconds, may be kept: first what took much for one alone,
        then what was not asked for longest. Never what is asked for: all sequences of a worker wait while it
        is compiled."""
        for key in [key for key, other in self._compiled.items() if other.seconds > _MUCH_SECONDS]:
            del self._compiled[key]
        taken = seconds + sum(other.seconds for other in self._compiled.values())
        while self._compiled and (
            taken > _KEPT_SECONDS or len(self._compiled) >= limits.MAX_COMPILED_STRUCTURES
        ):
            taken -= self._compiled.pop(next(iter(self._compiled))).seconds

    def _compile(self, wanted: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
        matcher = self._matcher(wanted, tokenizer)
        if self._naming and matcher.is_error() and _UNKNOWN_NAME in matcher.get_error():
            matcher = self._matcher(wanted, self._with_names())
        if matcher.is_error():
            raise InvalidArgumentError(wanted.field, reason_of(matcher.get_error()))
        return matcher

    def _matcher(self, wanted: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
        try:
            return LLMatcher(tokenizer, _grammar(wanted), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise InvalidArgumentError(wanted.field, reason_of(str(error))) from None

    def _with_names(self) -> LLTokenizer:
        """For a grammar that names special tokens: its texts cannot hold such a name."""
        if self._named is None:
            self._named = self._known(self._naming)
        return self._named

    def check(self, wanted: StructuredOutputs) -> None:
        """Compile a structure and follow it for a few tokens, as if to generate. Keeps nothing; raises as
        `start`."""
        begun = self._clock()
        state = self.alone(wanted)
        tokens: list[int] = []
        for _ in range(_TRIAL_TOKENS):
            try:
                (row,) = state.masks(tokens)
            except InvalidArgumentError:
                self._refuse_if_slow(wanted, begun)
                raise
            except InternalError:
                # The mask allowed a token that the grammar does not take: one that is no text.
                raise InvalidArgumentError(
                    wanted.field, "has the name of a special token in a text"
                ) from None
            row[list(self.ends)] = False
            if not row.any():
                break
            tokens.append(int(row.argmax()))
        self._refuse_if_slow(wanted, begun)

    def _refuse_if_slow(self, wanted: StructuredOutputs, begun: float) -> None:
        if self._clock() - begun > limits.MAX_STRUCTURE_SECONDS:
            raise InvalidArgumentError(wanted.field, "takes too long to compile")


def _grammar(wanted: StructuredOutputs) -> str:
    """In the library's own form. Raises ValueError."""
    value: Any = getattr(wanted, wanted.kind)
    match wanted.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
        case "choice":
            # Escapes of JSON are escapes of Lark; what follows "start" is one rule of constants.
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
    # A schema may carry options of the library's own; what would ignore parts of it stays off.
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    schema = value if wanted.kind == "json" else '{"type": "object"}'
    # The library takes a pattern for more than any other word on whitespace.
    bounded = not wanted.disable_any_whitespace and _OWN_OPTIONS not in schema
    defaults: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE} if bounded else {}
    return LLMatcher.grammar_from_json_schema(schema, defaults=defaults, overrides=options)
