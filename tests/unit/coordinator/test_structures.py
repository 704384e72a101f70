"""The coordinator's check of structured_outputs in a separate process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from harness.refusals import refused

from coordinator.app import Coordinator
from coordinator.auth import Principal, principal
from coordinator.text.structures import Structures
from coordinator.text.vocabulary import Vocabulary
from paceline.core.errors import UnavailableError
from paceline.core.structured import StructuredOutputs
from tests.unit.coordinator.machines import make_call, pass_through

GOOD = StructuredOutputs(regex="[a-z]+")
BAD = StructuredOutputs(regex="(")
EOS = [0]


@pytest.fixture
async def structures(vocabulary: Vocabulary) -> AsyncIterator[Structures]:
    made = Structures(vocabulary)
    yield made
    made.close()


async def test_a_bad_structure_is_refused_by_name(structures: Structures) -> None:
    for _ in range(2):
        await structures.check(GOOD, EOS)
        with refused("structured_outputs.regex", "regex parse error"):
            await structures.check(BAD, EOS)


async def test_a_model_without_an_end_token_is_refused(structures: Structures) -> None:
    with refused("structured_outputs", "no end-of-sequence token"):
        await structures.check(GOOD, [])


async def test_results_are_remembered_for_their_caller_only(structures: Structures) -> None:
    model = structures._model(EOS)
    for name in ("", "mine"):
        token = principal.set(Principal(name))
        assert not structures._checks.passed(name, model, GOOD)
        await structures.check(GOOD, EOS)
        assert structures._checks.passed(name, model, GOOD)
        principal.reset(token)


async def test_received_tokens_must_follow_the_structure(
    structures: Structures, vocabulary: Vocabulary
) -> None:
    """Otherwise a resumed request would look like a worker's internal error."""
    fine, wrong = vocabulary.encode("abc"), vocabulary.encode("a1")
    await structures.check(GOOD, EOS)
    await structures.check_received(GOOD, EOS, [fine, [], fine[:1]])
    with refused("received"):
        await structures.check_received(GOOD, EOS, [fine, wrong])


async def test_a_drain_ends_the_compiling_process(served: Coordinator) -> None:
    await served._structures.check(GOOD, EOS)
    assert served._structures.process.pid is not None
    await served.drain(0)
    assert served._structures.process.pid is None
    with pytest.raises(UnavailableError):
        await pass_through(served, make_call(structured_outputs=BAD))
    with pytest.raises(UnavailableError, match="stopping"):
        await served._structures.check(BAD, EOS)
