"""Long texts: bounded before tokenization, one large text at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness.refusals import refused

from coordinator.text import long_texts as module
from coordinator.text.long_texts import COUNTED_BYTES, LARGE_BYTES, PART_CHARACTERS, LongTexts
from coordinator.text.vocabulary import LONG_TEXT
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError
from paceline.rpc.codec.generation import ContextLengthError

HANG = 30.0
LONGEST = "é" * 4
LENGTH = limits.MAX_PROMPT_TOKENS


class Fake:
    """A vocabulary with a token a character, whose work ends when a test says so."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(get_vocab=lambda **_: {"a": 0, LONGEST: 1})
        self.encoded: list[int] = []
        self.decoded: list[int] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(len(text))
        assert self.may_end.wait(HANG)
        return [0] * len(text)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        self.decoded.append(len(token_ids))
        assert self.may_end.wait(HANG)
        return "a" * len(token_ids)


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    fake = Fake()
    async with asyncio.timeout(HANG):
        yield fake
    fake.may_end.set()


async def turns(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
        await asyncio.sleep(0)


async def test_counting_does_not_read_the_vocabulary(fake: Fake) -> None:
    texts = LongTexts(fake)  # type: ignore[arg-type]
    fake.tokenizer = SimpleNamespace()
    assert texts.max_bytes(100) == 4 * 100 * len(LONGEST.encode())


@pytest.mark.parametrize(("characters", "fits"), [(8 * 100, True), (8 * 100 + 1, False)])
async def test_texts_are_bounded_by_the_longest_token(characters: int, fits: bool, fake: Fake) -> None:
    texts = LongTexts(fake)  # type: ignore[arg-type]
    if fits:
        assert len(await texts.encode("prompt", "a" * characters, 100)) == characters
        return
    with pytest.raises(ContextLengthError) as caught:
        await texts.encode("prompt", "a" * characters, 100)
    assert caught.value.field == "prompt"
    assert not fake.encoded


@pytest.mark.parametrize(
    "text", ["a" * (limits.MAX_PROMPT_CHARACTERS + 1), "\u200d" * (limits.MAX_PROMPT_BYTES // 3 + 1)]
)
async def test_texts_are_bounded_for_any_model(text: str, fake: Fake) -> None:
    with pytest.raises(InvalidArgumentError, match="at most 4194304"):
        await LongTexts(fake).encode("text", text, LENGTH)  # type: ignore[arg-type]
    assert not fake.encoded


async def test_counting_stops_at_too_many_tokens(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_TOKENS", 2 * PART_CHARACTERS)
    with refused("text"):
        await LongTexts(fake).encode("text", "a" * 4 * COUNTED_BYTES, LENGTH)  # type: ignore[arg-type]
    assert fake.encoded == [PART_CHARACTERS] * 3


async def test_one_large_text_is_tokenized_at_a_time(fake: Fake) -> None:
    """A cancelled caller's thread still counts. Smaller texts do not wait."""
    texts = LongTexts(fake)  # type: ignore[arg-type]
    fake.may_end.clear()
    large = "a" * (LARGE_BYTES + 1)
    first = asyncio.create_task(texts.encode("text", large, LENGTH))
    await turns(lambda: len(fake.encoded) == 1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(texts.decode([0] * (LARGE_BYTES + 1)))
    smaller = asyncio.create_task(texts.encode("text", "a" * (LONG_TEXT + 1), LENGTH))
    await turns(lambda: len(fake.encoded) == 2)
    assert texts._num_waiting == 1
    assert not fake.decoded
    fake.may_end.set()
    assert len(await second) == LARGE_BYTES + 1
    assert len(await smaller) == LONG_TEXT + 1
    assert not texts._large.locked()


async def test_waiting_large_texts_are_bounded(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    texts, large = LongTexts(fake), "a" * (LARGE_BYTES + 1)  # type: ignore[arg-type]
    fake.may_end.clear()
    taken = [asyncio.create_task(texts.encode("text", large, LENGTH)) for _ in range(2)]
    await turns(lambda: texts._num_waiting == 1)
    with pytest.raises(ResourceExhaustedError):
        await texts.encode("text", large, LENGTH)
    taken[1].cancel()
    await turns(lambda: texts._num_waiting == 0)
    fake.may_end.set()
    await taken[0]
