"""Compilation of structures within bounds, and a cache of compiled structures per tokenizer."""

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
"""At most half of the library's defaults: tens of milliseconds to compile and a few per mask. Not verbose,
because verbose errors quote the generated text."""
_WHITESPACE = r"(\r?\n)?[ \t]{0,40}"
"""Whitespace between the parts of JSON: enough for indentation, but bounded."""
_OWN_OPTIONS = '"x-guidance"'
"""Key of a schema with its own compilation options."""
_KEPT_SECONDS = 4.0
"""Bound of the processor time spent on all cached structures, for compilation and use. It is a proxy for
their memory, which the library does not report: at most about 250 MB per second."""
_MUCH_SECONDS = _KEPT_SECONDS / 4
"""Structures that took longer are evicted first."""
_UNKNOWN_NAME = "unknown special token"
"""The library's error for a grammar that names an unknown token."""
_TRIAL_TOKENS = 8
"""Tokens generated on trial before a request is accepted, because some structures exceed their bounds only
after the first tokens."""


class Grammars:
    """The grammars of one model's tokenizer.

    Only `compiled` and `holds` are thread-safe; one thread creates and uses the states.
    """

    def __init__(
        self,
        tokenizer: str | None,
        vocabulary_size: int,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """An unusable tokenizer raises only when a structure is requested.

        Args:
            tokenizer: the content of tokenizer.json, or None.
            vocabulary_size: V; padding ids above it are never allowed.
            eos_token_ids: the tokens that end a text.
            clock: processor time of the calling thread, in seconds.
        """
        self.vocabulary_size = vocabulary_size
        self.ends = tuple(sorted(token_id for token_id in set(eos_token_ids) if token_id < vocabulary_size))
        self._clock = clock
        self._compiled: dict[tuple[str, StructuredOutputs], Prototype] = {}
        """Keyed by salt, so that response times reveal nothing about other tenants. Most recently used
        last."""
        self._unusable = ""
        self._naming = ""
        """The tokenizer.json with original names of special tokens, for grammars that use them."""
        self._named: LLTokenizer | None = None
        self._tokenizer = self._load(tokenizer)

    def _load(self, tokenizer: str | None) -> LLTokenizer | None:
        if tokenizer is None:
            self._unusable = "the model has no tokenizer.json"
        elif not self.ends:
            self._unusable = "the model has no end-of-sequence token, which is required to finish a text"
        else:
            try:
                text = plain(tokenizer)
                known = self._known(text)
                special = [token_id for token_id in added_ids(text) if known.is_special_token(token_id)]
                if special:
                    self._naming = without_names(text, self.ends)
                    known = self._known(without_names(text, special))
            except ValueError as error:
                self._unusable = f"the model's tokenizer is not supported: {reason_of(str(error))}"
            else:
                return known
        return None

    def _known(self, text: str) -> LLTokenizer:
        known = LLTokenizer(text, eos_token=list(self.ends))
        if known.vocab_size < self.vocabulary_size:
            known = LLTokenizer(text, n_vocab=self.vocabulary_size, eos_token=list(self.ends))
        return known

    def start(self, wanted: StructuredOutputs, salt: str = "") -> GrammarState:
        """A state at the beginning of a text. The compiled structure is cached by salt.

        Raises InvalidArgumentError naming `structured_outputs` for an unusable tokenizer, else the
        constraint's field.
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
        """True if the structure is cached. Thread-safe."""
        return (salt, wanted) in self._compiled

    def compiled(self, wanted: StructuredOutputs) -> Prototype:
        """Compile a structure without caching it; see `keep`. Thread-safe; raises as `start`."""
        tokenizer = self._usable()
        begun = self._clock()
        prototype = Prototype(lambda: self._compile(wanted, tokenizer))
        prototype.seconds = self._clock() - begun
        return prototype

    def keep(self, wanted: StructuredOutputs, salt: str, prototype: Prototype) -> None:
        """Cache a compiled structure as the most recently used."""
        if not self.holds(wanted, salt):
            self._make_room(prototype.seconds)
            self._compiled[salt, wanted] = prototype

    def alone(self, wanted: StructuredOutputs) -> GrammarState:
        """A state at the beginning of a text, with an uncached structure. Raises as `start`."""
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
        """Evict structures until one of `seconds` fits: first expensive ones, then the least recently used.
        The new structure itself is always cached, because all sequences of a worker wait while it is
        compiled."""
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
        """The tokenizer for grammars that name special tokens; their texts cannot contain such names."""
        if self._named is None:
            self._named = self._known(self._naming)
        return self._named

    def check(self, wanted: StructuredOutputs) -> None:
        """Compile a structure and generate a few tokens on trial, without caching. Raises as `start`."""
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
                # The mask allowed a token that the grammar refuses, because it is not text.
                raise InvalidArgumentError(
                    wanted.field, "contains the name of a special token in a text"
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
    """The structure in the library's format. Raises ValueError."""
    value: Any = getattr(wanted, wanted.kind)
    match wanted.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
        case "choice":
            # JSON's escapes are valid in Lark; the grammar is one rule of constants.
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
    # A schema may contain the library's options; those that ignore parts of the schema stay off.
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    schema = value if wanted.kind == "json" else '{"type": "object"}'
    # A whitespace pattern would override all other whitespace options of the library.
    bounded = not wanted.disable_any_whitespace and _OWN_OPTIONS not in schema
    defaults: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE} if bounded else {}
    return LLMatcher.grammar_from_json_schema(schema, defaults=defaults, overrides=options)
