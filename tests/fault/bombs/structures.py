"""Structures short to write but expensive to compile or to follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.core.structured import StructuredOutputs


def _patterns(count: int) -> dict[str, Any]:
    """Members whose names may match many patterns at a time: an automaton for each set of them."""
    return {
        "type": "object",
        "patternProperties": {f"^a{i}.*b{i}$": {"type": "integer"} for i in range(count)},
    }


def _deep(depth: int) -> dict[str, Any]:
    """Each definition refers to the next one twice."""
    definitions: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "lr"},
            "required": ["l", "r"],
        }
        for i in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "integer"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _intersected(depth: int) -> dict[str, Any]:
    """The same, with every member intersected with another."""
    definitions: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"properties": {f"p{i}": {"$ref": "#/$defs/d0"}}}]}
        for i in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "object"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _lengths(most: int) -> str:
    """Lengths that all of several numbers divide: an automaton as large as their least common multiple."""
    return "start: A\nA: " + " & ".join(f"/(..{{{n}}})*/" for n in range(2, most))


BOMBS: Final[Mapping[str, Mapping[str, Any]]] = {
    "pattern properties": {"json": _patterns(400)},
    "more pattern properties": {"json": _patterns(1000)},
    "intersected lengths": {"grammar": _lengths(14)},
    "more intersected lengths": {"grammar": _lengths(18)},
    "intersected alternatives": {
        "grammar": "start: A\nA: " + " & ".join(f"/.*(a.{{{n}}}|b.{{{n + 7}}})*c/" for n in range(20, 60, 3))
    },
    "complement": {"grammar": "start: A\nA: /.*/ & ~/(.*a.{200}|.*b.{300}|.*c.{400})(.*d.{100})*/"},
    "nested repetition": {"regex": "((a{1000}){1000}){1000}"},
    "nested bounds": {"regex": "(((a{0,100}b){0,100}c){0,100}d){0,100}"},
    "letters far back": {"regex": "(a|b)*a(a|b){3000}c"},
    "shared prefixes": {"regex": "|".join(f"{'a' * (i % 40)}[a-z]{{{i}}}.*{i}x.*" for i in range(1, 600))},
    "huge enumeration": {"json": {"enum": [f"{i:x}" * 6 for i in range(3000)]}},
    "huge choice": {"choice": [f"{i:04d}{'x' * 56}" for i in range(1024)]},
    "long choice": {"choice": ["a" * 65_000]},
    "unicode classes": {"regex": r"(\p{L}|\p{N}|\p{S}){1,2000}[^\p{L}]{1,2000}\w{500}"},
    "many items": {
        "json": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 900_000},
            "minItems": 1_000_000,
            "maxItems": 2_000_000,
        }
    },
    "long strings": {
        "json": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "minLength": 50_000, "maxLength": 1_000_000} for i in range(40)
            },
            "additionalProperties": False,
        }
    },
    "deep references": {"json": _deep(200)},
    "intersected references": {"json": _intersected(200)},
    "large divisors": {
        "json": {
            "allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941, 9931, 9929)]
        }
    },
    "ranges": {
        "json": {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "number", "minimum": i + 0.123456789, "maximum": i * 10**15 + 0.987654321}
                    for i in range(1, 300)
                ]
            },
        }
    },
    "nested brackets": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "rule without end": {"grammar": 'start: a\na: a a a a | "x" | '},
    "ambiguous rules": {
        "grammar": "start: a\n" + "a: " + " | ".join(f"a a a{i % 3 or ''}" for i in range(60)) + ' | "x"\n'
        "a1: a a | a2\na2: a a1 | a\n"
    },
}
"""By name, the members of a structured_outputs each."""


def bomb(name: str) -> StructuredOutputs:
    """The structure of that name."""
    return StructuredOutputs(**BOMBS[name])
