"""Prompt files: accepted lines, and refused ones by number."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from paceline.core.errors import InvalidArgumentError
from paceline.loadtest.prompts import EMBEDDED_KINDS, PROMPTS, PromptLine, read_prompts


def file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    text = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("\n".join(text), encoding="utf-8")
    return path


def test_prompt_lines_may_be_text_or_token_ids(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a\u2028b"},
        "",
        {"prompt": [1, 2], "max_tokens": 7},
        {"prompt": "c", "max_tokens": None, "kind": "prose"},
    ]
    assert read_prompts(file(tmp_path, *lines, "")) == [
        PromptLine("a\u2028b"),
        PromptLine((1, 2), 7),
        PromptLine("c", kind="prose"),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: is not JSON"),
        ("[" * 100_000, "line 2: is not JSON"),
        ("[1]", "line 2: must be an object"),
        ({"text": "a"}, "line 2: unknown field 'text'"),
        ({"max_tokens": 3}, "line 2: has no prompt"),
        ({"prompt": ""}, "line 2: prompt: is empty"),
        (r'{"prompt": "a\ud800b"}', "line 2: prompt: is not valid Unicode"),
        ({"prompt": []}, "line 2: prompt: is empty"),
        ({"prompt": 3}, "line 2: prompt: must be text or a list"),
        ({"prompt": [1, -1]}, "line 2: prompt: must contain integers"),
        ({"prompt": [1, True]}, "line 2: prompt: must contain integers"),
        ({"prompt": "a", "max_tokens": 0}, "line 2: max_tokens: must be in"),
        ({"prompt": "a", "max_tokens": "3"}, "line 2: max_tokens: must be an integer"),
        ({"prompt": "a", "max_tokens": True}, "line 2: max_tokens: must be an integer"),
        ({"prompt": "a", "kind": ""}, "line 2: kind: must be text"),
        ({"prompt": "a", "kind": 3}, "line 2: kind: must be text"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tmp_path: Path, line: object, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_prompts(file(tmp_path, {"prompt": "good"}, line))
    assert says in caught.value.message
    assert caught.value.field.startswith("prompts")


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    assert read_prompts(file(tmp_path, '\ufeff{"prompt": "a"}')) == [PromptLine("a")]


def test_unusable_prompt_files_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path, says in (
        (tmp_path / "none", "cannot be read"),
        (binary, "cannot be read"),
        (file(tmp_path, "", "  "), "no prompt"),
    ):
        with pytest.raises(InvalidArgumentError, match=says) as caught:
            read_prompts(path)
        assert caught.value.field == "prompts"


def test_the_built_in_prompts_are_distinct_texts() -> None:
    assert len({line.prompt for line in PROMPTS}) == len(PROMPTS) > 4
    assert all(isinstance(line.prompt, str) and line.prompt for line in PROMPTS)


def test_the_embedded_file_has_two_prompts_of_each_kind() -> None:
    lines = read_prompts(Path(EMBEDDED_KINDS))
    counts = Counter(line.kind for line in lines)
    assert set(counts.values()) == {2}
    assert list(counts) == [
        "prose",
        "code",
        "code editing",
        "JSON",
        "translation",
        "question answering",
        "lists",
        "random",
    ]
