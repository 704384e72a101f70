"""The coordinator's check of structured_outputs: beside the event loop, bounded, remembered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.structures import Structures
from coordinator.vocabulary import Vocabulary
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError
from paceline.core.structured import StructuredOutputs
from paceline.grammar import Grammars

GOOD = StructuredOutputs(regex="[a-z]+")
BAD = StructuredOutputs(regex="(")
EOS = [0]


@pytest.fixture
def structures(vocabulary: Vocabulary) -> Iterator[Structures]:
    made = Structures(vocabulary)
    yield made
    made._thread.shutdown()


async def test_a_good_one_passes_and_a_bad_one_is_refused_by_name_again_and_again(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    right = Grammars.check

    def noting(self: Grammars, wanted: StructuredOutputs) -> None:
        assert threading.current_thread() is not threading.main_thread()
        checked.append(wanted)
        right(self, wanted)

    monkeypatch.setattr(Grammars, "check", noting)
    for _ in range(2):
        await structures.check(GOOD, EOS)
        with pytest.raises(InvalidArgumentError, match="regex parse error") as caught:
            await structures.check(BAD, EOS)
        assert caught.value.field == "structured_outputs.regex"
    assert checked == [GOOD, BAD]


async def test_a_model_without_an_end_is_said(structures: Structures) -> None:
    with pytest.raises(InvalidArgumentError, match="no end-of-sequence token") as caught:
        await structures.check(GOOD, [])
    assert caught.value.field == "structured_outputs"


async def test_the_event_loop_goes_on_and_the_queue_is_bounded(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_STRUCTURE_CHECKS", 2)
    begun, released = threading.Event(), threading.Event()

    def slow(self: Grammars, wanted: StructuredOutputs) -> None:
        begun.set()
        assert released.wait(60)

    monkeypatch.setattr(Grammars, "check", slow)
    waiting: list[asyncio.Task[Any]] = [
        asyncio.create_task(structures.check(StructuredOutputs(regex=name), EOS)) for name in "ab"
    ]
    assert await asyncio.to_thread(begun.wait, 60)
    with pytest.raises(ResourceExhaustedError):
        await structures.check(GOOD, EOS)
    released.set()
    await asyncio.gather(*waiting)
    await structures.check(GOOD, EOS)


async def test_what_is_remembered_is_bounded(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_COMPILED_STRUCTURES", 2)
    for name in "abc":
        await structures.check(StructuredOutputs(regex=name), EOS)
    assert [wanted.regex for wanted in structures._found] == ["b", "c"]


async def test_what_a_client_has_of_a_structured_text_keeps_to_it(
    structures: Structures, vocabulary: Vocabulary
) -> None:
    """Once: a resumed request whose tokens did not was taken for a defect of the worker."""
    fine, wrong = await vocabulary.encode("abc"), await vocabulary.encode("a1")
    await structures.check(GOOD, EOS)
    await structures.check_received(GOOD, EOS, [fine, [], fine[:1]])
    with pytest.raises(InvalidArgumentError) as caught:
        await structures.check_received(GOOD, EOS, [fine, wrong])
    assert caught.value.field == "received"
    assert structures._grammars is not None
    assert not structures._grammars._compiled, "what a text made of it would stay as long"
