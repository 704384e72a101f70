"""Structures are compiled or refused by name, in bounded time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from harness.refusals import refused
from tokenizers import Tokenizer, models

from paceline import assets
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.structured import StructuredOutputs
from paceline.grammar import Grammars, compiler
from tests.unit.grammar.tiny import VOCAB, grammars, tokenizer_json

A = StructuredOutputs(regex="a+")
DEFINED = {"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"enum": [1]}}}


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "a(b|c)*"},
        {"regex": "^ab$"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "a" start | "b"'},
        {"json_object": True},
        {"json": {}},
        {"json": {"type": "integer"}},
        {"json": DEFINED},
        {"json": {"type": "array", "items": {"type": "string"}}, "disable_any_whitespace": True},
    ],
)
def test_supported_structures_pass(wanted: dict[str, Any]) -> None:
    # The bytes of JSON's own signs are not in the tiny vocabulary.
    text = (assets.path("target") / "tokenizer.json").read_text()
    Grammars(text, 2048, [0]).check(StructuredOutputs(**wanted))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "a("}, "regex parse error"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"[^\s\S]"}, ""),
        ({"regex": "x"}, "leaves no token"),
        ({"grammar": "start: other"}, "unknown name"),
        ({"grammar": "other: /a/"}, "start"),
        ({"grammar": 'start: <end> "a"'}, "unknown special token"),
        ({"json": {"type": "number or so"}}, "Invalid type"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "no format"}}, "Unknown format"),
        ({"json": {"$ref": "https://example.com/schema.json"}}, "not present in a registry"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "Unsatisfiable"),
        ({"json": '{"not": ' * 500 + "{}" + "}" * 500}, ""),
    ],
)
def test_unsupported_structures_are_refused_by_name(wanted: dict[str, Any], message: str) -> None:
    made = StructuredOutputs(**wanted)
    with refused(made.field) as caught:
        grammars().check(made)
    assert message in caught.value.description
    assert "\n" not in caught.value.description
    assert len(caught.value.description) <= 300


def test_a_structure_slow_to_compile_is_refused() -> None:
    """By the processor time of the thread: here every look at the clock costs 60 ms."""
    ticks = iter(range(1000))
    slow = grammars(clock=lambda: next(ticks) * 0.06)
    with pytest.raises(InvalidArgumentError, match="takes too long to compile"):
        slow.check(A)
    assert not slow._compiled


@pytest.mark.parametrize(
    ("space", "changes", "extra", "fits"),
    [
        ("", {}, {}, True),
        ("\n" + " " * 40, {}, {}, True),
        (" " * 41, {}, {}, False),
        ("\n\n", {}, {}, False),
        ("", {"disable_any_whitespace": True}, {}, True),
        (" ", {"disable_any_whitespace": True}, {}, False),
        (" ", {}, {"x-guidance": {"whitespace_flexible": False}}, False),
        (" " * 99, {}, {"x-guidance": {"whitespace_flexible": True}}, True),
    ],
)
def test_whitespace_in_json_is_bounded(
    space: str, changes: dict[str, Any], extra: dict[str, Any], fits: bool
) -> None:
    from llguidance import LLTokenizer

    text = (assets.path("target") / "tokenizer.json").read_text()
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], **extra}
    state = Grammars(text, 2048, [0]).start(StructuredOutputs(json=schema, **changes))
    tokens = LLTokenizer(text, eos_token=[0]).tokenize_str("{" + space + '"a":1}')
    rows = state.masks([], tokens)
    reached = all(row[token] for row, token in zip(rows, tokens, strict=False)) and rows[-1][0]
    assert bool(reached and not rows[-1].all()) == fits


def test_a_structure_is_compiled_once(compiled: list[StructuredOutputs]) -> None:
    one = grammars()
    first, second = one.start(A), one.start(StructuredOutputs(regex="a+"))
    assert compiled == [A]
    first.masks([1, 1])
    assert second.masks([]).sum() == first.masks([]).sum()


def test_the_least_recently_used_structure_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_COMPILED_STRUCTURES", 2)
    one = grammars()
    for pattern in ("a", "b", "a", "c"):
        one.start(StructuredOutputs(regex=pattern))
    assert [wanted.regex for _, wanted in one._compiled] == ["a", "c"]


def test_structures_with_much_processor_time_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed texts leave states in the compiled structure. Each look at the clock costs 1/8 s here."""
    monkeypatch.setattr(limits, "MAX_MASK_SECONDS", 1.0)
    ticks = itertools.count()
    one = grammars(clock=lambda: next(ticks) / 8)
    first, second, third = (StructuredOutputs(regex=f"[ab]*{end}") for end in "abc")
    one.start(first)
    busy = one.start(second)
    for count in range(100):
        assert one.start(third).masks([1] * count).any()
        busy.masks([1] * count)
        between = 2  # what is asked since room was made
        assert sum(kept.seconds for kept in one._compiled.values()) <= compiler._KEPT_SECONDS + between
    assert not one.holds(second)
    assert one.start(second).masks([1]).tolist() == busy.masks([1]).tolist()


def test_a_structure_in_steady_use_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling it for every sequence would delay all others."""
    seconds = [0.0]
    right, compiled = compiler.Grammars._compile, []

    def slow(self: Grammars, wanted: StructuredOutputs, tokenizer: Any) -> Any:
        compiled.append(wanted)
        seconds[0] += 0.45 if wanted == A else 0.3
        return right(self, wanted, tokenizer)

    monkeypatch.setattr(compiler.Grammars, "_compile", slow)
    one = grammars(clock=lambda: seconds[0])
    for count in range(13):
        one.start(StructuredOutputs(regex=f"b{{{count}}}"))
    for _ in range(10):
        one.start(A)
    assert compiled.count(A) == 1
    assert len(one._compiled) == 12  # eleven of 0.3 s beside the one of 0.45


def test_an_overused_single_structure_is_recompiled() -> None:
    ticks = itertools.count()
    one = grammars(clock=lambda: next(ticks) / 8)
    states = [one.start(A) for _ in range(80)]
    assert len({id(state.prototype) for state in states}) == 3


def _wordpiece() -> str:
    return str(Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).to_str())


@pytest.mark.parametrize(
    ("tokenizer", "eos", "message"),
    [
        (None, (0,), "no tokenizer.json"),
        (tokenizer_json(), (), "no end-of-sequence token"),
        (tokenizer_json(), (VOCAB,), "no end-of-sequence token"),
        (_wordpiece(), (0,), "not supported"),
        ("{}", (0,), "not supported"),
        ("no json", (0,), "not supported"),
    ],
)
def test_an_unusable_tokenizer_is_reported_on_use(
    tokenizer: str | None, eos: tuple[int, ...], message: str
) -> None:
    unusable = Grammars(tokenizer, VOCAB, eos)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        unusable.start(A)
    assert caught.value.field == "structured_outputs"


def test_a_tokenizers_truncation_and_padding_are_ignored() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    changed = Grammars(tokenizer.to_str(), VOCAB, (0,))
    wanted = StructuredOutputs(regex="(ab|c)+")
    assert changed.start(wanted).masks([3]).tolist() == grammars().start(wanted).masks([3]).tolist()


def test_a_compiled_structure_serves_its_salt_only(compiled: list[StructuredOutputs]) -> None:
    """Otherwise a fast start would reveal another tenant's structure."""
    one, wanted = grammars(), StructuredOutputs(regex="a")
    one.start(wanted, "mine")
    assert one.holds(wanted, "mine")
    assert not one.holds(wanted, "yours")
    one.start(wanted, "mine")
    assert compiled == [wanted]
    one.start(wanted, "yours")
    assert compiled == [wanted] * 2


def test_a_structure_compiled_elsewhere_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one, wanted = grammars(), StructuredOutputs(regex="a")
    prototype = one.compiled(wanted)
    assert not one.holds(wanted)
    one.keep(wanted, "", prototype)
    monkeypatch.setattr(compiler.Grammars, "_compile", None)
    assert one.start(wanted).prototype is prototype
    one.keep(wanted, "", prototype)
    assert len(one._compiled) == 1
